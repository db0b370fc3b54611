"""Tiny random checkpoints of every family, written by transformers itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 20, "num_hidden_layers": 4}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
MOE = {"num_experts_per_tok": 2}
QWEN_MOE = {**MOE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-tied": ("Llama", {"vocab_size": 321, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 32}),
    "smollm": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-mha": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
    "qwen3-window": ("Qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 33, "layer_types": MIXED}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 5, "sliding_window": 24}),
    "mixtral-one": ("Mixtral", {**MOE, "num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4, "head_dim": 32},
    ),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "olmoe": ("Olmoe", {**MOE, "num_experts": 6}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": ROPES}),
}

TWO = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 1.5, 3.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
ABSENT = "absent"
TOKENS = {name: SMALL[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
_GPT2_SIZES = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
_OPT_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}
HYBRID = {**TWO, "num_hidden_layers": 3, "sliding_window": 20, "layer_types": [*MIXED[1:], MIXED[0]]}
# More families, by the name of their configuration in transformers. Each has two or three small layers.
MORE: dict[str, tuple[str, dict[str, object]]] = {
    "phi3": ("Phi3", {**TWO, "sliding_window": 24}),
    "phi4-mini": (
        "Phi3",
        {**TWO, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", TWO),
    "granite": ("Granite", {**TWO, **MULTIPLIERS, "tie_word_embeddings": True}),
    "falcon3": ("Llama", {**TWO, "head_dim": 16, "rope_theta": 1000042.0}),
    "stablelm": ("StableLm", {**TWO, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**TWO, "use_parallel_residual": True}),
    "glm": ("Glm", {**TWO, "head_dim": 16}),
    "glm4": ("Glm4", {**TWO, "head_dim": 16}),
    "cohere2": ("Cohere2", {**HYBRID, "logit_scale": 0.25}),
    "exaone": ("Exaone", {**TWO, "rope_parameters": LLAMA3}),
    "exaone4": ("Exaone4", {**HYBRID, "head_dim": 8}),
    "exaone4-global": (
        "Exaone4",
        {**TWO, "head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **TWO,
            **MOE,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "head_dim": 16,
            "sliding_window": 20,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "opt": ("OPT", {**dict.fromkeys(SMALL, ABSENT), **TOKENS, **_OPT_SIZES, "num_attention_heads": 4}),
    "gpt2": ("GPT2", {**dict.fromkeys(SMALL, ABSENT), **TOKENS, **_GPT2_SIZES}),
}
OTHER_LAYERS = ("cohere2", "gpt2", "granite", "olmo2")
"""Those of MORE with every kind of layer that MORE adds."""

WITH_EXPERTS = frozenset(("mixtral", "mixtral-one", "qwen3-moe", "qwen3-moe-mixed", "qwen2-moe", "olmoe"))


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    """Write family `name` into `folder`; returns transformers' model, biases and norms made non-trivial."""
    if name in SHARING:
        return save_sharing(SHARING[name], folder, dtype)
    kind, extra = (FAMILIES | MORE)[name]
    keys = {key: value for key, value in {**SMALL, **extra}.items() if value != ABSENT}
    config = getattr(transformers, f"{kind}Config")(**keys)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 1 or key.endswith("_bias"):
                value.add_(torch.randn_like(value) * 0.2)
            elif "embed" in key:
                value.normal_(0.0, 0.5 / config.hidden_size**0.5)
    model.save_pretrained(folder, **options)
    return model


@dataclass(frozen=True, slots=True)
class Sharing:
    """A model with shared caches. layers: (window, layer whose keys and values it reads) of each. keys: of config.json."""

    layers: tuple[tuple[int | None, int | None], ...]
    keys: dict[str, object]


SHARING = {
    "cla": Sharing(
        ((None, None), (None, 0), (None, 0), (None, None), (None, 3)),
        {"cla_share_factor": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "yoco": Sharing(
        ((None, None), (None, None), (None, 1), (None, 1)),
        {"num_kv_shared_layers": 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "windows-shared": Sharing(
        ((20, None), (20, 0), (None, None), (20, None), (20, 3), (None, 2)),
        {"cla_share_factor": 2, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gemma3n-like": Sharing(
        ((24, None), (None, None), (24, None), (24, 2), (24, 2), (None, 1)),
        {
            "num_kv_shared_layers": 3,
            "sliding_window": 24,
            "layer_types": [*["sliding_attention", "full_attention"], *["sliding_attention"] * 3, "full_attention"],
        },
    ),
}


def save_sharing(sharing: Sharing, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' Llama, whose attention function reads the keys and values that another layer made. The checkpoint lacks weights
    of keys and values that no layer reads."""
    n, seen = len(sharing.layers), {}

    def attention(module, query, key, value, given, **options):
        window, source = sharing.layers[module.layer_idx]
        seen[module.layer_idx] = key, value
        key, value = seen[module.layer_idx if source is None else source]
        places = torch.arange(key.shape[2])
        back = places[-query.shape[2] :].unsqueeze(1) - places
        mask = (back >= 0) & (back < (window or len(places)))
        if given is not None:
            mask = mask & (given == 0)
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = (query @ key.mT * options["scaling"]).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("shared", attention)
    kinds = sharing.keys.get("layer_types")
    keys = {**sharing.keys, "num_hidden_layers": n}
    if isinstance(kinds, list):
        keys["layer_types"] = (kinds * n)[:n]
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": n, **_known(sharing.keys)})
    config._attn_implementation = "shared"
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for value in (value for value in model.parameters() if value.dim() == 1):
            value.add_(torch.randn_like(value) * 0.2)
    unread = tuple(
        f"model.layers.{index}.self_attn.{part}_proj."
        for index, (_, source) in enumerate(sharing.layers)
        if source is not None
        for part in "kv"
    )
    tensors = {name: value for name, value in model.state_dict().items() if not name.startswith(unread)}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")
    ours = {"model_type": "ridgeline", "architectures": ["RidgelineForCausalLM"], "torch_dtype": str(dtype)[6:]}
    (folder / "config.json").write_text(json.dumps({**SMALL, **keys, **ours}))
    return model


def _known(keys: dict[str, object]) -> dict[str, object]:
    """The keys that Llama has too."""
    return {
        key: keys[key]
        for key in ("num_key_value_heads", "head_dim", "attention_bias", "tie_word_embeddings")
        if key in keys
    }


def save_with_images(folder: Path) -> torch.nn.Module:
    """Gemma 3 with a small vision tower, as Gemma3ForConditionalGeneration writes it."""
    text = {**SMALL, **GEMMA, "num_hidden_layers": 7}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**sight, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    )
    torch.manual_seed(7)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model
