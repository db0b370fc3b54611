"""Steps of models that nobody has but as a config.json."""

from __future__ import annotations

import json
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
    read = model.spec.step_weight_bytes - model.spec.idle_bytes(1, 1)
    assert shapes.floor_s(model, shapes.case_of("decode:1x256")) > read / 4.3e12
    single, four = (shapes.floor_s(model, shapes.case_of(step)) for step in ("prefill:2048", "chunks:4x2048"))
    # A single prompt already reads all experts: that, not its arithmetic, is its floor.
    assert (3.2 if model.spec.layers[0].experts else 3.5) * single < four < 4.1 * single


def small(folder: Path, name: str) -> Path:
    """A folder with the config.json of a model of this family that is quick on a CPU."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes.MODELS[name] | SMALL))
    return folder


def test_rows_are_written(tmp_path: Path) -> None:
    names = [str(small(tmp_path / "qwen", "qwen3-4b")), f"{small(tmp_path / 'gemma', 'gemma-2-2b')}:fp8"]
    steps, out = "decode:3x20,prefill:24,chunks:2x16", tmp_path / "shapes.json"
    words = ["--device", "cpu", "--models", ",".join(names), "--steps", steps, "--layers", "2"]
    shapes.main([*words, "--repeats", "2", "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["row"] for row in rows] == [f"{name}-{step}" for name in names for step in steps.split(",")]
    assert all(row["floor_us"] < row["us"] and row["layers"] == 2 for row in rows)
