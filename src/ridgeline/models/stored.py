"""Reads quantization_config of config.json: the number format in which a checkpoint stores its linears. Fail closed.

Supported are, for e4m3, float-quantized of compressed-tensors and "fp8", with a `weight_scale` per output channel, per tensor or
per block of 128 outputs and inputs, and dynamic quantization of activations, which stay in 16 bits with scales of blocks; for
integers, pack-quantized and int-quantized of compressed-tensors, GPTQ and AWQ (see quant.layouts); for blocks, which are kept
(quant.blocks), the section that gguf.config writes, and MXFP4 (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import GROUPS, NUMBER_FORMATS
from ridgeline.quant.fp8 import BLOCK, Stored
from ridgeline.quant.layouts import BITS, Layout, Published

KEY = "quantization_config"
HEAD = "lm_head"
# Keys that do not affect the numbers, or that are read below, or in models.unquantized_modules.
_KNOWN = {
    "compressed-tensors": "format config_groups ignore quantization_status global_compression_ratio version",
    "fp8": "activation_scheme weight_block_size ignored_layers modules_to_not_convert fmt weight_per_tensor",
    "gptq": "bits group_size desc_act sym lm_head checkpoint_format format pack_dtype true_sequential damp_percent version "
    "static_groups model_name_or_path model_file_base_name meta quantizer is_marlin_format use_exllama exllama_config "
    "disable_exllama max_input_length cache_block_outputs batch_size dataset tokenizer block_name_to_quantize backend "
    "module_name_preceding_first_block use_cuda_fp16 model_seqlen hyb_act act_group_aware pad_token_id pack_impl "
    "modules_in_block_to_quantize dynamic",
    "awq": "bits group_size zero_point version modules_to_not_convert backend do_fuse fuse_max_seq_len exllama_config "
    "modules_to_fuse lm_head",
    "mxfp4": "modules_to_not_convert",
    "gguf": "format layers head",
}
_ALWAYS = ("quant_method", "dequantize")
_EMPTY: tuple[Any, ...] = (None, {}, [])


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Number format of stored linears. quantization: name of the format as in --quantization, "" if not quantized. scales:
    what an fp8 scale covers. integers: layout of integers; None for other formats. blocks: linears may be in blocks (quant.blocks).
    layers: LayerSpec.formats of each layer; () if all linears are in `quantization`. head: ModelSpec.head_format."""

    quantization: str = ""
    scales: Stored = "float"
    integers: Published | None = None
    blocks: bool = False
    layers: tuple[tuple[str, ...], ...] = ()
    head: str = ""


def read_stored(config: Mapping[str, Any]) -> StoredAs:
    """Number format of the checkpoint of a parsed config.json. Raises UnsupportedModel that names the key."""
    section = config.get(KEY)
    if section is None:
        return StoredAs()
    if not isinstance(section, dict):
        raise UnsupportedModel(f"config.json: {KEY} is {section!r}: it must be an object.")
    method = section.get("quant_method")
    readers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        # The names of the tensors say which of them are in MXFP4.
        "mxfp4": lambda section: StoredAs("mxfp4", blocks=True),
        "gguf": _gguf,
    }
    if method not in readers:
        raise _refused("quant_method", method, f". Supported: {', '.join(readers)}")
    for key, value in section.items():
        # kv_cache_scheme, sparsity_config, transform_config and unknown keys may change the computation.
        harmless = value in _EMPTY or (key == "sparsity_config" and (_dense(value) or _sparse(section)))
        if key not in (*_ALWAYS, *_KNOWN[method].split()) and not harmless:
            raise _refused(key, value)
    return readers[method](section)


def _compressed_tensors(section: Mapping[str, Any]) -> StoredAs:
    if _sparse(section):
        return StoredAs()  # quant.bitmask restores the dense tensors
    form = section.get("format")
    readers = {"float-quantized": _floats, "pack-quantized": _packed, "int-quantized": _w8a8}
    if form not in readers:
        raise _refused("format", form, f". Supported: {', '.join(readers)}")
    groups = section.get("config_groups") or {}
    if len(groups) != 1:
        raise _refused("config_groups", sorted(groups), ". Supported: one group for all linears")
    group = next(iter(groups.values()))
    if group.get("targets") != ["Linear"]:
        raise _refused("targets", group.get("targets"), '. Supported: ["Linear"]')
    if group.get("output_activations") not in _EMPTY:
        raise _refused("output_activations", group["output_activations"])
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    return readers[form](weights, inputs)


def _eight_bits(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, kind: str, by: str = "token") -> None:
    """Require 8 bits of type `kind` for weights, and for inputs dynamic quantization per `by`. inputs None: not quantized."""
    for side, values in (("weights", weights), ("input_activations", inputs)):
        for key, wanted in (("num_bits", 8), ("type", kind), ("symmetric", True)):
            if values is not None and values.get(key) != wanted:
                raise _refused(f"{side}.{key}", values.get(key), f". Supported: {wanted}")
    if inputs is not None and (not inputs.get("dynamic") or inputs.get("strategy") != by):
        raise _refused("input_activations", inputs, f". Supported: dynamic per {by}")


