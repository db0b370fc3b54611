"""LoRA adapters on a GPU: products grouped by slot, without the host, so that CUDA graphs capture them.

One kernel for each linear, with two kinds of programs. Makers compute A x of the tokens of a slot, in parts of the inputs. Users
add these parts up, compute B A x and add it to the linear's result: the two products of Punica (Chen et al. 2023,
arXiv:2310.18547, section 4.1) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285, section 5), for slots of different ranks. A user
waits until the makers of its tile have arrived at a counter. Makers have the lower numbers: a GPU starts programs in order, so
those that are waited for run already. Users of gate and up apply the activation as well, to all tokens.

Tokens are grouped once per step, as those of experts (ops.triton.experts): a tile has tokens of one slot. A step of few tokens
needs no order: each token is a tile, and tokens of one slot read its weights through the L2 cache. All programs begin while the
previous kernel ends (launch.py): slots of tiles are known since the begin of the step, so the first weights are read before the
programs wait.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.core.adapters import RANK_STEP as PADDED_RANK
from ridgeline.ops.adapters import AdapterOps, Bank, Pairs
from ridgeline.ops.step import StepInputs
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.expert_kernels import pairs_of, sort_kernel
from ridgeline.ops.triton.experts import MMA_ROWS, SORTED_AT_ONCE
from ridgeline.ops.triton.launch import await_inputs, overlap, processors

FEW_TOKENS = 16
"""Most tokens of a step without an order."""
MANY_TOKENS = 1024
"""Fewest tokens of a step whose tiles are large."""
LARGE_ROWS = 64
MAKER_ROWS = 32
"""Rows of A of a maker."""
MOST_MAKERS = 2
"""Most makers of the same inputs of a tile, whatever the largest rank is, where there are many tiles: each takes further rows of A
after its first ones."""
MAKER_ELEMENTS, FEW_MAKER_ELEMENTS = 2048, 4096
"""Of A that a maker has in registers, and reads ahead: where there are many tiles, so that a multiprocessor holds five programs
instead of three, and where there are few or large ones."""
MAKER_INPUTS = 512
"""Inputs of a maker: the others are read at the same time."""
MOST_PARTS, LARGE_PARTS = 16, 4
"""Most parts of the inputs, and those of large tiles."""
USER_OUTPUTS = 256
"""Of each part of a linear, by a user; of gate and up together."""
USER_ELEMENTS, FEW_USER_ELEMENTS = 4096, 8192
"""Of B that a user has in registers, and reads ahead, if a rank is above SMALL_RANK: as MAKER_ELEMENTS."""
MANY_PIECES, PROGRAMS = 4, 4
"""Times USER_OUTPUTS that a user computes, reading the next ones while it multiplies, if so many users remain on each
multiprocessor."""
WARPS = 4
SMALL_RANK: tl.constexpr = tl.constexpr(16)
"""Up to this many rows, products have the smallest tile that a matrix instruction takes."""
RANK_STEP: tl.constexpr = tl.constexpr(PADDED_RANK)
"""Ranks are multiples of it, so that loads of 16 bytes are aligned."""


class Group(NamedTuple):
    """Tokens of a step by slot. chosen: int32 [T], the slot of each, 0 for none. order: int32 [T]. places: int32 [3, tiles], as
    sort_kernel writes them. arrivals: int32 [tiles], zeros between two linears. rows: tokens of a tile. slots: with slot 0."""

    chosen: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    arrivals: torch.Tensor
    rows: int
    slots: int

    @property
    def is_sorted(self) -> bool:
        return len(self.chosen) > FEW_TOKENS


@triton.jit(do_not_specialize=["tokens", "tiles", "makers", "held", "users"])  # few forms for all numbers of tokens
def _adapt(
    x_ptr, a_ptr, b_ptr, ranks_ptr, inner_ptr, y_ptr, out_ptr, arrivals_ptr,
    chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr,
    tokens, tiles, makers, held, inputs, length, width, a_stride, b_stride, outputs, end_0, end_1, users,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr, MADE: tl.constexpr,
    MADE_ELEMENTS: tl.constexpr, MAKERS: tl.constexpr, USED: tl.constexpr, USED_ELEMENTS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, outputs] += B (A x); with KIND out [T, outputs / 2] = act(gate) * up of this sum.

    Programs 0 .. makers - 1 write inner float32 [SPLITS, T, width] = A x over `length` inputs each, MADE rows of A [PARTS * rank,
    inputs] at a time; MAKERS programs share all rows. Of the others `users` work on each tile, PIECES times USED outputs each.
    end_0, end_1: where the first two of three parts of the outputs end, which read different rows of A; a part may be empty. BLOCK:
    at least a rank. A and B are the begin of a slot's memory.
    """
    program = tl.program_id(0)
    made = program < makers
    tile = tl.where(made, program % tiles, (program - makers) // users)
    slot, token, inside = pairs_of(
        tile, chosen_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot)
    rank = rank // RANK_STEP * RANK_STEP  # the compiler sees that rows of B are aligned
    a_ptr += slot.to(tl.int64) * a_stride
    b_ptr += slot.to(tl.int64) * b_stride
    arrivals_ptr += tile
    rows = PARTS * rank
    if made:
        part = program // tiles
        split = part % SPLITS
        x_ptr += split * length
        a_ptr += split * length
        inner_ptr += split.to(tl.int64) * tokens * width
        size = tl.minimum(length, inputs - split * length)
        # Without rows a program ends at once, also before earlier kernels have completed: users wait for those.
        if rows <= SMALL_RANK:
            if part < SPLITS:
                _make(
                    x_ptr, a_ptr, inner_ptr, arrivals_ptr, token, inside, rows, size, inputs, width,
                    SMALL_RANK, MADE_ELEMENTS // SMALL_RANK, PDL,
                )  # fmt: skip
        else:
            for first in range(part // SPLITS * MADE, rows, MAKERS * MADE):
                _make(
                    x_ptr, a_ptr + first * inputs, inner_ptr + first, arrivals_ptr, token, inside, rows - first,
                    size, inputs, width, MADE, MADE_ELEMENTS // MADE, PDL,
                )  # fmt: skip
    else:
        block = (program - makers) % users
        blocks_0, blocks_1 = tl.cdiv(end_0, PIECES * USED), tl.cdiv(end_1 - end_0, PIECES * USED)
        part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
        end = tl.where(part == 0, end_0, tl.where(part == 1, end_1, outputs))
        block -= tl.where(part == 0, 0, tl.where(part == 1, blocks_0, blocks_0 + blocks_1))
        first, goal = begin + block * PIECES * USED, tl.cdiv(rows, MADE) * SPLITS
        inner_ptr += part * rank
        if rank <= SMALL_RANK:
            _use(
                inner_ptr, b_ptr, y_ptr, out_ptr, arrivals_ptr, token, inside, rank, first, end, goal, users,
                tokens, width, outputs, SPLITS, ROWS, USED, PIECES, SMALL_RANK, KIND, PDL,
            )  # fmt: skip
        else:
            WIDE: tl.constexpr = max(16, USED_ELEMENTS // BLOCK)
            _use(
                inner_ptr, b_ptr, y_ptr, out_ptr, arrivals_ptr, token, inside, rank, first, end, goal, users,
                tokens, width, outputs, SPLITS, ROWS, WIDE, PIECES * USED // WIDE, BLOCK, KIND, PDL,
            )  # fmt: skip


@triton.jit
def _make(
    x_ptr, a_ptr, inner_ptr, arrivals_ptr, token, inside, rows, size, inputs, width,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [token, WIDE] = A x over `size` inputs, and an arrival, if any of the rows exists."""
    at, place = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    # Without rows a program ends at once, also before earlier kernels have completed: users wait for those.
    if rows > 0:
        # The first weights come while the previous kernel ends.
        a = _factors(a_ptr, at, place, rows, size, inputs)
        await_inputs(PDL)
        x = _inputs(x_ptr, token, inside, place, size, inputs)
        total = tl.zeros((token.shape[0], WIDE), dtype=tl.float32)
        for start in range(BLOCK, size + BLOCK, BLOCK):
            following = _factors(a_ptr, at, place + start, rows, size, inputs)
            following_x = _inputs(x_ptr, token, inside, place + start, size, inputs)
            total = tl.dot(x, a, total, input_precision="ieee")
            a, x = following, following_x
        tl.store(inner_ptr + token[:, None] * width + at[None, :], total, mask=inside[:, None] & (at < rows)[None, :])
        # All threads must have stored their sums before one thread increments the counter.
        tl.debug_barrier()
        tl.atomic_add(arrivals_ptr, 1, sem="release")


@triton.jit
def _inputs(x_ptr, token, inside, place, end, inputs):
    """Some inputs of the tokens of a tile: [ROWS, BLOCK]."""
    pointers = x_ptr + token[:, None] * inputs + place[None, :]
    return tl.load(pointers, mask=inside[:, None] & (place < end)[None, :], other=0.0)


@triton.jit
def _factors(a_ptr, at, place, rows, end, inputs):
    """A of some inputs, transposed: [BLOCK, WIDE]."""
    pointers = a_ptr + at[None, :].to(tl.int64) * inputs + place[:, None]
    return tl.load(pointers, mask=(at < rows)[None, :] & (place < end)[:, None], other=0.0)


@triton.jit
def _use(
    inner_ptr, b_ptr, y_ptr, out_ptr, arrivals_ptr, token, inside, rank, first, end, goal, users,
    tokens, width, outputs, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y += B inner, or out = act(gate) * up of it, from output `first` on, below `end`. goal: arrivals of all makers. The last
    user of a tile resets the counter."""
    at, place = first + tl.arange(0, WIDE), tl.arange(0, BLOCK)
    half = outputs // 2
    up_ptr = b_ptr + half.to(tl.int64) * rank
    b = _rows(b_ptr, at, place, rank, end)
    up_b = b
    if KIND != 0:
        up_b = _rows(up_ptr, at, place, rank, end)
    await_inputs(PDL)
    if (rank > 0) | (KIND != 0):
        while tl.atomic_add(arrivals_ptr, 0, sem="acquire") < goal:
            pass
        inner = _sums(inner_ptr, token, inside, place, rank, tokens, width, SPLITS, ROWS, BLOCK).to(b.dtype)
        up_inner = inner
        if KIND != 0:
            up_inner = _sums(inner_ptr + rank, token, inside, place, rank, tokens, width, SPLITS, ROWS, BLOCK).to(
                b.dtype
            )
        if goal > 0:
            passed = tl.atomic_add(arrivals_ptr, 1, sem="relaxed") + 1
            tl.store(arrivals_ptr, 0, mask=passed == goal + users)
        for piece in range(PIECES):
            here = at + piece * WIDE
            mask = inside[:, None] & (here < end)[None, :]
            further = tl.where(piece + 1 < PIECES, end, 0)
            y = y_ptr + token[:, None] * outputs + here[None, :]
            value = tl.load(y, mask=mask, other=0.0).to(tl.float32)
            following = _rows(b_ptr, here + WIDE, place, rank, further)
            if KIND == 0:
                value = tl.dot(inner, b, value, input_precision="ieee")
                tl.store(y, value.to(y_ptr.dtype.element_ty), mask=mask)
            else:
                up = tl.load(y + half, mask=mask, other=0.0).to(tl.float32)
                up_following = _rows(up_ptr, here + WIDE, place, rank, further)
                value = tl.dot(inner, b, value, input_precision="ieee")
                up = tl.dot(up_inner, up_b, up, input_precision="ieee")
                value = gated(value, up, KIND, PDL).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + token[:, None] * half + here[None, :], value, mask=mask)
                up_b = up_following
            b = following


@triton.jit
def _rows(b_ptr, at, place, rank, end):
    """B of some outputs, transposed: [BLOCK, WIDE]."""
    pointers = b_ptr + at[None, :].to(tl.int64) * rank + place[:, None]
    return tl.load(pointers, mask=(at < end)[None, :] & (place < rank)[:, None], other=0.0)


@triton.jit
def _sums(
    inner_ptr, token, inside, place, rank, tokens, width, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A x of a tile, [ROWS, BLOCK], added up over the parts of the inputs. Other multiprocessors wrote them just now."""
    pointers = inner_ptr + token[:, None] * width + place[None, :]
    mask = inside[:, None] & (place < rank)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(pointers + split * tokens * width, mask=mask, other=0.0, cache_modifier=".cg")
    return total


class TritonAdapters(AdapterOps):
    """AdapterOps of a GPU. The kernel runs for every token of a step, whichever adapter it has: a captured step stays valid."""

    def group(self, bank: Bank, step: StepInputs) -> Group | None:
        if step.adapters is None:
            return None
        if (cached := step.derived.get("adapters")) is None:
            step.derived["adapters"] = cached = _group(bank, step, step.adapters)
        return cached  # type: ignore[no-any-return]

    def add(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Group) -> torch.Tensor:
        y = y.contiguous()
        return _launch(y, y, x, pairs, group, None)

    def activate(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Group, kind: str) -> torch.Tensor:
        out = y.new_empty(y.shape[0], y.shape[1] // 2)
        return _launch(y.contiguous(), out, x, pairs, group, kind)


def _launch(
    y: torch.Tensor, out: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Group, kind: str | None
) -> torch.Tensor:
    tokens, outputs = y.shape
    if not tokens:
        return out
    x, parts, tiles = x.contiguous(), len(pairs.ends), group.places.shape[1]
    rank = pairs.b.shape[1] // outputs
    width, most = parts * rank, max(16, triton.next_power_of_2(rank))
    splits = min(LARGE_PARTS if group.rows > MMA_ROWS else MOST_PARTS, triton.cdiv(pairs.inputs, MAKER_INPUTS))
    length = triton.cdiv(triton.cdiv(pairs.inputs, splits), MAKER_INPUTS) * MAKER_INPUTS
    splits = triton.cdiv(pairs.inputs, length)
    inner = torch.empty((splits, tokens, width), dtype=torch.float32, device=x.device)
    ends = [*pairs.ends, *[outputs] * 3][:3] if kind is None else [outputs // 2] * 3
    used = USER_OUTPUTS if kind is None else USER_OUTPUTS // 2
    fewest = PROGRAMS * processors(x.device)
    pieces = MANY_PIECES if tiles * ends[2] > MANY_PIECES * fewest * used else 1
    users = sum(triton.cdiv(end - begin, pieces * used) for begin, end in zip((0, *ends), ends, strict=False))
    each, made, held = triton.cdiv(width, MAKER_ROWS), FEW_MAKER_ELEMENTS, FEW_USER_ELEMENTS
    if group.is_sorted and group.rows == MMA_ROWS:
        each, made, held = min(MOST_MAKERS, each), MAKER_ELEMENTS, USER_ELEMENTS
    makers = tiles * splits * each
    _adapt[(makers + tiles * users,)](
        x, pairs.a, pairs.b, pairs.device_ranks, inner, y, out, group.arrivals, group.chosen, group.order, *group.places,
        tokens, tiles, makers, group.slots, pairs.inputs, length, width, pairs.a.stride(0), pairs.b.stride(0), outputs,
        ends[0], ends[1], users, PARTS=parts, SPLITS=splits, SORTED=group.is_sorted, ROWS=group.rows, MADE=MAKER_ROWS,
        MADE_ELEMENTS=made, MAKERS=each, USED=used, USED_ELEMENTS=held if kind is None else held // 2, PIECES=pieces,
        BLOCK=most, KIND=KINDS[kind], num_warps=WARPS, num_stages=1, **overlap(x.device),
    )  # fmt: skip
    return out


def _group(bank: Bank, step: StepInputs, adapters: torch.Tensor) -> Group:
    chosen = adapters.index_select(0, step.rows.index_select(0, step.row_of_inputs()))
    tokens, groups, order = len(chosen), bank.slots + 1, torch.empty_like(chosen)
    rows = LARGE_ROWS if tokens >= MANY_TOKENS else MMA_ROWS
    if tokens <= FEW_TOKENS:
        return Group(chosen, order, chosen.new_empty(3, tokens), torch.zeros_like(chosen), rows, groups)
    places = chosen.new_empty(3, tokens // rows + groups)
    early = overlap(chosen.device)
    sort_kernel[(groups,)](
        chosen, order, *places, tokens, groups, ROWS=rows, BLOCK=SORTED_AT_ONCE, num_warps=4, **early
    )
    return Group(chosen, order, places, torch.zeros_like(places[0]), rows, groups)
