"""Tiny random checkpoints of every family, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

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
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
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
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": ROPES}),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    """Write family `name` into `folder`; returns transformers' model, biases and norms made non-trivial."""
    kind, extra = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
            elif "embed" in key:
                value.normal_(0.0, 0.5 / config.hidden_size**0.5)
    model.save_pretrained(folder, **options)
    return model


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
