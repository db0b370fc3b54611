"""Checks which modules a quantization_config leaves unquantized, against the names of modules in published checkpoints.

Number formats are those of all linears of attention, MLPs and experts. Routers, gates of shared experts, norms, embeddings and the
head are not quantized here, so lists may name them. Entries that match no module have no effect.

Rules of the lists:
    compressed-tensors, `ignore`: "re:" and a pattern that matches from the start of the name, the whole name, or the class of the
        module. Source: compressed_tensors/utils/match.py, match_name and _match_class.
    fp8, `modules_to_not_convert` and `ignored_layers`: a pattern, with or without "re:", that matches from the start of the name,
        or the end of the name. Source: transformers/quantizers/quantizers_utils.py, should_convert_module. Whole names, which
        vLLM compares (quant_utils.py, is_layer_skipped), are part of that.
    awq, `modules_to_not_convert`: a part of the name. Source: AutoAWQ, awq/utils/module.py, exclude_layers_to_not_quantize.
    gptq, `modules_in_block_to_quantize`: all names of quantized modules, behind that of their layer (optimum/gptq/quantizer.py) or
        whole. `dynamic`: patterns that match from the start of the name; the first match decides, "-:" means unquantized, others
        have settings of their own (vLLM, gptq_utils.py, get_dynamic_override).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.stored import HEAD, KEY

LISTS: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": ("ignore",),
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "awq": ("modules_to_not_convert",),
}
"""Keys of lists of unquantized modules, by quant_method."""
CLASSES = ("Linear", "Module")
"""Of every linear."""
HEADS = (HEAD, f"language_model.{HEAD}")
REMEDY = (
    "Supported: routers, gates of shared experts, norms, embeddings and lm_head without quantization, all other linears with it. "
    "Use another checkpoint of the model, or the unquantized one with --quantization."
)


@dataclass(frozen=True, slots=True)
class LinearNames:
    """Names of the linears of a family in published checkpoints.

    layers: what may stand before the number of a layer. attention, mlp, shared: behind the name of the layer. experts: between the
    name of the layer and the number of an expert. expert: behind that number.
    """

    layers: tuple[str, ...] = ("model.layers",)
    attention: tuple[str, ...] = tuple(f"self_attn.{name}_proj" for name in "qkvo")
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    experts: str = "mlp.experts"
    expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[str, ...] = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_FUSED_GATE = ("mlp.gate_up_proj", "mlp.down_proj")
NAMES: Mapping[str, LinearNames] = {
    "Gemma3ForCausalLM": LinearNames(("model.layers", "language_model.model.layers", "model.language_model.layers")),
    "MixtralForCausalLM": LinearNames(experts="block_sparse_moe.experts", expert=("w1", "w3", "w2")),
    "Phi3ForCausalLM": LinearNames(attention=("self_attn.qkv_proj", "self_attn.o_proj"), mlp=_FUSED_GATE),
    "GlmForCausalLM": LinearNames(mlp=_FUSED_GATE),
    "Glm4ForCausalLM": LinearNames(mlp=_FUSED_GATE),
    "ExaoneForCausalLM": LinearNames(
        ("transformer.h",),
        tuple(f"attn.attention.{name}_proj" for name in ("q", "k", "v", "out")),
        ("mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"),
    ),
    "OPTForCausalLM": LinearNames(("model.decoder.layers",), (*_QKV, "self_attn.out_proj"), ("fc1", "fc2")),
    "GPT2LMHeadModel": LinearNames(("transformer.h",), ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")),
}
"""By ModelSpec.architecture. Others have Llama's names."""


def linears_of_layers(spec: ModelSpec) -> Iterator[tuple[str, list[str]]]:
    """(name of a layer with a dot, whole names of its quantized linears), for each layer and each way to name it."""
    names = NAMES.get(spec.architecture, LinearNames())
    for start in names.layers:
        for index, layer in enumerate(spec.layers):
            linears = [*names.attention]
            if layer.experts is None:
                linears += names.mlp
            else:
                linears += (f"{names.experts}.{n}.{part}" for n in range(layer.experts.count) for part in names.expert)
                linears += names.shared if layer.experts.shared_width else ()
            yield f"{start}.{index}.", [f"{start}.{index}.{linear}" for linear in linears]


