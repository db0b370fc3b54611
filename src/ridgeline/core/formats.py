"""Number formats of weights and of cached keys and values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a weight matrix is stored.

    bits: per element. row: rows of elements are padded to multiples of it. group: inputs of one output channel that share a scale
    of `scale_bytes`; 0: all inputs; the last group may be shorter. zeros: each group also has a zero point of one byte. ordered:
    the matrix stores an int32 per input, the order of its inputs (act-order). inputs_8bit: products quantize their activations
    too. products: precision of matrix products on a device that has a unit for it; "": the model's dtype. kept: one input of so
    many keeps its weights in the model's dtype, with an int32 index; their number is rounded up to a multiple of `row`. 0: none.
    scaling: form of the scales, see ops.blocks; "": float16. super_bytes: of scales that 256 inputs of one output channel share.
    published: only checkpoints have it, --quantization does not. experts: only weights of experts have it, others are in the
    model's dtype.
    """

    bits: int
    group: int = 0
    zeros: bool = False
    ordered: bool = False
    inputs_8bit: bool = False
    products: str = ""
    kept: int = 0
    scale_bytes: int = 2
    row: int = 32
    scaling: str = ""
    super_bytes: int = 0
    published: bool = False
    experts: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether only ops.blocks has it."""
        return bool(self.scaling) or self.bits in (5, 6)

    @property
    def on_gpu_experts(self) -> bool:
        """Whether a GPU has products for experts in it (ops.triton.experts): not with act-order, with integer inputs, with some
        inputs in the dtype, or in blocks other than those of gpt-oss. With `fp8` long prompts quantize inputs of experts."""
        return not (self.ordered or self.kept or self.products == "int8") and self.in_blocks == self.experts

    def kept_inputs(self, inputs: int) -> int:
        """The number of inputs, of `inputs`, whose weights stay in the model's dtype."""
        return min(inputs, -(-inputs // (self.kept * self.row)) * self.row) if self.kept else 0

    def matrix_bytes(self, outputs: int, inputs: int, width: int = 2) -> int:
        """Bytes of a matrix without its bias. width: bytes of an element of the model's dtype."""
        elements = -(-inputs // self.row) * self.row * self.bits // 8
        groups = -(-inputs // self.group) if self.group else 1
        scales = groups * (self.scale_bytes + (1 if self.zeros else 0)) + self.super_bytes * -(-inputs // SUPER)
        kept = self.kept_inputs(inputs) * (outputs * width + 4)
        return outputs * (elements + scales) + (4 * inputs if self.ordered else 0) + kept


SUPER = 256
"""Inputs of one output channel that share super_bytes."""
GROUPS = (32, 64, 128, 256)
"""Group sizes of integer weights, in inputs. A scale may also cover all inputs."""


def _integers() -> dict[str, NumberFormat]:
    """int4-g128 and its variants: -channel for one scale per output channel, -zp with zero points, -ordered for act-order."""
    formats = {}
    for bits, default_group in ((8, 0), (4, 128), (3, 128)):
        for group in (0, *GROUPS):
            for zeros in (False, True):
                for ordered in (False, True):
                    suffix = ("-zp" if zeros else "") + ("-ordered" if ordered else "")
                    number_format = NumberFormat(bits, group, zeros, ordered, published=ordered)
                    formats[f"int{bits}-g{group}{suffix}" if group else f"int{bits}-channel{suffix}"] = number_format
        formats[f"int{bits}"] = NumberFormat(bits, default_group)
    return formats


NUMBER_FORMATS = {
    "fp8": NumberFormat(8, inputs_8bit=True, products="float8_e4m3", scale_bytes=4, row=1),
    "fp8-weight": NumberFormat(8, scale_bytes=4, row=1),
    "fp8-block": NumberFormat(8, 128, scale_bytes=4, row=1, published=True),
    "w8a8": NumberFormat(8, inputs_8bit=True, products="int8"),
    # Outlier inputs of a token stay in floating point, so products are in the model's dtype (quant/mixed).
    "llm-int8": NumberFormat(8, inputs_8bit=True, kept=64),
    **_integers(),
    # The blocks of llama.cpp that the formats above do not have, and the experts of gpt-oss.
    "q4_1": NumberFormat(4, 32, scale_bytes=4, scaling="float16_minimum", published=True),
    "q5_0": NumberFormat(5, 32, published=True),
    "q5_1": NumberFormat(5, 32, scale_bytes=4, scaling="float16_minimum", published=True),
    "q4_k": NumberFormat(4, 32, scaling="super_6bit", row=SUPER, published=True),
    "q5_k": NumberFormat(5, 32, scaling="super_6bit", row=SUPER, published=True),
    "q6_k": NumberFormat(6, 16, scale_bytes=1, scaling="super_8bit", super_bytes=2, row=SUPER, published=True),
    "mxfp4": NumberFormat(4, 32, scale_bytes=1, scaling="e8m0", published=True, experts=True),
}
"""Formats by their name in the option `quantization`. Embedding, norms and biases stay in the model's dtype."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How the cache stores keys and values. For each layer a page holds [K | V | scales of both][head][slot][dim].

    dtype: torch's name of the stored type; a type with more bits than an element packs several elements. bits: per element.
    scale_dtype: torch's name of the type of scales; None for a format without scales. group: neighbouring elements of one key or
    value (of one head and token) that share a scale; 0: all of them. value = stored * scale. largest: largest stored magnitude of
    a format with scales.
    """

    name: str
    dtype: str
    bits: int
    scale_dtype: str | None = None
    group: int = 0
    largest: float = 0.0

    def scales(self, dim: int) -> int:
        """Number of scales of one key or value of `dim` elements."""
        if self.scale_dtype is None:
            return 0
        return -(-dim // self.group) if self.group else 1

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one key or value of `dim` elements, with its scales."""
        return dim * self.bits // 8 + (self.scales(dim) * DTYPE_BYTES[self.scale_dtype] if self.scale_dtype else 0)


KV_FORMATS = {
    **{name: KvFormat(name, name, 8 * DTYPE_BYTES[name]) for name in ("float32", "bfloat16", "float16")},
    "int8": KvFormat("int8", "int8", 8, "float16", largest=127.0),
    "fp8": KvFormat("fp8", "float8_e4m3fn", 8, "float16", largest=448.0),
    "int4": KvFormat("int4", "uint8", 4, "float16", 32, largest=7.0),
}
"""Formats by name. A device serves the model's dtype and those in AttentionOps.kv_formats."""
QUANTIZED_KV = tuple(name for name, kv_format in KV_FORMATS.items() if kv_format.scale_dtype)
