"""LoRA adapters as PEFT writes them, and the models into which they are merged by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "modules_to_save": None,
}


def write_adapter(base: Path, folder: Path, *, seed: int, modules: Sequence[str] = ALL, **options: Any) -> Path:
    """A random adapter of the model in `base`, of rank 4 and alpha 8 unless `options` of adapter_config.json say otherwise."""
    config = {**PLAIN, "r": 4, "lora_alpha": 8, "target_modules": list(modules), **options}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and module.rpartition(".")[2] in modules:
            rank = config.get("rank_pattern", {}).get(module.rpartition(".")[2], config["r"])
            rows, columns = weight.shape
            a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a / columns**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = b / rank
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """The model with W + scale * B A, which is what PEFT computes (peft.tuners.lora.Linear.forward and get_delta_weight)."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    shutil.copytree(base, folder)
    weights, tensors = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        module = name.removesuffix(".weight")
        if (key := f"base_model.model.{module}.lora_A.weight") in tensors:
            a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
            alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            weights[name] = (weights[name].double() + scale * b.double() @ a.double()).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
