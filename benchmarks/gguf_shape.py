"""A GGUF file of random weights in the shape of a config.json, as llama.cpp's `llama-quantize` would store it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from ridgeline.text.pieces import byte_letters

SEED = 1
SCALES = {"token_embd": 5.0}
"""Times 1 / sqrt(inputs), the deviation of weights. The last position then depends on its token, and tokens vary."""


def write_gguf(path: Path, config: dict[str, Any], kind: Kind) -> None:
    """A Llama with a tied head. The weights are the same for every kind, up to rounding. Where linears have 4 bits, the embedding
    has 8, as llama-quantize does when it is the head and its rows are no whole blocks of 256."""
    hidden, inner, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    linears = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    writer, chance = gguf.GGUFWriter(path, "llama"), np.random.default_rng(SEED)
    _metadata(writer, config)

    def add(name: str, outputs: int, inputs: int, stored: Kind) -> None:
        weight = chance.standard_normal((outputs, inputs), np.float32) * np.float32(
            SCALES.get(name, 1.0) / np.sqrt(inputs)
        )
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, stored), raw_dtype=stored)

    add("token_embd", config["vocab_size"], hidden, Kind.Q8_0 if kind == Kind.Q4_0 else kind)
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
        for name, (outputs, inputs) in linears.items():
            add(f"blk.{layer}.{name}", outputs, inputs, kind)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    letters = [*byte_letters(), "he"]
    tokens = ["<|end|>", *letters, *(f"<{index}>" for index in range(config["vocab_size"] - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
