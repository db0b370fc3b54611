"""A server of one GGUF file: the shipped weights in Q8_0, with their chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from ridgeline.models.hub import shipped_model
from ridgeline.text.tokenizer import Tokenizer

from ..models.gguf_files import NAMES, Options, add_values, permuted, values_of
from .served import served


def convert(path: Path) -> None:
    """Write the shipped model to `path`, as llama.cpp's convert_hf_to_gguf.py does."""
    folder = shipped_model()
    config = json.loads((folder / "config.json").read_text())
    vocabulary: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokenizer = Tokenizer.load(folder)
    tokens = [tokenizer.backend.id_to_token(index) or f"[PAD{index}]" for index in range(config["vocab_size"])]
    metadata = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index in tokenizer.special_ids else 1 for index in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in vocabulary["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.chat_template": tokenizer.templates["default"],
    }
    writer = gguf.GGUFWriter(path, "llama")
    add_values(writer, values_of(Options(metadata=metadata)))
    for key, value in load_file(folder / "model.safetensors").items():
        parts = key.split(".")
        kind = Kind.Q8_0 if value.dim() == 2 else Kind.F32
        blocks = gguf.quants.quantize(value.float().numpy(), kind)
        if parts[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"]
            blocks = permuted(blocks, heads)
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        writer.add_tensor(f"{layer}{NAMES[parts[-2]]}.weight", blocks, raw_dtype=kind)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()


@pytest.mark.long
def test_serve_a_file(tmp_path: Path) -> None:
    """Greedy words of 8 bits may differ from those of bfloat16 in places; a greeting is one in both."""
    path = tmp_path / "model.gguf"
    convert(path)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with served(tmp_path, command=("serve", str(path), "--port", "0", "--threads", "1"), variables=cache) as server:
        answer = server.chat("Hello!", max_tokens=20, temperature=0)
        assert answer.status == 200
        choice = answer.json["choices"][0]
        assert choice["message"]["content"].startswith("Hello") and choice["finish_reason"] == "stop"
        assert any((tmp_path / "cache/ridgeline/gguf").iterdir())
