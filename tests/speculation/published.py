"""Random heads in the formats in which heads are published, and what they compute, in plain PyTorch and float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.core.spec import LayerSpec, ModelSpec

HEADS, KV_HEADS, DIM, INNER, THETA, EPS = 4, 2, 24, 80, 5_000.0, 1e-5
"""Of EAGLE heads, which need not be like the target's layers."""
SHAPE = DIM, THETA, EPS
DRAFT_VOCABULARY = 96

Tensors = dict[str, Tensor]


def layer(width: int, inputs: int, seed: int, spec: LayerSpec | None = None) -> Tensors:
    """The matrices of a decoder layer, without norms, in the names of Llama."""
    chance = torch.Generator().manual_seed(seed)
    heads, kv, dim, inner = (HEADS, KV_HEADS, DIM, INNER)
    if spec is not None:
        heads, kv, dim, inner = spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.d_ff
    shapes = {"q": (heads * dim, inputs), "k": (kv * dim, inputs), "v": (kv * dim, inputs), "o": (width, heads * dim)}
    named = {f"self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
    named |= {f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")} | {
        "mlp.down_proj.weight": (width, inner)
    }
    return {name: random(chance, *shape) for name, shape in named.items()}


def random(chance: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=chance) * 1.5 / shape[-1] ** 0.5


def norm(chance: torch.Generator, width: int) -> Tensor:
    return 1 + 0.2 * torch.randn(width, generator=chance)


def config(width: int, vocab: int, **more: object) -> dict[str, Any]:
    sizes = {"hidden_size": width, "vocab_size": vocab, "intermediate_size": INNER, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    facts = {"rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu", "max_position_embeddings": 2048}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **heads, **facts, **more}


def eagle(spec: ModelSpec, seed: int = 1) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors as of EAGLE-LLaMA3.1-Instruct-8B, with an embedding."""
    chance, width = torch.Generator().manual_seed(seed), spec.d_model
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer(width, width, seed).items()}
    tensors["layers.0.post_attention_layernorm.weight"] = norm(chance, width)
    tensors |= {"fc.weight": random(chance, width, 2 * width), "fc.bias": 0.1 * torch.randn(width, generator=chance)}
    tensors["embed_tokens.weight"] = torch.randn(spec.vocab_size, width, generator=chance)
    return config(width, spec.vocab_size, bias=True), tensors


def eagle3(
    spec: ModelSpec, seed: int = 2, width: int = 0, taps: tuple[int, ...] = ()
) -> tuple[dict[str, Any], Tensors]:
    """As of EAGLE3-LLaMA3.1-Instruct-8B, with its sizes said. width: 0 for the target's. taps: layers before which it reads."""
    chance, size = torch.Generator().manual_seed(seed), width or spec.d_model
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer(size, 2 * size, seed).items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = norm(chance, size)
    tensors["fc.weight"] = random(chance, size, 3 * spec.d_model)
    tensors["lm_head.weight"] = random(chance, DRAFT_VOCABULARY, size)
    ids = torch.randperm(spec.vocab_size, generator=chance)[:DRAFT_VOCABULARY].sort().values
    tensors |= {
        "d2t": ids - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.zeros(spec.vocab_size).index_fill_(0, ids, 1).bool(),
    }
    if width:
        tensors["embed_tokens.weight"] = torch.randn(spec.vocab_size, size, generator=chance)
    more = {
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(taps or (0, 1, len(spec.layers) - 1)),
    }
    return config(size, spec.vocab_size, target_hidden_size=spec.d_model, **more), tensors


DEEPSEEK = {"fc": "eh_proj", "embed": "enorm", "hidden": "hnorm", "final": "shared_head.norm"}
MIMO = {"fc": "input_proj", "embed": "token_layernorm", "hidden": "hidden_layernorm", "final": "final_layernorm"}


def mtp(spec: ModelSpec, names: Mapping[str, str], seed: int = 3) -> Tensors:
    """Tensors of an MTP layer in a checkpoint: DEEPSEEK or MIMO."""
    chance, width, last = torch.Generator().manual_seed(seed), spec.d_model, spec.layers[-1]
    prefix = "model.mtp_layers.0." if names is MIMO else f"model.layers.{len(spec.layers)}."
    tensors = layer(width, width, seed, last)
    for name in ("input_layernorm", "post_attention_layernorm", names["embed"], names["hidden"], names["final"]):
        tensors[f"{name}.weight"] = norm(chance, width)
    if spec.qkv_bias:
        for name in "qkv":
            matrix = tensors[f"self_attn.{name}_proj.weight"]
            tensors[f"self_attn.{name}_proj.bias"] = 0.1 * torch.randn(len(matrix), generator=chance)
    tensors[f"{names['fc']}.weight"] = random(chance, width, 2 * width)
    return {prefix + name: tensor for name, tensor in tensors.items()}


Published = tuple[dict[str, Any], Tensors]
"""config.json and tensors."""


def as_vllm(published: Published) -> Published:
    """EAGLE-1 with HASS's norms and vLLM's config.json, which holds the layer's as `model`."""
    keys, tensors = published
    chance = torch.Generator().manual_seed(9)
    norms = {f"{name}_layernorm.weight": norm(chance, keys["hidden_size"]) for name in ("embedding", "hidden_states")}
    outer = {"architectures": ["EAGLEModel"], "model_type": "eagle", "add_para_norm": True}
    return {**outer, "model": keys}, tensors | norms


def as_speculators(published: Published) -> Published:
    """EAGLE-1 as the speculators library converts it: without the embedding, which is the model's."""
    keys, tensors = published
    renamed = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensors[name] for name in tensors
    }
    del renamed["embed_tokens.weight"]
    outer = {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle"}
    facts = {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False, "fusion_bias": True}
    return outer | facts | {"speculators_config": {"algorithm": "eagle"}, "transformer_layer_config": keys}, renamed


def as_authors3(published: Published) -> Published:
    """EAGLE-3 as of its authors, who do not say which layers it reads."""
    keys, tensors = published
    unsaid = ("eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    return {key: value for key, value in keys.items() if key not in unsaid}, tensors


def as_sglang3(published: Published) -> Published:
    """EAGLE-3 as SpecForge trains it for SGLang: layers are counted from 0, and read behind."""
    keys, tensors = as_authors3(published)
    behind = [tap - 1 for tap in published[0]["eagle_aux_hidden_state_layer_ids"]]
    nested = {"eagle_aux_hidden_state_layer_ids": behind, "use_aux_hidden_state": True}
    return keys | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}, tensors


def as_speculators3(published: Published) -> Published:
    """EAGLE-3 of the speculators library, in the names of vLLM."""
    keys, tensors = published
    outer = ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size")
    inner = {key: value for key, value in keys.items() if key not in (*outer, "architectures")}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return nested | {key: keys[key] for key in outer} | {"norm_before_residual": True}, renamed


LAYOUTS: Mapping[str, Callable[[ModelSpec], Published]] = {
    "eagle": eagle,
    "eagle-vllm": lambda spec: as_vllm(eagle(spec)),
    "eagle-speculators": lambda spec: as_speculators(eagle(spec)),
    "eagle3": lambda spec: as_authors3(eagle3(spec, taps=(2, len(spec.layers) // 2, len(spec.layers) - 3))),
    "eagle3-sglang": lambda spec: as_sglang3(eagle3(spec, taps=(1, 2, 4))),
    "eagle3-speculators": lambda spec: as_speculators3(eagle3(spec, width=40)),
}
"""Every layout in which heads are published. "eagle" and "eagle3" are those of the authors, in pytorch_model.bin."""


def save_layout(folder: Path, name: str, spec: ModelSpec) -> Path:
    return save_head(folder, LAYOUTS[name](spec), pickled=name in ("eagle", "eagle3"))


def save_head(folder: Path, published: tuple[dict[str, Any], Tensors], pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    keys, tensors = published
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


# --- what they compute ------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [tokens, heads, dim] at positions 0, 1, ..: a rotation in the complex plane for each pair."""
    tokens, _, dim = x.shape
    angle = torch.arange(tokens).double()[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def block(weights: Tensors, x: Tensor, stream: Tensor, shape: tuple[int, float, float]) -> Tensor:
    """The stream after attention over x [tokens, inputs] and the feed-forward block. weights: float64, without prefix. shape: head
    size, theta of the rotation, eps of norms."""
    dim, theta, eps = shape
    q, k, v = (
        (x @ weights[f"self_attn.{name}_proj.weight"].T + weights.get(f"self_attn.{name}_proj.bias", 0)).unflatten(
            1, (-1, dim)
        )
        for name in "qkv"
    )
    q, k, shared = turned(q, theta), turned(k, theta), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    future = torch.ones(len(x), len(x)).triu(1).bool()
    shares = scores.masked_fill(future, float("-inf")).softmax(-1)
    stream = stream + torch.einsum("hts,shd->thd", shares, v).flatten(1) @ weights["self_attn.o_proj.weight"].T
    normed = rms(stream, weights["post_attention_layernorm.weight"], eps)
    gated = torch.nn.functional.silu(normed @ weights["mlp.gate_proj.weight"].T) * (
        normed @ weights["mlp.up_proj.weight"].T
    )
    return stream + gated @ weights["mlp.down_proj.weight"].T


Step = Callable[[Tensor, Tensor], Tensor]
"""(embeddings, features) of all pairs from the first on -> the layer's states after them, float64 [pairs, width]."""


def eagle_states(tensors: Tensors, shape: tuple[int, float, float] = SHAPE) -> Step:
    weights = {name.removeprefix("layers.0."): tensor.double() for name, tensor in tensors.items()}

    def states(embedded: Tensor, features: Tensor) -> Tensor:
        if "embedding_layernorm.weight" in weights:
            embedded = rms(embedded, weights["embedding_layernorm.weight"])
            features = rms(features, weights["hidden_states_layernorm.weight"])
        stream = torch.cat((embedded, features), 1) @ weights["fc.weight"].T + weights.get("fc.bias", 0)
        return block(weights, stream, stream, shape)

    return states


def eagle3_states(tensors: Tensors, norm_before_residual: bool = False) -> Step:
    weights = {name.removeprefix("midlayer."): tensor.double() for name, tensor in tensors.items()}

    def states(embedded: Tensor, features: Tensor) -> Tensor:
        normed = rms(features, weights["hidden_norm.weight"])
        x = torch.cat((rms(embedded, weights["input_layernorm.weight"]), normed), 1)
        return block(weights, x, normed if norm_before_residual else features, SHAPE)

    return states


def mtp_states(tensors: Tensors, names: Mapping[str, str], spec: ModelSpec) -> Step:
    weights = {name.partition("layers.")[2].partition(".")[2]: tensor.double() for name, tensor in tensors.items()}
    last = spec.layers[-1]

    def states(embedded: Tensor, features: Tensor) -> Tensor:
        eps = spec.norm_eps
        parts = [
            rms(embedded, weights[f"{names['embed']}.weight"], eps),
            rms(features, weights[f"{names['hidden']}.weight"], eps),
        ]
        stream = torch.cat(parts[::-1] if names is MIMO else parts, 1) @ weights[f"{names['fc']}.weight"].T
        x = rms(stream, weights["input_layernorm.weight"], eps)
        state = block(weights, x, stream, (last.head_dim, last.rope.theta, eps))
        return rms(state, weights[f"{names['final']}.weight"], eps) if names is MIMO else state

    return states
