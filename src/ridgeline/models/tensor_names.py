"""Gives the tensors of published checkpoints the names and the layout of Llama's, while they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.mxfp4 import Get, Tensors, separate_stacked

_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
ROWS = ("weight", "bias", "weight_scale", "weight_scale_inv")
"""Tensors of a linear that have a row for each output."""
QUANTIZED_GATE = re.compile(
    r"\.(gate|router|shared_expert_gate)\.(qweight|qzeros|scales|g_idx|weight_(packed|scale|scale_inv|zero_point|shape))$"
)
"""Tensors of a router, or of the gate of a shared expert, that are in a number format."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the checkpoints of a family differ from Llama's.

    names: (pattern, replacement), applied in this order. fused: a projection (after `names`) that holds the rows of several, one
    after the other. transposed: linears are stored as [inputs, outputs]. skipped: first rows of the table of positions, not used.
    unused: pattern of tensors that are not weights. stacked_experts: see models.mxfp4.
    """

    names: Sequence[tuple[str, str]] = ()
    fused: Mapping[str, tuple[str, ...]] | None = None
    transposed: bool = False
    skipped: int = 0
    unused: str = ""
    stacked_experts: bool = False


_FUSED_GATE = {"mlp.gate_up_proj": _GATE_UP}
_GLM4_NORMS = (
    (r"post_attention_layernorm", "pre_feedforward_layernorm"),
    (r"post_self_attn_layernorm", "post_attention_layernorm"),
    (r"post_mlp_layernorm", "post_feedforward_layernorm"),
)
_GPT2 = (
    (r"^(transformer\.)?h\.", "layers."),
    (r"^(transformer\.)?wte\.", "embed_tokens."),
    (r"^(transformer\.)?wpe\.", "embed_positions."),
    (r"^(transformer\.)?ln_f\.", "norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_OPT = (
    (r"^(model\.)?decoder\.", ""),
    (r"^final_layer_norm\.", "norm."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
)
_EXAONE = (
    (r"^transformer\.h\.", "layers."),
    (r"^transformer\.wte\.", "embed_tokens."),
    (r"^transformer\.ln_f\.", "norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
LAYOUTS: Mapping[str, Layout] = {
    "Phi3ForCausalLM": Layout(fused={"self_attn.qkv_proj": _QKV, **_FUSED_GATE}),
    "GlmForCausalLM": Layout(fused=_FUSED_GATE),
    "Glm4ForCausalLM": Layout(_GLM4_NORMS, _FUSED_GATE),
    "ExaoneForCausalLM": Layout(_EXAONE, unused=r"rotary\.inv_freq$"),
    "GptOssForCausalLM": Layout(((r"\.mlp\.router\.", ".mlp.gate."),), stacked_experts=True),
    "OPTForCausalLM": Layout(_OPT, skipped=2),
    "GPT2LMHeadModel": Layout(_GPT2, {"self_attn.c_attn": _QKV}, transposed=True, unused=r"\.attn\.(masked_)?bias$"),
}
"""By ModelSpec.architecture."""


def as_llama(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """Yield the tensors of a checkpoint of `spec` with the names and the layout of Llama's. Raises UnsupportedModel for a number
    format whose tensors cannot be divided into projections, and for a router in a number format."""
    layout = LAYOUTS.get(spec.architecture, Layout())
    for name, get in separate_stacked(tensors) if layout.stacked_experts else tensors:
        if layout.unused and re.search(layout.unused, name):
            continue
        if QUANTIZED_GATE.search(name):
            raise UnsupportedModel(
                f"The tensor {name} is of a quantized router, which is not supported: routers and gates of experts must be in "
                "floating point. Use another checkpoint of the model, or the unquantized one with --quantization."
            )
        for pattern, replacement in layout.names:
            name = re.sub(pattern, replacement, name)
        if layout.transposed and name.endswith(("_proj.weight", "c_attn.weight")):
            get = partial(_transposed, get)
        if layout.skipped and name == "embed_positions.weight":
            get = partial(_without_rows, get, layout.skipped)
        for part, read in _separated(spec, layout, name, get):
            yield part, partial(_pairs_apart, spec, part, read) if spec.interleaved and _rotates(part) else read


def require_llama(spec: ModelSpec) -> None:
    """Raise UnsupportedModel for a family whose layers or tensors are not Llama's, which compression and training do not know."""
    if spec.architecture in LAYOUTS or spec.interleaved or not spec.plain:
        raise UnsupportedModel(
            f"{spec.architecture} cannot be compressed or trained: its layers or the layout of its tensors differ from Llama's. "
            "Serve it with --quantization int8, int4 or fp8-weight, which quantize it while it is loaded."
        )


def _separated(spec: ModelSpec, layout: Layout, name: str, get: Get) -> Tensors:
    """The projections that a tensor holds."""
    path, _, suffix = name.rpartition(".")
    fused, parts = next(((key, parts) for key, parts in (layout.fused or {}).items() if path.endswith(key)), ("", ()))
    if not parts:
        yield name, get
        return
    _check(spec, name, suffix)
    tensor, layer = get(), spec.layers[0]
    heads = layer.n_heads, layer.n_kv_heads, layer.n_kv_heads
    sizes = [count * layer.head_dim for count in heads] if parts is _QKV else [layer.d_ff] * len(parts)
    if tensor.numel() > 1 and tensor.shape[0] != sum(sizes):
        raise UnsupportedModel(
            f"The tensor {name} has shape {list(tensor.shape)}, but config.json requires {sum(sizes)} rows."
        )
    rows = [tensor] * len(parts) if tensor.numel() == 1 else tensor.split(sizes)
    for part, piece in zip(parts, rows, strict=True):
        yield f"{path.removesuffix(fused)}{part}.{suffix}", partial(_same, piece)


def _rotates(name: str) -> bool:
    return ".q_proj." in name or ".k_proj." in name


def _pairs_apart(spec: ModelSpec, name: str, get: Get) -> torch.Tensor:
    """Reorder the outputs of each head: the first elements of all pairs, then the second ones. Queries and keys are reordered
    alike, so their products stay, and neighbours that rotated together become halves that rotate together."""
    _check(spec, name, name.rpartition(".")[2])
    tensor, layer = get(), spec.layers[0]
    if tensor.numel() == 1:
        return tensor
    rotated = max(layer.rope.dim for layer in spec.layers)
    order = torch.cat((torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, layer.head_dim)))
    return tensor.unflatten(0, (-1, layer.head_dim))[:, order].flatten(0, 1)


def _check(spec: ModelSpec, name: str, suffix: str) -> None:
    """Raise UnsupportedModel for a tensor without a row for each output."""
    if suffix not in ROWS or spec.quantization == "fp8-block":
        raise UnsupportedModel(
            f"The tensor {name} is in a number format whose projections cannot be divided: use a checkpoint that is not quantized, "
            "with --quantization int8 or int4."
        )


def _transposed(get: Get) -> torch.Tensor:
    return get().t()


def _without_rows(get: Get, count: int) -> torch.Tensor:
    return get()[count:]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