def _w8a8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredAs:
    _eight_bits(weights, inputs, "int")
    if weights.get("strategy") != "channel":
        raise _refused("weights.strategy", weights.get("strategy"), ". Supported: channel")
    return StoredAs("w8a8", integers=Published("int-quantized", 8, 0))


def _floats(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredAs:
    strategy, blocks = weights.get("strategy"), weights.get("block_structure")
    _eight_bits(weights, inputs or None, "float", "group" if strategy == "block" else "token")
    if strategy not in ("channel", "tensor", "block"):
        raise _refused("weights.strategy", strategy, ". Supported: channel, tensor and block")
    if strategy == "block" and blocks != [BLOCK, BLOCK]:
        raise _refused("weights.block_structure", blocks, f". Supported: [{BLOCK}, {BLOCK}]")
    return StoredAs("fp8-block" if strategy == "block" else "fp8" if inputs else "fp8-weight", strategy)


def _packed(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredAs:
    if inputs:
        raise _refused("input_activations", inputs, ". Supported: null")
    if weights.get("type") != "int":
        raise _refused("weights.type", weights.get("type"), ". Supported: int")
    strategy = weights.get("strategy")
    if strategy not in ("channel", "group"):
        raise _refused("weights.strategy", strategy, ". Supported: channel and group")
    group = 0 if strategy == "channel" else _group(weights)
    if strategy == "group" and not group:
        raise _refused("weights.group_size", weights.get("group_size"))
    zeros, order = not weights.get("symmetric", True), weights.get("actorder")
    # "weight" and "static" reorder only during quantization: groups are stored in order.
    ordered = order in (True, "group", "dynamic")
    if not ordered and order not in (None, False, "weight", "static"):
        raise _refused("weights.actorder", order)
    return _integers(Published("pack-quantized", weights.get("num_bits", 0), group, zeros, ordered), "weights.num_bits")


def _fp8(section: Mapping[str, Any]) -> StoredAs:
    blocks = section.get("weight_block_size")
    if blocks not in (None, [BLOCK, BLOCK]):
        raise _refused("weight_block_size", blocks, f". Supported: [{BLOCK}, {BLOCK}], null (one scale per tensor)")
    if section.get("activation_scheme") != "dynamic":
        raise _refused("activation_scheme", section.get("activation_scheme"), ". Supported: dynamic")
    if section.get("fmt", "e4m3") != "e4m3":
        raise _refused("fmt", section["fmt"], ". Supported: e4m3")
    return StoredAs("fp8-block", "block") if blocks else StoredAs("fp8", "tensor")


def _gguf(section: Mapping[str, Any]) -> StoredAs:
    layers = tuple(tuple(formats) for formats in section["layers"])
    return StoredAs(section["format"], blocks=True, layers=layers, head=section["head"])


def _gptq(section: Mapping[str, Any]) -> StoredAs:
    """Read GPTQ. Zero points are read unless `sym` is set; groups are reordered if `desc_act` is set."""
    form = section.get("checkpoint_format") or section.get("format") or "gptq"
    layouts: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    if form not in layouts:
        raise _refused("checkpoint_format", form, f". Supported: {', '.join(layouts)}")
    if section.get("lm_head"):
        raise _refused("lm_head", section["lm_head"], f": {HEAD} must not be quantized")
    zeros, ordered = not section.get("sym", False), bool(section.get("desc_act"))
    return _integers(Published(layouts[form], section.get("bits", 0), _group(section), zeros, ordered), "bits")


def _awq(section: Mapping[str, Any]) -> StoredAs:
    if str(section.get("version", "gemm")).lower() != "gemm":
        raise _refused("version", section["version"], ". Supported: gemm")
    if section.get("lm_head"):
        raise _refused("lm_head", section["lm_head"], f": {HEAD} must not be quantized")
    return _integers(
        Published("awq", section.get("bits", 0), _group(section), bool(section.get("zero_point", True))), "bits"
    )


def _group(section: Mapping[str, Any]) -> int:
    group = section.get("group_size", -1)
    if not isinstance(group, int):
        raise _refused("group_size", group)
    return max(group, 0)


def _integers(form: Published, key: str) -> StoredAs:
    if form.bits not in BITS[form.layout]:
        raise _refused(key, form.bits, f". Supported: {', '.join(map(str, BITS[form.layout]))}")
    ends = ("-zp" if form.zeros else "") + ("-ordered" if form.order else "")
    name = f"int{form.bits}-g{form.group}{ends}" if form.group else f"int{form.bits}-channel{ends}"
    if name not in NUMBER_FORMATS:
        raise _refused("group_size", form.group, f". Supported: {', '.join(map(str, GROUPS))} and -1 (per channel)")
    return StoredAs(name, integers=form)


def _sparse(section: Mapping[str, Any]) -> bool:
    """Whether the checkpoint stores sparse floats: only the nonzero ones."""
    value = section.get("sparsity_config")
    return (
        isinstance(value, dict)
        and (value.get("format"), section.get("format")) == ("sparse-bitmask", "dense")
        and not section.get("config_groups")
    )


def _dense(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") in (None, "dense")


def _refused(key: str, value: Any, remedy: str = "") -> UnsupportedModel:
    text = repr(value)
    return UnsupportedModel(f"config.json: {KEY}.{key} = {text[:120]} is not supported{remedy}.")
