"""In which numbers a checkpoint holds its linears: the quantization_config of config.json. Fail closed.

Two published layouts are read: compressed-tensors' float-quantized and plain "fp8", both e4m3 with a `weight_scale` per
output channel or per tensor and activations quantized as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UnsupportedModel
from ridgeline.quant.fp8 import Stored

KEY = "quantization_config"
HEAD = "lm_head"
_BOOKKEEPING = frozenset(
    (
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "quantization_status",
        "global_compression_ratio",
        "version",
        "activation_scheme",
        "weight_block_size",
        "ignored_layers",
        "modules_to_not_convert",
        "fmt",
        "weight_per_tensor",
        "dequantize",
    )
)
_EMPTY: tuple[Any, ...] = (None, {}, [])


@dataclass(frozen=True, slots=True)
class StoredAs:
    """quantization: the number format by its option's name, "" for plain floats. scales: what a scale covers."""

    quantization: str = ""
    scales: Stored = "float"


def read_stored(config: Mapping[str, Any]) -> StoredAs:
    """What config.json says of its checkpoint. Raises UnsupportedModel naming the key."""
    said = config.get(KEY)
    if said is None:
        return StoredAs()
    if not isinstance(said, dict):
        raise UnsupportedModel(f"config.json: {KEY} is {said!r}; an object is needed.")
    method = said.get("quant_method")
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in readers:
        raise _refused("quant_method", method, f"; supported are {', '.join(readers)}")
    for key, value in said.items():
        # kv_cache_scheme, sparsity_config, transform_config and what comes after them change what is computed.
        if key not in _BOOKKEEPING and value not in _EMPTY and not (key == "sparsity_config" and _dense(value)):
            raise _refused(key, value)
    return StoredAs("fp8", readers[method](said))


def _compressed_tensors(said: Mapping[str, Any]) -> Stored:
    if said.get("format") != "float-quantized":
        raise _refused("format", said.get("format"), "; supported is float-quantized")
    groups = said.get("config_groups") or {}
    if len(groups) != 1:
        raise _refused("config_groups", sorted(groups), "; one group for all linears is")
    group = next(iter(groups.values()))
    if group.get("targets") != ["Linear"]:
        raise _refused("targets", group.get("targets"), '; supported is ["Linear"]')
    if group.get("output_activations") not in _EMPTY:
        raise _refused("output_activations", group["output_activations"])
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    for side, values in (("weights", weights), ("input_activations", inputs)):
        for key, wanted in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
            if values.get(key) != wanted:
                raise _refused(f"{side}.{key}", values.get(key), f"; supported is {wanted}")
    if not inputs.get("dynamic") or inputs.get("strategy") != "token":
        raise _refused("input_activations", inputs, "; supported are dynamic ones per token")
    _layers(said.get("ignore"), "ignore", head_is_plain=False)
    strategy = weights.get("strategy")
    if strategy == "channel":
        return "channel"
    if strategy == "tensor":
        return "tensor"
    raise _refused("weights.strategy", strategy, "; supported are channel and tensor")


def _fp8(said: Mapping[str, Any]) -> Stored:
    if said.get("weight_block_size") is not None:
        raise _refused("weight_block_size", said["weight_block_size"], "; supported are scales per tensor")
    if said.get("activation_scheme") != "dynamic":
        raise _refused("activation_scheme", said.get("activation_scheme"), "; supported is dynamic")
    if said.get("fmt", "e4m3") != "e4m3":
        raise _refused("fmt", said["fmt"], "; supported is e4m3")
    for key in ("ignored_layers", "modules_to_not_convert"):
        _layers(said.get(key), key, head_is_plain=True)
    return "tensor"


def _layers(names: Any, key: str, *, head_is_plain: bool) -> None:
    """Linears left in floats: the head must be, and nothing else may be."""
    left = [name for name in names or () if name != HEAD]
    if left:
        raise _refused(key, left, f"; only {HEAD} may be left in floats")
    if not head_is_plain and HEAD not in (names or ()):
        raise _refused(key, names, f"; {HEAD} must be left in floats")


def _dense(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") in (None, "dense")


def _refused(key: str, value: Any, remedy: str = "") -> UnsupportedModel:
    text = repr(value)
    return UnsupportedModel(f"config.json: {KEY}.{key} = {text[:120]} is not supported{remedy}.")
