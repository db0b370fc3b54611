"""Integer weights whose groups of inputs store scales in other forms than float16: the formulas, in PyTorch.

Checkpoints bring them: the blocks of GGUF files and the experts of gpt-oss. They are kept as they are stored, in arrays that a
device reorders. Forms (NumberFormat.scaling), with n inputs and g = groups:

"": scales float16 [out, g]. weight = (code - 2^(bits - 1)) * scale.
float16_minimum: scales float16 [out, g], extra: minima, likewise. weight = code * scale - minimum.
super_6bit: extra: two float16 of 8 groups of 32 inputs [out, 2 n / 256]. scales uint8 [out, 12 n / 256]: of these 12 bytes, byte i
    of the first 8 holds the lower four bits of the scale and of the minimum of group i, and byte i of the last 4 the upper two
    bits of scale and minimum of group 2 i, then of group 2 i + 1. weight = code * (first * scale) - second * minimum.
super_8bit: extra: a float16 of 16 groups of 16 inputs [out, n / 256]. scales int8 [out, g].
    weight = (code - 2^(bits - 1)) * (extra * scale).
e8m0: scales uint8 [out, g]. weight = E2M1[code] * 2^(scale - 127).

Sources: ggml-quants.c of llama.cpp; OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ridgeline.ops.table import FloatInput, FloatOps, IntMatrix, IntOps, TokenwiseOps, apply_norm

SCALINGS = ("", "float16_minimum", "super_6bit", "super_8bit", "e8m0")
SUPER = 256
"""Inputs that share what `supers` holds."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_CODES = (*E2M1, *(-value for value in E2M1))
EXPONENT_BIAS = 127
HOPPER = 9
"""Major compute capability."""
MOST_WEIGHTS = 1 << 27
"""Weights that are dequantized at a time. More is the head of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Weights of a linear. codes: uint8 [out, in]. scales, extra: see above; extra None: the form has none."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    scaling: str
    extra: torch.Tensor | None = None

    def columns(self, columns: slice) -> Blocks:
        """Some inputs, which begin and end where groups, and groups of groups, do."""
        inputs = self.codes.shape[1]

        def part(tensor: torch.Tensor) -> torch.Tensor:
            first, end = (at * tensor.shape[1] // inputs for at in (columns.start, columns.stop))
            return tensor[:, first:end]

        return self._each(part)

    def reshaped(self, outputs: int) -> Blocks:
        """Each array as [outputs, ...], from one row for each block."""
        return self._each(lambda tensor: tensor.reshape(outputs, -1))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Blocks:
        extra = None if self.extra is None else change(self.extra)
        return replace(self, codes=change(self.codes), scales=change(self.scales), extra=extra)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what codes are multiplied by, what is subtracted then, or None), float32 [out, groups]."""
        scales = self.scales
        if self.scaling == "e8m0":
            return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - EXPONENT_BIAS), None
        if self.extra is None:
            return scales.float(), None
        extra = self.extra.float()
        if self.scaling == "float16_minimum":
            return scales.float(), extra
        if self.scaling == "super_8bit":
            return extra.repeat_interleave(SUPER // self.group, 1) * scales.float(), None
        packed, pairs = scales.unflatten(1, (-1, 12)), extra.unflatten(1, (-1, 2))
        low, high = packed[..., :8], packed[..., 8:].repeat_interleave(2, -1)
        high = high >> torch.tensor([0, 4] * 4, dtype=torch.uint8, device=scales.device)
        scale, minimum = low & 15 | (high & 3) << 4, low >> 4 | (high & 12) << 2
        return (pairs[..., :1] * scale.float()).flatten(1), (pairs[..., 1:] * minimum.float()).flatten(1)

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in], with the roundings of llama.cpp."""
        scale, minimum = (None if part is None else part.unsqueeze(-1) for part in self.factors())
        assert scale is not None
        codes = self.codes.unflatten(1, (-1, self.group))
        if self.scaling == "e8m0":
            values = torch.tensor(E2M1_CODES, device=codes.device)[codes.long()]
        else:
            values = codes.float() if minimum is not None else codes.float() - (1 << self.bits - 1)
        return (values * scale if minimum is None else values * scale - minimum).flatten(1)


def kind_of(device: torch.device) -> str:
    """Of core.gpu_blocks: cpu, hopper for a GPU of that architecture, or cuda for another one."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
    return "hopper" if is_hopper else device.type


def stack(parts: list[Blocks]) -> Blocks:
    """Outputs of several linears of one format."""
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    extra = [part.extra for part in parts if part.extra is not None]
    return replace(parts[0], codes=codes, scales=scales, extra=torch.cat(extra) if extra else None)


def pack_six(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Scales and minima of super_6bit, uint8 below 64 [out, groups] -> uint8 [out, 12 groups / 8]."""
    low = scales & 15 | (minima & 15) << 4
    upper = (scales >> 4 | minima >> 4 << 2).unflatten(1, (-1, 2))
    high = upper[..., 0] | upper[..., 1] << 4
    return torch.cat((low.unflatten(1, (-1, 8)), high.unflatten(1, (-1, 4))), -1).flatten(1)


def chained(matrices: list[IntMatrix]) -> IntMatrix:
    """The outputs of several matrices, one after the other."""
    first, *others = matrices
    return replace(first, more=chained(others)) if others else first


def parts_of(matrix: IntMatrix) -> list[IntMatrix]:
    """The matrices that `chained` got."""
    return [replace(matrix, more=None), *(parts_of(matrix.more) if matrix.more else ())]


def pieces_of(matrix: IntMatrix) -> list[IntMatrix]:
    """The matrices of a chain, in pieces of at most MOST_WEIGHTS weights. Their arrays have a row for each output."""
    made, rows = [], max(1, MOST_WEIGHTS // matrix.d_in)
    for part in parts_of(matrix):
        for first in range(0, part.out, rows):
            end = min(first + rows, part.out)
            names = ("codes", "scales", "zeros", "extra")
            held = {name: array[first:end] for name in names if (array := getattr(part, name)) is not None}
            made.append(replace(part, **held, out=end - first))
    return made


def joined_products(
    product: Callable[[IntMatrix, torch.Tensor | None], torch.Tensor],
    pieces: list[IntMatrix],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """product(piece, its bias) [T, out] of all pieces, side by side."""
    biases = [None] * len(pieces) if bias is None else bias.split([piece.out for piece in pieces])
    products = [product(piece, part) for piece, part in zip(pieces, biases, strict=True)]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def arrays(matrix: IntMatrix) -> list[torch.Tensor]:
    """The memory of a matrix in blocks."""
    stored = [matrix.codes, matrix.scales, *(() if matrix.extra is None else (matrix.extra,))]
    return stored + (arrays(matrix.more) if matrix.more else [])


def widened_blocks(
    pack: Callable[[Blocks], IntMatrix],
    dequantize: Callable[[IntMatrix, torch.dtype], torch.Tensor],
    pieces: Callable[[IntMatrix], list[IntMatrix]],
    ops: FloatOps,
    tokenwise: TokenwiseOps,
) -> IntOps:
    """Linears that dequantize the matrix in `pieces` for every product and multiply with `ops`. They keep its guarantees."""

    def linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        source = apply_norm(x, tokenwise.rms_norm)
        return joined_products(
            lambda piece, part: ops.linear(source, ops.pack(dequantize(piece, source.dtype)), part),
            pieces(matrix),
            bias,
        )

    def linear_add(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
        return stream + linear(x, matrix, bias)

    def linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return tokenwise.activate(linear(x, matrix, bias), kind)

    return IntOps(pack, linear, linear_add, linear_activate)
