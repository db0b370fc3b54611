"""Steps of models that nobody has but as a config.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import shapes
import torch

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 96}  # fmt: skip


@pytest.mark.parametrize("name", shapes.MODELS)
def test_every_model_is_one_that_we_serve(name: str) -> None:
    """With its layers cut and its sizes kept."""
    model = shapes.load(name, 2, torch.device("meta"))
    facts = shapes.MODELS[name]
    assert len(model.spec.layers) == 2 and model.spec.d_model == facts["hidden_size"]
    assert shapes.floor_s(model, shapes.case_of("decode:1x256")) > model.spec.step_weight_bytes / 4.3e12
    one, four = (shapes.floor_s(model, shapes.case_of(step)) for step in ("prefill:2048", "chunks:4x2048"))
    assert 3.5 * one < four < 4.1 * one


def test_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3-4b", "gemma-2-2b"):
        monkeypatch.setitem(shapes.MODELS, name, shapes.MODELS[name] | SMALL)
    steps, out = "decode:3x20,prefill:24,chunks:2x16", tmp_path / "shapes.json"
    words = ["--device", "cpu", "--models", "qwen3-4b,gemma-2-2b:fp8", "--steps", steps, "--layers", "2"]
    monkeypatch.setattr(sys, "argv", ["shapes.py", *words, "--repeats", "2", "--out", str(out)])
    shapes.main()
    rows = json.loads(out.read_text())
    assert [row["row"] for row in rows] == [
        f"{name}-{step}" for name in ("qwen3-4b", "gemma-2-2b:fp8") for step in steps.split(",")
    ]
    assert all(row["floor_us"] < row["us"] and row["layers"] == 2 for row in rows)
