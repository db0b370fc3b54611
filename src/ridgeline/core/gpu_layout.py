"""What a GPU holds of a quantized matrix, as a number format: the memory layouts of ops.triton, for counting bytes."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.experts import Matrix
from ridgeline.core.formats import NumberFormat

CHUNK = 64
"""Bytes of which rows of codes consist (ops.triton.integer)."""
EXPERT_GROUP = 4
"""Bytes of the scale and the zero point of a group of an expert's weights: one word (ops.triton.experts)."""


def held_format(numbers: NumberFormat, kind: str, matrix: Matrix) -> NumberFormat:
    """The format in which a device holds a matrix in the format `numbers`. kind: of the device, see core.gpu_blocks.

    A GPU pads rows to whole chunks and holds 3 bits as 4. Of experts that have several groups, each has a word.
    """
    own_layout = numbers.in_blocks or numbers.kept or numbers.products == "int8"
    if kind == "cpu" or own_layout or (numbers.products and not matrix.chosen):
        return numbers
    bits = max(4, numbers.bits)
    held = replace(numbers, bits=bits, row=CHUNK * 8 // bits)
    has_words = matrix.chosen and 0 < numbers.group < matrix.inputs
    return replace(held, scale_bytes=EXPERT_GROUP, zeros=False) if has_words else held
