"""fp8 from model folder to tokens: quantized while loading, or read from the layouts that others publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.fit import Deployment, size
from ridgeline.core.sizing import GIB, Memory
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.config import read_spec, stored_as
from ridgeline.models.hub import resolve_model
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE, quantize
from ridgeline.ops.table import Scaled
from tests.combinations import crossed
from tests.models.families import FAMILIES, save
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
LINEAR = "_proj.weight"
TOKENS = list(range(3, 60))
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed_tensors(strategy: str = "channel") -> dict[str, Any]:
    """quantization_config as llm-compressor writes it."""
    group = {
        "input_activations": {**INPUTS, "observer": None, "group_size": None, "block_structure": None},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**WEIGHTS, "strategy": strategy, "observer": "minmax", "group_size": None},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.2,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def plain_fp8() -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}


def load(folder: Path, **options: Any) -> LoadedModel:
    return build(folder, model=ModelConfig(**options), ops=REFERENCE, device=CPU)


def run(model: LoadedModel) -> torch.Tensor:
    return PagedRows(model).step([(1, TOKENS)])


def publish(folder: Path, config: dict[str, Any], store: Callable[[torch.Tensor], tuple[Scaled, str]]) -> None:
    """Rewrite the checkpoint in `folder`: every linear but the head as `store` makes it."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(LINEAR):
            tensors[name] = tensor
            continue
        scaled, suffix = store(tensor)
        tensors[name], tensors[name + suffix] = scaled.values, scaled.scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": config}))


def per_channel(tensor: torch.Tensor) -> tuple[Scaled, str]:
    scaled = quantize(tensor)
    return Scaled(scaled.values, scaled.scales.unsqueeze(1)), "_scale"


def per_tensor(shape: tuple[int, ...], suffix: str) -> Callable[[torch.Tensor], tuple[Scaled, str]]:
    def store(tensor: torch.Tensor) -> tuple[Scaled, str]:
        scaled = quantize(tensor.reshape(1, -1))
        return Scaled(scaled.values.view(tensor.shape), scaled.scales.reshape(shape)), suffix

    return store


@pytest.mark.parametrize("name", crossed(sorted(FAMILIES), quick=lambda name: name % 3 == 1))
def test_predicted_bytes_equal_real_tensors(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, torch.bfloat16)
    plain, model = load(tmp_path), load(tmp_path, quantization="fp8")
    held = sum(tensor.nbytes for tensor in model.decoder.tensors())
    assert model.spec.weight_bytes == held < plain.spec.weight_bytes
    embedding = plain.spec.embedding_params * 2
    assert model.spec.step_weight_bytes == held - embedding
    meta = build(tmp_path, model=ModelConfig(quantization="fp8"), ops=REFERENCE, device=torch.device("meta"))
    assert held == sum(tensor.nbytes for tensor in meta.decoder.tensors())


def rounded_head(weight: torch.Tensor) -> torch.Tensor:
    """The formula, written once more: each row in 255 steps, of which the lowest one is its largest magnitude."""
    step = (weight.gather(1, weight.abs().argmax(1, keepdim=True)) / -128).half().float()
    return (weight / step).round().clamp(-128, 127) * step


def with_head(model: LoadedModel, other: LoadedModel) -> LoadedModel:
    """The model with the head of another one."""
    model.decoder.head = other.decoder.head
    return model


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """The formula, written once more: each row to e4m3 by its own scale and back."""
    top = x.abs().amax(-1, keepdim=True) / 448
    return (x / top).to(torch.float8_e4m3fn).float() * top


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-bias", "qwen3", "gemma2", "gemma3"])
def test_logits_are_those_of_the_formula_and_chunks_agree(name: str, tmp_path: Path) -> None:
    """Against transformers with every linear but the head on rounded weights and inputs, and a head in 8 bits; one step or many."""
    theirs = save(name, tmp_path)
    head = theirs.get_output_embeddings()
    head.weight = torch.nn.Parameter(rounded_head(head.weight.detach()))  # of its own where it was tied
    for key, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and key != "lm_head":
            with torch.no_grad():
                module.weight.copy_(round_trip(module.weight))
            module.register_forward_pre_hook(lambda _, given: round_trip(given[0]))
    with torch.inference_mode():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    model = load(tmp_path, quantization="fp8")
    out = run(model)
    # A value at the border of two e4m3 numbers falls to either side when sums are ordered otherwise.
    assert (out - want).norm() / want.norm() < 0.04
    rows = PagedRows(model)
    parts = torch.cat([rows.step([(1, TOKENS[:20])]), *(rows.step([(1, [token])]) for token in TOKENS[20:])])
    assert (parts - out).norm() / out.norm() < 0.04


