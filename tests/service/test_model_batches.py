"""Batches and the shadow model in a server with several models: rows load their models and give way to online requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service import shadow
from ridgeline.service.models import rows as model_rows
from ridgeline.service.models.file import read_models
from ridgeline.service.models.front import ModelsFront
from ridgeline.service.models.model import Model

from .live import Live
from .real import write_checkpoint
from .test_batch_lane import get, lines, start, until
from .test_models import PROMPT, SMALL, serving, states, text, write
from .test_shadow import reference

PATH = "/v1/completions"
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rows, "IDLE_S", 0.1)
    monkeypatch.setattr(model_rows, "LOADS", 1)
    monkeypatch.setattr(shadow, "LOOK_S", 0.01)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return {**SMALL, "model": str(folder), "load_format": "dummy", "dtype": "float32"}


def row(name: str, model: str | None, **fields: Any) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    body |= {} if model is None else {"model": model}
    return json.dumps({"custom_id": name, "method": "POST", "url": PATH, "body": body}).encode() + b"\n"


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(server: Live, batch_id: str) -> dict[str, Any]:
    wait(lambda: get(server, batch_id)["status"] == "completed")
    return get(server, batch_id)


def test_each_row_runs_in_the_model_that_it_names(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    write_checkpoint(tmp_path / "broken", model_type="unheard-of", architectures=["Unheard"])
    models = {"a": tiny, "b": tiny, "broken": {**SMALL, "model": str(tmp_path / "broken")}}
    data = b"".join(row(f"{model}{number}", model) for number in range(3) for model in ("a", "b", "broken"))
    data += row("latest", "a:latest") + row("unknown", "c") + row("nameless", None)
    with serving(write(tmp_path, models), batch_dir=str(tmp_path / "state")) as server:
        batch = ended(server, start(server, data, endpoint=PATH))
        front = server.server.front
        answered = {line["custom_id"]: line["response"] for line in lines(server, batch["output_file_id"])}
        assert {name: answer["body"]["model"] for name, answer in answered.items()} == {
            **{f"{model}{number}": model for number in range(3) for model in ("a", "b")},
            "latest": "a",
        }
        failed = {line["custom_id"]: line["response"] for line in lines(server, batch["error_file_id"])}
        assert {name: answer["status_code"] for name, answer in failed.items()} == {
            **{f"broken{number}": 500 for number in range(3)},
            "unknown": 404,
            "nameless": 400,
        }
        message = failed["broken0"]["body"]["error"]["message"]
        assert message.startswith("The model 'broken' cannot be loaded: ") and message.count("cannot be loaded") == 1
        assert "Unheard" in message
        assert "name one in each row: a, b, broken" in failed["nameless"]["body"]["error"]["message"]
        assert front.models["a"].loads == front.models["b"].loads == 1, "rows are sorted by model"
        assert states(server) == {"a": "asleep", "b": "asleep", "broken": "failed"}
        taken = {name: rows._taken for name, rows in server.server.rows._engines.items()}
        assert taken == {"a": 0, "b": 0, "broken": 0}, "every place is given back once"
        series = server.get("/metrics").data.decode()
        assert 'ridgeline:batch_rows_total{result="completed"} 7.0' in series
        assert 'ridgeline:batch_rows_total{result="failed"} 5.0' in series


@pytest.mark.long
def test_rows_give_way_to_requests_for_another_model_and_come_back(tiny: dict[str, Any], tmp_path: Path) -> None:
    with serving(write(tmp_path, {"a": tiny, "b": tiny}), batch_dir=str(tmp_path / "state")) as server:
        text(server, "a")
        text(server, "b")
        assert states(server) == {"a": "asleep", "b": "awake"}
        batch_id = start(server, b"".join(row(str(number), "a", max_tokens=400) for number in range(48)), endpoint=PATH)
        until(server, batch_id, "in_progress")
        wait(lambda: states(server) == {"a": "awake", "b": "asleep"})
        text(server, "b")
        assert states(server)["b"] == "awake"
        assert get(server, batch_id)["request_counts"]["completed"] < 48, "the request did not wait for the batch"
        batch = ended(server, batch_id)
        assert batch["request_counts"] == {"total": 48, "completed": 48, "failed": 0}


@pytest.mark.long
def test_answers_of_each_model_are_scored_by_its_reference(tiny: dict[str, Any], tmp_path: Path) -> None:
    with reference() as (url, asked):
        models = {"a": {**tiny, "shadow-rate": 1.0, "shadow-url": url, "shadow-model": "original"}, "b": tiny}
        with serving(write(tmp_path, models)) as server:
            text(server, "b")
            text(server, "a")
            name = 'ridgeline:shadow_answers_total{engine="0",model_name="a"} 1.0'
            wait(lambda: name in server.get("/metrics").data.decode())
            assert [body["model"] for body in asked] == ["original"]
            text(server, "b")  # scoring does not keep the model awake
            assert states(server) == {"a": "asleep", "b": "awake"}


def test_rows_pass_those_of_a_model_that_takes_nothing_from_them(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "takes_memory", property(lambda model: model.name == "b"))
    models = {name: {**tiny, "memory_gb": 1} for name in "ab"}
    for limit, passes in ((None, False), (1, False), (2, True)):
        entries = read_models(write(tmp_path, models), {"models_memory_gb": limit}, {})
        front = ModelsFront(ServiceConfig(models_memory_gb=limit), [Model(entry, tmp_path) for entry in entries])
        assert model_rows.ModelRows(front, None).may_pass("a") == passes


def test_a_reference_in_this_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'a' .*shadow_rate with several models needs .* as shadow_url"):
        read_models(write(tmp_path, {"a": {"shadow_rate": 0.5, "shadow_model": "x"}}), {"device": "cpu"}, {})
