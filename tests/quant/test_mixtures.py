"""Quantized checkpoints of models with experts, with the lists of unquantized modules that published checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.config import read_spec
from ridgeline.models.tensor_names import as_llama
from ridgeline.models.unquantized_modules import linears_of_layers
from ridgeline.models.weights import short_name, targets
from ridgeline.ops.reference import REFERENCE, dequantized, quantize
from ridgeline.quant.integer import round_to_nearest
from ridgeline.quant.layouts import Published, encode
from tests.combinations import crossed
from tests.models import families
from tests.models.families import save
from tests.quant.test_block_checkpoints import PROJECTIONS, block_fp8, in_blocks, linears, run
from tests.quant.test_checkpoints import compressed_tensors, plain_fp8
from tests.quant.test_integer_checkpoints import awq, gptq, pack_quantized

LAYERS = range(2)
SIZES: dict[str, dict[str, object]] = {
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4},
    "qwen3-moe": {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 64},
    "qwen2-moe": {"num_hidden_layers": 2, "num_experts": 4, "shared_expert_intermediate_size": 64},
}
GATES = {"mixtral": ("block_sparse_moe.gate",), "qwen3-moe": ("mlp.gate",)}
GATES["qwen2-moe"] = ("mlp.gate", "mlp.shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Stored:
    """A linear in a checkpoint: tensors by the end of their names, and the float32 weights that they stand for."""

    tensors: dict[str, torch.Tensor]
    floats: torch.Tensor


def of_layers(*names: str) -> list[str]:
    return [f"model.layers.{index}.{name}" for index in LAYERS for name in names]


def patterns(family: str) -> list[str]:
    """`ignore` of llm-compressor's recipes for Mixtral and Qwen's models with experts."""
    if family == "mixtral":
        return ["lm_head", "re:.*block_sparse_moe.gate"]
    shared = ["re:.*shared_expert_gate$", "re:.*mlp.shared_expert$"] if family == "qwen2-moe" else []
    return ["re:.*lm_head", "re:.*mlp.gate$", "re:.*mlp.gate[.].*", "re:.*embed_tokens$", *shared]


def ignoring(config: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    return {**config, "ignore": ignore, "sparsity_config": {}, "transform_config": {}, "version": "0.10.2"}


def w8a8_config() -> dict[str, Any]:
    config = pack_quantized(8, 0)
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    return {**config, "format": "int-quantized"}


def integers(form: Published, format_name: str, weight: torch.Tensor) -> Stored:
    codes, scales, zeros = round_to_nearest(weight, NUMBER_FORMATS[format_name])
    floats = dequantized(codes, scales, zeros, form.bits, form.group or weight.shape[1])
    return Stored({"." + name: tensor for name, tensor in encode(form, codes, scales, zeros).items()}, floats)


def channels(weight: torch.Tensor) -> Stored:
    scaled = quantize(weight)
    scales = scaled.scales.unsqueeze(1)
    return Stored({".weight": scaled.values, ".weight_scale": scales}, scaled.values.float() * scales)


def whole(shape: tuple[int, ...], weight: torch.Tensor) -> Stored:
    scaled = quantize(weight.reshape(1, -1))
    values = scaled.values.view(weight.shape)
    return Stored({".weight": values, ".weight_scale": scaled.scales.view(shape)}, values.float() * scaled.scales)


def blocks(weight: torch.Tensor) -> Stored:
    values, scales, floats = in_blocks(weight, torch.bfloat16)
    return Stored({".weight": values, ".weight_scale_inv": scales}, floats)


def gptq_config(family: str) -> dict[str, Any]:
    """Qwen3-30B-A3B-GPTQ-Int4 has no list, optimum and GPTQModel write one."""
    if family == "qwen3-moe":
        return gptq(4, 32)
    if family == "mixtral":
        return gptq(4, 32, dynamic={r"-:.*block_sparse_moe\.gate$": {}, "+:.*lm_head": {"bits": 8}})
    parts = [f"{part}_proj" for part in ("gate", "up", "down")]
    experts = [[f"mlp.experts.{number}.{part}" for number in range(4)] for part in parts]
    attention = [[f"self_attn.{part}_proj" for part in "kvq"], ["self_attn.o_proj"]]
    return gptq(
        4, 32, modules_in_block_to_quantize=[*attention, [f"mlp.shared_expert.{part}" for part in parts], *experts]
    )


def awq_config(family: str) -> dict[str, Any]:
    return awq(32, modules_to_not_convert=["gate"] if family == "mixtral" else of_layers(*GATES[family]))


def whole_names(family: str) -> list[str]:
    """As Qwen3-30B-A3B-FP8 has them."""
    norms = ("input_layernorm", "post_attention_layernorm")
    return ["lm_head", "model.embed_tokens", "model.norm", *of_layers(*norms, *GATES[family])]


FORMATS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[torch.Tensor], Stored]]] = {
    "gptq": (gptq_config, partial(integers, Published("gptq", 4, 32), "int4-g32")),
    "awq": (awq_config, partial(integers, Published("awq", 4, 32, zeros=True), "int4-g32-zp")),
    "pack-quantized": (
        lambda family: ignoring(pack_quantized(4, 32), [*of_layers(*GATES[family]), "lm_head"]),
        partial(integers, Published("pack-quantized", 4, 32), "int4-g32"),
    ),
    "int-quantized": (
        lambda family: ignoring(w8a8_config(), patterns(family)),
        partial(integers, Published("int-quantized", 8, 0), "int8-channel"),
    ),
    "fp8-channel": (lambda family: ignoring(compressed_tensors("channel"), patterns(family)), channels),
    "fp8-tensor": (lambda family: ignoring(compressed_tensors("tensor"), patterns(family)), partial(whole, (1,))),
    "plain-fp8": (
        lambda family: {**plain_fp8(), "ignored_layers": ["lm_head", *of_layers(*GATES[family])]},
        partial(whole, ()),
    ),
    "fp8-block": (lambda family: block_fp8(modules_to_not_convert=whole_names(family)), blocks),
}
ROUNDED_INPUTS = ("int-quantized", "fp8-channel", "fp8-tensor", "plain-fp8")


@cache
def original(family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, tensors) of a random model."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        kind, keys = families.FAMILIES[family]
        patch.setitem(families.FAMILIES, family, (kind, keys | SIZES[family]))
        save(family, Path(folder))
        return json.loads((Path(folder) / "config.json").read_text()), load_file(Path(folder) / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def publish(family: str, form: str, folder: Path, router: str = "") -> tuple[Path, Path]:
    """(a quantized checkpoint, its weights in float32). router: name of one that is quantized too."""
    config, tensors = original(family)
    if router:  # of 32 experts, so that it fills whole words
        tensors = {**tensors, router: torch.randn(32, 64)}
    make, store = FORMATS[form]
    stored, floats = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(PROJECTIONS) or name == router:
            linear = store(stored.pop(name))
            stored |= {name.removesuffix(".weight") + end: tensor for end, tensor in linear.tensors.items()}
            floats[name] = linear.floats
    quantized = {**config, "quantization_config": make(family)}
    return write(folder / "stored", quantized, stored), write(folder / "floats", config, floats)


def load(folder: Path) -> LoadedModel:
    return build(folder, model=ModelConfig(), ops=REFERENCE, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "form"), crossed(sorted(SIZES), sorted(FORMATS), quick=lambda family, form: family == form % 3)
)
def test_logits_are_those_of_the_same_weights_in_floats(family: str, form: str, tmp_path: Path) -> None:
    """Where inputs are rounded too, some tokens choose other experts: there each linear is compared, and logits of most tokens."""
    stored, floats = publish(family, form, tmp_path)
    model, plain = load(stored), load(floats)
    assert model.spec.quantization and not plain.spec.quantization
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    bound = 0.05 if form in ROUNDED_INPUTS else 1e-4
    want = run(plain)
    error = (run(model) - want).norm(dim=1) / want.norm(dim=1)
    assert error.median() < 6 * bound and (form in ROUNDED_INPUTS or error.max() < bound)
    for layer, target in zip(model.decoder.layers, plain.decoder.layers, strict=True):
        for (name, ours), (_, theirs) in zip(linears(layer), linears(target), strict=True):
            inputs = 0.1 * torch.randn(20, theirs.expects[0, "weight"].shape[1])
            product = theirs.apply(inputs)
            assert (ours.apply(inputs) - product).norm() < bound * product.norm(), name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", SIZES)
def test_lists_of_published_checkpoints_are_read(family: str, form: str) -> None:
    config, _ = original(family)
    assert read_spec({**config, "quantization_config": FORMATS[form][0](family)}).quantization


def fp8_with(*names: str) -> dict[str, Any]:
    return block_fp8(modules_to_not_convert=list(names))


def ct_with(*names: str) -> dict[str, Any]:
    return ignoring(pack_quantized(4, 32), ["lm_head", *names])


def mixtral_fp8(*names: str) -> dict[str, Any]:
    return {**plain_fp8(), "ignored_layers": list(names)}


def awq_with(*names: str) -> dict[str, Any]:
    return awq(32, modules_to_not_convert=list(names))


ATTENTION, EXPERT, BLOCK = "0.self_attn.q_proj", "0.mlp.experts.0.gate_proj", "0.block_sparse_moe.experts.0.w1"


@pytest.mark.parametrize(
    ("family", "config", "key", "linear"),
    [
        ("qwen3-moe", ct_with("model.layers.1.mlp.experts.3.down_proj"), "ignore", "1.mlp.experts.3.down_proj"),
        ("qwen3-moe", ct_with("re:.*self_attn.*"), "ignore", ATTENTION),
        ("qwen3-moe", ct_with("re:.*mlp.*"), "ignore", EXPERT),
        ("qwen3-moe", ct_with("Linear"), "ignore", ATTENTION),
        ("qwen2-moe", ct_with("re:.*gate"), "ignore", EXPERT),
        ("qwen2-moe", ct_with("re:.*shared_expert"), "ignore", "0.mlp.shared_expert.gate_proj"),
        ("mixtral", ct_with("re:.*w2$"), "ignore", "0.block_sparse_moe.experts.0.w2"),
        ("qwen3-moe", fp8_with("model.layers.1.self_attn"), "modules_to_not_convert", "1.self_attn.q_proj"),
        ("qwen3-moe", fp8_with("down_proj"), "modules_to_not_convert", "0.mlp.experts.0.down_proj"),
        ("qwen3-moe", fp8_with("model.layers.*.mlp"), "modules_to_not_convert", EXPERT),
        ("mixtral", mixtral_fp8("model.layers.0.block_sparse_moe.experts"), "ignored_layers", BLOCK),
        ("mixtral", mixtral_fp8("re:.*self_attn.*"), "ignored_layers", ATTENTION),
        ("qwen3-moe", awq_with("gate"), "modules_to_not_convert", EXPERT),
        ("mixtral", awq_with("experts.1."), "modules_to_not_convert", "0.block_sparse_moe.experts.1.w1"),
        ("mixtral", gptq(4, 32, dynamic={"-:.*w1$": {}}), "dynamic", BLOCK),
        ("qwen3-moe", gptq(4, 32, dynamic={".*down": {"bits": 8}}), "dynamic", "0.mlp.experts.0.down_proj"),
        (
            "qwen3-moe",
            gptq(4, 32, modules_in_block_to_quantize=[["self_attn.q_proj"]]),
            "modules_in",
            "0.self_attn.k_proj",
        ),
    ],
)
def test_lists_that_leave_linears_unquantized_are_refused(
    family: str, config: dict[str, Any], key: str, linear: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"quantization_config.{key}.* the linear model.layers.{linear}"):
        read_spec({**original(family)[0], "quantization_config": config})


def test_other_faults_of_lists_are_named() -> None:
    config = original("qwen3-moe")[0]
    with pytest.raises(UnsupportedModel, match=r"ignore has '\*mlp', which is not a pattern"):
        read_spec({**config, "quantization_config": ct_with("re:*mlp")})
    without_head = ignoring(pack_quantized(4, 32), ["re:.*mlp.gate$"])
    with pytest.raises(UnsupportedModel, match="ignore does not name lm_head: lm_head must"):
        read_spec({**config, "quantization_config": without_head})
    with pytest.raises(ConfigError, match="wrong type"):
        read_spec({**config, "quantization_config": gptq(4, 32, dynamic=["-:.*mlp.gate$"])})


def test_entries_that_match_no_module_are_harmless() -> None:
    config = original("qwen3-moe")[0]
    for section in (
        ct_with("re:model.visual.*", "model.layers.7.mlp.gate", "Qwen3MoeTopKRouter", "model.layers.0.mlp"),
        fp8_with("model.layers.9.mlp.experts.0.up_proj", "mlp.gate", "visual"),
        awq(32, modules_to_not_convert=["visual", "mlp.gate"]),
        gptq(4, 32, dynamic={"-:.*visual.*": {}, "+:.*visual": {"bits": 8}, ".*up_proj": {}, "-:.*up_proj": {}}),
    ):
        assert read_spec({**config, "quantization_config": section}).quantization


@pytest.mark.parametrize(("family", "form"), [("qwen3-moe", "gptq"), ("qwen2-moe", "awq"), ("mixtral", "fp8-channel")])
def test_quantized_routers_are_refused_by_name(family: str, form: str, tmp_path: Path) -> None:
    """As AutoRound stores them in GPTQ's layout, and GPTQModel in that of AWQ; no key of config.json says so."""
    router = f"model.layers.0.{GATES[family][0]}"
    stored, _ = publish(family, form, tmp_path, f"{router}.weight")
    with pytest.raises(UnsupportedModel, match=f"{router}.* is of a quantized router"):
        load(stored)


def published_targets(spec: ModelSpec) -> Iterator[str]:
    """Names of the weights that the linears of models.unquantized_modules become when they are loaded."""
    modules = [module for _, linears in linears_of_layers(spec) for module in linears]
    scalar = torch.zeros(1)
    for name, _ in as_llama(spec, ((f"{module}.weight", lambda: scalar) for module in modules)):
        yield short_name(name)


OTHER_NAMES = (
    "gemma3",
    "glm",
    "glm4",
    "gpt-oss",
    "gpt2",
    "llama-gqa",
    "mixtral",
    "opt",
    "phi3",
    "qwen2-moe",
    "qwen3-moe-mixed",
)


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_names_of_linears_are_those_that_are_loaded(family: str, tmp_path: Path) -> None:
    """Every one: an entry for a linear without a name would have no effect."""
    kind, keys = (families.FAMILIES | families.MORE)[family]
    keys = {key: value for key, value in {**families.SMALL, **keys}.items() if value != families.ABSENT}
    getattr(transformers, f"{kind}Config")(**keys).save_pretrained(tmp_path)
    model = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("meta"))
    needed = {name for name in targets(model.decoder) if name.endswith("_proj.weight")}
    assert set(published_targets(model.spec)) == needed
