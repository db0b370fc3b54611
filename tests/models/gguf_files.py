"""Tiny random models in GGUF, written by llama.cpp's package, and the same weights in Hugging Face's layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from ridgeline.text.pieces import byte_letters

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "Ġ Ġ"]
SPECIALS = ["<|bos|>", "<|end|>", "<tool>"]
TOKENS = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
BOS, END, TOOL = (TOKENS.index(token) for token in SPECIALS)
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "bos_token_id": BOS,
    "eos_token_id": END,
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "attn_output",
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}

GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Written:
    """path: the GGUF file. folder: the same weights, dequantized by llama.cpp's package, with safetensors."""

    path: Path
    folder: Path


@dataclass
class Options:
    """architecture, kind: of the file. head: type of the head; None: tied to the embedding. kinds: type by the name of a module,
    where it differs. metadata: added or replaced keys."""

    architecture: str = "llama"
    kind: Kind = Kind.F32
    head: Kind | None = Kind.F32
    kinds: dict[str, Kind] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def write(folder: Path, options: Options) -> Written:
    folder.mkdir(exist_ok=True)
    name = CLASSES[options.architecture]
    parts_of = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{parts_of}Config")(
        **{**SIZES, **options.config}, tie_word_embeddings=options.head is None
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, options.architecture)
    add_values(writer, values_of(options))
    weights = {}
    names = NAMES | (GEMMA if options.architecture == "gemma3" else {})
    for key, value in model.state_dict().items():
        parts = key.split(".")
        if key == "lm_head.weight" and options.head is None:
            continue
        kind = options.head if parts[0] == "lm_head" else options.kind if value.dim() == 2 else Kind.F32
        kind = options.kinds.get(parts[-2], kind)
        noise = torch.randn_like(value) * (0.3 if value.dim() == 1 else 0.1)
        blocks = stored((value + noise).numpy(), kind or Kind.F32)
        weights[key] = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind or Kind.F32)))
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        if options.architecture == "gemma3" and value.dim() == 1:
            blocks = blocks + 1  # as modify_tensors of convert_hf_to_gguf.py
        if options.architecture == "llama" and parts[-2] in ("q_proj", "k_proj"):
            blocks = permuted(blocks, SIZES["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"])
        writer.add_tensor(f"{layer}{names[parts[-2]]}.{parts[-1]}", blocks, raw_dtype=kind)
    for key, array in options.tensors.items():
        writer.add_tensor(key, array)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    reference = folder / "reference"
    config.save_pretrained(reference)
    save_file(weights, reference / "model.safetensors")
    return Written(path, reference)


def stored(value: np.ndarray, kind: Kind) -> np.ndarray:
    """The tensor in blocks. llama.cpp's package has no K types to write, so these get random codes with small scales."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(value, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(value.size).integers(0, 256, (value.size // elements, size), dtype=np.uint8)
    scales = np.full((len(blocks), 2), [2e-5, 3e-4] if kind != Kind.Q6_K else 3e-5, np.float16)
    if kind == Kind.Q6_K:
        blocks[:, -2:] = scales[:, :1].view(np.uint8)
    else:
        blocks[:, :4] = scales.view(np.uint8)
    return blocks.reshape(*value.shape[:-1], -1)


def permuted(blocks: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys as _permute of convert_hf_to_gguf.py stores them: the halves of a head become pairs of neighbours."""
    return blocks.reshape(heads, 2, -1, *blocks.shape[1:]).swapaxes(1, 2).reshape(blocks.shape)


def values_of(options: Options) -> dict[str, Any]:
    """The metadata of a file."""
    kind = options.architecture
    return {
        f"{kind}.block_count": options.config.get("num_hidden_layers", SIZES["num_hidden_layers"]),
        f"{kind}.context_length": SIZES["max_position_embeddings"],
        f"{kind}.embedding_length": SIZES["hidden_size"],
        f"{kind}.feed_forward_length": SIZES["intermediate_size"],
        f"{kind}.attention.head_count": SIZES["num_attention_heads"],
        f"{kind}.attention.head_count_kv": SIZES["num_key_value_heads"],
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{kind}.rope.freq_base": SIZES["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [4 if token == "<tool>" else 3 if token in SPECIALS else 1 for token in TOKENS],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
        **options.metadata,
    }


def add_values(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Write metadata. A value None is left out."""
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
