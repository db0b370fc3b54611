"""The program of the first host (gpu_host), here on a CPU whose steps run as graphs do on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.runner import Runner
from ridgeline.ops.capture import Uncaptured
from tests.engine.gpu_host import main
from tests.models.families import save


def graphs(runner: Runner) -> GraphExecutor:
    made = GraphExecutor(runner._step, runner._sizes, Uncaptured)
    with torch.inference_mode():
        made.capture(lambda stage, done, total: None)
    return made


def test_replayed_graphs_are_counted_and_say_what_steps_without_graphs_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save("llama-gqa", tmp_path)
    said: list[dict[str, Any]] = []
    executors: list[GraphExecutor] = []

    def kept(runner: Runner) -> GraphExecutor:
        executors.append(graphs(runner))
        assert executors[0]._captured
        return executors[0]

    for make in (Runner._make_executor, kept):
        monkeypatch.setattr(Runner, "_make_executor", make)
        main({"folder": str(tmp_path), "sizes": {"device": "cpu"}})
        said.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    eager, replayed = said
    assert replayed["answers"] == replayed["again"] == eager["answers"] and len(eager["answers"]) == 12
    assert replayed["replayed"] > 20 and not eager["replayed"]
    assert not executors[0]._captured, "a closed engine has freed its graphs, which connections of ranks wait for"
