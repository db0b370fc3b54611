"""Reads Hugging Face's config.json and generation_config.json into ModelSpec and GenerationDefaults. Fail closed.

A key that affects the computation is either read or must have a supported value. An unknown key is an error that names the key,
because a nearly correct decoder is worse than none.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError, RequestError, UnsupportedModel
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.sharing import share_in_groups, share_last
from ridgeline.core.spec import DTYPE_BYTES, LayerSpec, ModelSpec, Rope
from ridgeline.models.expert_keys import read_experts
from ridgeline.models.families import (
    FAMILIES,
    FIXED,
    HARMLESS,
    HARMLESS_PREFIXES,
    MTP,
    REFUSED,
    WITHOUT_PARTS,
    WRAPPERS,
    supported,
)
from ridgeline.models.family import REQUIRED, Family
from ridgeline.models.rope import read_rope
from ridgeline.models.stored import KEY as QUANTIZATION
from ridgeline.models.stored import StoredAs, read_stored
from ridgeline.models.unquantized_modules import check_modules

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
UNGATED = {**ACTIVATIONS, "relu": "relu", "gelu": "gelu"}
"""Activations of families without a gate."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_SWITCH = (bool, type(None))
_KINDS: Mapping[str, Any] = {
    "rms_norm_eps": float,
    "rope_theta": (int, float),
    "rope_local_base_freq": (int, float),
    "rope_scaling": dict,
    "rope_parameters": dict,
    "partial_rotary_factor": (int, float),
    **dict.fromkeys(
        (
            "query_pre_attn_scalar",
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "logit_scale",
        ),
        (int, float),
    ),
    "attn_logit_softcapping": (int, float),
    "final_logit_softcapping": (int, float),
    "sliding_window": (int, type(None)),
    "sliding_window_pattern": (int, str, type(None)),
    "max_window_layers": int,
    "num_kv_shared_layers": int,
    "cla_share_factor": int,
    "layer_types": list,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _SWITCH),
    **dict.fromkeys(("use_qkv_bias", "use_parallel_residual"), _SWITCH),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of generation_config.json; None: not stated."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_model(folder: Path) -> tuple[ModelSpec, GenerationDefaults]:
    """(spec of the model in `folder`, sampling defaults). End tokens of config.json and generation_config.json are merged."""
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    spec = read_spec(config, generation)
    defaults = {name: generation[name] for name in GenerationDefaults.__slots__ if generation.get(name) is not None}
    for name, value in defaults.items():
        if not isinstance(value, int | float):
            raise ConfigError(f"generation_config.json: {name} is {value!r}: it must be a number.")
    try:  # an invalid default would refuse every request; the service handles top_p 0
        SamplingParams(**{**defaults, "top_k": int(defaults.get("top_k", 0)), "top_p": defaults.get("top_p") or 1.0})
    except (RequestError, ValueError, OverflowError) as error:
        raise ConfigError(f"generation_config.json: {error}") from None
    return spec, GenerationDefaults(**defaults)


def stored_as(folder: Path) -> StoredAs:
    """The number format in which the checkpoint in `folder` stores its linears."""
    return read_stored(_json(folder / "config.json"))


def read_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """ModelSpec of a parsed config.json. Raises UnsupportedModel or ConfigError that names the key."""
    try:
        return _read_spec(config, generation or {})
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json has a value of the wrong type: {error}.") from None


