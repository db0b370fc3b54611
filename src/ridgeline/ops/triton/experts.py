"""Experts on a GPU: routing, grouping and products without the host, so that CUDA graphs capture them.

Four kernels. `_route` chooses the experts of each token. `_sort` orders the (token, choice) pairs by expert and lists the tiles of
at most ROWS pairs of one expert that the products work on. Its list has a fixed length, pairs // ROWS + groups: expert e's tiles
start at pairs_before(e) // ROWS + e, which leaves room for each expert's last, partly filled tile; unused entries hold -1. `_inner`
multiplies by gate and up and applies the activation, `_outer` multiplies by down and by the pair's share. A token's terms are
then added in float32 in the order of its choices, so its sum does not depend on the other tokens. Terms are stored in x's dtype:
in 16 bits that adds one rounding of the result to the two that it has (of what down multiplies, and of the sum), and saves half of
what prompts move for them.

A step of few pairs needs no order: each pair is a tile, and two pairs of one expert read its weights through the L2 cache.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.ops.experts import Grouped, Tensors
from ridgeline.ops.reference import FP8
from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton import block_tiles
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.blocks import E8M0, block_product, pack_codes
from ridgeline.ops.triton.launch import is_hopper

FEW_PAIRS = 32
"""Most pairs of a step without an order."""
SORTED_AT_ONCE, MANY_SORTED_AT_ONCE = 1024, 8192
"""Pairs that `_sort` reads at once, and those of a long prompt."""
MMA_ROWS = 16
TILED = torch.int32
"""Codes in the layout of block_tiles."""


class Tile(NamedTuple):
    """rows: pairs of a tile. outputs: of a block of down, and of gate and of up each. inputs: of a block. warps, stages: of the
    launch."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW = Tile(MMA_ROWS, 32, 128, 4, 4)
MANY = Tile(64, 64, 64, 4, 3)
MOST = Tile(128, 128, 64, 8, 4)
HOPPER_TILES = ((128, MOST), (MMA_ROWS, MANY), (0, FEW))
TILES = HOPPER_TILES[1:]
"""From so many pairs of an expert, on average, this tile. MOST takes 192 KiB of shared memory; GPUs before and after Hopper's
generation may have 99."""


@triton.jit
def _route(
    logits_ptr, chosen_ptr, shares_ptr, load_ptr, count, per_token, first, held,
    NORMALIZED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `per_token` likeliest experts of one token, likeliest first; of equal ones the first. See ops.experts.route. Experts are
    numbered from `first`, and the `held` others of this rank; all others get the number `held`.

    Logits that are not numbers choose the last expert: one request's overflow must not read beyond the weights of all.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + token * count + at, mask=at < count, other=-float("inf")).to(tl.float32)
    exps = tl.exp(logits - tl.max(logits, 0))
    probabilities = exps / tl.sum(exps, 0)
    left = tl.where(at < count, probabilities, -1.0)
    total = 0.0
    for _ in range(per_token):
        best = tl.max(left, 0)
        expert = tl.minimum(tl.min(tl.where(left == best, at, BLOCK), 0), count - 1)
        total += best
        left = tl.where(at == expert, -1.0, left)
    scale = 1.0 / total if NORMALIZED else 1.0
    left = tl.where(at < count, probabilities, -1.0)
    for choice in range(per_token):
        best = tl.max(left, 0)
        expert = tl.minimum(tl.min(tl.where(left == best, at, BLOCK), 0), count - 1)
        here = (expert >= first) & (expert < first + held)
        tl.store(chosen_ptr + token * per_token + choice, tl.where(here, expert - first, held))
        tl.store(shares_ptr + token * per_token + choice, best * scale)
        tl.atomic_add(load_ptr + expert, 1)
        left = tl.where(at == expert, -1.0, left)


@triton.jit(do_not_specialize=["pairs"])  # start-up compiles one form for all numbers of pairs
def _sort(
    chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, pairs, held,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Order the pairs of one expert behind those of all earlier experts, and list its tiles. Those of number `held`, which are
    other ranks', are unused."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = 0
    count = 0
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=2147483647)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    placed = before
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=2147483647)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + placed + tl.cumsum(mine, 0) - 1, start + at, mask=mine > 0)
        placed += tl.sum(mine, 0)
    first_tile = before // ROWS + expert
    tiles = (count + ROWS - 1) // ROWS
    next_first = (before + count) // ROWS + expert + 1
    for tile in range(first_tile, next_first):
        used = (tile < first_tile + tiles) & (expert < held)
        tl.store(tile_expert_ptr + tile, tl.where(used, expert, -1))
        tl.store(tile_first_ptr + tile, before + (tile - first_tile) * ROWS)
        tl.store(tile_end_ptr + tile, before + count)


