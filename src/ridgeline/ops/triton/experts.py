"""Experts on a GPU: routing, grouping and products without the host, so that CUDA graphs capture them.

Five kernels. `_route` chooses the experts of each token. `_sort` orders the (token, choice) pairs by expert and lists the tiles of
at most ROWS pairs of one expert that the products work on. Its list has a fixed length, pairs // ROWS + groups: expert e's tiles
start at pairs_before(e) // ROWS + e, which leaves room for each expert's last, partly filled tile; unused entries hold -1. `_inner`
multiplies by gate and up and applies the activation, `_outer` multiplies by down and by the pair's share. `_sum` adds a token's
terms in float32 in the order of its choices, so its sum does not depend on the other tokens. Terms are stored in x's dtype:
in 16 bits that adds one rounding of the result to the two that it has (of what down multiplies, and of the sum), and saves half of
what prompts move for them.

Weights are floats, codes in the layout of ops.triton.integer, or MXFP4. Codes are dequantized in registers, as the left operand of
the product, so that they go to the matrix unit without a way through shared memory; groups have their scales there, and one scale
per output multiplies the sum.

A step of few pairs needs no order: each pair is a tile, and two pairs of one expert read its weights through the L2 cache.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.table import Fp8Matrix, Grouped, IntMatrix, Matrix
from ridgeline.ops.triton import block_tiles
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.blocks import E8M0, block_product, pack_codes
from ridgeline.ops.triton.integer import as_codes
from ridgeline.ops.triton.integer_matrix import constants, dequantized
from ridgeline.ops.triton.launch import await_inputs, is_hopper, overlap

FEW_PAIRS = 32
"""Most pairs of a step without an order."""
SUMMED = 1024
"""Elements of a program of `_sum`."""
SORTED_AT_ONCE, MANY_SORTED_AT_ONCE = 1024, 8192
"""Pairs that `_sort` reads at once, and those of a long prompt."""
MMA_ROWS = 16
FLOATS, CODES, MXFP4 = (tl.constexpr(number) for number in range(3))
"""Forms of weights."""


class Block(NamedTuple):
    """outputs: of a block of down, or of gate and of up each. inputs: of a block. warps, stages: of the launch."""

    outputs: int
    inputs: int
    warps: int
    stages: int


class Tile(NamedTuple):
    """rows: pairs of a tile. inner, outer: blocks of the two products."""

    rows: int
    inner: Block
    outer: Block

    def of_floats(self) -> Tile:
        """For x in float32, in the same shared memory."""
        inner, outer = (block._replace(outputs=block.outputs // 2) for block in self[1:])
        return Tile(self.rows, inner, outer)


Tiles = tuple[tuple[int, Tile], ...]
FEW = Tile(MMA_ROWS, Block(32, 128, 4, 4), Block(32, 128, 4, 4))
MANY = Tile(64, Block(64, 64, 4, 3), Block(64, 64, 4, 3))
MOST = Tile(128, Block(128, 64, 8, 4), Block(128, 64, 8, 4))
HOPPER_TILES: Tiles = ((128, MOST), (MMA_ROWS, MANY), (0, FEW))
TILES = HOPPER_TILES[1:]
"""From so many pairs of an expert, on average, this tile. MOST takes 192 KiB of shared memory; GPUs before and after Hopper's
generation may have 99."""
HOPPER_CODE_TILES: Tiles = (
    (256, Tile(128, Block(64, 128, 8, 3), Block(128, 128, 8, 3))),
    (30, Tile(64, Block(64, 128, 8, 3), Block(64, 128, 4, 3))),
    (10, Tile(32, Block(64, 128, 8, 3), Block(64, 128, 4, 4))),
    (0, Tile(MMA_ROWS, Block(32, 128, 4, 4), Block(64, 128, 4, 4))),
)
CODE_TILES: Tiles = (
    (30, Tile(64, Block(32, 128, 4, 3), Block(64, 128, 4, 3))),
    (10, Tile(32, Block(32, 128, 4, 3), Block(64, 128, 4, 3))),
    *HOPPER_CODE_TILES[-1:],
)
"""Of weights in codes. A warp has 16 rows of weights, so that none is read twice or passes through shared memory; gate and up have
twice as many rows as outputs. Blocks are whole chunks of a row (ops.triton.integer)."""


@triton.jit
def _route(
    logits_ptr, chosen_ptr, shares_ptr, load_ptr, count, per_token, first, held,
    NORMALIZED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The `per_token` likeliest experts of one token, likeliest first; of equal ones the first. See ops.experts.route. Experts are
    numbered from `first`, and the `held` others of this rank; all others get the number `held`.

    Logits that are not numbers choose the last expert: one request's overflow must not read beyond the weights of all.
    """
    await_inputs(PDL)
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
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Order the pairs of one expert behind those of all earlier experts, and list its tiles. Those of number `held`, which are
    other ranks', are unused."""
    await_inputs(PDL)
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
def _code_product(
    x_ptr, row, inside, w_ptr, scale_ptr, zero_ptr, out_at, outputs, inputs, units, groups,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr,
    POWER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As _product, of codes: see integer_matrix.dequantized."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    total = tl.zeros((WIDE, row.shape[0]), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        here = start + at
        x = tl.load(
            x_ptr + row[None, :] * inputs + here[:, None], mask=inside[None, :] & (here < inputs)[:, None], other=0.0
        )
        w = dequantized(
            w_ptr, scale_ptr, zero_ptr, out_at, start, outputs, units, groups,
            SHIFT, GROUP, ZEROS, BITS, PTX, POWER, TYPE, WIDE, BLOCK,
        )  # fmt: skip
        total = tl.dot(w, x, total, input_precision="ieee")
    if GROUP == 0:
        total *= tl.load(scale_ptr + out_at, mask=out_at < outputs, other=0.0).to(tl.float32)[:, None]
    return tl.trans(total)


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
    x_ptr, row, inside, w_ptr, scale_ptr, zero_ptr, first, out_at, outputs, inputs, units, groups,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows `first` + `out_at` of all experts' rows, of which `outputs` after `first` exist. A row of codes has
    `units` int16 and `groups` scales and zero points."""
    if FORM == MXFP4:
        last = first + tl.minimum(out_at, outputs - 1)
        return block_product(x_ptr, row, inside, w_ptr, scale_ptr, scale_ptr, last, inputs, E8M0, 4, BLOCK // 64, WIDE)
    elif FORM == CODES:
        return _code_product(
            x_ptr, row, inside, w_ptr + first * units, scale_ptr + first * groups, zero_ptr + first * groups,
            out_at, outputs, inputs, units, groups, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, WIDE,
        )  # fmt: skip
    else:
        return _product(x_ptr, row, inside, w_ptr + first * inputs, out_at, outputs, inputs, BLOCK, WIDE)


@triton.jit
def _inner(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, units, groups,
    out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, width, inputs, per_token, held,
    KIND: tl.constexpr, BIASED: tl.constexpr, SORTED: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = act(gate) * up of each pair's token; w [experts, 2 width, inputs], gate's rows first; bias: likewise."""
    await_inputs(PDL)
    expert, pair, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        both = tl.arange(0, 2 * WIDE)
        row = tl.program_id(1) * WIDE + both // 2 + both % 2 * width  # gate and up by turns: one product has both
        total = _matrix_product(
            x_ptr, pair // per_token, inside, w_ptr, scale_ptr, zero_ptr, expert.to(tl.int64) * 2 * width, row, 2 * width,
            inputs, units, groups, FORM, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, 2 * WIDE,
        )  # fmt: skip
        if BIASED:
            bias = tl.load(bias_ptr + expert * 2 * width + row, mask=row < 2 * width, other=0.0)
            total += bias.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(total, (ROWS, WIDE, 2)))
        here = pair[:, None] * width + at[None, :]
        value = gated(gate, up, KIND).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, value, mask=inside[:, None] & (at < width)[None, :])


