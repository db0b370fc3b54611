"""LoRA adapters on a GPU: products grouped by slot, without the host, so that CUDA graphs capture them.

Two kernels for each linear. `_shrink` computes A x of each token, in parts of the inputs, whose sums `_expand` adds up while it
computes B A x and adds it to the linear's result: the kernels of Punica (Chen et al. 2023, arXiv:2310.18547, section 4.1) and
S-LoRA (Sheng et al. 2023, arXiv:2311.03285, section 5), for slots of different ranks. Tokens are grouped once per step, as those of
experts (ops.triton.experts): a tile has tokens of one slot, and tiles without an adapter end at once. A step of few tokens needs no
order: each token is a tile, and tokens of one slot read its weights through the L2 cache. Both kernels begin while their
predecessor ends (launch.py): the slots of tiles are known since the begin of the step, so the first weights are read before they
wait.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.core.adapters import RANK_STEP as PADDED_RANK
from ridgeline.ops.adapters import Bank, Pairs
from ridgeline.ops.step import StepInputs
from ridgeline.ops.triton.experts import MMA_ROWS, SORTED_AT_ONCE, _pairs_of, _sort
from ridgeline.ops.triton.launch import await_inputs, overlap, processors

FEW_TOKENS = 16
"""Most tokens of a step without an order."""
MANY_TOKENS = 1024
"""Fewest tokens of a step whose tiles are large."""
LARGE_ROWS = 64
SHRINK_INPUTS, EXPAND_OUTPUTS = 256, 256
PART_INPUTS = 512
"""Inputs that one program of `_shrink` reads in a step of few tiles: the others are read at the same time."""
MOST_PARTS = 16
SHRINK_WARPS, EXPAND_WARPS = 2, 4
EXPAND_ELEMENTS = 16384
"""Of B that a program of `_expand` has in registers."""
MANY_PIECES, PROGRAMS = 4, 4
"""Pieces of a program of `_expand`, which reads the next one while it multiplies one, if so many programs remain on each
multiprocessor."""
RANK_STEP: tl.constexpr = tl.constexpr(PADDED_RANK)
"""Ranks are multiples of it, so that loads of 16 bytes are aligned."""


class Group(NamedTuple):
    """Tokens of a step by slot. chosen: int32 [T], slot - 1, or the number of slots for none. order: int32 [T]. places: int32
    [3, tiles], as _sort writes them. rows: tokens of a tile."""

    chosen: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    rows: int
    slots: int

    @property
    def is_sorted(self) -> bool:
        return len(self.chosen) > FEW_TOKENS


@triton.jit
def _shrink(
    x_ptr, a_ptr, ranks_ptr, out_ptr, chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr,
    tokens, inputs, width, a_stride, held, length,
    PARTS: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [splits, T, width]: A x over `length` inputs each. A [PARTS * rank, inputs] is the begin of a slot's memory."""
    slot, token, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    rows = 0
    if slot >= 0:
        rows = PARTS * tl.load(ranks_ptr + slot + 1)
    first, split = tl.program_id(1) * WIDE, tl.program_id(2)
    at, place = first + tl.arange(0, WIDE), split * length + tl.arange(0, BLOCK)
    end = tl.minimum((split + 1) * length, inputs)
    a_ptr += (slot + 1).to(tl.int64) * a_stride
    # The first weights come while the previous kernel ends.
    a = _factors(a_ptr, at, place, rows, end, inputs)
    await_inputs(PDL)
    if first < rows:
        x = tl.load(
            x_ptr + token[:, None] * inputs + place[None, :], mask=inside[:, None] & (place < end)[None, :], other=0.0
        )
        total = tl.dot(x, a, input_precision="ieee")
        for start in range(BLOCK, end - split * length, BLOCK):
            here = place + start
            x = tl.load(
                x_ptr + token[:, None] * inputs + here[None, :], mask=inside[:, None] & (here < end)[None, :], other=0.0
            )
            total = tl.dot(x, _factors(a_ptr, at, here, rows, end, inputs), total, input_precision="ieee")
        out = out_ptr + (split * tokens + token)[:, None] * width + at[None, :]
        tl.store(out, total, mask=inside[:, None] & (at < rows)[None, :])


@triton.jit
def _factors(a_ptr, at, place, rows, end, inputs):
    """A of some inputs, transposed: [BLOCK, WIDE]."""
    pointers = a_ptr + at[None, :].to(tl.int64) * inputs + place[:, None]
    return tl.load(pointers, mask=(at < rows)[None, :] & (place < end)[:, None], other=0.0)


