"""Experts on a GPU: routing, grouping and products without the host, so that CUDA graphs capture them.

The kernels are those of expert_kernels. A step of few pairs needs no order: each pair is a tile, and two pairs of one expert read
its weights through the L2 cache.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.table import Fp8Matrix, Grouped, IntMatrix, Matrix
from ridgeline.ops.triton import block_tiles
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.blocks import pack_codes
from ridgeline.ops.triton.expert_kernels import (
    CODES,
    FLOATS,
    MXFP4,
    inner_kernel,
    outer_kernel,
    route_kernel,
    sort_kernel,
    sum_kernel,
)
from ridgeline.ops.triton.expert_prompts import inner_prompt_kernel, outer_prompt_kernel, round_kernel
from ridgeline.ops.triton.integer import as_codes
from ridgeline.ops.triton.integer_matrix import constants
from ridgeline.ops.triton.launch import is_hopper, overlap
from ridgeline.ops.triton.quantize import FP8

FEW_PAIRS = 32
"""Most pairs of a step without an order."""
SUMMED = 1024
"""Elements of a program of `sum_kernel`."""
SORTED_AT_ONCE, MANY_SORTED_AT_ONCE = 1024, 8192
"""Pairs that `sort_kernel` reads at once, and those of a long prompt."""
MMA_ROWS = 16
TMA_ROW = 16
"""Both sizes of gate and up are multiples of it where TMA loads weights in 16 bits: a row is a multiple of 16 bytes, and a row of
down has half as many elements as gate and up have outputs."""


class Block(NamedTuple):
    """outputs: of a block of down, or of gate and of up each. inputs: of a block. warps, stages: of the launch."""

    outputs: int
    inputs: int
    warps: int
    stages: int


class Tile(NamedTuple):
    """rows: pairs of a tile. inner, outer: blocks of the two products. by_tma: the kernels are those of expert_prompts."""

    rows: int
    inner: Block
    outer: Block
    by_tma: bool = False

    def of_floats(self) -> Tile:
        """For x in float32, in the same shared memory."""
        inner, outer = (block._replace(outputs=block.outputs // 2) for block in self[1:3])
        return Tile(self.rows, inner, outer)


Tiles = tuple[tuple[int, Tile], ...]
FEW = Tile(MMA_ROWS, Block(32, 128, 4, 4), Block(32, 128, 4, 4))
MANY = Tile(64, Block(64, 64, 4, 3), Block(64, 64, 4, 3))
TILES: Tiles = ((MMA_ROWS, MANY), (0, FEW))
HOPPER_TILES: Tiles = ((128, Tile(128, Block(128, 64, 8, 4), Block(256, 64, 8, 4), by_tma=True)), *TILES)
"""From so many pairs of an expert, on average, this tile."""
HOPPER_CODE_TILES: Tiles = (
    (256, Tile(128, Block(64, 128, 8, 3), Block(128, 128, 8, 3))),
    (30, Tile(64, Block(64, 128, 8, 3), Block(64, 128, 4, 3))),
    (10, Tile(32, Block(64, 128, 8, 3), Block(64, 128, 4, 4))),
    (0, Tile(MMA_ROWS, Block(32, 128, 4, 4), Block(64, 128, 4, 4))),
)
HOPPER_ROUNDED_TILES: Tiles = (
    (256, Tile(128, Block(128, 128, 8, 4), Block(256, 128, 8, 4), by_tma=True)),
    (32, Tile(64, Block(128, 128, 8, 4), Block(256, 128, 8, 4), by_tma=True)),
    *HOPPER_CODE_TILES[1:],
)
"""Of e4m3 weights whose format quantizes inputs: those of many pairs are."""
CODE_TILES: Tiles = (
    (30, Tile(64, Block(32, 128, 4, 3), Block(64, 128, 4, 3))),
    (10, Tile(32, Block(32, 128, 4, 3), Block(64, 128, 4, 3))),
    *HOPPER_CODE_TILES[-1:],
)
"""Of weights in codes. A warp has 16 rows of weights, so that none is read twice or passes through shared memory; gate and up have
twice as many rows as outputs. Blocks are whole chunks of a row (ops.triton.integer)."""

Weights = torch.Tensor | IntMatrix
_NO_CODES = {"SHIFT": 0.0, "GROUP": 0, "ZEROS": False, "BITS": 4, "PTX": "", "POWER": 1.0}
"""Constants of integer_matrix for weights that are not codes."""


class Stacked(NamedTuple):
    """The matrices of a layer's experts: floats [experts, outputs, inputs], or codes whose arrays have a dimension of experts in
    front. Scales of groups are int32: the bits of a float16, then those of the zero point, which `zeros` has as a view. Codes of
    MXFP4 lie as in block_tiles or, for x in float32, as in ops.triton.blocks. biases: [experts, outputs]."""

    weights: Weights
    biases: torch.Tensor | None

    @property
    def experts(self) -> int:
        return len(self.weights.codes if isinstance(self.weights, IntMatrix) else self.weights)

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
    stacked_codes, scales = torch.stack([each.codes for each in codes]), torch.stack([each.scales for each in codes])
    points = torch.stack(zeros) if zeros else None
    if not first.scaling and first.group < first.d_in:
        scales = scales.view(torch.int16).int() & 0xFFFF
        if points is not None:
            scales |= points.int() << 16
            points = scales.view(torch.uint8)[..., 2::4]
    return replace(first, codes=stacked_codes, scales=scales, zeros=points)


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
        by_tma = is_hopper_16 and weights.dtype is x.dtype and not any(size % TMA_ROW for size in weights.shape[1:])
        tiles = HOPPER_TILES if by_tma else TILES
    elif weights.inputs == "rounded" and is_hopper_16:
        tiles = HOPPER_ROUNDED_TILES
    elif weights.scaling == "e8m0":
        tiles = TILES  # whose kernels end at 64 rows
    else:
        tiles = HOPPER_CODE_TILES if is_hopper_16 else CODE_TILES
    tile = next(tile for least, tile in tiles if mean_pairs >= least)
    return tile if x.itemsize == 2 else tile.of_floats()


def _arguments(side: Stacked, dtype: torch.dtype) -> tuple[tuple[object, ...], dict[str, object]]:
    """(arguments from w_ptr to `groups`, constants) of `inner_kernel` and `outer_kernel`."""
    weights, bias = side.weights, side.biases
    constant = {"BIASED": bias is not None, **_NO_CODES}
    if not isinstance(weights, IntMatrix):
        return (weights, None, None, bias, 0, 0), {**constant, "FORM": FLOATS.value}
    if weights.scaling == "e8m0":
        return (weights.codes, weights.scales, None, bias, 0, 0), {**constant, "FORM": MXFP4.value}
    codes, zeros = weights.codes.view(torch.int16), weights.scales if weights.zeros is None else weights.zeros
    constant |= {**constants(weights, dtype), "FORM": CODES.value}
    return (codes, weights.scales, zeros, bias, codes.shape[-1], weights.scales.shape[-1]), constant


def _prompt_arguments(
    side: Stacked, x: torch.Tensor, block: Block
) -> tuple[tuple[object, ...], int, dict[str, object]]:
    """(arguments up to `bias_ptr`, length of a row, constants) of the kernels of expert_prompts."""
    x_scales, w_scales = None, None
    if isinstance(side.weights, IntMatrix):
        values, w_scales = side.weights.codes.view(FP8).flatten(0, 1), side.weights.scales
        x, x_scales = rounded(x, values.shape[1])
    else:
        values = side.weights.flatten(0, 1)
    inputs = values.shape[1]
    box = TensorDescriptor(values, list(values.shape), list(values.stride()), [block.outputs, block.inputs])
    constant: dict[str, object] = {
        "BIASED": side.biases is not None,
        "ROUNDED": x_scales is not None,
        "EVEN": inputs % block.inputs == 0,
    }
    return (x, x_scales, box, w_scales, side.biases), inputs, constant


def rounded(x: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x as `round_kernel` makes them: (e4m3 [rows, padded], scales float32 [rows])."""
    rows, size = x.shape
    values = torch.empty((rows, padded), dtype=FP8, device=x.device)
    scales, block = torch.empty(rows, dtype=torch.float32, device=x.device), triton.next_power_of_2(padded)
    round_kernel[(rows,)](
        x, values, scales, size, padded, BLOCK=block, num_warps=min(16, max(1, block // 1024)), **overlap(x.device)
    )
    return values, scales


def _launch(block: Block) -> dict[str, int]:
    return {"WIDE": block.outputs, "BLOCK": block.inputs, "num_warps": block.warps, "num_stages": block.stages}


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """ExpertOps. fixed: one tile for every step, so that a token's result does not depend on the number of tokens."""

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
        width, experts = gate_up.outputs // 2, gate_up.experts
        pairs, count = tokens * per_token, logits.shape[1]
        new = torch.empty if experts == count else torch.zeros  # nobody writes the pairs of other ranks' experts
        # The kernels of tiles write float32.
        out = new((pairs, d_model), dtype=torch.float32 if tiled else x.dtype, device=x.device)
        if not tokens:
            return out.float()
        inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        chosen, order = torch.empty((2, pairs), dtype=torch.int32, device=x.device)
        shares, early = torch.empty(pairs, dtype=torch.float32, device=x.device), overlap(x.device)
        route_kernel[(tokens,)](
            logits, chosen, shares, load, count, per_token, self._first, experts,
            NORMALIZED=normalized, CHOICES=triton.next_power_of_2(per_token), BLOCK=triton.next_power_of_2(count),
            num_warps=1, **early,
        )  # fmt: skip
        is_sorted = pairs > FEW_PAIRS
        tile = tile_for(gate_up.weights, x, pairs / count if is_sorted and not self._fixed else 0)
        groups = min(experts + 1, count)  # the last one are the pairs of other ranks' experts, if there are any
        tiles = pairs // tile.rows + groups if is_sorted else pairs
        places = torch.empty((3, tiles), dtype=torch.int32, device=x.device)
        if is_sorted:
            block, warps = (MANY_SORTED_AT_ONCE, 8) if pairs >= MANY_SORTED_AT_ONCE else (SORTED_AT_ONCE, 4)
            sort_kernel[(groups,)](
                chosen, order, *places, pairs, experts, ROWS=tile.rows, BLOCK=block, num_warps=warps, **early
            )
        listed = chosen, order, *places
        if tiled:
            columns = tile.rows // 8 if is_sorted or self._fixed else 1
            given = block_tiles.Pairs(chosen, order, places, tiles, is_sorted, columns, experts, shares)
            self._multiply_tiles(x, inner, out, given)
        elif tile.by_tma:
            self._multiply_prompt(x, inner, out, shares, listed, tile)
        else:
            arrays, constant = _arguments(gate_up, x.dtype)
            inner_kernel[(tiles, triton.cdiv(width, tile.inner.outputs))](
                x, *arrays, inner, *listed, width, d_model, per_token, experts,
                KIND=self._kind, SORTED=is_sorted, ROWS=tile.rows, **constant, **_launch(tile.inner), **early,
            )  # fmt: skip
            arrays, constant = _arguments(down, x.dtype)
            outer_kernel[(tiles, triton.cdiv(d_model, tile.outer.outputs))](
                inner, *arrays, shares, out, *listed, d_model, width, experts,
                SORTED=is_sorted, ROWS=tile.rows, **constant, **_launch(tile.outer), **early,
            )  # fmt: skip
        total = torch.empty((tokens, d_model), dtype=torch.float32, device=x.device)
        sum_kernel[(tokens, triton.cdiv(d_model, SUMMED))](out, total, d_model, per_token, BLOCK=SUMMED, **early)
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
        """`inner_kernel` and `outer_kernel` with weights in tiles."""
        gate_up, down = self._gate_up, self._down
        assert isinstance(gate_up.weights, IntMatrix) and isinstance(down.weights, IntMatrix)
        block_tiles.expert_product(x.contiguous(), gate_up.weights, gate_up.biases, inner, pairs, self._kind)
        block_tiles.expert_product(inner, down.weights, down.biases, out, pairs)

    def _multiply_prompt(
        self, x: torch.Tensor, inner: torch.Tensor, out: torch.Tensor, shares: torch.Tensor,
        listed: tuple[torch.Tensor, ...], tile: Tile,
    ) -> None:  # fmt: skip
        """`inner_kernel` and `outer_kernel` by the kernels of expert_prompts. listed: chosen, order and places of tiles."""
        tiles, experts, early = len(listed[-1]), self._gate_up.experts, overlap(x.device)
        (pairs, width), (tokens, d_model) = inner.shape, x.shape
        arrays, inputs, constant = _prompt_arguments(self._gate_up, x, tile.inner)
        inner_prompt_kernel[(triton.cdiv(width, tile.inner.outputs), tiles)](
            *arrays, inner, *listed, width, inputs, pairs // tokens, experts,
            KIND=self._kind, ROWS=tile.rows, **constant, **_launch(tile.inner), **early,
        )  # fmt: skip
        arrays, inputs, constant = _prompt_arguments(self._down, inner, tile.outer)
        outer_prompt_kernel[(triton.cdiv(d_model, tile.outer.outputs), tiles)](
            *arrays, shares, out, *listed, d_model, inputs, experts,
            ROWS=tile.rows, **constant, **_launch(tile.outer), **early,
        )  # fmt: skip

    def tensors(self) -> Iterator[torch.Tensor]:
        for side in (self._gate_up, self._down):
            weights = side.weights
            if isinstance(weights, IntMatrix):
                yield from (weights.codes, weights.scales)
                if weights.zeros is not None and weights.scales.dtype is not torch.int32:
                    yield weights.zeros
            else:
                yield weights
            if side.biases is not None:
                yield side.biases


def _outputs(matrix: Matrix) -> int:
    packed = matrix.packed
    return (
        packed.out if isinstance(packed, IntMatrix) else len(packed.scales if isinstance(packed, Fp8Matrix) else packed)
    )