def check_modules(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise UnsupportedModel unless quantization_config of a parsed config.json quantizes all linears of the layers, and not the
    head. models.stored has read its other keys. The message names the first linear that is not quantized."""
    section = config.get(KEY) or {}
    method, layers = section.get("quant_method", ""), list(linears_of_layers(spec)) if section else []
    if method == "compressed-tensors" and not section.get("config_groups"):
        return  # sparse floats
    for key in LISTS.get(method, ()):
        for entry in section.get(key) or ():
            _check_entry(key, entry, _rule(method, key, entry), layers)
    if method == "compressed-tensors":
        ignored = [_rule("compressed-tensors", "ignore", entry) for entry in section.get("ignore") or ()]
        if not any(rule(head) for rule in ignored for head in HEADS):
            raise UnsupportedModel(
                f"config.json: {KEY}.ignore does not name {HEAD}: {HEAD} must be in the list, because a quantized {HEAD} is not "
                "supported. Use another checkpoint of the model."
            )
    if method == "gptq":
        _check_quantized(section.get("modules_in_block_to_quantize"), layers)
        _check_dynamic(section.get("dynamic") or {}, layers)


Rule = Callable[[str], object]
"""Name of a module -> something true if an entry of a list matches it."""


def _rule(method: str, key: str, entry: str) -> Rule:
    if method == "awq":
        return lambda name: entry in name
    if method == "fp8":
        pattern = _pattern(key, entry.removeprefix("re:"))
        return lambda name: pattern.match(name) or name.endswith(entry)
    if entry.startswith("re:"):
        return _pattern(key, entry.removeprefix("re:")).match
    return lambda name: name == entry or entry in CLASSES


def _pattern(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UnsupportedModel(f"config.json: {KEY}.{key} has {text!r}, which is not a pattern: {error}.") from None


Layers = Sequence[tuple[str, list[str]]]


def _check_entry(key: str, entry: str, rule: Rule, layers: Layers) -> None:
    """Raise UnsupportedModel if an entry of a list of unquantized modules matches a linear."""
    # An entry that is a whole name matches in its own layer only. Lists have some entries for each layer.
    same = [layer for layer in layers if entry.startswith(layer[0])] if re.fullmatch(r"[\w.]+", entry) else []
    for _, linears in same or layers:
        if linear := next(filter(rule, linears), ""):
            raise UnsupportedModel(
                f"config.json: {KEY}.{key} names {entry!r}, so the linear {linear} is not quantized. {REMEDY}"
            )


def _check_quantized(listed: Any, layers: Layers) -> None:
    """Raise UnsupportedModel unless `modules_in_block_to_quantize`, names or lists of names, has every linear."""
    if not listed:
        return
    names = {name for entry in listed for name in (entry if isinstance(entry, list) else [entry])}
    for start, linears in layers:
        for linear in linears:
            if linear not in names and linear.removeprefix(start) not in names:
                raise UnsupportedModel(
                    f"config.json: {KEY}.modules_in_block_to_quantize does not name the linear {linear}. {REMEDY}"
                )


def _check_dynamic(rules: Mapping[str, Mapping[str, Any]], layers: Layers) -> None:
    """Raise UnsupportedModel if a rule of `dynamic` matches a linear and changes how it is stored."""
    patterns = [(text, _pattern("dynamic", re.sub(r"^[-+]?:", "", text)), values) for text, values in rules.items()]
    for _, linears in layers:
        for linear in linears:
            matches = ((text, values) for text, pattern, values in patterns if pattern.match(linear))
            text, values = next(matches, ("", {}))
            if text.startswith("-:") or values:
                stored = "not quantized" if text.startswith("-:") else f"stored with {values}"
                raise UnsupportedModel(
                    f"config.json: {KEY}.dynamic has the rule {text!r}, so the linear {linear} is {stored}. {REMEDY}"
                )
