"""Published checkpoint layouts of integer weights: encode and decode one linear.

In this module codes are uint8 [out, in], scales [out, groups], and zeros uint8 [out, groups] or None (2^(bits - 1)).
weight = (code - zero) * scale. The group of input k is g_idx[k], or k // group if g_idx is None.

pack-quantized (compressed-tensors): `weight_packed` int32 [out, in / codes per word], lowest code first; `weight_scale`
    [out, groups]; `weight_zero_point` int32 [out / codes per word, groups], packed along the outputs; `weight_shape`;
    `weight_g_idx` int32 [in]. 4 or 8 bits.
gptq: `qweight` int32 [in * bits / 32, out], one bit stream along the inputs, so codes of 3 bits cross words; `qzeros` int32
    [groups, out * bits / 32], zero - 1 (gptq_v2 stores the zero itself); `scales` [groups, out]; `g_idx` int32 [in].
    3, 4 or 8 bits.
awq: `qweight` int32 [in, out / 8], codes of eight outputs in the order 0 2 4 6 1 3 5 7; `qzeros` in the same order; `scales`
    [groups, out]. 4 bits.
int-quantized (compressed-tensors): `weight` int8 [out, in], code - 128; `weight_scale` [out, 1]. 8 bits, a scale per output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.ops.reference import pack_bits, unpack_bits
from ridgeline.quant.format import FLOATS, Expected

Layout = Literal["pack-quantized", "gptq", "gptq_v2", "awq", "int-quantized"]
BITS: Mapping[Layout, tuple[int, ...]] = {
    "pack-quantized": (4, 8),
    "gptq": (3, 4, 8),
    "gptq_v2": (3, 4, 8),
    "awq": (4,),
    "int-quantized": (8,),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD = 32

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""codes, scales float32, zeros or None, g_idx int64 [in] or None."""


