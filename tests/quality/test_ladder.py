"""The ladder of one model: which rungs there are, what is held against what, and the command on the shipped model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.ops import native_cpu
from ridgeline.quality.ladder import chart, flips, rungs

from ..cli.conftest import tiny
from .test_scores import model

__all__ = ["model", "tiny"]
SHORT = ("--prompts", "2", "--prompt-tokens", "32", "--answer-tokens", "24", "--repeats", "1", "--judged-tokens", "300")
HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.jsonl"


def test_every_rung_keeps_what_the_one_below_has() -> None:
    steps = rungs(ModelConfig(model="m"), EngineConfig(threads=3), ["int8", "int4"], "compiled")
    assert [step.name for step in steps] == ["eager", "compiled", "int8", "int4", "speculation"]
    assert [step.model.quantization for step in steps] == ["", "", "int8", "int4", "int4"]
    assert [step.engine.enforce_eager for step in steps] == [True, False, False, False, False]
    assert [step.engine.speculate for step in steps] == ["", "", "", "", "auto"]
    assert all(step.model.model == "m" and step.engine.threads == 3 for step in steps)
    last = rungs(ModelConfig(), EngineConfig(speculate="lookahead"), [], "graphs")[-1]
    assert last.engine.speculate == "lookahead" and last.model.quantization == ""


def test_tokens_behind_a_first_difference_do_not_count() -> None:
    below = [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert flips(below, below) == (0, 8)
    assert flips(below, [(1, 9, 9, 9), (5, 6, 7, 8)]) == (1, 6)


def climbed(folder: Path, *model: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and plot of a model in float32, where the same numbers give the same tokens."""
    threads, out, plot = torch.get_num_threads(), folder / "ladder.json", folder / "ladder.svg"
    words = [
        "ladder",
        *model,
        "--device",
        "cpu",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--text",
        str(HELD_OUT),
        *SHORT,
    ]
    assert main([*words, "--out", str(out), "--plot", str(plot)]) == 0
    torch.set_num_threads(threads)
    return json.loads(out.read_text()), plot.read_text()


@pytest.mark.long
def test_speed_memory_and_drift_of_every_rung(tmp_path: Path) -> None:
    by_rung = {row["rung"]: row for row in climbed(tmp_path)[0]}
    eager, compiled, int8, int4, last = by_rung.values()
    assert eager["ops"] == "cpu" and eager["kl"] == 0.0 and eager["top1"] == 1.0 and eager["speedup"] == 1.0
    assert compiled["ops"] == ("cpu" if native_cpu.load()[0] is None else "native")
    assert compiled["kl"] < 1e-5 and compiled["weight_bytes"] == eager["weight_bytes"]
    assert 0.0 < int8["kl"] < 0.01 < int4["kl"] < 0.5 and int4["top1"] < int8["top1"] < 1.0
    assert int4["weight_bytes"] < int8["weight_bytes"] < 0.6 * eager["weight_bytes"]
    assert all(0 < row["tok_s_low"] <= row["tok_s"] <= row["tok_s_high"] for row in by_rung.values())
    assert last["quantization"] == "int4" and last["speculate"] == "reference" and last["drafter_bytes"] == 0
    assert (last["answers"], last["answers_changed"], last["tokens_compared"]) == (2, 0, 48)
    assert last["kl"] == pytest.approx(int4["kl"], abs=1e-4)


def test_a_small_model_climbs_and_the_plot_names_every_rung(model: Path, tmp_path: Path) -> None:
    rows, plot = climbed(tmp_path, str(model))
    assert [row["rung"] for row in rows] == ["eager", "compiled", "int8", "int4", "speculation"]
    assert rows[3]["weight_bytes"] < rows[2]["weight_bytes"] < rows[1]["weight_bytes"] == rows[0]["weight_bytes"]
    texts = [element.text or "" for element in ElementTree.fromstring(plot).iter() if element.text]
    for row in rows:
        assert any(text.startswith(f"rungs: {row['rung']}: ") for text in texts)
    assert chart(rows, "title").title == "title"


def test_what_cannot_be_climbed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("One line.")
    for words, said in (
        (["--text", str(short)], "No text has 128 tokens: lower --prompt-tokens"),
        (["--answer-tokens", "1"], "--answer-tokens is 1: give 2 or more"),
        (["--prompt-tokens", "100x"], "argument --prompt-tokens"),
        (["--prompt-tokens", "100k"], "100000 prompt tokens and 128 answer tokens exceed the context of 4096"),
        (["--prompt-tokens", "100000"], "exceed the context of 4096: lower --prompt-tokens"),
        (["--speculate", "guess"], "--speculate: 'guess' is unknown"),
        (["--enforce-eager"], "leave --enforce-eager out"),
        (
            ["--prompt-tokens", "2", "--text", str(short), "--prompts", "5"],
            "The texts give 1 prompt of 2 tokens: lower --prompts",
        ),
        (["--formats", "int5"], "quantization 'int5' is unknown"),
    ):
        assert main(["ladder", "--device", "cpu", "--threads", "1", *words]) == 2
        assert said in capsys.readouterr().err
