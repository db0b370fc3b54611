"""Weights that stay in host memory (`--cpu-offload-gb`): which they are, and what a step pays for them.

They are copied to the GPU in every step, beside its work there (FlexGen, Sheng et al. 2023, section 4). In a step of few tokens
some linears are multiplied on the CPU instead, where they lie, while others are copied; Fiddler (Kamahori et al. 2024) does so for
experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec

BUFFERS = 2
"""Places on the device for linears that arrive: while one is multiplied, the next one is copied."""
LINK_SHARE = 0.8
"""Share of the published rate of a host link that copies reach, where it is not measured."""
NEAR, LESS = 4, 0.9999
"""Linears among which two change sides together, and the share of its time that makes a step a shorter one."""
GIB = 1 << 30
OPTION = "cpu_offload_gb"


@dataclass(frozen=True, slots=True)
class HostWeights:
    """linears: numbers of the linears that stay in host memory; linears of all layers are numbered in the order of their use.
    sizes: bytes of each of these."""

    linears: frozenset[int] = frozenset()
    sizes: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of device memory that are free because of it: the linears leave, and their buffers come."""
        return self.bytes - BUFFERS * self.largest


def check_gpu(spec: ModelSpec, kind: str) -> None:
    """Raise ConfigError for weights in host memory on a CPU. kind: of the device."""
    if spec.host_bytes and kind == "cpu":
        raise ConfigError(
            "--cpu-offload-gb needs a GPU: on a CPU all weights are in host memory. Leave it out.", param=OPTION
        )


def host_weights(spec: ModelSpec) -> HostWeights:
    """The linears that stay in host memory, at least spec.host_bytes.

    They are spread evenly, so that copies run beside the products of those that stay on the device: going through the linears in
    order, one is taken whenever the bytes taken so far are behind their share. So the first one is taken, and the copies of a step
    start with it. The last layer stays on the device: a step that draws no token runs only a part of it, and a copy of the rest
    would have no reader. Raises ConfigError where that is not enough, or frees nothing.
    """
    if not spec.host_bytes:
        return HostWeights()
    sizes = _sizes(spec)
    most = sum(sizes)
    if spec.host_bytes > most:
        raise ConfigError(
            f"--cpu-offload-gb is {spec.host_bytes / GIB:.4g}: the linears of all layers but the last have {most / GIB:.4g} GiB. "
            "Give less.",
            param=OPTION,
        )
    taken: dict[int, int] = {}
    passed = total = 0
    for number, size in enumerate(sizes):
        passed += size
        if total * most < spec.host_bytes * passed:
            taken[number] = size
            total += size
    chosen = HostWeights(frozenset(taken), tuple(taken.values()))
    if chosen.saved_bytes <= 0:
        raise ConfigError(
            f"--cpu-offload-gb is {spec.host_bytes / GIB:.4g}: it frees no memory, because copies need buffers of "
            f"{BUFFERS * chosen.largest / GIB:.4g} GiB on the device. Give more, or leave it out.",
            param=OPTION,
        )
    return chosen


def _sizes(spec: ModelSpec) -> list[int]:
    """Bytes of each linear of all layers but the last, in the order of their use."""
    return [spec.matrix_bytes(matrix) for layer in spec.layers[:-1] for matrix in spec.matrices(layer)]


def least_host_bytes(spec: ModelSpec, missing: int) -> int:
    """The fewest whole GiB, in bytes, of weights in host memory that free `missing` bytes of device memory; 0: there is no such
    number."""
    most = sum(_sizes(spec))
    for gib in range(max(1, missing // GIB), most // GIB + 1):
        try:
            if host_weights(replace(spec, host_bytes=gib * GIB)).saved_bytes >= missing:
                return gib * GIB
        except ConfigError:
            continue
    return 0


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds that weights in host memory take in each step: copies_s: of the copies of all of them. In a step of at most
    few_tokens tokens the CPU multiplies some while others are copied, which takes few_s without the work on the device."""

    copies_s: float = 0.0
    few_tokens: int = 0
    few_s: float = 0.0

    def step_s(self, device_s: float, tokens: int) -> float:
        """Seconds of a step whose work on the device takes device_s. Copies run beside all other work, products after it."""
        if tokens <= self.few_tokens:
            return device_s + self.few_s
        return max(device_s, self.copies_s)


NO_HOST_WEIGHTS = HostTimes()


class Rates(NamedTuple):
    """Bytes/s that products of the CPU and copies to the GPU read at the same time; they share the memory. link 0: no GPU. call_s:
    seconds of a product besides reading."""

    products: float
    link: float
    call_s: float = 0.0


def read_s(sizes: Sequence[int], computed: frozenset[int], rates: Rates) -> float:
    """Seconds in which the linears in host memory are multiplied one after the other, if nothing else takes time.

    The others have their places in the buffers by their numbers. As in WeightStream (quant.streamed) a step starts with the copy
    of the first into each buffer, and a later one is copied when the one before it in its buffer is multiplied.
    """
    copied = [number for number in range(len(sizes)) if number not in computed]
    queues = [iter([number for number in copied if number % BUFFERS == buffer]) for buffer in range(BUFFERS)]
    now = link = 0.0
    arrived: dict[int, float] = {}

    def copy(number: int | None) -> None:
        nonlocal link
        if number is not None:
            link = arrived[number] = max(now, link) + sizes[number] / rates.link

    for first in sorted(number for queue in queues if (number := next(queue, None)) is not None):
        copy(first)
    for number, size in enumerate(sizes):
        if number in computed:
            now += rates.call_s + size / rates.products
        else:
            now = max(now, arrived[number])
            copy(next(queues[number % BUFFERS], None))
    return now


def computed_linears(sizes: Sequence[int], rates: Rates) -> frozenset[int]:
    """Of the linears in host memory, in the order of their use, those that the CPU multiplies in a step of few tokens.

    At first these are all; then single linears and pairs of near ones change sides for as long as that makes a step shorter.

    Args:
        sizes: bytes of each linear.
        rates: products 0: the CPU multiplies none.
    """
    if not rates.products:
        return frozenset()
    places = range(len(sizes))
    changes = [frozenset((place, other)) for place in places for other in places[place : place + NEAR]]
    computed = frozenset(places)
    best, shorter = read_s(sizes, computed, rates), True
    while shorter:
        shorter = False
        for change in changes:
            seconds = read_s(sizes, computed ^ change, rates)
            if seconds < LESS * best:
                computed, best, shorter = computed ^ change, seconds, True
    return computed


def copy_s(count: int, bytes_per_s: float) -> float:
    """Seconds in which `count` bytes are copied from host memory; infinite without a link."""
    return 0.0 if not count else count / bytes_per_s if bytes_per_s else math.inf


def streamed_s(spec: ModelSpec, bytes_per_s: float) -> float:
    """Seconds of a step's copies of weights from host memory. bytes_per_s: that copies reach."""
    return copy_s(host_weights(spec).bytes, bytes_per_s)