@dataclass(frozen=True, slots=True)
class Published:
    """The layout that a checkpoint uses for every linear."""

    layout: Layout
    bits: int
    group: int
    """Inputs per scale. 0: one scale per output."""
    zeros: bool = False
    """Whether the checkpoint contains zero points that differ from the symmetric one."""
    order: bool = False
    """Whether the checkpoint contains the group index of each input (act-order)."""

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def expected_tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """List the tensors of a linear of this size, by name."""
        groups, per_word, ints = self.groups(inputs), WORD // self.bits, (torch.int32,)
        if self.layout == "int-quantized":
            weight = Expected((outputs, inputs), (torch.int8,))
            return {"weight": weight, "weight_scale": Expected((outputs, groups), FLOATS)}
        if self.layout == "pack-quantized":
            tensors = {
                "weight_packed": Expected((outputs, -(-inputs // per_word)), ints),
                "weight_scale": Expected((outputs, groups), FLOATS),
                "weight_shape": Expected((2,), (torch.int64, torch.int32)),
            }
            if self.zeros:
                tensors["weight_zero_point"] = Expected((-(-outputs // per_word), groups), ints)
            if self.order:
                tensors["weight_g_idx"] = Expected((inputs,), ints)
            return tensors
        packed_zeros = Expected((groups, outputs * self.bits // WORD), ints)
        scales = Expected((groups, outputs), FLOATS)
        if self.layout == "awq":
            return {"qweight": Expected((inputs, outputs // per_word), ints), "qzeros": packed_zeros, "scales": scales}
        qweight = Expected((inputs * self.bits // WORD, outputs), ints)
        return {"qweight": qweight, "qzeros": packed_zeros, "scales": scales, "g_idx": Expected((inputs,), ints)}


def encode(
    form: Published,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Encode one linear as checkpoint tensors, by their names after the linear's name.

    16-bit scales keep their type, other scales become float16. Raises UnsupportedModel for what the layout cannot store.
    """
    outputs, inputs = codes.shape
    _check_layout(form, outputs, inputs, g_idx)
    stored_scales = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.half()
    if form.layout == "int-quantized":
        return {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": stored_scales.contiguous()}
    if form.layout == "pack-quantized":
        tensors = {
            "weight_packed": _words(codes, form.bits),
            "weight_scale": stored_scales.contiguous(),
            "weight_shape": torch.tensor([outputs, inputs], dtype=torch.int64),
        }
        if zeros is not None:
            tensors["weight_zero_point"] = _words(zeros.t(), form.bits).t().contiguous()
        if g_idx is not None:
            tensors["weight_g_idx"] = g_idx.int()
        return tensors
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << form.bits - 1, dtype=torch.uint8, device=codes.device)
    tensors = {"scales": stored_scales.t().contiguous()}
    if form.layout == "awq":
        order = torch.tensor(AWQ_ORDER, device=codes.device)
        for name, values in (("qweight", codes), ("qzeros", zeros)):
            tensors[name] = _words(_permute_eights(values.t(), order), form.bits)
        return tensors
    if form.layout == "gptq":
        if not bool((zeros > 0).all()):
            raise UnsupportedModel("has zero points of 0, which the layout gptq cannot store: use gptq_v2.")
        zeros = zeros - 1
    tensors["qweight"] = _words(codes, form.bits).t().contiguous()
    tensors["qzeros"] = _words(zeros.t(), form.bits)
    tensors["g_idx"] = _unordered_index(inputs, form) if g_idx is None else g_idx.int()
    return tensors


def decode(form: Published, tensors: Mapping[str, torch.Tensor]) -> Decoded:
    """Decode the checkpoint tensors of one linear: the inverse of `encode`. zeros is None if `form` has none.

    Raises UnsupportedModel for zero points in a symmetric layout and for group indices out of range.
    """
    bits = form.bits
    if form.layout == "int-quantized":
        return (tensors["weight"].to(torch.int16) + 128).to(torch.uint8), tensors["weight_scale"].float(), None, None
    if form.layout == "pack-quantized":
        outputs, inputs = tensors["weight_shape"].tolist()
        codes = _codes(tensors["weight_packed"], bits, inputs)
        packed_zeros = tensors.get("weight_zero_point")
        zeros = None if packed_zeros is None else _codes(packed_zeros.t(), bits, outputs).t().contiguous()
        return codes, tensors["weight_scale"].float(), zeros, _group_index(tensors.get("weight_g_idx"), inputs, form)
    outputs = tensors["scales"].shape[1]
    if form.layout == "awq":
        inverse = torch.tensor(AWQ_ORDER, device=tensors["qweight"].device).argsort()
        codes = _permute_eights(_codes(tensors["qweight"], bits, outputs), inverse).t().contiguous()
        zeros = _permute_eights(_codes(tensors["qzeros"], bits, outputs), inverse).t().contiguous()
        g_idx = None
    else:
        inputs = tensors["qweight"].shape[0] * WORD // bits
        codes = _codes(tensors["qweight"].t(), bits, inputs)
        zeros = _codes(tensors["qzeros"], bits, outputs).t().contiguous()
        if form.layout == "gptq":
            zeros = zeros + 1 & (1 << bits) - 1
        g_idx = _group_index(tensors["g_idx"], inputs, form)
    if not form.zeros:
        if not bool((zeros == 1 << bits - 1).all()):
            raise UnsupportedModel("has zero points, but quantization_config declares it as symmetric.")
        zeros = None
    return codes, tensors["scales"].float().t().contiguous(), zeros, g_idx


def _check_layout(form: Published, outputs: int, inputs: int, g_idx: torch.Tensor | None) -> None:
    if form.bits not in BITS[form.layout]:
        raise UnsupportedModel(
            f"has {form.bits} bits, but the layout {form.layout} supports {', '.join(map(str, BITS[form.layout]))}."
        )
    if form.layout == "int-quantized" and (form.group or form.zeros or g_idx is not None):
        raise UnsupportedModel(
            "has groups, zero points or an order of inputs, but int-quantized supports only one scale per output."
        )
    if g_idx is not None and form.layout == "awq":
        raise UnsupportedModel("has an order of inputs (act-order), which the layout awq cannot store.")
    divisors = {"pack-quantized": (1, 1), "int-quantized": (1, 1), "awq": (8, 1)}.get(form.layout, (WORD, WORD))
    for size, divisor, axis in ((outputs, divisors[0], "outputs"), (inputs, divisors[1], "inputs")):
        if size % divisor:
            raise UnsupportedModel(f"has {size} {axis}, but the layout {form.layout} needs a multiple of {divisor}.")


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [N, K] into int32 [N, ceil(K * bits / 32)]."""
    words = pack_bits(codes, bits).flatten().view(torch.int32).view(codes.shape[0], -1)
    return words[:, : -(-codes.shape[1] * bits // WORD)].contiguous()


def _codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack int32 [N, W] into codes uint8 [N, count]."""
    return unpack_bits(words.flatten().view(torch.uint8).view(words.shape[0], -1), bits, count)


def _permute_eights(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Permute values [N, K] by `order` within each run of eight along K."""
    return values.reshape(values.shape[0], -1, len(order))[:, :, order].reshape(values.shape)


def _unordered_index(inputs: int, form: Published) -> torch.Tensor:
    """Return the group of each input without act-order: k // group."""
    return torch.arange(inputs, dtype=torch.int32) // (form.group or inputs)


def _group_index(g_idx: torch.Tensor | None, inputs: int, form: Published) -> torch.Tensor | None:
    """Return g_idx as int64, or None if it equals k // group."""
    if g_idx is None:
        return None
    if not bool(((g_idx >= 0) & (g_idx < form.groups(inputs))).all()):
        raise UnsupportedModel(f"has a group index outside 0..{form.groups(inputs) - 1}.")
    return None if torch.equal(g_idx.cpu().int(), _unordered_index(inputs, form)) else g_idx.long()
