"""Checkpoints in e4m3 with scales of blocks, as Qwen and DeepSeek publish them: the same weights in floats give the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.config import read_spec
from ridgeline.models.layers import DecoderLayer
from ridgeline.ops.choose import choose, choose_invariant
from ridgeline.ops.reference import FP8, FP8_WEIGHT_REFERENCE, REFERENCE
from ridgeline.ops.table import Ops
from ridgeline.quant.format import LinearShape, Part, Share, Weight
from ridgeline.quant.fp8 import BLOCK, Fp8Format, quantize_groups
from tests.models import families
from tests.models.families import save
from tests.models.paged import PagedRows
from tests.quant.test_checkpoints import LLAMA, compressed_tensors

CPU = torch.device("cpu")
TOKENS = list(range(3, 60))
PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
"""Sizes of several blocks, the last of which are not whole."""


def block_fp8(**other: Any) -> dict[str, Any]:
    """quantization_config as Qwen's checkpoints have it."""
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {**said, "modules_to_not_convert": ["lm_head"], **other}


def in_blocks(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 values, a scale for each block in `dtype`, the float32 weights that they stand for)."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / 440).to(dtype)
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    values = (weight / spread).to(FP8)
    return values, scales, values.float() * spread


def publish(name: str, folder: Path, config: dict[str, Any], suffix: str, dtype: torch.dtype) -> tuple[Path, Path]:
    """(checkpoint in blocks, the same one in floats)."""
    save(name, folder / "floats")
    save(name, folder / "blocks")
    floats = load_file(folder / "floats" / "model.safetensors")
    stored = dict(floats)
    for key in [key for key in floats if key.endswith(PROJECTIONS)]:
        stored[key], stored[key + suffix], floats[key] = in_blocks(floats[key], dtype)
    for tensors, kind in ((floats, "floats"), (stored, "blocks")):
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "blocks" / "config.json").read_text())
    (folder / "blocks" / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    return folder / "blocks", folder / "floats"


def load(folder: Path, ops: Ops = REFERENCE, **options: Any) -> LoadedModel:
    return build(folder, model=ModelConfig(**options), ops=ops, device=CPU)


def run(model: LoadedModel) -> torch.Tensor:
    return PagedRows(model).step([(1, TOKENS)])


def linears(layer: DecoderLayer) -> list[tuple[str, Weight]]:
    return [*layer.attention.linears(), *layer.feed_forward.linears()]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in WIDE.items():
        monkeypatch.setitem(families.SMALL, key, value)
    for name in ("qwen3-moe", "qwen2-moe"):
        kind, keys = families.FAMILIES[name]
        monkeypatch.setitem(families.FAMILIES, name, (kind, keys | {"moe_intermediate_size": 160}))


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen2-moe"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama-mha-bias", "qwen3-moe", "mixtral")),
    ],
)
def test_logits_are_those_of_the_same_weights_in_floats(name: str, wide: None, tmp_path: Path) -> None:
    """By the reference. Compiled operations round inputs to bfloat16, which changes the experts that some tokens choose: there each
    linear is compared."""
    stored, floats = publish(name, tmp_path, block_fp8(), "_scale_inv", torch.bfloat16)
    model = load(stored)
    assert model.spec.quantization == "fp8-block"
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    plain = load(floats)
    want, out = run(plain), run(model)
    assert (out - want).norm() < 1e-4 * want.norm()
    for ops in (choose(CPU, torch.float32), choose_invariant(CPU, torch.float32)):
        for layer, target in zip(load(stored, ops).decoder.layers, plain.decoder.layers, strict=True):
            for (name, ours), (_, theirs) in zip(linears(layer), linears(target), strict=True):
                inputs = 0.1 * torch.randn(20, ours.expects[0, "weight"].shape[1])
                product = theirs.apply(inputs)
                assert (ours.apply(inputs) - product).norm() < 1e-2 * product.norm(), name


def test_blocks_of_compressed_tensors(wide: None, tmp_path: Path) -> None:
    """As llm-compressor writes them, with scales in float32, which the names of its formats differ from Qwen's."""
    config = compressed_tensors("block")
    group = config["config_groups"]["group_0"]
    group["weights"]["block_structure"] = [128, 128]
    group["input_activations"] |= {"strategy": "group", "group_size": 128}
    stored, floats = publish("llama-gqa", tmp_path, config, "_scale", torch.float32)
    want, model = run(load(floats)), load(stored)
    assert model.spec.quantization == "fp8-block" and (run(model) - want).norm() < 1e-4 * want.norm()


def test_random_weights_take_the_bytes_of_real_ones(wide: None, tmp_path: Path) -> None:
    stored, _ = publish("qwen3-moe", tmp_path, block_fp8(), "_scale_inv", torch.bfloat16)
    model, dummy = load(stored), load(stored, load_format="dummy")
    held = [sum(tensor.nbytes for tensor in loaded.decoder.tensors()) for loaded in (model, dummy)]
    meta = build(stored, model=ModelConfig(), ops=REFERENCE, device=torch.device("meta"))
    assert held == [sum(tensor.nbytes for tensor in meta.decoder.tensors())] * 2
    assert run(dummy).isfinite().all()