def test_published_per_channel_equals_quantized_while_loading(tmp_path: Path) -> None:
    """But for the head, which such checkpoints have in floating point."""
    save("llama-mha-bias", tmp_path)
    want = run(with_head(load(tmp_path, quantization="fp8"), load(tmp_path)))
    publish(tmp_path, compressed_tensors(), per_channel)
    model = load(tmp_path)
    assert model.spec.quantization == "fp8"
    assert torch.equal(run(model), want)
    assert torch.equal(run(load(tmp_path, quantization="fp8")), want)
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())


def test_weights_alone_in_fp8(tmp_path: Path) -> None:
    """Activations stay as they are: the model is that of the rounded weights; published without input_activations."""
    save("llama-gqa", tmp_path)
    rounded = load(tmp_path, quantization="fp8-weight")
    native = build(tmp_path, model=ModelConfig(quantization="fp8-weight"), ops=choose(CPU, torch.float32), device=CPU)
    out = run(rounded)
    assert (PagedRows(native).step([(1, TOKENS)]) - out).norm() < 2e-2 * out.norm()
    want = run(with_head(rounded, load(tmp_path)))
    floats = load_file(tmp_path / "model.safetensors")
    config = compressed_tensors()
    config["config_groups"]["group_0"]["input_activations"] = None
    publish(tmp_path, config, per_channel)
    model = load(tmp_path)
    assert model.spec.quantization == "fp8-weight" and torch.equal(run(model), want)
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    back = {name: round_trip(tensor) if name.endswith(LINEAR) else tensor for name, tensor in floats.items()}
    save_file(back, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": None}))
    plain = run(load(tmp_path))
    assert (plain - want).norm() < 1e-4 * plain.norm()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_published_per_tensor(shape: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    """Both names of the scale, both shapes; the same model stored by its dequantized weights agrees."""
    save("llama-gqa", tmp_path / "floats")
    save("llama-gqa", tmp_path / "fp8")
    store = per_tensor(shape, suffix)
    tensors = load_file(tmp_path / "floats" / "model.safetensors")
    for name in tensors:
        if name.endswith(LINEAR):
            scaled, _ = store(tensors[name])
            tensors[name] = scaled.values.float() * scaled.scales
    save_file(tensors, tmp_path / "floats" / "model.safetensors", {"format": "pt"})
    publish(tmp_path / "fp8", plain_fp8(), store)
    floats, mine = load(tmp_path / "floats"), load(tmp_path / "fp8")
    x = torch.randn(4, floats.spec.d_model)
    for ours, theirs in zip(mine.decoder.layers, floats.decoder.layers, strict=True):
        want = theirs.attention.qkv.apply(x)
        assert (ours.attention.qkv.apply(x) - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "exl2"}, "quant_method = 'exl2'"),
        ({"format": "marlin-24"}, "format = 'marlin-24'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}, "ignore.*down_proj"),
        ({"ignore": []}, "ignore.*lm_head must"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"group": {"weights": {**WEIGHTS, "strategy": "group"}}}, "weights.strategy = 'group'"),
        ({"group": {"weights": {**WEIGHTS, "num_bits": 4}}}, "weights.num_bits = 4"),
        ({"group": {"input_activations": {**INPUTS, "num_bits": 4}}}, "input_activations.num_bits = 4"),
        ({"group": {"input_activations": {**INPUTS, "dynamic": False}}}, "input_activations"),
        ({"group": {"targets": ["re:.*mlp.*"]}}, "targets"),
    ],
)
def test_other_compressed_tensors_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    config = compressed_tensors()
    config["config_groups"]["group_0"].update(change.pop("group", {}))
    with pytest.raises(UnsupportedModel, match=f"quantization_config.{said}"):
        read_spec(LLAMA | {"quantization_config": {**config, **change}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_block_size": [1, 128]}, r"weight_block_size = \[1, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"modules_to_not_convert": ["model.layers.3.mlp"]}, "modules_to_not_convert"),
        ({"surprise": 1}, "surprise = 1"),
    ],
)
def test_other_fp8_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantization_config.{said}"):
        read_spec(LLAMA | {"quantization_config": {**plain_fp8(), **change}})


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def test_what_is_served_is_what_is_sized() -> None:
    """An 8B in fp8: 6.98 GB of matrices, their scales, 2.10 GB of embedding and head."""
    spec = read_spec(LLAMA | {"quantization_config": plain_fp8()})
    plain = read_spec(LLAMA)
    scales = 32 * 4 * (6144 + 4096 + 28672 + 4096)
    matrices = 32 * (6144 + 4096 + 3 * 14336) * 4096
    assert plain.weight_bytes - spec.weight_bytes == matrices - scales
    assert size(Deployment(spec, EngineConfig(), Memory("cuda", 24 * GIB))).weight_bytes == spec.weight_bytes
    assert replace(spec, quantization="") == plain
    on_cpu, plain_on_cpu = (size(Deployment(model, EngineConfig(), Memory("cpu", 60 * GIB))) for model in (spec, plain))
    assert on_cpu.workspace_bytes - plain_on_cpu.workspace_bytes == 4 * 28672 * 4096


