"""Weights that stay in memory as the blocks of their checkpoint: those of GGUF files, and the experts of gpt-oss in MXFP4.

A checkpoint tensor in blocks is uint8 [outputs, blocks, bytes of a block], whose last two sizes name its kind. Its codes and scales
are only reordered, so the weights are exactly those of the file. A checkpoint may have several kinds, and floats among them: each
linear keeps what it gets. Where the projections of a merged linear differ, each kind is a matrix of its own.

Sources: ggml-quants.c of llama.cpp; OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.gpu_blocks import most_rows
from ridgeline.core.spec import NUMBER_FORMATS, NumberFormat
from ridgeline.ops.blocks import E2M1, EXPONENT_BIAS, SUPER, Blocks, arrays, chained, pack_six, parts_of, stack
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, FloatInput, IntMatrix, MatmulOps, Matrix, Scaled
from ridgeline.quant.both_forms import Expanded
from ridgeline.quant.format import (
    BLOCKS,
    Cut,
    Expected,
    LinearShape,
    Share,
    Weight,
    adds_bias,
    expected_tensors,
)

LANES = 16
"""Outputs of different kinds that are merged in one linear are multiples of this; see native/integer.h."""
NAN_EXPONENT = 255
"""The scale of e8m0 that is not a number."""
SMALLEST = 1e-7
"""Scales below this one divide as if they were this one."""
PLAIN_BITS = (4, 8)
"""Bits of kinds that other integer formats have too."""
_CHUNK = 1 << 18
"""Blocks that `dequantize` converts at a time, which bounds temporary memory."""
_KINDS = {
    (32, 18): "Q4_0", (32, 20): "Q4_1", (32, 22): "Q5_0", (32, 24): "Q5_1", (32, 34): "Q8_0", (32, 17): "MXFP4",
    (256, 144): "Q4_K", (256, 176): "Q5_K", (256, 210): "Q6_K",
}  # fmt: skip
"""Kind by elements and bytes of a block."""


# --- from a checkpoint ------------------------------------------------------------------------------------------------


def dequantize(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [blocks, bytes] of a kind -> float32 [blocks, elements]."""
    parts = [_READERS[kind](chunk).dequantized() for chunk in blocks.split(_CHUNK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_blocks(tensor: torch.Tensor, inputs: int) -> Blocks:
    """A checkpoint tensor in blocks [outputs, blocks, bytes]. Raises UnsupportedModel for an unknown kind, and for scales that are
    NaN or infinite."""
    outputs, count, size = tensor.shape
    kind = _KINDS.get((inputs // count if count and not inputs % count else 0, size))
    if kind is None:
        raise UnsupportedModel(
            f"has {count} blocks of {size} bytes for {inputs} inputs. Known kinds: {', '.join(_READERS)}."
        )
    read = _READERS[kind](tensor.flatten(0, 1))
    scales = [read.scales, *([] if read.extra is None else [read.extra])]
    if any(bool((part == NAN_EXPONENT if kind == "MXFP4" else ~part.isfinite()).any()) for part in scales):
        raise UnsupportedModel("has scales that are NaN or infinite: download the checkpoint again.")
    return read.reshaped(outputs)


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """The float16 from byte `start` on, [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes: those in the low halves of the bytes, then those in the high halves. [B, n] -> [B, 2 n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bits, lowest first: [B, n] -> [B, 8 n]."""
    return (packed.unsqueeze(-1) >> _shifts(packed, 8) & 1).flatten(-2)


def _shifts(like: torch.Tensor, count: int, step: int = 1) -> torch.Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _four_bits(packed: torch.Tensor) -> torch.Tensor:
    """Codes of eight groups of 32, of which 32 bytes hold two. [B, 128] -> [B, 256]."""
    return _nibbles(packed.unflatten(1, (4, 32))).flatten(1)


def _q8_0(blocks: torch.Tensor) -> Blocks:
    # An int8 plus 128 is its bits with the highest one inverted.
    return Blocks(blocks[:, 2:] ^ 0x80, _halves(blocks, 0), 8, 32, "")


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 2:]), _halves(blocks, 0), 4, 32, "")


def _q5_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _halves(blocks, 0), 5, 32, "")


def _q4_1(blocks: torch.Tensor) -> Blocks:
    # The file has what is added, here it is subtracted.
    return Blocks(_nibbles(blocks[:, 4:]), _halves(blocks, 0), 4, 32, "float16_minimum", extra=-_halves(blocks, 2))


def _q5_1(blocks: torch.Tensor) -> Blocks:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Blocks(codes, _halves(blocks, 0), 5, 32, "float16_minimum", extra=-_halves(blocks, 2))