def _read_spec(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    stored = read_stored(config)
    family, text, outer = _text_part({key: value for key, value in config.items() if key != QUANTIZATION})
    values = _values(family, text)
    heads, d_ff = values["num_attention_heads"], values["intermediate_size"] or 4 * values["hidden_size"]
    kv_heads = values["num_key_value_heads"] or heads
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads} and head_dim {head_dim}: the heads must "
            "be a multiple of the key-value heads, and head_dim must be even."
        )
    unrotated, max_len = Rope(dim=head_dim, scaling="identity"), values["max_position_embeddings"]
    global_rope, local_rope = unrotated, unrotated
    if family.rotated != "none":
        global_rope, local_rope, max_len = read_rope(values, head_dim)
    softcap = values.get("attn_logit_softcapping")
    global_layer = LayerSpec(heads, kv_heads, head_dim, d_ff, global_rope, None, softcap)
    windowed_layer, windows = replace(global_layer, rope=local_rope), _windows(family, values)
    if family.rotated == "windowed" and any(windows):
        global_layer = replace(global_layer, rope=unrotated)
    layers = [global_layer if window is None else replace(windowed_layer, window=window) for window in windows]
    blocks = zip(layers, read_experts(family, values), strict=True)
    layers = [
        replace(layer, d_ff=experts.active_width, experts=experts) if experts else layer for layer, experts in blocks
    ]
    if stored.layers:
        layers = [replace(layer, formats=formats) for layer, formats in zip(layers, stored.layers, strict=True)]
    bias = bool(values.get("attention_bias"))
    traits: dict[str, Any] = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(values.get("mlp_bias"))}
    traits["activation"] = _activation(values, UNGATED if family.traits.get("gated") is False else ACTIVATIONS)
    traits |= {name: bool(values[key]) for name, key in family.switches.items()}
    if family.scaled_embedding:
        traits["embed_scale"] = values["hidden_size"] ** 0.5
    traits |= {
        name: float(values[key]) ** power for name, (key, power) in family.numbers.items() if values[key] is not None
    }
    spec = ModelSpec(
        architecture=family.architectures[0],
        vocab_size=values["vocab_size"],
        d_model=values["hidden_size"],
        layers=drop_idle_windows(_shared(layers, values), max_len),
        max_len=max_len,
        norm_eps=float(values["rms_norm_eps"]),
        positions=max_len if family.rotated == "none" else 0,
        tied=bool(outer.get("tie_word_embeddings", values["tie_word_embeddings"])),
        final_softcap=values.get("final_logit_softcapping"),
        mtp_layers=_mtp_layers(text),
        dtype=_dtype(text, outer),
        quantization=stored.quantization,
        head_format=stored.head,
        bos_id=_first(text.get("bos_token_id"), outer.get("bos_token_id")),
        eos_ids=_eos(generation, outer, text),
        **{**traits, **family.traits},
    )
    check_modules(config, spec)
    return spec


def _shared(layers: Sequence[LayerSpec], values: Mapping[str, Any]) -> Sequence[LayerSpec]:
    """The layers with `share_from` of the family's keys."""
    count, size = values.get("num_kv_shared_layers", 0), values.get("cla_share_factor", 1)
    if count >= len(layers) or size > len(layers):
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {count} and cla_share_factor {size}, but there are {len(layers)} layers: give "
            f"at most {len(layers) - 1} shared layers and groups of at most {len(layers)}."
        )
    return share_in_groups(share_last(layers, count), size)


def drop_idle_windows(layers: Sequence[LayerSpec], max_len: int) -> tuple[LayerSpec, ...]:
    """Remove windows that cover the whole context, so that their layers join the KV group of global layers."""
    return tuple(replace(layer, window=None) if (layer.window or 0) >= max_len else layer for layer in layers)


def _text_part(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any], Mapping[str, Any]]:
    """(family, keys of the text decoder, keys of the whole model). The last two are equal for a text-only model."""
    kind = str(config.get("model_type"))
    named = config.get("architectures") or []
    text, outer = config, config
    if kind in WRAPPERS:
        inner, others = WRAPPERS[kind]
        text = config.get(inner) or {}
        _refuse_unknown({key: value for key, value in config.items() if key not in others | {inner}}, {}, {})
        kind = str(text.get("model_type", f"{kind}_text"))
    if kind in WITHOUT_PARTS:
        raise UnsupportedModel(
            f"config.json: model_type {kind} is not supported: layers may share keys and values here, but {WITHOUT_PARTS[kind]} "
            "are not built."
        )
    family = FAMILIES.get(kind)
    if family is None or any(architecture not in family.architectures for architecture in named):
        stated = ", ".join(named) or f"model_type {kind}"
        if kind in REFUSED:
            raise UnsupportedModel(
                f"config.json: {stated} is not supported: {REFUSED[kind]}. Supported: {supported()}."
            )
        raise UnsupportedModel(f"config.json: {stated} is not supported. Supported: {supported()}.")
    return family, text, outer


