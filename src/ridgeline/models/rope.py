"""Rotary embeddings: reads their keys of config.json, and computes the table of cosines and sines for the operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import Rope

SPARE_POSITIONS = 128
"""Rows of a table beyond the served length. Drafts and steps of ended rows may use them; their results are discarded."""

_BASE = {"rope_theta", "rope_type", "type"}
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}
_KEYS = {
    "default": _BASE,
    "linear": _BASE | {"factor"},
    "llama3": _BASE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _BASE | {"factor", "original_max_position_embeddings"} | _YARN,
    "longrope": _BASE
    | {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"},
}
_OLD_NAMES = {"su": "longrope"}


def read_rope(values: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope, int]:
    """(rope of global layers, rope of windowed layers, longest context) from the keys of config.json.

    transformers 5 writes `rope_parameters`, flat or by layer type. Older versions write `rope_theta`, `rope_scaling` and, for
    Gemma 3, `rope_local_base_freq`.
    """
    longest = values["max_position_embeddings"]
    theta, local = values["rope_theta"], values.get("rope_local_base_freq")
    parameters = values["rope_parameters"]
    if parameters is None:
        global_keys = {"rope_theta": theta, **(values["rope_scaling"] or {})}
        windowed_keys = global_keys if local is None else {"rope_theta": local}
    elif "full_attention" in parameters or "sliding_attention" in parameters:
        global_keys = {"rope_theta": theta, **(parameters.get("full_attention") or {})}
        windowed_keys = {"rope_theta": local, **(parameters.get("sliding_attention") or {})}
        if local is None:
            raise UnsupportedModel("config.json: rope_parameters per layer type are supported only for Gemma 3.")
    elif local is not None:
        raise UnsupportedModel("config.json: Gemma 3 needs full_attention and sliding_attention in rope_parameters.")
    else:
        global_keys = windowed_keys = {"rope_theta": theta, **parameters}
    original = values["original_max_position_embeddings"] or longest
    partial = values.get("partial_rotary_factor")
    if partial is not None:
        partial = (parameters or {}).get("partial_rotary_factor", partial)
        global_keys, windowed_keys = ({**keys, "partial_rotary_factor": None} for keys in (global_keys, windowed_keys))
    dim = head_dim if partial is None else int(head_dim * partial)
    rope, local_rope = (
        _parse_rope(global_keys, dim, original, longest),
        _parse_rope(windowed_keys, dim, original, longest),
    )
    for rope_part in (rope, local_rope):
        if rope_part.dim % 2 or not 0 < rope_part.dim <= head_dim:
            raise ConfigError(
                f"config.json: partial_rotary_factor gives {rope_part.dim} rotated elements of {head_dim}: it must be even."
            )
        turns = inverse_frequencies(rope_part) * rope_part.attention_factor
        if not bool(((turns > 0) & (turns < math.inf)).all()):
            raise ConfigError(
                "config.json: rope_theta and rope_scaling give rotary frequencies that are not positive finite numbers."
            )
    if rope.scaling == "yarn":
        longest = max(longest, int(rope.original_max_len * rope.factor))
    return rope, local_rope, longest


def _parse_rope(keys: Mapping[str, Any], dim: int, original: int, longest: int) -> Rope:
    keys = {key: value for key, value in keys.items() if value is not None}
    if keys.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("config.json: partial_rotary_factor other than 1 is not supported.")
    kind = keys.get("rope_type", keys.get("type", "default"))
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in _KEYS:
        raise UnsupportedModel(f"config.json: rope type {kind!r} is not supported. Supported: {', '.join(_KEYS)}.")
    unknown = sorted(set(keys) - _KEYS[kind] - {"original_max_position_embeddings"})
    if unknown or not isinstance(truncate := keys.get("truncate", True), bool):
        raise UnsupportedModel(f"config.json: rope type {kind!r} with {', '.join(unknown) or 'truncate'} is unknown.")
    theta = float(keys["rope_theta"])
    if kind == "default":
        return Rope(theta, dim)
    original = int(keys.get("original_max_position_embeddings", original))
    try:
        if kind == "longrope":
            return _parse_longrope(keys, dim, original, longest)
        factor = float(keys["factor"] if kind != "yarn" else keys.get("factor", longest / original))
        if kind == "linear":
            return Rope(theta, dim, "linear", factor)
        if kind == "llama3":
            low, high = float(keys["low_freq_factor"]), float(keys["high_freq_factor"])
            return Rope(theta, dim, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    except KeyError as error:
        raise ConfigError(f"config.json: rope type {kind!r} needs the key {error.args[0]!r}.") from None
    return Rope(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=float(keys.get("beta_fast", 32.0)),
        beta_slow=float(keys.get("beta_slow", 1.0)),
        attention_factor=_yarn_attention(keys, factor),
        truncate=truncate,
    )


def _parse_longrope(keys: Mapping[str, Any], dim: int, original: int, longest: int) -> Rope:
    short, long = (tuple(map(float, keys[f"{name}_factor"])) for name in ("short", "long"))
    if {len(short), len(long)} != {dim // 2} or min(*short, *long) <= 0:
        raise ConfigError(
            f"config.json: short_factor and long_factor of rope type 'longrope' must list {dim // 2} numbers above 0."
        )
    factor = float(keys.get("factor", longest / original))
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = float(keys.get("attention_factor", grown))
    theta = float(keys["rope_theta"])
    return Rope(
        theta, dim, "longrope", factor, original, attention_factor=attention, short_factors=short, long_factors=long
    )


def _yarn_attention(keys: Mapping[str, Any], factor: float) -> float:
    """Attention factor: 0.1 ln(factor) + 1 (Peng et al. 2023, section 3.4), unless the checkpoint states it."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if "attention_factor" in keys:
        return float(keys["attention_factor"])
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return grown(float(keys["mscale"])) / grown(float(keys["mscale_all_dim"]))
    return grown(1.0)


def inverse_frequencies(rope: Rope, context: int = 0) -> torch.Tensor:
    """float32 [dim / 2]: radians per position of each pair. context: the longest one that is served."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim))
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "identity":
        return torch.zeros_like(frequencies)
    if rope.scaling == "longrope":
        return frequencies / torch.tensor(rope.long_factors if context > rope.original_max_len else rope.short_factors)
    if rope.scaling == "llama3":
        turns = rope.original_max_len * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    if rope.scaling == "yarn":
        low, high = _yarn_dim(rope, rope.beta_fast), _yarn_dim(rope, rope.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if rope.truncate else (low, high)
        first, last = max(low, 0), min(high, rope.dim - 1)
        ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
        stretched = ramp.clamp(0.0, 1.0)
        return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
    return frequencies


def _yarn_dim(rope: Rope, turns: float) -> float:
    """Index (a real number) of the pair that rotates `turns` times over the original context (Peng et al. 2023, eq. 17)."""
    ratio = rope.original_max_len / (turns * 2 * math.pi)
    return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))


def rope_table(rope: Rope, positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, 2, dim / 2]: cosines and sines, multiplied by the attention factor. positions: the context that is
    served, and SPARE_POSITIONS."""
    frequencies = inverse_frequencies(rope, positions - SPARE_POSITIONS)
    angle = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.stack((angle.cos(), angle.sin()), dim=1) * rope.attention_factor).to(device)
