"""Linears in host memory that steps of few tokens multiply on the CPU, where they lie, while others are copied to the device.

A decode step reads a weight once, and the CPU reads its memory faster than the host link copies it. The tokens' inputs go to the
host, a thread of the library multiplies them (native/replay.cpp), and the results come back, all in the order of the stream, so
that CUDA graphs capture them. Steps of more tokens copy these linears like all others, since the GPU multiplies them faster. They
are in host memory twice: as the device reads them, and as the CPU does.

Source: Fiddler (Kamahori et al. 2024, arXiv:2402.07033), which computes experts of few tokens on the CPU.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ridgeline.core.host_weights import (
    NO_HOST_WEIGHTS,
    HostTimes,
    HostWeights,
    Rates,
    computed_linears,
    host_weights,
    read_s,
)
from ridgeline.core.spec import ModelSpec
from ridgeline.ops.native_host import HostCalls, HostOps
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, FromHost, RmsNorm, Scaled, apply_norm
from ridgeline.quant.format import LinearShape, Part, Share, Weight, WeightFormat
from ridgeline.quant.streamed import CudaLane, HostMemory, StreamedFormat, StreamedWeight, WeightStream, tokens_of

log = logging.getLogger(__name__)

SIZES = (1, 4, 16)
"""Tokens for which products are recorded; others take the next larger one. From some 36 tokens on a copy is as fast, by arithmetic
(docs/log/2026-11-27-layers-on-the-cpu.md)."""
NEARLY = 0.7
"""Share of the fastest rate that products of the most tokens must reach: without AMX many tokens are bound by arithmetic."""
COPIES, COPIED_BYTES = 256, 16 << 20
"""Copies that go on while products are timed: some 80 ms over PCIe 5."""
TIMED = 10
"""Products of the largest linear whose time decides which linears the CPU multiplies."""
IN_TURN = 5
"""Copies of that linear that they use in turn: a server's caches hold hundreds of MB."""


TINY = 64
"""Width of a linear whose product takes as long as any call: from the device to a thread of the CPU and back."""


