"""Products of 65 to 256 tokens on Hopper, in CUDA C++ (wide.cu): what Gluon's powers of two and cuBLAS's tiles leave.

There x is as large as the weights that it meets. Tiles are as wide as the step, to sixteen tokens, so that 136 rows do not pay for
256; silu of gate times up is made where its sums are; a weight that is read once is the first to leave the L2 cache; and who has
nothing left of the last round of tiles takes a part of others' (stream-K: Osama et al., 2023).
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
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.pairs import PAIR, STEP
from ridgeline.ops.triton.shapes import ANY, PROCESSORS

# As in wide.cu.
GROUPS, HIGH, CHUNK, STAGED, MOST_STAGES = 2, 64, 16, 4, 8
ROWS = GROUPS * HIGH
THREADS = 128 * (1 + GROUPS)
CLUSTERS = PROCESSORS // PAIR
WIDTHS = (80, 96, 112, 128, 160, 192, 208, 224, 256)
"""Tokens of a tile for which there is a kernel."""
FEWEST = 65
"""Tokens below which rings are as good."""
SHARED = 232448 - 1024
"""Bytes of shared memory of a program, whatever its ring takes: one fits a processor."""
COUNTERS = GROUPS * PROCESSORS


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is cut. tokens: of a tile. half: a program's rows of gate and as many of up, or half of its rows. split: parts
    of each tile, which must all run at a time; 0: see cut. cut: whether clusters take even shares of all tiles' steps, as they may
    where there is a tile for each, or whole tiles."""

    tokens: int
    half: int
    split: int = 0
    cut: bool = False

    @property
    def stages(self) -> int:
        """Of the ring: what memory holds beside what aligns it and what is staged."""
        left = SHARED - 1024 - STAGED * CHUNK * (2 * ROWS + 16)
        return min(MOST_STAGES, left // (2 * STEP * (2 * self.half + self.tokens)))


@dataclass(frozen=True, slots=True)
class _For:
    """Weights of up to `most` outputs (of gate and up each) and at least `inputs` inputs: by this kernel for up to `tokens`. full:
    also those for which others have full tiles."""

    most: int
    tokens: int
    inputs: int = 0
    full: bool = False


# In order; the first that fits says it. Measured against rings, cuBLAS and the kernel of the activation
# (docs/log/2026-11-23-products-65-to-256-cuda.md): where tiles of cuBLAS are full, as with 256 tokens, and so is their last
# round, nothing is gained; small weights wait for other things.
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
"""Tokens up to which products wait for memory, so that rounds of smaller tiles cost less than tiles that are cut; and behind these
those that fill tiles of 128. There a step of an 8B took .8 % more by this kernel; the gates of a 7B and a 14B, and outputs beyond
4,096, have no ring then."""


def plan_for(tokens: int, n: int, k: int, gate: bool) -> Plan | None:
    """The plan of x [tokens, k] times a weight of n outputs, or of gate and up with n each. None: others are as fast."""
    row = next((row for row in (_GATE if gate else _SUMMED) if n <= row.most and k >= row.inputs), None)
    if row is None or not FEWEST <= tokens <= row.tokens or (EVEN < tokens <= FULL and not row.full):
        return None
    width = next(width for width in WIDTHS if tokens <= width)
    if not gate:
        # A part without tokens of its own would add nothing.
        return Plan(width, HIGH, min(width // CHUNK, CLUSTERS // -(-n // (2 * PAIR * HIGH))))
    rounds = -(-n // (PROCESSORS * HIGH))
    if tokens > EVEN:
        return Plan(width, HIGH, cut=rounds > 1)
    return Plan(width, -(-n // (PROCESSORS * rounds * 8)) * 8)


class Sizes(ctypes.Structure):
    """As in wide.cu."""

    _fields_ = tuple(
        (name, c_uint32)
        for name in ("tokens", "features", "half", "stages", "steps", "tiles", "wide", "units", "split")
    )


@cache
def source(width: int) -> str:
    """The text that is compiled for tiles of so many tokens."""
    sums = width // 2
    named = {"SHAPE": f"m64n{width}k16", "LEFT_NAME": f"%{sums}", "RIGHT_NAME": f"%{sums + 1}"}
    return pairs.text("wide.cu", {"SUM": sums}, BATCH=width, **{name: f'"{value}"' for name, value in named.items()})


@cache
def _kernels(device: torch.device) -> Mapping[int, cuda.Kernel | None]:
    """All at once, so that start-up has them whichever steps it runs; they compile side by side, as NVRTC lets go of Python's
    lock."""
    if not is_hopper(device) or not cuda.available():
        return {}
    with ThreadPoolExecutor(min(len(WIDTHS), len(os.sched_getaffinity(0)))) as pool:
        for future in [pool.submit(cuda.compiled, source(width)) for width in WIDTHS]:
            future.exception()  # what fails is told where it is loaded
    return {width: pairs.kernel(device, source(width), "wide_product", SHARED) for width in WIDTHS}


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Of the parts of tiles that are in memory: whole rounds before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def gated(x: torch.Tensor, weight: torch.Tensor, plan: Plan) -> torch.Tensor | None:
    """silu(x gate^T) * (x up^T), both rounded to bfloat16 before: [T, n]; None: not by this kernel.

    x [T, k], weight [2 n, k] gate's rows first, both contiguous bfloat16 at a multiple of 16 bytes, n and k in eights."""
    n = weight.shape[0] // 2
    if n % 8 or not _addressed(x, weight):
        return None
    out = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    return out if planned(x, weight, out, plan, True) else None


def added(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor, plan: Plan) -> bool:
    """Whether x weight^T was added to the stream [T, n] by this kernel.

    x [T, k], weight [n, k], all contiguous bfloat16 at a multiple of 16 bytes, n and k in eights."""
    return _addressed(x, weight, stream) and planned(x, weight, stream, plan, False)


def _addressed(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.dtype == torch.bfloat16
        and tensor.is_contiguous()
        and not (tensor.data_ptr() % 16 or tensor.shape[1] % 8)
        for tensor in tensors
    )


def planned(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, plan: Plan, gate: bool) -> bool:
    """gated, or added to `out`, by a plan; False: there is no kernel."""
    kernel = _kernels(x.device).get(plan.tokens)
    if kernel is None:
        return False
    (tokens, inputs), n = x.shape, out.shape[1]
    steps, wide = -(-inputs // STEP), -(-tokens // plan.tokens)
    tiles = -(-n // (PAIR * plan.half * (2 - gate))) * wide
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
        c_uint32(gate),
        Sizes(tokens, n, plan.half, plan.stages, steps, tiles, wide, 1 if plan.cut else steps, plan.split),
        early=True,
    )
    return True