def test_faults_are_named(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with pytest.raises(ConfigError, match="quantization 'int9' is unknown: use fp8"):
        load(tmp_path, quantization="int9")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"tensor model.layers.1.mlp.up_proj.weight cannot be stored in fp8"):
        load(tmp_path, quantization="fp8")


@pytest.mark.parametrize(
    ("suffix", "said"),
    [("", "NaN, infinite or beyond float32 in NAME:"), ("_scale", "tensor NAME cannot be stored in fp8")],
)
def test_published_codes_and_scales_that_are_no_numbers_are_named(suffix: str, said: str, tmp_path: Path) -> None:
    """e4m3 has two codes for NaN, one with each sign."""
    save("llama-gqa", tmp_path)
    publish(tmp_path, compressed_tensors(), per_channel)
    whole, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight" + suffix
    for sign in (1.0, -1.0):
        changed = {**whole, name: whole[name].clone()}
        changed[name][3, 0] = torch.tensor(float("nan")).copysign(torch.tensor(sign)).to(changed[name].dtype)
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UnsupportedModel, match=said.replace("NAME", name)):
            load(tmp_path)


def test_a_checkpoint_unlike_its_config_is_named(tmp_path: Path) -> None:
    """Scales that are missing, floats where e4m3 is stated, e4m3 where floats are."""
    save("llama-gqa", tmp_path)
    publish(tmp_path, compressed_tensors(), per_channel)
    assert stored_as(tmp_path).scales == "channel"
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": compressed_tensors("tensor")}))
    with pytest.raises(UnsupportedModel, match=r"_proj.weight_scale has shape \[\d+, 1\].*\[1\]"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": None}))
    with pytest.raises(UnsupportedModel, match=r"_proj.weight has dtype torch.float8_e4m3fn, but config.json requires"):
        load(tmp_path)
    save("llama-gqa", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": compressed_tensors()}))
    with pytest.raises(UnsupportedModel, match=r"_proj.weight has dtype torch.float32.*requires torch.float8_e4m3fn"):
        load(tmp_path)


def test_the_shipped_model_answers_in_fp8() -> None:
    """Through the engine, token for token what the reference formula says."""
    prompt = [5, 300, 12, 77, 1030, 42, 9]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(quantization="fp8", max_model_len=128, device="cpu", dtype="float32")
    [answer] = llm.generate([prompt], greedy)
    llm.close()
    folder = resolve_model(ModelConfig())
    options = ModelConfig(quantization="fp8", max_model_len=128, dtype="float32")
    model = build(folder, model=options, ops=choose(CPU, torch.float32), device=CPU)
    rows, known = PagedRows(model), list(prompt)
    logits = rows.step([(1, known)])
    for _ in range(12):
        known.append(int(logits[-1].argmax()))
        logits = rows.step([(1, known[-1:])])
    assert answer.choices[0].token_ids == known[len(prompt) :]