@dataclass(slots=True)
class Host:
    """The CPU of a machine with a GPU. format: of weights that it multiplies. norm, from_host: of the device. kind: of the
    activation. pinned: of the memory that the device copies from and to. sizes: tokens for which products are recorded."""

    ops: HostOps
    format: WeightFormat
    norm: RmsNorm
    from_host: FromHost
    kind: str
    dtype: torch.dtype
    pinned: bool = True
    sizes: Sequence[int] = SIZES
    _inputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def inputs(self, width: int) -> torch.Tensor:
        """Memory for the inputs [most tokens, width] of a product. Products take turns, in the order of the stream."""
        if width not in self._inputs:
            self._inputs[width] = torch.zeros(SIZES[-1], width, dtype=self.dtype, pin_memory=self.pinned)
        return self._inputs[width]

    def products(self, width: int, work: Callable[[torch.Tensor], torch.Tensor]) -> list[Product]:
        """`work` on inputs of each size; none if the CPU cannot repeat it without Python."""
        products = []
        for size in self.sizes:
            x = self.inputs(width)[:size]
            result, calls = self.ops.record(partial(work, x), self.pinned)
            if calls is not None:
                products.append(Product(x, result, calls, self.from_host))
        return products if len(products) == len(self.sizes) else []

    def rates(self, shape: LinearShape, device: torch.device) -> list[Rates]:
        """What products of each size and copies beside them read from host memory; empty: there are no products."""
        linears = [self._filled(shape) for _ in range(IN_TURN)]
        products = [self.products(shape.d_in, linear.apply) for linear in linears]
        tiny = self.products(TINY, self._filled(LinearShape(TINY, (Part(TINY, TINY),))).apply)
        if not tiny or not all(products):
            return []
        count, rates, copies = sum(tensor.nbytes for tensor in linears[0].tensors()), [], _Copies(device)
        for call, of_size in zip(tiny, zip(*products, strict=True), strict=True):
            (call_s, _), (seconds, copied) = copies.beside([call] * TIMED), copies.beside(of_size * (TIMED // IN_TURN))
            rates.append(Rates(count / max(seconds - call_s, NEARLY * seconds), copied / (TIMED * seconds), call_s))
        return rates

    def _filled(self, shape: LinearShape) -> Weight:
        """A linear without zeros, which would be packed as a pruned one."""
        weight = self.format.create(shape, Share())
        for (part, name), expected in weight.expects.items():
            weight.load(part, name, torch.full(expected.shape, 0.01, dtype=self.dtype))
        return weight


class _Copies:
    """Copies from host memory to a GPU, which read this memory while products do. None without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
            self._target = torch.empty_like(self._source, device=device)
            self._ended = [torch.cuda.Event() for _ in range(COPIES)]

    def beside(self, products: Sequence[Product]) -> tuple[float, float]:
        """Seconds of each of these products, one after the other, and bytes copied in the time of all."""
        inputs = [torch.zeros_like(product.x, device=self._device) for product in products]
        products[0].run(inputs[0])
        self._wait_for_products()
        for ended in self._ended:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._source, non_blocking=True)
                ended.record()
        started = time.perf_counter()
        for product, x in zip(products, inputs, strict=True):
            product.run(x)
        self._wait_for_products()
        seconds, copied = time.perf_counter() - started, COPIED_BYTES * sum(ended.query() for ended in self._ended)
        for ended in self._ended[-1:]:
            ended.synchronize()
        return seconds / len(products), copied

    def _wait_for_products(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True, slots=True)
class Product:
    """A recorded product: reads x [tokens, inputs] and writes result [tokens, outputs], both on the host. from_host: of Ops."""

    x: torch.Tensor
    result: torch.Tensor
    calls: HostCalls
    from_host: FromHost

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [up to as many tokens, inputs] on the device, in the order of its stream."""
        rows = len(x)
        self.x[:rows].copy_(x, non_blocking=True)
        self.calls.enqueue(x.device)
        return self.from_host(self.result[:rows], x.device)


class HostedWeight(StreamedWeight):
    """A linear in host memory. Few tokens are multiplied there."""

    __slots__ = ("_applied", "_activated", "_host", "_linear", "_parts", "_width")

    def __init__(
        self,
        host: Host,
        stream: WeightStream,
        number: int,
        create: Callable[[], Weight],
        shape: LinearShape,
    ) -> None:
        super().__init__(stream, number, create)
        self._host, self._linear = host, host.format.create(shape, Share())
        self._width, self._parts = shape.d_in, len(shape.parts)
        self._applied: Sequence[Product] = ()
        self._activated: Sequence[Product] = ()

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        self._linear.load(part, name, tensor.cpu())
        super().load(part, name, tensor)
        if not self._missing:
            self._applied = self._host.products(self._width, self._linear.apply)
            if self._parts == 2:  # gate and up
                self._activated = self._host.products(self._width, self._gated)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        result = self._linear.activate(x, self._host.kind)
        assert isinstance(result, torch.Tensor)
        return result

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        product = self._product(x, self._applied)
        return super().apply(x, step) if product is None else product.run(self._plain(x))

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        product = self._product(x, self._applied)
        return super().add(x, stream, step) if product is None else product.run(self._plain(x)).add_(stream)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        product = self._product(x, self._activated) if kind == self._host.kind else None
        return super().activate(x, kind, step) if product is None else product.run(self._plain(x))

    def _product(self, x: Activation, products: Sequence[Product]) -> Product | None:
        tokens = tokens_of(x)
        if (at := bisect_left(self._host.sizes, tokens)) == len(products):
            return None
        self._stream.skip(self._number, tokens)
        return products[at]

    def _plain(self, x: Activation) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        return apply_norm(x, self._host.norm)


def streamed(
    base: WeightFormat, spec: ModelSpec, device: torch.device, host: Host | None
) -> tuple[WeightFormat, HostTimes]:
    """The format for a model on a GPU, of whose weights spec.host_bytes stay in host memory, and the time that they take; `base` if
    none do. host: None: none are multiplied there."""
    chosen = host_weights(spec)
    if not chosen.linears or device.type == "meta":
        return base, NO_HOST_WEIGHTS
    computed, times = (frozenset[int](), NO_HOST_WEIGHTS) if host is None else divided(chosen, spec, device, host)
    lane, memory, few = CudaLane(device), HostMemory(pinned=True), times.few_tokens
    stream = WeightStream(len(chosen.sizes), lane, memory, computed, few)
    if host is not None:
        host.sizes = [size for size in SIZES if size <= few]
    return StreamedFormat(base, chosen.linears, stream, partial(HostedWeight, host) if host else None), times


def divided(chosen: HostWeights, spec: ModelSpec, device: torch.device, host: Host) -> tuple[frozenset[int], HostTimes]:
    """Which of the linears in host memory the CPU multiplies in steps of few tokens, by measured rates, and the time of both kinds
    of steps. None if the host has too little memory to hold them twice."""
    link, widest = host.ops.link_rate(device), max(layer.d_ff for layer in spec.layers)
    rates = host.rates(LinearShape(spec.d_model, (Part(2 * widest, 2 * widest),)), device)
    least = NEARLY * max((rate.products for rate in rates), default=0.0)
    fast = [(size, rate) for size, rate in zip(SIZES, rates, strict=False) if rate.products >= least]
    few, both = fast[-1] if fast else (0, Rates(0.0, 0.0))
    both = both._replace(link=both.link or link)
    computed = computed_linears(chosen.sizes, both)
    twice = sum(chosen.sizes[number] for number in computed)
    log.info(
        "weights in host memory: copies reach %.1f GB/s, products of 1, 4, 16 tokens and copies beside them %s GB/s, a call takes "
        "%.0f us; %.1f of %.1f GB multiplied there",
        link / 1e9,
        ", ".join(f"{rate.products / 1e9:.1f} and {rate.link / 1e9:.1f}" for rate in rates) or "no",
        both.call_s * 1e6,
        twice / 1e9,
        chosen.bytes / 1e9,
    )
    if not twice or chosen.bytes + twice > host.ops.free_bytes():
        return frozenset(), HostTimes(chosen.bytes / link)
    return computed, HostTimes(chosen.bytes / link, few, read_s(chosen.sizes, computed, both))