@triton.jit
def _outer(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, units, groups,
    shares_ptr, out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, outputs, width, held,
    BIASED: tl.constexpr, SORTED: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, outputs] = share * down(x); w [experts, outputs, width]."""
    await_inputs(PDL)
    expert, pair, inside = _pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        first = expert.to(tl.int64) * outputs
        total = _matrix_product(
            x_ptr, pair, inside, w_ptr, scale_ptr, zero_ptr, first, at, outputs, width, units, groups,
            FORM, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, WIDE,
        )  # fmt: skip
        if BIASED:
            total += tl.load(bias_ptr + expert * outputs + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(shares_ptr + pair, mask=inside, other=0.0)[:, None]
        here = pair[:, None] * outputs + at[None, :]
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (at < outputs)[None, :])


@triton.jit
def _sum(x_ptr, out_ptr, width, per_token, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out float32 [tokens, width]: the sums of the terms of each token, x [tokens, per_token, width], in their order."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for term in range(per_token):
        total += tl.load(x_ptr + (token * per_token + term) * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, total, mask=at < width)


Weights = torch.Tensor | IntMatrix
_NO_CODES = {"SHIFT": 0.0, "GROUP": 0, "ZEROS": False, "BITS": 4, "PTX": "", "POWER": 1.0}
FORMATS = frozenset(name for name, form in NUMBER_FORMATS.items() if form.on_gpu_experts)
"""Number formats whose experts are grouped, beside the model's dtype."""