def _values(family: Family, text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the family with the values of config.json or the family's defaults, checked by type and range."""
    text = {family.renamed.get(key, key): value for key, value in text.items()}
    theirs = {ours: name for name, ours in family.renamed.items()}
    _refuse_unknown(text, family.fields, family.fixed)
    values = {key: text.get(key, default) for key, default in family.fields.items()}
    missing = [key for key, value in values.items() if value is REQUIRED]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(theirs.get(key, key) for key in missing)}.")
    for key in _SIZES:
        value, optional = values[key], family.fields[key] is None
        if not (optional and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"config.json: {theirs.get(key, key)} is {value!r}: it must be a positive integer.")
    for key, kind in _KINDS.items():
        value = values.get(key)
        if value is None and family.fields.get(key) is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not _SWITCH):
            raise ConfigError(f"config.json: {theirs.get(key, key)} is {value!r}, which has the wrong type.")
        unused = key == "sliding_window" and values.get("use_sliding_window") is False
        may_be_0 = unused or key in ("max_window_layers", "num_kv_shared_layers", "sliding_window_pattern")
        lowest = 0 if may_be_0 else sys.float_info.min
        if kind is not _SWITCH and isinstance(value, int | float) and not lowest <= value < math.inf:
            raise ConfigError(f"config.json: {theirs.get(key, key)} is {value!r}: it must be a number above 0.")
    return values


def _refuse_unknown(config: Mapping[str, Any], fields: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    unknown = []
    for key, value in config.items():
        if key in fields or key in HARMLESS or key.startswith(HARMLESS_PREFIXES):
            continue
        allowed = fixed.get(key, FIXED.get(key))
        if allowed is None:
            unknown.append(key)
        elif value not in allowed:
            raise UnsupportedModel(f"config.json: {key} = {_short(value)} is not supported.")
    if unknown:
        raise UnsupportedModel(
            f"config.json has unknown keys: {', '.join(sorted(unknown))}. Delete the keys that do not change what the model "
            "computes; with the others the model is not supported."
        )


def _windows(family: Family, values: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    if family.windows is None:
        return [None] * count
    if values.get("use_sliding_window") is False:
        window = None
    if family.windows == "all":
        return [window] * count
    kinds = values["layer_types"]
    if kinds is None and family.pattern and window is None:
        return [None] * count
    if kinds is None and family.pattern:
        pattern = values.get("sliding_window_pattern") or family.pattern
        letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
        if set(letters) - {"L", "G"}:
            raise ConfigError(f"config.json: sliding_window_pattern is {pattern!r}: it must consist of L and G.")
        names = {"L": "sliding_attention", "G": "full_attention"}
        kinds = [names[letters[index % len(letters)]] for index in range(count)]
    elif kinds is None and window is not None and family.experts:
        raise UnsupportedModel(
            "config.json: use_sliding_window needs layer_types: which layers have windows is ambiguous."
        )
    elif kinds is None:
        first = values["max_window_layers"] if window is not None else count
        kinds = ["full_attention" if index < first else "sliding_attention" for index in range(count)]
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if odd or len(kinds) != count:
        raise UnsupportedModel(
            f"config.json: layer_types must list full_attention or sliding_attention {count} times, not {odd or kinds}."
        )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention, but there is no sliding_window.")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _mtp_layers(text: Mapping[str, Any]) -> int:
    count = text.get(MTP) or 0
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"config.json: {MTP} is {count!r}: it must be a number of layers.")
    return count


def _activation(values: Mapping[str, Any], known: Mapping[str, str]) -> Any:
    name = values.get("hidden_activation", values["hidden_act"])
    if name not in known:
        raise UnsupportedModel(f"config.json: activation {name!r} is not supported. Supported: {list(known)}.")
    return known[name]


def _dtype(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """The stated dtype of the weights; bfloat16, the dtype of most checkpoints, if none is stated."""
    stated = [text.get("dtype"), text.get("torch_dtype"), outer.get("dtype"), outer.get("torch_dtype"), "bfloat16"]
    name = str(next(name for name in stated if name is not None)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"config.json: dtype {name!r} is not supported. Supported: {', '.join(DTYPE_BYTES)}.")
    return name


def _eos(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    end_ids: dict[int, None] = {}
    for source in sources:
        ids = source.get("eos_token_id")
        for end_id in ids if isinstance(ids, list) else [ids]:
            if end_id is not None:
                end_ids[_id("eos_token_id", end_id)] = None
    return tuple(end_ids)


def _first(*ids: Any) -> int | None:
    for value in ids:
        if value is not None:
            return _id("bos_token_id", value[0] if isinstance(value, list) else value)
    return None


def _id(key: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ConfigError(f"{key} is {value!r}: it must be a token id.")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}: give a model folder in the layout of Hugging Face.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return content
