"""Attention of long chunks on Hopper, in CUDA C++ (hopper.cu): causal, optionally with a window or soft cap, 16-bit floats only.
chunk serves all other cases.

The kernel is persistent: programs take one unit of work after another. Clusters of two programs share loads of keys and values by
TMA multicast. The softmax maximum is updated only where weights would exceed 2^8 (as in FlashAttention-4, 2025). Otherwise no
rescaling and no exchange between threads are needed, which made the kernel faster than the same algorithm in Gluon
(docs/log/2026-11-23-long-chunk-attention-cuda.md). With a window a unit starts at the first tile that its first query sees. With
heads of 256, shared memory holds the queries of one unit at a time.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_uint32, c_void_p
from functools import cache
from typing import NamedTuple

import torch

from ridgeline.ops.step import KvView
from ridgeline.ops.triton import cuda, pairs

# Must equal the constants of hopper.cu.
GROUPS, HALF, STAGES = 2, 64, 2
QUERIES = pairs.PAIR * GROUPS * HALF
"""Packed queries (tokens times heads of a group) of a unit of work, which a cluster of two programs shares."""
THREADS = 128 * (1 + GROUPS)
KEYS = {64: 128, 128: 128, 256: 64}
"""Slots of a key tile, by head size. For 256, shared memory fits 80, but only in copies of 8 slots, which took a sixth longer than
64."""
SMALLEST_PAGE = 16
"""Page sizes must be multiples of this many slots. Smaller pages would need too many copies."""
SHORTEST_CHUNK = {64: 256, 128: 128, 256: 64}
"""Tokens below which more, smaller programs are faster, by head size."""
LARGEST_BOUNDED = 60
"""Largest soft cap without a running maximum: weights reach 2^87, which bfloat16 represents, and float32 a sum of a million of
them."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
WORD, BITS = 16, 31
"""WORD: bytes of a query copy, to which addresses are aligned. BITS: see _inverse."""
LOG2E = 1.4426950408889634


class Form(NamedTuple):
    """Variant of the kernel that a layer uses."""

    windowed: bool
    capped: bool
    bounded: bool
    """No running maximum is needed: the cap is so low that no exponent overflows."""


class Sizes(ctypes.Structure):
    """Kernel parameter; must equal the struct of hopper.cu."""

    _fields_ = (
        *((name, c_uint32) for name in ("q_token", "q_head", "page_rows", "kind_rows", "head_rows", "table")),
        *((name, c_uint32) for name in ("units", "kv_heads", "group", "page", "box", "by_group", "by_page")),
        *(("scale", c_float), ("window", c_uint32), ("inner", c_float)),
    )


def shared_bytes(dim: int) -> int:
    """Shared memory per program: alignment, queries of two units (of one with heads of 256), and the ring of keys and values."""
    units = 2 if dim < 256 else 1
    return 1024 + 2 * dim * (units * GROUPS * HALF + 2 * STAGES * KEYS[dim])


def _product(prefix: str, columns: int, left: int) -> dict[str, str]:
    """Assembly operands of a wgmma of 64 rows and `columns` columns, after its accumulators, of which a thread has columns / 2.
    left: number of operands of its left side."""
    after = [f"%{columns // 2 + i}" for i in range(left + 2)]
    sides = ", ".join(("{" + ", ".join(after[:left]) + "}" if left > 1 else after[0], after[left]))
    return {
        f"{prefix}_SHAPE": f'"m64n{columns}k16"',
        f"{prefix}_SIDES": f'"{sides}"',
        f"{prefix}_ADD": f'"{after[-1]}"',
    }


def source(dim: int, dtype: torch.dtype, form: Form) -> str:
    """Source text that NVRTC compiles."""
    keys = KEYS[dim]
    sums, products = {"SCORE": keys // 2, "OUT": dim // 2}, _product("SCORE", keys, 1) | _product("OUT", dim, 4)
    macros: dict[str, int | str] = {"DIM": dim, "KEYS": f"{keys}u", "TYPE": f'"{TYPES[dtype]}"'}
    macros |= {name.upper(): int(on) for name, on in form._asdict().items()}
    return pairs.text("hopper.cu", sums, **macros, **products)


@cache
def kernel(device: torch.device, dim: int, dtype: torch.dtype, form: Form) -> cuda.Kernel | None:
    """Kernel for heads of size `dim`. None: not supported."""
    if dim not in KEYS or dtype not in TYPES:
        return None
    return pairs.kernel(device, source(dim, dtype, form), "attend_chunks", shared_bytes(dim))


def form_of(window: int | None, cap: float | None, dtype: torch.dtype) -> Form:
    bounded = cap is not None and cap <= LARGEST_BOUNDED and dtype == torch.bfloat16
    return Form(window is not None, cap is not None, bounded)


def addresses(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether TMA can address the queries and the cache."""
    strides = (*q.stride()[:2], q.data_ptr() // q.itemsize)
    return not any(stride * q.itemsize % WORD for stride in strides) and not any(
        stride % q.shape[2] for stride in kv.stride()[:3]
    )


def _inverse(by: int) -> int:
    """Multiplier that divides numbers below 2^31 / by by `by`: (n * multiplier) >> 31."""
    return -(-(1 << BITS) // by)


def attend(
    q: torch.Tensor, view: KvView, units: torch.Tensor, results: tuple[torch.Tensor, torch.Tensor], processors: int
) -> None:
    """Run the units of work that chunk_plan_kernel wrote, from the last to the first, with at most `processors` programs.

    q [T, Hq, D], for which `addresses` holds. results: out like q and log-sum-exp float32 [T, Hq], both contiguous. view.scale > 0.
    """
    kv, dim = view.kv, q.shape[2]
    attends = kernel(q.device, dim, q.dtype, form_of(view.window, view.softcap, q.dtype))
    assert attends is not None
    kv_heads, page, count = kv.shape[2], view.page_tokens, units.shape[1]
    group, box = q.shape[1] // kv_heads, math.gcd(page, KEYS[dim] // pairs.PAIR)
    rows = (stride // dim for stride in kv.stride()[:3])
    sizes = (*q.stride()[:2], *rows, view.table.stride(0), count, kv_heads, group, page, box)
    pointers = (c_void_p(tensor.data_ptr()) for tensor in (q, *results, view.table, units))
    programs = pairs.PAIR * min(count * kv_heads, processors // pairs.PAIR)
    # With a cap, scores lie between -1 and 1 before scaling.
    scale = view.scale if view.softcap is None else view.softcap
    attention_sizes = Sizes(
        *sizes, _inverse(group), _inverse(page), scale * LOG2E, view.window or 0, view.scale / scale
    )
    attends(programs, THREADS, cuda.rows_map(kv, (box, HALF)), *pointers, attention_sizes, early=True)
