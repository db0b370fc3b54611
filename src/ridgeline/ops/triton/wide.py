"""Products of 17 to 256 tokens on Hopper, in CUDA C++ (wide.cu), for shapes that Gluon and cuBLAS serve less well.

At these sizes x is as large as the weights of a tile. Tiles match the token count to within sixteen, whereas Gluon needs powers of
two, so 136 tokens do not cost as much as 256. The epilogue applies act(gate) * up to the sums. Weights that are read once are
marked as first to be evicted from L2. Programs without a tile in the last wave take part of other tiles. Source: stream-K (Osama et
al. 2023).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.pairs import PAIR, STEP
from ridgeline.ops.triton.shapes import ANY, PROCESSORS

# Must equal the constants of wide.cu.
GROUPS, HIGH, CHUNK, STAGED, MOST_STAGES = 2, 64, 16, 4, 8
ROWS = GROUPS * HIGH
THREADS = 128 * (1 + GROUPS)
CLUSTERS = PROCESSORS // PAIR
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 208, 224, 256)
"""Token counts of a tile for which a kernel exists."""
FEWEST = 65
"""Token count below which the ring kernels are as fast, unless the last wave of their tiles is nearly empty."""
FEWEST_UNFILLED, RING_ROWS = 17, 128
"""Token count from which this kernel runs gates that leave the last wave of ring tiles nearly empty. RING_ROWS: of such a tile."""
SHARED = 232448 - 1024
"""Bytes of shared memory per program, independent of the ring's size. One program fits on an SM."""
COUNTERS = GROUPS * PROCESSORS


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is divided. tokens: of a tile. half: a program's rows of gate and as many of up, or half of its rows. split:
    programs per tile along k (split-K), which must all run at once; 0: see cut. cut: clusters take equal shares of all tiles' k
    steps (stream-K), which needs at least one tile per cluster; otherwise they take complete tiles."""

    tokens: int
    half: int
    split: int = 0
    cut: bool = False

    @property
    def stages(self) -> int:
        """Stages of the ring that fit into shared memory beside alignment and the output staging buffer."""
        left = SHARED - 1024 - STAGED * CHUNK * (2 * ROWS + 16)
        return min(MOST_STAGES, left // (2 * STEP * (2 * self.half + self.tokens)))


@dataclass(frozen=True, slots=True)
class _For:
    """Weights of up to `max_outputs` outputs (of gate and of up) and at least `min_inputs` inputs use this kernel for up to
    `tokens` tokens. full: also for token counts that fill the tiles of other kernels."""

    max_outputs: int
    tokens: int
    min_inputs: int = 0
    full: bool = False


# The first entry that matches is used. Measured against ring, cuBLAS and the activation kernel
# (docs/log/2026-11-23-products-65-to-256-cuda.md). Nothing is gained where cuBLAS has full tiles and a full last wave, as with 256
# tokens. Small weights have other limits.
_GATE = (
    _For(6143, 0),
    _For(7168, 112),
    _For(8448, 256),
    _For(12288, 240),
    _For(16384, 256),
    _For(ANY, 240, full=True),
)
_SUMMED = (
    _For(2047, 0),
    _For(4096, 240, 9216),
    _For(5632, 240, 9216, full=True),
)
EVEN, FULL = 112, 128
"""EVEN: token count up to which products are bound by memory, so that waves of smaller tiles are cheaper than stream-K. FULL: token
counts between EVEN and FULL fill tiles of 128. There a step of an 8B took 0.8 % longer with this kernel; the gates of a 7B and a
14B, and outputs beyond 4,096, have no ring configuration and use this kernel."""


def plan_for(tokens: int, n: int, k: int, gate: bool) -> Plan | None:
    """Plan of x [tokens, k] times a weight of n outputs, or of gate and up with n outputs each. None: other kernels are as fast."""
    if tokens < FEWEST:
        return _even(tokens, n) if gate and tokens >= FEWEST_UNFILLED and _wastes_ring(n) else None
    row = next((row for row in (_GATE if gate else _SUMMED) if n <= row.max_outputs and k >= row.min_inputs), None)
    if row is None or tokens > row.tokens or (EVEN < tokens <= FULL and not row.full):
        return None
    width = _width(tokens)
    if not gate:
        # A part without tokens to reduce would add nothing.
        return Plan(width, HIGH, min(width // CHUNK, CLUSTERS // -(-n // (2 * PAIR * HIGH))))
    return Plan(width, HIGH, cut=n > PROCESSORS * HIGH) if tokens > EVEN else _even(tokens, n)


def _width(tokens: int) -> int:
    return next(width for width in WIDTHS if tokens <= width)


def _even(tokens: int, n: int) -> Plan:
    """Complete tiles of gates, of such a height that they fill all waves."""
    rounds = -(-n // (PROCESSORS * HIGH))
    return Plan(_width(tokens), -(-n // (PROCESSORS * rounds * 8)) * 8)


def _wastes_ring(n: int) -> bool:
    """Whether the ring's tiles of n gates and as many of up fill less than a third of the second wave. A layer of Gemma 3 4B
    (n = 10,240) took 4.5 us less at 64 tokens (docs/log/2026-11-28-batches-by-kernel.md)."""
    return PROCESSORS < -(-2 * n // RING_ROWS) < PROCESSORS * 4 // 3


class Sizes(ctypes.Structure):
    """Kernel parameter; must equal the struct of wide.cu."""

    _fields_ = tuple(
        (name, c_uint32)
        for name in ("tokens", "features", "half", "stages", "steps", "tiles", "wide", "units", "split")
    )


@cache
def source(width: int) -> str:
    """Source text for tiles of `width` tokens."""
    sums = width // 2
    named = {"SHAPE": f"m64n{width}k16", "LEFT_NAME": f"%{sums}", "RIGHT_NAME": f"%{sums + 1}"}
    return pairs.text("wide.cu", {"SUM": sums}, BATCH=width, **{name: f'"{value}"' for name, value in named.items()})


@cache
def _kernels(device: torch.device) -> Mapping[int, cuda.Kernel | None]:
    """Compile and load the kernels of all widths, so that start-up has them whichever steps it runs. They compile in parallel,
    because NVRTC releases the GIL."""
    if not is_hopper(device) or not cuda.available():
        return {}
    with ThreadPoolExecutor(min(len(WIDTHS), len(os.sched_getaffinity(0)))) as pool:
        for future in [pool.submit(cuda.compiled, source(width)) for width in WIDTHS]:
            future.exception()  # loading reports the error
    return {width: pairs.kernel(device, source(width), "wide_product", SHARED) for width in WIDTHS}


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Arrival counters of tile parts. Each is a multiple of a full round before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def gated(x: torch.Tensor, weight: torch.Tensor, plan: Plan, kind: str) -> torch.Tensor | None:
    """act(x gate^T) * (x up^T) [T, n], with both products rounded to bfloat16 first. None: the kernel does not support the inputs.

    x [T, k], weight [2 n, k] with gate's rows first. Both are contiguous bfloat16 at addresses of 16 bytes. n and k are multiples
    of 8.
    """
    n = weight.shape[0] // 2
    if n % 8 or not _addressed(x, weight):
        return None
    out = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    return out if planned(x, weight, out, plan, kind) else None


def added(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor, plan: Plan) -> bool:
    """Add x weight^T to the stream [T, n] in place. False: the kernel does not support the inputs.

    x [T, k], weight [n, k]. All are contiguous bfloat16 at addresses of 16 bytes. n and k are multiples of 8.
    """
    return _addressed(x, weight, stream) and planned(x, weight, stream, plan, None)


def _addressed(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.dtype == torch.bfloat16
        and tensor.is_contiguous()
        and not (tensor.data_ptr() % 16 or tensor.shape[1] % 8)
        for tensor in tensors
    )


def planned(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, plan: Plan, kind: str | None) -> bool:
    """Run a plan: `gated` into `out`, or add the product to `out`. False: no kernel is available."""
    kernel = _kernels(x.device).get(plan.tokens)
    if kernel is None:
        return False
    (tokens, inputs), n = x.shape, out.shape[1]
    steps, wide = -(-inputs // STEP), -(-tokens // plan.tokens)
    tiles = -(-n // (PAIR * plan.half * (2 if kind is None else 1))) * wide
    clusters = tiles * plan.split if plan.split else min(CLUSTERS, tiles)
    parts = out
    if plan.split or plan.cut:
        parts = torch.empty(clusters * PAIR * ROWS * plan.tokens, dtype=torch.float32, device=x.device)
    kernel(
        PAIR * clusters,
        THREADS,
        cuda.tensor_map(x, (plan.tokens // PAIR, STEP)),
        cuda.tensor_map(weight, (plan.half, STEP)),
        *(c_void_p(tensor.data_ptr()) for tensor in (out, parts, _counters(x.device))),
        c_uint32(KINDS[kind]),
        Sizes(tokens, n, plan.half, plan.stages, steps, tiles, wide, 1 if plan.cut else steps, plan.split),
        early=True,
    )
    return True