class Stacked(NamedTuple):
    """The matrices of a layer's experts: floats [experts, outputs, inputs], or codes whose arrays have a dimension of experts in
    front. Those in MXFP4 lie as in block_tiles or, for x in float32, as in ops.triton.blocks. biases: [experts, outputs]."""

    weights: Weights
    biases: torch.Tensor | None

    @property
    def outputs(self) -> int:
        return self.weights.out if isinstance(self.weights, IntMatrix) else self.weights.shape[1]


def stacked(matrices: Sequence[Matrix], inputs: int) -> Stacked:
    """inputs: of a matrix."""
    packed = [each.packed for each in matrices]
    biases = [each.bias for each in matrices if each.bias is not None]
    weights = [as_codes(each, inputs) if isinstance(each, Fp8Matrix) else each for each in packed]
    return Stacked(_joined(weights), torch.stack(biases) if biases else None)


def _joined(weights: Sequence[Weights]) -> Weights:
    first, codes = weights[0], [each for each in weights if isinstance(each, IntMatrix)]
    if not isinstance(first, IntMatrix):
        return torch.stack([each for each in weights if isinstance(each, torch.Tensor)])
    zeros = [each.zeros for each in codes if each.zeros is not None]
    return replace(
        first,
        codes=torch.stack([each.codes for each in codes]),
        scales=torch.stack([each.scales for each in codes]),
        zeros=torch.stack(zeros) if zeros else None,
    )


def _untiled(matrix: IntMatrix) -> IntMatrix:
    """For x in float32, which the kernels of tiles do not multiply."""
    made = []
    for codes, scales in zip(matrix.codes, matrix.scales, strict=True):
        blocks = block_tiles.unpack(replace(matrix, codes=codes, scales=scales))
        made.append((pack_codes(blocks.codes, 4), blocks.scales.contiguous()))
    codes, scales = (torch.stack(tensors) for tensors in zip(*made, strict=True))
    return replace(matrix, codes=codes, scales=scales)


def tile_for(weights: Weights, x: torch.Tensor, mean_pairs: float) -> Tile:
    """The tile of a step with so many pairs of an expert on average."""
    is_hopper_16 = is_hopper(x.device) and x.itemsize == 2
    if not isinstance(weights, IntMatrix):
        tiles = HOPPER_TILES if is_hopper_16 else TILES
    elif weights.scaling == "e8m0":
        tiles = TILES  # whose kernels end at 64 rows
    else:
        tiles = HOPPER_CODE_TILES if is_hopper_16 else CODE_TILES
    tile = next(tile for least, tile in tiles if mean_pairs >= least)
    return tile if x.itemsize == 2 else tile.of_floats()


def _arguments(side: Stacked, dtype: torch.dtype) -> tuple[tuple[object, ...], dict[str, object]]:
    """(arguments from w_ptr to `groups`, constants) of `_inner` and `_outer`."""
    weights, bias = side.weights, side.biases
    constant = {"BIASED": bias is not None, **_NO_CODES}
    if not isinstance(weights, IntMatrix):
        return (weights, None, None, bias, 0, 0), {**constant, "FORM": FLOATS.value}
    if weights.scaling == "e8m0":
        return (weights.codes, weights.scales, None, bias, 0, 0), {**constant, "FORM": MXFP4.value}
    codes, zeros = weights.codes.view(torch.int16), weights.scales if weights.zeros is None else weights.zeros
    constant |= {**constants(weights, dtype), "FORM": CODES.value}
    return (codes, weights.scales, zeros, bias, codes.shape[-1], weights.scales.shape[-1]), constant


def _launch(block: Block) -> dict[str, int]:
    return {"WIDE": block.outputs, "BLOCK": block.inputs, "num_warps": block.warps, "num_stages": block.stages}


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """ExpertOps. fixed: one tile for every step, so that a token's result does not depend on the number of tokens."""

    formats: frozenset[str] = frozenset({"", *FORMATS})
    fixed: bool = False

    def group(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], kind: str, held: range) -> Grouped:
        return GroupedExperts(gate_up, down, kind, held, self.fixed)


