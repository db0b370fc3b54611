"""The tensors of a GGUF file under the names and in the layout of Hugging Face, as a safetensors file gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.gguf.config import PERMUTED, required
from ridgeline.gguf.file import read_file
from ridgeline.quant.blocks import dequantize

HEAD = "lm_head.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names that differ in Gemma 3."""
_INTO_CONFIG = ("rope_freqs.weight",)
"""Tensors that gguf.config reads."""


class GgufTensors:
    """Reads tensors by memory map, with the methods of safetensors' `safe_open`.

    The matrices of layers and head are given in their blocks, uint8 [outputs, blocks, bytes of a block], as quant.blocks reads
    them. An embedding in blocks becomes float32; a head that is tied to it is given in its blocks.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_file(path)
        self._content = np.memmap(path, np.uint8, "r")
        kind = self._file.metadata["general.architecture"]
        self._sources: dict[str, str] = {}
        """Name in the file by the name that is given."""
        for name in self._file.tensors:
            if name in _INTO_CONFIG:
                continue
            given = _hugging_face(name, _INSIDE | (_GEMMA if kind == "gemma3" else {}))
            self._sources[given] = name
        embedding = self._file.tensors["token_embd.weight"]
        if embedding.kind.name not in _DTYPES:  # a tied head stays in the blocks
            self._sources.setdefault(HEAD, "token_embd.weight")

    def offset_keys(self) -> list[str]:
        """Names in the order of the file."""
        return list(self._sources)

    keys = offset_keys

    def get_tensor(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        stored = self._file.tensors[source]
        blocks = torch.from_numpy(np.array(self._content[stored.start : stored.start + stored.size]))
        if stored.kind.name in _DTYPES:
            tensor = blocks.view(_DTYPES[stored.kind.name]).view(stored.shape)
        elif name.endswith(("_proj.weight", HEAD)):
            tensor = blocks.view(stored.shape[0], -1, stored.kind.size)
        else:
            tensor = dequantize(stored.kind.name, blocks.view(-1, stored.kind.size)).view(stored.shape)
        return self._ordered(source, tensor)

    def _ordered(self, source: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo what llama.cpp changes. Outputs of queries and keys: [head, pair, half] becomes [head, half, pair]."""
        kind = self._file.metadata["general.architecture"]
        if kind == "gemma3" and source.endswith("norm.weight"):
            return tensor - 1.0  # llama.cpp adds Gemma's offset of norms to the weights
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", source)
        if kind not in PERMUTED or match is None:
            return tensor
        heads = required(self._file, f"{kind}.attention.head_count")
        if match[1] == "k":
            heads = self._file.metadata.get(f"{kind}.attention.head_count_kv", heads)
        if tensor.shape[0] % (2 * heads):
            raise UnsupportedModel(
                f"The tensor {source} has {tensor.shape[0]} rows, which {heads} heads cannot share: download it again."
            )
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _hugging_face(name: str, inside: Mapping[str, str]) -> str:
    """The name in Hugging Face's layout; an unknown tensor keeps its name, and the loader refuses it."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None or layer[2] not in inside:
        return _OUTSIDE.get(name, name)
    return f"model.layers.{layer[1]}.{inside[layer[2]]}.{layer[3]}"