@triton.jit
def _product(x_ptr, row, inside, w_ptr, out_at, outputs, inputs, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Rows of x times rows `out_at` of a matrix [outputs, inputs], float32. WIDE: number of columns of out_at."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((row.shape[0], WIDE), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        here = start + at
        x = tl.load(
            x_ptr + row[:, None] * inputs + here[None, :], mask=inside[:, None] & (here < inputs)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + out_at[None, :].to(tl.int64) * inputs + here[:, None],
            mask=(out_at < outputs)[None, :] & (here < inputs)[:, None],
            other=0.0,
        )
        total = tl.dot(x, w.to(x.dtype), total, input_precision="ieee")
    return total


@triton.jit
def _pairs_of(
    tile, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held,
    ROWS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """(expert, numbers of the pairs [ROWS], which of them exist). expert -1: the tile is unused."""
    at = tl.arange(0, ROWS)
    if SORTED:
        expert = tl.load(tile_expert_ptr + tile)
        place = tl.load(tile_first_ptr + tile) + at
        inside = (place < tl.load(tile_end_ptr + tile)) & (expert >= 0)
        pair = tl.load(order_ptr + place, mask=inside, other=0)
    else:
        expert = tl.load(chosen_ptr + tile)
        expert = tl.where(expert < held, expert, -1)
        pair, inside = tile + at * 0, at == 0
    return expert, pair.to(tl.int64), inside


@triton.jit
def _matrix_product(
    x_ptr, row, inside, w_ptr, scale_ptr, first, out_at, outputs, inputs,
    FOUR_BITS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows `first` + `out_at` of all experts' rows, of which `outputs` after `first` exist. FOUR_BITS: in MXFP4."""
    if FOUR_BITS:
        last = first + tl.minimum(out_at, outputs - 1)
        return block_product(x_ptr, row, inside, w_ptr, scale_ptr, scale_ptr, last, inputs, E8M0, 4, BLOCK // 64, WIDE)
    else:
        return _product(x_ptr, row, inside, w_ptr + first * inputs, out_at, outputs, inputs, BLOCK, WIDE)


@triton.jit
def _inner(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr,
    width, inputs, per_token, held,
    KIND: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, FOUR_BITS: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = act(gate) * up of each pair's token; w [experts, 2 width, inputs], gate's rows first; bias: likewise."""
    expert, pair, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        both = tl.arange(0, 2 * WIDE)
        row = tl.program_id(1) * WIDE + both // 2 + both % 2 * width  # gate and up by turns: one product has both
        total = _matrix_product(
            x_ptr, pair // per_token, inside, w_ptr, scale_ptr, expert.to(tl.int64) * 2 * width, row, 2 * width, inputs,
            FOUR_BITS, BLOCK, 2 * WIDE,
        )  # fmt: skip
        if SCALED:
            total *= tl.load(scale_ptr + expert * 2 * width + row, mask=row < 2 * width, other=0.0)[None, :]
        if BIASED:
            bias = tl.load(bias_ptr + expert * 2 * width + row, mask=row < 2 * width, other=0.0)
            total += bias.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(total, (ROWS, WIDE, 2)))
        here = pair[:, None] * width + at[None, :]
        value = gated(gate, up, KIND).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, value, mask=inside[:, None] & (at < width)[None, :])


@triton.jit
def _outer(
    x_ptr, w_ptr, scale_ptr, bias_ptr, shares_ptr, out_ptr,
    chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr,
    outputs, width, held,
    SCALED: tl.constexpr, BIASED: tl.constexpr, FOUR_BITS: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [pairs, outputs] = share * down(x); w [experts, outputs, width]."""
    expert, pair, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        first = expert.to(tl.int64) * outputs
        total = _matrix_product(
            x_ptr, pair, inside, w_ptr, scale_ptr, first, at, outputs, width, FOUR_BITS, BLOCK, WIDE
        )
        if SCALED:
            total *= tl.load(scale_ptr + expert * outputs + at, mask=at < outputs, other=0.0)[None, :]
        if BIASED:
            total += tl.load(bias_ptr + expert * outputs + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(shares_ptr + pair, mask=inside, other=0.0)[:, None]
        here = pair[:, None] * outputs + at[None, :]
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (at < outputs)[None, :])


def tile_for(weights: torch.Tensor, x: torch.Tensor, mean_pairs: float) -> Tile:
    """The tile of a step with so many pairs of an expert on average."""
    largest = (
        is_hopper(x.device) and x.itemsize == 2 and weights.is_floating_point()
    )  # not in MXFP4, whose kernels end at 64 rows
    tile = next(tile for least, tile in (HOPPER_TILES if largest else TILES) if mean_pairs >= least)
    return tile if x.itemsize == 2 else tile._replace(outputs=tile.outputs // 2)  # in the same shared memory


class Stacked(NamedTuple):
    """Weights [experts, outputs, inputs]; scales float32 and biases [experts, outputs] or None. In MXFP4 weights and scales are
    [experts, outputs, ...] in the layout of ops.triton.blocks, or int32 and uint8 [experts, tiles, ...] in that of block_tiles."""

    values: torch.Tensor
    scales: torch.Tensor | None
    biases: torch.Tensor | None


def stacked(weights: Sequence[Tensors]) -> Stacked:
    values, *vectors = (torch.stack(tensors) for tensors in zip(*weights, strict=True))
    scales = vectors.pop(0) if values.itemsize == 1 or values.dtype is TILED else None
    return Stacked(values, scales, vectors[0] if vectors else None)


def _matrix(side: Stacked, inputs: int) -> IntMatrix:
    """The tiles of all experts. Their outputs and inputs are multiples of 32, so tiles have no padding rows."""
    assert side.scales is not None
    outputs = side.values.shape[1] * block_tiles.ROWS
    return IntMatrix(side.values, side.scales, None, 4, 32, outputs, inputs, scaling="e8m0")


def _untiled(side: Stacked, inputs: int) -> Stacked:
    """For x in float32, which the kernels of tiles do not multiply."""
    matrix, made = _matrix(side, inputs), []
    for codes, scales in zip(matrix.codes, matrix.scales, strict=True):
        blocks = block_tiles.unpack(replace(matrix, codes=codes, scales=scales))
        made.append((pack_codes(blocks.codes, 4), blocks.scales.contiguous()))
    codes, scales = (torch.stack(tensors) for tensors in zip(*made, strict=True))
    return Stacked(codes, scales, side.biases)


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """ExpertOps. fixed: one tile for every step, so that a token's result does not depend on the number of tokens."""

    formats: frozenset[str] = frozenset({"", "fp8-weight", "mxfp4"})
    fixed: bool = False

    def group(self, gate_up: Sequence[Tensors], down: Sequence[Tensors], kind: str, held: range) -> Grouped:
        return GroupedExperts(gate_up, down, kind, held, self.fixed)


class GroupedExperts:
    """The weights of a layer's experts on this rank. Implements Grouped."""

    __slots__ = ("_gate_up", "_down", "_kind", "_first", "_fixed")

    def __init__(
        self, gate_up: Sequence[Tensors], down: Sequence[Tensors], kind: str, held: range, fixed: bool
    ) -> None:
        self._gate_up, self._down = stacked(gate_up), stacked(down)
        self._kind, self._first, self._fixed = KINDS[kind], held.start, fixed

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, per_token: int, normalized: bool, load: torch.Tensor
    ) -> torch.Tensor:
        (tokens, d_model), (experts, both, *_) = x.shape, self._gate_up.values.shape
        tiled = self._gate_up.values.dtype is TILED
        width = both * (block_tiles.ROWS if tiled else 1) // 2
        if tiled and x.dtype not in block_tiles.TYPES:
            self._gate_up, self._down, tiled = _untiled(self._gate_up, d_model), _untiled(self._down, width), False
        four_bits = self._down.values.dtype is torch.uint8
        pairs, count = tokens * per_token, logits.shape[1]
        new = torch.empty if experts == count else torch.zeros  # nobody writes the pairs of other ranks' experts
        # The kernels of tiles write float32.
        out = new((pairs, d_model), dtype=torch.float32 if tiled else x.dtype, device=x.device)
        if not tokens:
            return out.float()
        inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        chosen, order = torch.empty((2, pairs), dtype=torch.int32, device=x.device)
        shares = torch.empty(pairs, dtype=torch.float32, device=x.device)
        _route[(tokens,)](
            logits, chosen, shares, load, count, per_token, self._first, experts,
            NORMALIZED=normalized, BLOCK=triton.next_power_of_2(count), num_warps=1,
        )  # fmt: skip
        tile = tile_for(self._gate_up.values, x, 0 if self._fixed else pairs / count)
        is_sorted = pairs > FEW_PAIRS
        groups = min(experts + 1, count)  # the last one are the pairs of other ranks' experts, if there are any
        tiles = pairs // tile.rows + groups if is_sorted else pairs
        places = torch.empty((3, tiles), dtype=torch.int32, device=x.device)
        if is_sorted:
            block, warps = (MANY_SORTED_AT_ONCE, 8) if pairs >= MANY_SORTED_AT_ONCE else (SORTED_AT_ONCE, 4)
            _sort[(groups,)](chosen, order, *places, pairs, experts, ROWS=tile.rows, BLOCK=block, num_warps=warps)
        if tiled:
            columns = tile.rows // 8 if is_sorted or self._fixed else 1
            listed = block_tiles.Pairs(chosen, order, places, tiles, is_sorted, columns, experts, shares)
            self._multiply_tiles(x, inner, out, listed)
            return out.view(tokens, per_token, d_model).sum(1)
        shape = {"SORTED": is_sorted, "ROWS": tile.rows, "WIDE": tile.outputs, "BLOCK": tile.inputs}
        launch = {"num_warps": tile.warps, "num_stages": tile.stages}
        shape |= {"SCALED": self._down.values.dtype is FP8, "BIASED": self._down.biases is not None}
        shape["FOUR_BITS"] = four_bits
        _inner[(tiles, triton.cdiv(width, tile.outputs))](
            x, *self._gate_up, inner, chosen, order, *places, width, d_model, per_token, experts,
            KIND=self._kind, **shape, **launch,
        )  # fmt: skip
        _outer[(tiles, triton.cdiv(d_model, tile.outputs))](
            inner, *self._down, shares, out, chosen, order, *places, d_model, width, experts,
            **shape, **launch,
        )  # fmt: skip
        return out.view(tokens, per_token, d_model).sum(1, dtype=torch.float32)

    def _multiply_tiles(
        self, x: torch.Tensor, inner: torch.Tensor, out: torch.Tensor, pairs: block_tiles.Pairs
    ) -> None:
        """`_inner` and `_outer` with weights in tiles."""
        matrix = _matrix(self._gate_up, x.shape[1])
        block_tiles.expert_product(x.contiguous(), matrix, self._gate_up.biases, inner, pairs, self._kind)
        matrix = _matrix(self._down, inner.shape[1])
        block_tiles.expert_product(inner, matrix, self._down.biases, out, pairs)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (*self._gate_up, *self._down) if tensor is not None)