def test_what_is_served_is_what_is_sized() -> None:
    """An 8B: a byte for each weight, and 4 bytes for each 128 inputs of an output."""
    spec, plain = read_spec(LLAMA | {"quantization_config": block_fp8()}), read_spec(LLAMA)
    outputs_by_inputs = {4096: 6144 + 4096 + 28672, 14336: 4096}
    stored = sum(outputs * (inputs + inputs // 32) for inputs, outputs in outputs_by_inputs.items())
    matrices = sum(outputs * inputs for inputs, outputs in outputs_by_inputs.items())
    assert plain.weight_bytes - spec.weight_bytes == 32 * (2 * matrices - stored)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("stored", ["block", "float"])
def test_ranks_cut_blocks(size: int, stored: Any) -> None:
    """Rows and columns of ranks begin within blocks: each keeps the scales of its own."""
    noise = torch.Generator().manual_seed(size)
    form = Fp8Format(FP8_WEIGHT_REFERENCE, torch.float32, CPU, stored, False, BLOCK)
    for split, parts, inputs in (("out", (Part(240, 6), Part(120, 6)), 200), ("in", (Part(150, 1),), 384)):
        shape = LinearShape(inputs, parts, split=split, in_units=6)  # type: ignore[arg-type]
        weights = [torch.randn(part.rows, inputs, generator=noise) for part in parts]
        if stored == "block":
            made = [in_blocks(weight, torch.float32) for weight in weights]
            whole = [floats for _, _, floats in made]
        else:
            groups = torch.arange(inputs) // BLOCK
            rounded = [quantize_groups(weight, BLOCK) for weight in weights]
            whole = [part.values.float() * part.scales[:, groups] for part in rounded]
        for rank in range(size):
            share = Share(rank, size)
            weight = form.create(shape, share)
            for part in range(len(parts)):
                values = made[part][0] if stored == "block" else weights[part]
                weight.load(part, "weight", values)
                if stored == "block":
                    weight.load(part, "weight_scale", made[part][1])
            columns = share.span(inputs, 6) if split == "in" else slice(0, inputs)
            rows = [share.span(part.rows, part.units) if split == "out" else slice(0, part.rows) for part in parts]
            want = torch.cat([part[cut, columns] for part, cut in zip(whole, rows, strict=True)])
            assert torch.equal(weight.apply(torch.eye(want.shape[1])).T, want)


def test_ranks_that_would_cut_groups_too_finely_are_refused() -> None:
    form = Fp8Format(FP8_WEIGHT_REFERENCE, torch.float32, CPU, "block", False, BLOCK)
    shape = LinearShape(384, (Part(16, 1),), split="in", in_units=24)
    with pytest.raises(ConfigError, match="Groups of 128 inputs cannot be split over 8 devices, which hold 48 of 384"):
        form.create(shape, Share(0, 8))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (block_fp8(weight_block_size=[64, 128]), r"weight_block_size = \[64, 128\].*Supported: \[128, 128\], null"),
        (block_fp8(activation_scheme="static"), "activation_scheme = 'static'"),
        (block_fp8(modules_to_not_convert=["model.layers.3.mlp"]), "modules_to_not_convert"),
        (compressed_tensors("block"), "input_activations = .*Supported: dynamic per group"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantization_config.{said}"):
        read_spec(LLAMA | {"quantization_config": config})


def test_faults_are_named(wide: None, tmp_path: Path) -> None:
    """A scale of a block that no weight has, scales of another shape, and the format as an option."""
    stored, _ = publish("llama-gqa", tmp_path, block_fp8(), "_scale_inv", torch.float32)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    for bad in (float("nan"), -1.0, 128.0):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][1, 0] = bad
        save_file(changed, stored / "model.safetensors", {"format": "pt"})
        with pytest.raises(UnsupportedModel, match="up_proj.weight_scale_inv (cannot be stored in fp8|has values)"):
            load(stored)
    save_file({**tensors, name: tensors[name][:1].clone()}, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=r"weight_scale_inv has shape \[1, 2\], but config.json requires \[3, 2\]"
    ):
        load(stored)
    with pytest.raises(ConfigError, match="--quantization 'fp8-block' is unknown"):
        load(tmp_path / "floats", quantization="fp8-block")


def test_families_that_divide_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """A fused projection may end within a block."""
    stored, _ = publish("phi3", tmp_path, block_fp8(), "_scale_inv", torch.float32)
    with pytest.raises(
        UnsupportedModel, match="gate_up_proj.* is in a number format whose projections cannot be divided"
    ):
        load(stored)
