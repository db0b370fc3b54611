"""config.json and generation_config.json from the metadata of a GGUF file. Fail closed."""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from typing import Any

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.gguf.file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Architectures that are read, as general.architecture names them, and the name in config.json."""
PERMUTED = ("llama",)
"""Architectures whose queries and keys llama.cpp stores in another order of their outputs."""
_FORMATS = {"F32": "", "F16": "", "BF16": "", "Q8_0": "int8-g32", "Q4_0": "int4-g32"}
"""Number format by type of tensor; other types have their name. "": the model's dtype."""
_LINEARS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
"""Matrices that are multiplied together, in the order of LayerSpec.formats."""
_READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count", "vocab_size",
    "tensor_data_layout",
)  # fmt: skip
"""Keys of an architecture that are read or do not affect the numbers."""
_GEMMA_READ = ("attention.sliding_window", "rope.freq_base_swa")
_GEMMA_27B_LAYERS = 62
"""Gemma 3 27B scales queries by its width per head, the other sizes by the size of a head. The file does not say so."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of every published Llama 3 with scaled frequencies. The file has only the resulting factors."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def required(file: GgufFile, key: str) -> Any:
    """A value of the metadata. Raises ConfigError if there is none."""
    if key not in file.metadata:
        raise ConfigError(f"{file.path} lacks the metadata {key}: convert or download it again.")
    return file.metadata[key]


def _stored(file: GgufFile, layers: int) -> dict[str, Any] | None:
    """The quantization_config: the number format that holds most bytes of the layers, those of all matrices if they have others,
    and that of the head. None: all are floats. Of matrices that are multiplied together all are floats if one is (quant.blocks)."""
    sizes: Counter[str] = Counter()
    formats = []
    for layer in range(layers):
        names = []
        for linear in _LINEARS:
            stored = [file.tensors.get(f"blk.{layer}.{name}.weight") for name in linear]
            forms = ["" if tensor is None else _format(tensor.kind.name) for tensor in stored]
            names += forms if all(forms) else [""] * len(forms)
            for form, tensor in zip(forms, stored, strict=True):
                sizes[form] += tensor.size if tensor else 0
        formats.append(names)
    head = _format((file.tensors.get("output.weight") or file.tensors["token_embd.weight"]).kind.name)
    kinds = {name for names in formats for name in names}
    quantized = {*kinds, head} - {""}
    if not quantized:
        return None
    most = max(quantized, key=lambda name: sizes[name])
    return {"quant_method": "gguf", "format": most, "layers": [] if kinds == {most} else formats, "head": head}


def _format(kind: str) -> str:
    return _FORMATS.get(kind, kind.lower())


def make_config(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, generation_config.json). Raises UnsupportedModel for an architecture or a key that is not supported."""
    kind = required(file, "general.architecture")
    if kind not in ARCHITECTURES:
        raise file.refused(
            f"general.architecture {kind!r} is not read",
            f"supported are {', '.join(ARCHITECTURES)}; serve the safetensors",
        )
    if file.metadata.get("split.count", 0) > 1:
        raise file.refused("it is one of several parts", "join them with `llama-gguf-split --merge` first")
    values = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    unknown = sorted(set(values) - {*_READ, *(_GEMMA_READ if kind == "gemma3" else ())})
    if unknown:
        raise file.refused(f"the metadata {kind}.{unknown[0]} is not supported", "serve the safetensors of this model")
    if values.get("expert_count"):
        raise file.refused("models with experts are not read from GGUF", "serve the safetensors of this model")
    for key in ("attention.head_count_kv", "feed_forward_length", "attention.head_count"):
        if isinstance(values.get(key), list):
            raise file.refused(f"{kind}.{key} differs between layers", "serve the safetensors of this model")
    heads, width = (required(file, f"{kind}.{key}") for key in ("attention.head_count", "embedding_length"))
    if not isinstance(heads, int) or heads < 1:
        raise ConfigError(f"{file.path}: {kind}.attention.head_count is {heads!r}: download it again.")
    head_dim = values.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise file.refused(f"{kind}.{key} is not the size of a head, {head_dim}", "serve the safetensors")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path} lacks the tensor token_embd.weight: download it again.")
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": required(file, f"{kind}.feed_forward_length"),
        "num_hidden_layers": required(file, f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": required(file, f"{kind}.context_length"),
        "rms_norm_eps": required(file, f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": float(values.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if kind == "gemma3":
        config |= _gemma(file, values, config)
    else:
        config["hidden_act"] = "silu"
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if (scaling := _rope_scaling(file, values, config)) is not None:
        config["rope_scaling"] = scaling
    if (stored := _stored(file, config["num_hidden_layers"])) is not None:
        config["quantization_config"] = stored
    return config | _tokens(file), _generation(file)


def _gemma(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The keys of Gemma 3. Every sixth layer is global, as in all published sizes; only these layers have a rope scaling."""
    scale = config["hidden_size"] // config["num_attention_heads"]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": float(values.get("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": float(values.get("rope.freq_base_swa", 10_000.0)),
        "sliding_window": required(file, "gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": scale if config["num_hidden_layers"] == _GEMMA_27B_LAYERS else config["head_dim"],
    }


def _dtype(file: GgufFile) -> str:
    """The type of all matrices if it is one of floats; bfloat16 for quantized ones."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _tokens(file: GgufFile) -> dict[str, Any]:
    first = file.metadata.get("tokenizer.ggml.bos_token_id")
    ends = _generation(file)["eos_token_id"]
    return {"bos_token_id": first, "eos_token_id": ends[0] if ends else None}


def _generation(file: GgufFile) -> dict[str, Any]:
    ends = [file.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}


def _rope_scaling(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise file.refused(f"rope.scaling.type {kind!r} is not supported", "serve the safetensors of this model")
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        original = values.get("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling from the factor of each pair that the file has. Raises UnsupportedModel for other factors."""
    stored = file.tensors["rope_freqs.weight"]
    pairs = config["head_dim"] // 2
    if stored.kind.name != "F32" or stored.shape != (pairs,):
        raise file.refused("rope_freqs.weight is not a float32 for each pair of a head", "download it again")
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        factors = struct.unpack_from(f"<{pairs}f", content, stored.start)
    scaling = {"rope_type": "llama3", "factor": round(max(factors), 4), **_LLAMA3}
    wanted = [_llama3_factor(config["rope_theta"] ** (-index / pairs), scaling) for index in range(pairs)]
    if not all(math.isclose(ours, theirs, rel_tol=1e-3) for ours, theirs in zip(wanted, factors, strict=True)):
        raise UnsupportedModel(
            f"{file.path}: the factors of rope_freqs.weight are not those of a Llama 3: serve the safetensors of this model."
        )
    return scaling


def _llama3_factor(frequency: float, scaling: dict[str, Any]) -> float:
    """What the frequency of a pair is divided by, see transformers' _compute_llama3_parameters."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1.0 / ((1.0 - share) / factor + share)
