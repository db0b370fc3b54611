"""The head beside quantized layers: 8 bits, from a matrix of its own or from the embedding, in one process or in the last stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.config import ModelConfig
from ridgeline.core.quantization import HEAD_FORMAT, quantized
from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.models.build import LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from ridgeline.parallel.pipeline import Stage
from ridgeline.planner.layouts import Layout, stages
from ridgeline.quant import integer
from ridgeline.quant.integer import round_to_nearest
from tests.models.families import save
from tests.quant.test_checkpoints import rounded_head

CPU = torch.device("cpu")
FORMATS = ("int8", "int4", "fp8", "fp8-weight", "w8a8", "llm-int8")
"""Of the layers: one of each kind."""


def load(folder: Path, ops: Ops = REFERENCE, mesh: Mesh = ONE_DEVICE, **options: Any) -> LoadedModel:
    return build(folder, model=ModelConfig(**options), ops=ops, device=CPU, mesh=mesh)


def hidden_states(model: LoadedModel, tokens: int = 9) -> torch.Tensor:
    return torch.randn(tokens, model.spec.d_model, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-tied"])
def test_logits_are_those_of_a_head_in_eight_bits(family: str, quantization: str, tmp_path: Path) -> None:
    """Also of 321 tokens, which kernels of a CPU take 16 at a time, and for one token as for several."""
    save(family, tmp_path)
    plain, model = load(tmp_path), load(tmp_path, quantization=quantization)
    compiled = load(tmp_path, choose(CPU, torch.float32), quantization=quantization)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    hidden = hidden_states(model)
    want = hidden @ rounded_head(head).t()
    assert not torch.equal(plain.decoder.logits(hidden), want)
    torch.testing.assert_close(model.decoder.logits(hidden), want, rtol=1e-5, atol=1e-5)
    for given in (hidden, hidden[:1]):
        torch.testing.assert_close(compiled.decoder.logits(given), want[: len(given)], rtol=1e-3, atol=1e-3)
    assert torch.equal(model.decoder.embedding, plain.decoder.embedding)
    assert (model.spec.head_format, plain.spec.head_format) == (HEAD_FORMAT, "")


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-tied"])
def test_plans_count_the_served_head(family: str, tmp_path: Path) -> None:
    """What planners compute with is what is served, and its bytes are those of the tensors."""
    save(family, tmp_path, torch.bfloat16)
    checkpoint, _ = read_model(tmp_path)
    served = served_spec(checkpoint, ModelConfig(quantization="int4"))
    assert quantized(checkpoint, "int4") == served and quantized(checkpoint, "") == checkpoint
    model = load(tmp_path, quantization="int4")
    assert model.decoder.head is not None
    assert served.head_bytes == sum(tensor.nbytes for tensor in model.decoder.head.tensors())


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-tied"])
def test_a_last_stage_makes_its_head_without_an_embedding(family: str, tmp_path: Path) -> None:
    save(family, tmp_path, torch.bfloat16)
    whole = load(tmp_path, quantization="int8")
    last = len(whole.spec.layers) - 1
    mesh = replace(ONE_DEVICE, stage=Stage(1, 2, slice(last, last + 1)))
    stage = load(tmp_path, mesh=mesh, quantization="int8")
    hidden = hidden_states(whole).bfloat16()
    assert not stage.decoder.embedding.numel()
    assert torch.equal(stage.decoder.logits(hidden), whole.decoder.logits(hidden))
    planned = stages(replace(whole.spec, layers=whole.spec.layers[:1] * 2), Layout(pipeline=2))[1]
    held = sum(tensor.nbytes for tensor in stage.decoder.tensors())
    assert planned.spec.weight_bytes + planned.embedding_bytes == held
    assert planned.spec.step_weight_bytes == held


def test_a_head_that_an_export_repeats_is_not_read_twice(tmp_path: Path) -> None:
    """Some exports of tied models store the head, too."""
    save("llama-mqa-tied", tmp_path)
    want = load(tmp_path, quantization="int8")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    model, hidden = load(tmp_path, quantization="int8"), hidden_states(want)
    assert torch.equal(model.decoder.logits(hidden), want.decoder.logits(hidden))


@pytest.mark.parametrize("name", ["int8", "int4-g32-zp"])
def test_a_large_matrix_is_rounded_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, form = torch.randn(37, 64), NUMBER_FORMATS[name]
    whole = round_to_nearest(weight, form)
    monkeypatch.setattr(integer, "ROUNDED", 5 * 64)
    for tensor, want in zip(round_to_nearest(weight, form), whole, strict=True):
        assert tensor is want is None or torch.equal(tensor, want)
