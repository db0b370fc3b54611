"""Published layouts of integer weights: how a checkpoint stores one linear, both ways, as functions of tensors.

Everywhere here codes are uint8 [out, in], scales [out, groups] and zeros uint8 [out, groups] or None (2^(bits - 1)):
weight = (code - zero) * scale, the group of input k being g_idx[k], or k // group where g_idx is None.

pack-quantized (compressed-tensors): `weight_packed` int32 [out, in / per word], lowest code first; `weight_scale`
    [out, groups]; `weight_zero_point` int32 [out / per word, groups], packed along the outputs; `weight_shape`;
    `weight_g_idx` int32 [in]. 4 or 8 bits.
gptq: `qweight` int32 [in * bits / 32, out], one run of bits along the inputs (so 3 bits cross words); `qzeros` int32
    [groups, out * bits / 32], each zero less one (its first version's habit; gptq_v2 stores them as they are); `scales`
    [groups, out]; `g_idx` int32 [in].
awq: `qweight` int32 [in, out / 8], codes of eight outputs in the order 0 2 4 6 1 3 5 7; `qzeros` likewise; `scales`
    [groups, out]. 4 bits.
int-quantized (compressed-tensors): `weight` int8 [out, in], each code less 128; `weight_scale` [out, 1]. 8 bits, a scale per
    output.
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
    """How a checkpoint stores every linear. group 0: one for all inputs. zeros: whether it brings zero points that matter.
    order: whether it says which group an input is of."""

    layout: Layout
    bits: int
    group: int
    zeros: bool = False
    order: bool = False

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def expected(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """name -> what a checkpoint brings of a linear of that size."""
        groups, per, ints = self.groups(inputs), WORD // self.bits, (torch.int32,)
        if self.layout == "int-quantized":
            whole = Expected((outputs, inputs), (torch.int8,))
            return {"weight": whole, "weight_scale": Expected((outputs, groups), FLOATS)}
        if self.layout == "pack-quantized":
            found = {
                "weight_packed": Expected((outputs, -(-inputs // per)), ints),
                "weight_scale": Expected((outputs, groups), FLOATS),
                "weight_shape": Expected((2,), (torch.int64, torch.int32)),
            }
            if self.zeros:
                found["weight_zero_point"] = Expected((-(-outputs // per), groups), ints)
            if self.order:
                found["weight_g_idx"] = Expected((inputs,), ints)
            return found
        packed_zeros = Expected((groups, outputs * self.bits // WORD), ints)
        scales = Expected((groups, outputs), FLOATS)
        if self.layout == "awq":
            return {"qweight": Expected((inputs, outputs // per), ints), "qzeros": packed_zeros, "scales": scales}
        qweight = Expected((inputs * self.bits // WORD, outputs), ints)
        return {"qweight": qweight, "qzeros": packed_zeros, "scales": scales, "g_idx": Expected((inputs,), ints)}


def encode(
    form: Published,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of one linear by the names they have behind the linear's own. Scales of 16 bits keep their type, others
    become float16. Raises UnsupportedModel for what the layout cannot hold."""
    outputs, inputs = codes.shape
    _refuse_misfit(form, outputs, inputs, g_idx)
    half = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.half()
    if form.layout == "int-quantized":
        return {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": half.contiguous()}
    if form.layout == "pack-quantized":
        found = {
            "weight_packed": _words(codes, form.bits),
            "weight_scale": half.contiguous(),
            "weight_shape": torch.tensor([outputs, inputs], dtype=torch.int64),
        }
        if zeros is not None:
            found["weight_zero_point"] = _words(zeros.t(), form.bits).t().contiguous()
        if g_idx is not None:
            found["weight_g_idx"] = g_idx.int()
        return found
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << form.bits - 1, dtype=torch.uint8, device=codes.device)
    found = {"scales": half.t().contiguous()}
    if form.layout == "awq":
        order = torch.tensor(AWQ_ORDER, device=codes.device)
        for name, values in (("qweight", codes), ("qzeros", zeros)):
            found[name] = _words(_reordered(values.t(), order), form.bits)
        return found
    if form.layout == "gptq":
        if not bool((zeros > 0).all()):
            raise UnsupportedModel("has zero points of 0, which the layout gptq cannot store: use gptq_v2.")
        zeros = zeros - 1
    found["qweight"] = _words(codes, form.bits).t().contiguous()
    found["qzeros"] = _words(zeros.t(), form.bits)
    found["g_idx"] = _plain_order(inputs, form) if g_idx is None else g_idx.int()
    return found


