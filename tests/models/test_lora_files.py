"""Adapters in folders: what is read, and what is refused with its name and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.adapters import AdapterPlan, plan_adapters
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.models.adapters import Adapter, read_adapter
from ridgeline.models.build import load
from ridgeline.models.config import read_spec
from ridgeline.ops.reference import REFERENCE
from tests.models.adapter_files import write_adapter
from tests.models.families import SMALL

SHAPES = {"layers.0.self_attn.q_proj": (6, 8), "layers.1.mlp.down_proj": (8, 12)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    weights = {f"model.{name}.weight": torch.zeros(shape) for name, shape in SHAPES.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def read(folder: Path, most: int = 16) -> Adapter:
    return read_adapter(folder, SHAPES, most, torch.float32)


def test_scale_and_fingerprint(base: Path) -> None:
    first = read(write_adapter(base, base / "one", seed=1))
    again, other = (read(write_adapter(base, base / name, seed=seed)) for name, seed in (("again", 1), ("other", 2)))
    assert set(first.factors) == set(SHAPES) and first.rank == 4
    raw = load_file(base / "one" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = first.factors["layers.0.self_attn.q_proj"]
    assert torch.equal(a, raw[f"{name}A.weight"]) and torch.equal(b, raw[f"{name}B.weight"] * 2)
    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora = 'True'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"new_key": 3}, "new_key = '3'"),
        ({"lora_alpha": "8"}, "alpha '8'"),
        ({"r": 0}, "rank 0"),
        ({"r": 32}, "--max-lora-rank 32"),
        ({"r": 512}, "at most 256"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base: Path, options: dict[str, object], message: str) -> None:
    folder = write_adapter(base, base / "one", seed=1)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **options}))
    with pytest.raises(ConfigError) as refused:
        read(folder)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, tensors: tensors.pop(name), "has no lora_A of model.layers.0"),
        (lambda name, tensors: tensors.update({name: tensors[name][:2].clone()}), "has the shape [2, 8]"),
        (lambda name, tensors: tensors.update({name: tensors[name] * torch.inf}), "not finite"),
        (
            lambda name, tensors: tensors.update({f"{name}.bias": tensors[name].clone()}),
            "A.weight.bias, which is not supported",
        ),
        (
            lambda name, tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": tensors[name].clone()}),
            "changes lm_head",
        ),
        (lambda name, tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_tensors_are_checked(
    base: Path, change: Callable[[str, dict[str, torch.Tensor]], object], message: str
) -> None:
    path = write_adapter(base, base / "one", seed=1) / "adapter_model.safetensors"
    tensors = load_file(path)
    change("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", tensors)
    save_file(tensors, path)
    with pytest.raises(ConfigError) as refused:
        read(path.parent)
    assert message in refused.value.message


def test_the_plan_counts_the_memory_of_all_slots(tmp_path: Path) -> None:
    """As many bytes as the linears have, and none without adapters."""
    keys = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = ModelConfig(str(tmp_path), dtype="float32", enable_lora=True, max_loras=3, max_lora_rank=4)
    plan = plan_adapters(config)
    decoder = load(tmp_path, model=config, ops=REFERENCE, device=torch.device("meta")).decoder
    weights = [
        weight for layer in decoder.layers for _, weight in (*layer.attention.linears(), *layer.feed_forward.linears())
    ]
    held = sum(weight.pairs.a[1:].nbytes + weight.pairs.b[1:].nbytes for weight in weights)
    spec = read_spec(json.loads((tmp_path / "config.json").read_text()))
    assert plan == AdapterPlan(3, 4) and plan.bytes(spec) == held
    assert plan_adapters(ModelConfig(str(tmp_path))) == AdapterPlan()
