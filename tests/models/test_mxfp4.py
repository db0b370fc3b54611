"""gpt-oss as it is published: keys of config.json, and experts in MXFP4."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.cli.main import main
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.config import read_spec
from ridgeline.models.mxfp4 import in_blocks
from ridgeline.ops.blocks import arrays
from ridgeline.ops.reference import REFERENCE
from ridgeline.quant.blocks import read_blocks
from tests.models.families import save
from tests.models.paged import PagedRows

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
GPT_OSS_120B = {
    **GPT_OSS_20B,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}


@pytest.mark.parametrize(("config", "billions"), [(GPT_OSS_20B, 20.91), (GPT_OSS_120B, 116.83)], ids=["20b", "120b"])
def test_published_sizes(config: dict[str, object], billions: float) -> None:
    """Parameters as the model card counts them (arXiv:2508.10925, table 1)."""
    spec = read_spec(config)
    assert round(spec.params / 1e9, 2) == billions
    assert [layer.window for layer in spec.layers[:4]] == [128, None] * 2
    assert spec.sinks and spec.qkv_bias and spec.out_bias and not spec.plain
    assert (spec.max_len, spec.layers[0].rope.truncate, spec.quantization) == (131072, False, "mxfp4")


@pytest.mark.parametrize(("config", "gib"), [(GPT_OSS_20B, 12.8), (GPT_OSS_120B, 60.8)], ids=["20b", "120b"])
def test_published_bytes(
    config: dict[str, object], gib: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights take the bytes of the checkpoint (model card, table 1), and `fit` says so."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert abs(read_spec(config).weight_bytes / 2**30 / gib - 1) < 0.005
    assert main(("fit", str(tmp_path), "--on", "h200", "--max-model-len", "8192")) == 0
    out = capsys.readouterr().out
    row = re.search(r"weights +([\d.]+) GiB in mxfp4 \(experts\) and bfloat16", out)
    assert row is not None and abs(float(row[1]) - gib) < 0.05


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4", "group": 16}}, "quantization_config.group = 16"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": 2}}, "'yarn' with truncate is unknown"),
    ],
)
def test_what_is_not_published_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_spec({**GPT_OSS_20B, **change})


def in_mxfp4(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(tensors of a checkpoint with random experts in MXFP4, the same dequantized by transformers)."""
    # Not for all who collect tests: it takes seconds, more than transformers itself.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.Generator().manual_seed(5)
    stored = load_file(folder / "model.safetensors")
    floats = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=codes)
        scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=codes)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    return stored, floats


def run(folder: Path, **options: object) -> tuple[torch.Tensor, LoadedModel]:
    """Logits of a prompt."""
    model = build(folder, model=ModelConfig(**options), ops=REFERENCE, device=torch.device("cpu"))
    return PagedRows(model).step([(1, list(range(3, 43)))]), model


def test_dummy_experts_are_in_mxfp4(tmp_path: Path) -> None:
    save("gpt-oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = GPT_OSS_20B["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits, model = run(tmp_path, load_format="dummy")
    assert logits.isfinite().all() and model.spec.quantization == "mxfp4"
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())


def test_experts_in_mxfp4_equal_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    save("gpt-oss", tmp_path)
    stored, floats = in_mxfp4(tmp_path)
    save_file(floats, tmp_path / "model.safetensors")
    expected = run(tmp_path)[0]
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = GPT_OSS_20B["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    logits, model = run(tmp_path)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    experts = [tensor for name, tensor in stored.items() if name.endswith(("_blocks", "_scales"))]
    held = [pair for layer in model.decoder.layers for pair in layer.feed_forward.experts]
    matrices = [weight.matrix().packed for pair in held for weight in (pair.gate_up, pair.down)]
    assert sum(tensor.nbytes for matrix in matrices for tensor in arrays(matrix)) == sum(
        each.nbytes for each in experts
    )
    missing = next(name for name in stored if name.endswith("down_proj_scales"))
    save_file({name: tensor for name, tensor in stored.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="down_proj_blocks in a file without its blocks or scales"):
        run(tmp_path)


def test_other_shapes_are_no_mxfp4() -> None:
    with pytest.raises(UnsupportedModel, match="is not MXFP4"):
        in_blocks(torch.zeros(2, 3, 8, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))


def test_blocks_equal_the_dequantization_of_transformers() -> None:
    """Every code and every scale that is a number."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    expected = convert_moe_packed_tensors(blocks.unsqueeze(0), scales.unsqueeze(0), dtype=torch.float32)[0].t()
    read = read_blocks(in_blocks(blocks, scales), 512)
    assert torch.equal(read.dequantized(), expected) and read.scales.dtype is torch.uint8
    scales[3, 4] = 255
    with pytest.raises(UnsupportedModel, match="NaN or infinite"):
        read_blocks(in_blocks(blocks, scales), 512)