def decode(form: Published, tensors: Mapping[str, torch.Tensor]) -> Decoded:
    """What `encode` was given, of the tensors of one linear. zeros: None where `form` says that there are none.

    Raises UnsupportedModel for zero points where there should be none, and for sizes that contradict the tensors."""
    bits = form.bits
    if form.layout == "int-quantized":
        return (tensors["weight"].to(torch.int16) + 128).to(torch.uint8), tensors["weight_scale"].float(), None, None
    if form.layout == "pack-quantized":
        outputs, inputs = tensors["weight_shape"].tolist()
        codes = _codes(tensors["weight_packed"], bits, inputs)
        found = tensors.get("weight_zero_point")
        zeros = None if found is None else _codes(found.t(), bits, outputs).t().contiguous()
        return codes, tensors["weight_scale"].float(), zeros, _order(tensors.get("weight_g_idx"), inputs, form)
    outputs = tensors["scales"].shape[1]
    if form.layout == "awq":
        back = torch.tensor(AWQ_ORDER, device=tensors["qweight"].device).argsort()
        codes = _reordered(_codes(tensors["qweight"], bits, outputs), back).t().contiguous()
        zeros = _reordered(_codes(tensors["qzeros"], bits, outputs), back).t().contiguous()
        g_idx = None
    else:
        inputs = tensors["qweight"].shape[0] * WORD // bits
        codes = _codes(tensors["qweight"].t(), bits, inputs)
        zeros = _codes(tensors["qzeros"], bits, outputs).t().contiguous()
        if form.layout == "gptq":
            zeros = zeros + 1 & (1 << bits) - 1
        g_idx = _order(tensors["g_idx"], inputs, form)
    if not form.zeros:
        if not bool((zeros == 1 << bits - 1).all()):
            raise UnsupportedModel("has zero points, but quantization_config declares it as symmetric.")
        zeros = None
    return codes, tensors["scales"].float().t().contiguous(), zeros, g_idx


def _refuse_misfit(form: Published, outputs: int, inputs: int, g_idx: torch.Tensor | None) -> None:
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
    for size, divisor, what in ((outputs, divisors[0], "outputs"), (inputs, divisors[1], "inputs")):
        if size % divisor:
            raise UnsupportedModel(f"has {size} {what}, but the layout {form.layout} needs a multiple of {divisor}.")


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [N, K] -> int32 [N, ceil(K * bits / 32)]."""
    words = pack_bits(codes, bits).flatten().view(torch.int32).view(codes.shape[0], -1)
    return words[:, : -(-codes.shape[1] * bits // WORD)].contiguous()


def _codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [N, W] -> uint8 [N, count]."""
    return unpack_bits(words.flatten().view(torch.uint8).view(words.shape[0], -1), bits, count)


def _reordered(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """values [N, K] with each eight along K in `order`."""
    return values.reshape(values.shape[0], -1, len(order))[:, :, order].reshape(values.shape)


def _plain_order(inputs: int, form: Published) -> torch.Tensor:
    return torch.arange(inputs, dtype=torch.int32) // (form.group or inputs)


def _order(g_idx: torch.Tensor | None, inputs: int, form: Published) -> torch.Tensor | None:
    """g_idx where it says more than k // group."""
    if g_idx is None:
        return None
    if not bool(((g_idx >= 0) & (g_idx < form.groups(inputs))).all()):
        raise UnsupportedModel(f"has a group index outside 0..{form.groups(inputs) - 1}.")
    return None if torch.equal(g_idx.cpu().int(), _plain_order(inputs, form)) else g_idx.long()