def _six(blocks: torch.Tensor) -> torch.Tensor:
    """Scales and minima of Q4_K and Q5_K in the order of pack_six."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1)
    return pack_six(scales, torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1))


def _q4_k(blocks: torch.Tensor) -> Blocks:
    return Blocks(_four_bits(blocks[:, 16:]), _six(blocks), 4, 32, "super_6bit", _halves(blocks, 0, 2))


def _q5_k(blocks: torch.Tensor) -> Blocks:
    # Bit i of byte k is the highest bit of element k of group i.
    fifth = (blocks[:, 16:48].unsqueeze(1) >> _shifts(blocks, 8).view(1, 8, 1) & 1).flatten(1)
    return Blocks(_four_bits(blocks[:, 48:]) | fifth << 4, _six(blocks), 5, 32, "super_6bit", _halves(blocks, 0, 2))


def _q6_k(blocks: torch.Tensor) -> Blocks:
    low, high = blocks[:, :128].unflatten(1, (2, 1, 64)), blocks[:, 128:192].unflatten(1, (2, 1, 32))
    four = (low >> _shifts(blocks, 2, 4).view(1, 1, 2, 1) & 15).flatten(1)
    two = (high >> _shifts(blocks, 4, 2).view(1, 1, 4, 1) & 3).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Blocks(four | two << 4, scales, 6, 16, "super_8bit", _halves(blocks, 208))


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 1:]), blocks[:, :1], 4, 32, "e8m0")


_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "MXFP4": _mxfp4,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# --- from floats ------------------------------------------------------------------------------------------------------


def round_to_blocks(weight: torch.Tensor, form: NumberFormat) -> Blocks:
    """Round weights [out, in] to the nearest codes, for random weights. What converts checkpoints searches for better scales."""
    outputs, inputs = weight.shape
    if inputs % (SUPER if form.scaling.startswith("super") else form.group):
        raise UnsupportedModel(f"has {inputs} inputs, which are no multiple of a block.")
    groups, most = weight.float().view(outputs, -1, form.group), (1 << form.bits) - 1
    if form.scaling == "e8m0":
        return _to_e2m1(groups)
    low, largest = groups.amin(-1).clamp(max=0.0), groups.abs().amax(-1)
    has_minimum = form.scaling in ("float16_minimum", "super_6bit")
    scale = (groups.amax(-1).clamp(min=0.0) - low) / most if has_minimum else largest / (1 << form.bits - 1)
    scales, extra = scale.half(), -low.half() if has_minimum else None
    if form.scaling == "super_6bit":
        both = torch.stack((scale, -low), -1).unflatten(1, (-1, 8))
        extra = (both.amax(2) / 63).half()
        six = (both / extra.float().clamp(min=SMALLEST).unsqueeze(2)).round().clamp(0, 63).to(torch.uint8).flatten(1, 2)
        scales, extra = pack_six(six[..., 0], six[..., 1]), extra.flatten(1)
    elif form.scaling == "super_8bit":
        of_super = scale.unflatten(1, (-1, SUPER // form.group))
        extra = (of_super.amax(-1) / 127).half()
        scales = (
            (of_super / extra.float().clamp(min=SMALLEST).unsqueeze(-1)).round().clamp(1, 127).to(torch.int8).flatten(1)
        )
    empty = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    blocks = Blocks(empty, scales, form.bits, form.group, form.scaling, extra)
    factor, minimum = blocks.factors()
    shift = 1 << form.bits - 1 if minimum is None else (minimum / factor.clamp(min=SMALLEST)).unsqueeze(-1)
    codes = (groups / factor.clamp(min=SMALLEST).unsqueeze(-1) + shift).round().clamp(0, most)
    return replace(blocks, codes=codes.to(torch.uint8).flatten(1))


def _to_e2m1(groups: torch.Tensor) -> Blocks:
    """groups float32 [out, groups, 32]. The largest magnitude of a group becomes 4 to 8 times its scale, as the specification
    proposes."""
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2 + EXPONENT_BIAS
    units = torch.ldexp(groups, (EXPONENT_BIAS - exponents).int().unsqueeze(-1))
    magnitudes = torch.tensor(E2M1, device=groups.device)
    codes = (units.abs().unsqueeze(-1) > (magnitudes[:-1] + magnitudes[1:]) / 2).sum(-1) + 8 * (units < 0)
    return Blocks(codes.to(torch.uint8).flatten(1), exponents.to(torch.uint8), 4, groups.shape[-1], "e8m0")


# --- a linear ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Linears that stay as a checkpoint has them. numbers: of random weights; None: what is loaded in floating point stays so.
    converts: forms, as (bits, scaling), that become floating point."""

    ops: MatmulOps
    dtype: torch.dtype
    device: torch.device
    numbers: NumberFormat | None = None
    converts: frozenset[tuple[int, str]] = frozenset()
    name: str = "blocks"

    def create(self, shape: LinearShape, share: Share) -> BlockWeight:
        return BlockWeight(self, shape, share)


def _name_of(matrix: IntMatrix) -> str:
    """In NUMBER_FORMATS."""
    form = matrix.bits, matrix.scaling
    names = (name for name, has in NUMBER_FORMATS.items() if has.in_blocks and (has.bits, has.scaling) == form)
    return next(names, f"int{matrix.bits}")