@triton.jit
def _expand(
    inner_ptr, b_ptr, ranks_ptr, y_ptr, chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr,
    tokens, width, b_stride, held, end_0, end_1, outputs,
    SPLITS: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, outputs] += B (A x), PIECES times WIDE outputs per program. B [outputs, rank] is the begin of a slot's memory. end_0,
    end_1: where the first two of three parts end, which read different rows of A; a part may be empty. BLOCK: at least a rank."""
    slot, token, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot + 1)
    rank = rank // RANK_STEP * RANK_STEP  # the compiler sees that rows of B are aligned
    block = tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(end_0, PIECES * WIDE), tl.cdiv(end_1 - end_0, PIECES * WIDE)
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
    end = tl.where(part == 0, end_0, tl.where(part == 1, end_1, outputs))
    block -= tl.where(part == 0, 0, tl.where(part == 1, blocks_0, blocks_0 + blocks_1))
    at, place = begin + block * PIECES * WIDE + tl.arange(0, WIDE), tl.arange(0, BLOCK)
    b_ptr += (slot + 1).to(tl.int64) * b_stride
    b = _rows(b_ptr, at, place, rank, end)
    await_inputs(PDL)
    if rank > 0:
        first = inner_ptr + token[:, None] * width + part * rank + place[None, :]
        inner = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            inner += tl.load(first + split * tokens * width, mask=inside[:, None] & (place < rank)[None, :], other=0.0)
        for piece in range(PIECES):
            here = at + piece * WIDE
            y = y_ptr + token[:, None] * outputs + here[None, :]
            mask = inside[:, None] & (here < end)[None, :]
            value = tl.load(y, mask=mask, other=0.0).to(tl.float32)
            following = _rows(b_ptr, here + WIDE, place, rank, tl.where(piece + 1 < PIECES, end, 0))
            value = tl.dot(inner.to(b.dtype), b, value, input_precision="ieee")
            tl.store(y, value.to(y_ptr.dtype.element_ty), mask=mask)
            b = following


@triton.jit
def _rows(b_ptr, at, place, rank, end):
    """B of some outputs, transposed: [BLOCK, WIDE]."""
    pointers = b_ptr + at[None, :].to(tl.int64) * rank + place[:, None]
    return tl.load(pointers, mask=(at < end)[None, :] & (place < rank)[:, None], other=0.0)


class TritonAdapters:
    """AdapterOps of a GPU. The kernels run in every step, also while no adapter is loaded: a captured step stays valid."""

    def group(self, bank: Bank, step: StepInputs) -> Group | None:
        if step.adapters is None:
            return None
        if (cached := step.derived.get("adapters")) is None:
            step.derived["adapters"] = cached = _group(bank, step, step.adapters)
        return cached  # type: ignore[no-any-return]

    def add(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Group) -> torch.Tensor:
        tokens, outputs = y.shape
        if not tokens:
            return y
        x, y, parts = x.contiguous(), y.contiguous(), len(pairs.ends)
        rank = pairs.b.shape[1] // outputs
        width, tiles = parts * rank, group.places.shape[1]
        splits = 1 if group.rows > MMA_ROWS else min(MOST_PARTS, triton.cdiv(pairs.inputs, PART_INPUTS))
        length = triton.cdiv(triton.cdiv(pairs.inputs, splits), SHRINK_INPUTS) * SHRINK_INPUTS
        splits = triton.cdiv(pairs.inputs, length)
        inner = torch.empty((splits, tokens, width), dtype=torch.float32, device=x.device)
        places = (group.chosen, group.order, *group.places)
        wide = min(64, max(16, triton.next_power_of_2(rank)))
        shape = {"SORTED": group.is_sorted, "ROWS": group.rows, **overlap(x.device)}
        _shrink[(tiles, triton.cdiv(width, wide), splits)](
            x, pairs.a, pairs.device_ranks, inner, *places, tokens, pairs.inputs, width, pairs.a.stride(0), group.slots,
            length, PARTS=parts, **shape, WIDE=wide, BLOCK=SHRINK_INPUTS, num_warps=SHRINK_WARPS, num_stages=3,
        )  # fmt: skip
        ends = [*pairs.ends, *[outputs] * 3][:2]
        most = max(16, triton.next_power_of_2(rank))
        columns = min(EXPAND_OUTPUTS, EXPAND_ELEMENTS // most)
        fewest = PROGRAMS * processors(x.device)
        pieces = MANY_PIECES if tiles * outputs > MANY_PIECES * fewest * columns else 1
        blocks = sum(
            triton.cdiv(end - begin, pieces * columns) for begin, end in zip((0, *ends), (*ends, outputs), strict=True)
        )
        _expand[(tiles, blocks)](
            inner, pairs.b, pairs.device_ranks, y, *places, tokens, width, pairs.b.stride(0), group.slots, *ends,
            outputs, SPLITS=splits, **shape, WIDE=columns, PIECES=pieces, BLOCK=most, num_warps=EXPAND_WARPS,
        )  # fmt: skip
        return y


def _group(bank: Bank, step: StepInputs, adapters: torch.Tensor) -> Group:
    slots = adapters.index_select(0, step.rows.index_select(0, step.row_of_inputs()))
    chosen = torch.where(slots == 0, bank.slots, slots - 1)
    tokens, groups, order = len(chosen), bank.slots + 1, torch.empty_like(chosen)
    rows = LARGE_ROWS if tokens >= MANY_TOKENS else MMA_ROWS
    if tokens <= FEW_TOKENS:
        return Group(chosen, order, chosen.new_empty(3, tokens), rows, bank.slots)
    places = chosen.new_empty(3, tokens // rows + groups)
    _sort[(groups,)](chosen, order, *places, tokens, bank.slots, ROWS=rows, BLOCK=SORTED_AT_ONCE, num_warps=4)
    return Group(chosen, order, places, rows, bank.slots)