class GroupedExperts:
    """The weights of a layer's experts on this rank. Implements Grouped."""

    __slots__ = ("_gate_up", "_down", "_kind", "_first", "_fixed")

    def __init__(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], kind: str, held: range, fixed: bool) -> None:
        self._gate_up = stacked(gate_up, _outputs(down[0]))
        self._down = stacked(down, _outputs(gate_up[0]) // 2)
        self._kind, self._first, self._fixed = KINDS[kind], held.start, fixed

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, per_token: int, normalized: bool, load: torch.Tensor
    ) -> torch.Tensor:
        tokens, d_model = x.shape
        tiled = self._is_tiled(x.dtype)
        gate_up, down = self._gate_up, self._down
        width, experts = gate_up.outputs // 2, len(next(self.tensors()))
        pairs, count = tokens * per_token, logits.shape[1]
        new = torch.empty if experts == count else torch.zeros  # nobody writes the pairs of other ranks' experts
        # The kernels of tiles write float32.
        out = new((pairs, d_model), dtype=torch.float32 if tiled else x.dtype, device=x.device)
        if not tokens:
            return out.float()
        inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        chosen, order = torch.empty((2, pairs), dtype=torch.int32, device=x.device)
        shares, early = torch.empty(pairs, dtype=torch.float32, device=x.device), overlap(x.device)
        _route[(tokens,)](
            logits, chosen, shares, load, count, per_token, self._first, experts,
            NORMALIZED=normalized, BLOCK=triton.next_power_of_2(count), num_warps=1, **early,
        )  # fmt: skip
        tile = tile_for(gate_up.weights, x, 0 if self._fixed else pairs / count)
        is_sorted = pairs > FEW_PAIRS
        groups = min(experts + 1, count)  # the last one are the pairs of other ranks' experts, if there are any
        tiles = pairs // tile.rows + groups if is_sorted else pairs
        places = torch.empty((3, tiles), dtype=torch.int32, device=x.device)
        if is_sorted:
            block, warps = (MANY_SORTED_AT_ONCE, 8) if pairs >= MANY_SORTED_AT_ONCE else (SORTED_AT_ONCE, 4)
            _sort[(groups,)](
                chosen, order, *places, pairs, experts, ROWS=tile.rows, BLOCK=block, num_warps=warps, **early
            )
        if tiled:
            columns = tile.rows // 8 if is_sorted or self._fixed else 1
            listed = block_tiles.Pairs(chosen, order, places, tiles, is_sorted, columns, experts, shares)
            self._multiply_tiles(x, inner, out, listed)
        else:
            listed_pairs = chosen, order, *places
            arrays, constant = _arguments(gate_up, x.dtype)
            _inner[(tiles, triton.cdiv(width, tile.inner.outputs))](
                x, *arrays, inner, *listed_pairs, width, d_model, per_token, experts,
                KIND=self._kind, SORTED=is_sorted, ROWS=tile.rows, **constant, **_launch(tile.inner), **early,
            )  # fmt: skip
            arrays, constant = _arguments(down, x.dtype)
            _outer[(tiles, triton.cdiv(d_model, tile.outer.outputs))](
                inner, *arrays, shares, out, *listed_pairs, d_model, width, experts,
                SORTED=is_sorted, ROWS=tile.rows, **constant, **_launch(tile.outer), **early,
            )  # fmt: skip
        total = torch.empty((tokens, d_model), dtype=torch.float32, device=x.device)
        _sum[(tokens, triton.cdiv(d_model, SUMMED))](out, total, d_model, per_token, BLOCK=SUMMED, **early)
        return total

    def _is_tiled(self, dtype: torch.dtype) -> bool:
        """Whether weights are in tiles of MXFP4. The first x in a dtype that those kernels do not multiply undoes the tiles."""
        weights, other = self._gate_up.weights, self._down.weights
        if not (isinstance(weights, IntMatrix) and isinstance(other, IntMatrix) and block_tiles.is_tiled(weights)):
            return False
        if dtype in block_tiles.TYPES:
            return True
        self._gate_up = self._gate_up._replace(weights=_untiled(weights))
        self._down = self._down._replace(weights=_untiled(other))
        return False

    def _multiply_tiles(
        self, x: torch.Tensor, inner: torch.Tensor, out: torch.Tensor, pairs: block_tiles.Pairs
    ) -> None:
        """`_inner` and `_outer` with weights in tiles."""
        gate_up, down = self._gate_up, self._down
        assert isinstance(gate_up.weights, IntMatrix) and isinstance(down.weights, IntMatrix)
        block_tiles.expert_product(x.contiguous(), gate_up.weights, gate_up.biases, inner, pairs, self._kind)
        block_tiles.expert_product(inner, down.weights, down.biases, out, pairs)

    def tensors(self) -> Iterator[torch.Tensor]:
        for side in (self._gate_up, self._down):
            weights = side.weights
            arrays = (weights.codes, weights.scales, weights.zeros) if isinstance(weights, IntMatrix) else (weights,)
            yield from (tensor for tensor in (*arrays, side.biases) if tensor is not None)


def _outputs(matrix: Matrix) -> int:
    packed = matrix.packed
    return (
        packed.out if isinstance(packed, IntMatrix) else len(packed.scales if isinstance(packed, Fp8Matrix) else packed)
    )