class BlockWeight(Weight):
    """Parts stacked along the outputs. Each part is in blocks of any kind or in floating point. If one of them is in floating point
    all are, in the model's dtype. A linear in blocks that was expanded is there in both forms, and the rows of x choose."""

    __slots__ = (
        "expects",
        "_bias",
        "_cut",
        "_adds_bias",
        "_expanded",
        "_form",
        "_missing",
        "_packed",
        "_parts",
        "_shape",
        "_share",
    )

    def __init__(self, form: BlockFormat, shape: LinearShape, share: Share) -> None:
        self._form, self._shape, self._share = form, shape, share
        self.expects: Mapping[tuple[int, str], Expected] = expected_tensors(shape, BLOCKS)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        self._bias = torch.zeros(self._cut.size[0], dtype=form.dtype, device=form.device) if shape.bias else None
        self._parts: dict[int, Blocks | torch.Tensor] = {}
        self._expanded = Expanded()

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        rows = self._cut.rows[part]
        if name == "bias":
            if self._bias is not None and self._adds_bias:
                self._bias[self._cut.stacked_rows[part]].copy_(tensor[rows])
        else:
            self._parts[part] = self._read(tensor[rows])
        self._missing.discard((part, name))
        if not self._missing:
            self._pack()

    def _read(self, tensor: torch.Tensor) -> Blocks | torch.Tensor:
        """This rank's columns of some outputs."""
        numbers, inputs = self._form.numbers, self._shape.d_in
        if tensor.dtype is BLOCKS:
            blocks = read_blocks(tensor.to(self._form.device), inputs)
        elif numbers is not None and (self._shape.of_expert or not numbers.experts):
            blocks = round_to_blocks(tensor.to(self._form.device), numbers)
        else:
            return tensor[:, self._cut.columns].to(self._form.device)
        columns, step = self._cut.columns, SUPER if blocks.scaling.startswith("super") else blocks.group
        if columns.start % step or columns.stop % step:
            raise ConfigError(
                f"Blocks of {step} inputs cannot be split over {self._share.size} devices, which hold "
                f"{self._cut.size[1]} of {inputs} inputs each: use fewer devices."
            )
        blocks = blocks.columns(columns)
        return blocks.dequantized() if (blocks.bits, blocks.scaling) in self._form.converts else blocks

    def _pack(self) -> None:
        """Hand the parts to the device's operations."""
        form, parts = self._form, [self._parts[index] for index in range(len(self._shape.parts))]
        self._parts = {}
        blocks = [part for part in parts if isinstance(part, Blocks)]
        runs = [stack(list(run)) for _, run in groupby(blocks, lambda part: (part.bits, part.group, part.scaling))]
        if len(blocks) == len(parts) and not any(len(run.codes) % LANES for run in runs[:-1]):
            self._packed: torch.Tensor | IntMatrix = chained([form.ops.blocks.pack(run) for run in runs])
        else:
            floats = (part.dequantized() if isinstance(part, Blocks) else part for part in parts)
            self._packed = form.ops.unquantized.pack(torch.cat([part.to(form.dtype) for part in floats]))

    def expand(self) -> torch.Tensor | None:
        packed, weights = self._packed, self._form.ops.blocks.weights
        if weights is None or not isinstance(packed, IntMatrix):
            return None
        most = most_rows(_name_of(part) for part in parts_of(packed))
        return self._expanded.write(weights(packed), most, self._cut.size, self._form.dtype) if most else None

    def _form_for(self, x: FloatInput) -> tuple[Any, IntMatrix | torch.Tensor]:
        """(operations, the form of the weights) for the rows of x."""
        ops, packed = self._form.ops, self._packed
        if (expanded := self._expanded.for_rows(x)) is not None:
            return ops.unquantized, expanded
        return ops.blocks if isinstance(packed, IntMatrix) else ops.unquantized, packed

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        ops, packed = self._form_for(x)
        return ops.linear(x, packed, self._bias)  # type: ignore[no-any-return]

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        ops, packed = self._form_for(x)
        return ops.linear_add(x, packed, self._bias, stream)  # type: ignore[no-any-return]

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        ops, packed = self._form_for(x)
        return ops.linear_activate(x, packed, self._bias, kind)  # type: ignore[no-any-return]

    def matrix(self) -> Matrix | None:
        """None for several kinds, and on a GPU, whose programs know other integers only, for most kinds."""
        if self._missing:
            return None
        packed = self._packed
        if isinstance(packed, IntMatrix):
            known = self._form.device.type == "cpu" or (not packed.scaling and packed.bits in PLAIN_BITS)
            if packed.more is not None or not known:
                return None
        return Matrix(packed, self._bias)

    def stored(self) -> Matrix:
        return Matrix(self._packed, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        packed = self._packed
        kept = arrays(packed) if isinstance(packed, IntMatrix) else [self._form.ops.unquantized.memory(packed)]
        return tuple(kept if self._bias is None else [*kept, self._bias])
