"""Attention of long chunks on Hopper, in CUDA C++ (hopper.cu): causal, also within a window or of capped scores, of 16-bit floats
alone; the rest is chunk's.

Programs stay for the whole launch and take one unit of work after the other without a stop. Two of them share what they fetch of
keys and values, and a weight's maximum is renewed only where weights would outgrow 2^8 (as FlashAttention-4 does, 2025): nothing is
scaled then and no thread asks another, which is what made it faster than the same in Gluon
(docs/log/2026-11-23-long-chunk-attention-cuda.md). Within a window a unit begins with the first tile that its first
query sees. Heads of 256 leave room for the queries of one unit at a time.
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

# As in hopper.cu.
GROUPS, HALF, STAGES = 2, 64, 2
QUERIES = pairs.PAIR * GROUPS * HALF
"""Packed queries (tokens times heads of a group) of a unit of work, which a pair of programs shares."""
THREADS = 128 * (1 + GROUPS)
KEYS = {64: 128, 128: 128, 256: 64}
"""Slots of a tile, by the size of heads. Of 256 memory holds 80, but in copies of 8 slots: a sixth slower than 64."""
SMALLEST_PAGE = 16
"""Slots of which a page must be a multiple, or copies are too many."""
SHORTEST_CHUNK = {64: 256, 128: 128, 256: 64}
"""Tokens below which more and smaller programs are faster, by the size of heads."""
MOST_BOUNDED = 60
"""Of a cap: weights reach 2^87, which bfloat16 holds, and the sum of a million of them float32."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
WORD, BITS = 16, 31
"""Bytes of queries that are copied at a time; of the numbers that divide (see _inverse)."""
LOG2E = 1.4426950408889634


class Form(NamedTuple):
    """Which of its texts a layer takes."""

    windowed: bool
    capped: bool
    bounded: bool
    """Whether weights need no maximum to refer to: what is capped may be so low that no exponent overflows."""


class Sizes(ctypes.Structure):
    """As in hopper.cu."""

    _fields_ = (
        *((name, c_uint32) for name in ("q_token", "q_head", "page_rows", "kind_rows", "head_rows", "table")),
        *((name, c_uint32) for name in ("units", "kv_heads", "group", "page", "box", "by_group", "by_page")),
        *(("scale", c_float), ("window", c_uint32), ("inner", c_float)),
    )


def shared_bytes(dim: int) -> int:
    """Of a program: what alignment may take, queries of two units (of one with heads of 256), the ring of keys and values."""
    units = 2 if dim < 256 else 1
    return 1024 + 2 * dim * (units * GROUPS * HALF + 2 * STAGES * KEYS[dim])


def _product(prefix: str, columns: int, left: int) -> dict[str, str]:
    """How a product of 64 rows and so many columns is written behind its sums, of which a thread has half as many; left: operands
    that say where its left side is."""
    after = [f"%{columns // 2 + i}" for i in range(left + 2)]
    sides = ", ".join(("{" + ", ".join(after[:left]) + "}" if left > 1 else after[0], after[left]))
    return {
        f"{prefix}_SHAPE": f'"m64n{columns}k16"',
        f"{prefix}_SIDES": f'"{sides}"',
        f"{prefix}_ADD": f'"{after[-1]}"',
    }


def source(dim: int, dtype: torch.dtype, form: Form) -> str:
    """The text that is compiled."""
    keys = KEYS[dim]
    sums, products = {"SCORE": keys // 2, "OUT": dim // 2}, _product("SCORE", keys, 1) | _product("OUT", dim, 4)
    macros: dict[str, int | str] = {"DIM": dim, "KEYS": f"{keys}u", "TYPE": f'"{TYPES[dtype]}"'}
    macros |= {name.upper(): int(on) for name, on in form._asdict().items()}
    return pairs.text("hopper.cu", sums, **macros, **products)


@cache
def kernel(device: torch.device, dim: int, dtype: torch.dtype, form: Form) -> cuda.Kernel | None:
    """For heads of `dim`; None: not here."""
    if dim not in KEYS or dtype not in TYPES:
        return None
    return pairs.kernel(device, source(dim, dtype, form), "attend_chunks", shared_bytes(dim))


def form_of(window: int | None, cap: float | None, dtype: torch.dtype) -> Form:
    bounded = cap is not None and cap <= MOST_BOUNDED and dtype == torch.bfloat16
    return Form(window is not None, cap is not None, bounded)


def addresses(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether copies can address the queries and the cache."""
    strides = (*q.stride()[:2], q.data_ptr() // q.itemsize)
    return not any(stride * q.itemsize % WORD for stride in strides) and not any(
        stride % q.shape[2] for stride in kv.stride()[:3]
    )


def _inverse(by: int) -> int:
    """Numbers below 2^31 / by are divided by `by` as they are multiplied by this."""
    return -(-(1 << BITS) // by)


def attend(
    q: torch.Tensor, view: KvView, units: torch.Tensor, results: tuple[torch.Tensor, torch.Tensor], processors: int
) -> None:
    """Units of work, as chunk_plan_kernel cut them, from the last to the first, by at most `processors` programs.

    q [T, Hq, D], which it `addresses`; results: out like q and log-sum-exp float32 [T, Hq], both contiguous. view.scale > 0."""
    kv, dim = view.kv, q.shape[2]
    attends = kernel(q.device, dim, q.dtype, form_of(view.window, view.softcap, q.dtype))
    assert attends is not None
    kv_heads, page, count = kv.shape[2], view.page_tokens, units.shape[1]
    group, box = q.shape[1] // kv_heads, math.gcd(page, KEYS[dim] // pairs.PAIR)
    rows = (stride // dim for stride in kv.stride()[:3])
    sizes = (*q.stride()[:2], *rows, view.table.stride(0), count, kv_heads, group, page, box)
    pointers = (c_void_p(tensor.data_ptr()) for tensor in (q, *results, view.table, units))
    programs = pairs.PAIR * min(count * kv_heads, processors // pairs.PAIR)
    # A capped score lies between -1 and 1 before it is scaled.
    scale = view.scale if view.softcap is None else view.softcap
    attention_sizes = Sizes(
        *sizes, _inverse(group), _inverse(page), scale * LOG2E, view.window or 0, view.scale / scale
    )
    attends(programs, THREADS, cuda.rows_map(kv, (box, HALF)), *pointers, attention_sizes, early=True)
