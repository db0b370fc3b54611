"""A server with LoRA adapters: they are listed, chosen by the model of a request, loaded and unloaded over HTTP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.models.hub import shipped_model
from tests.models.adapter_files import write_adapter

from .live import MODEL, Live
from .real import real_server

ENGINE = EngineConfig(device="cpu", max_num_seqs=4, threads=1, kv_cache_memory=16 << 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(shipped_model(), folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Live]:
    folder = shipped_model()
    config = ServiceConfig(port=0, served_model_name=MODEL, drain_s=1.0, answer_cache_mb=1.0)
    model = ModelConfig(str(folder), lora_modules=f"one={root / 'one'}", max_loras=2)
    with real_server(folder, config, ENGINE, model) as running:
        yield running


def text(server: Live, model: str) -> str:
    body = server.complete(model=model, prompt="Once upon a time there was a", temperature=0, max_tokens=8).json
    assert body["model"] == model
    return str(body["choices"][0]["text"])


def change(server: Live, route: str, **fields: object) -> str:
    """The message of a route that loads or unloads."""
    body = server.send("POST", f"/v1/{route}", fields).json
    return str(body["message"] if "message" in body else body["error"]["message"])


def names(server: Live) -> list[tuple[str, str | None]]:
    return [(entry["id"], entry["parent"]) for entry in server.send("GET", "/v1/models").json["data"]]


def test_adapters_are_models_that_come_and_go(server: Live, root: Path) -> None:
    assert names(server) == [(MODEL, None), ("one", MODEL)]
    assert server.send("GET", "/v1/models/one").json["root"] == str(root / "one")
    base, first = text(server, MODEL), text(server, "one")
    missing = server.complete(model="two", prompt="x")
    assert missing.status == 404 and f"serves '{MODEL}', 'one'" in missing.json["error"]["message"]
    assert (
        change(server, "load_lora_adapter", lora_name="two", lora_path=str(root / "two"))
        == "The adapter 'two' is loaded."
    )
    two = text(server, "two")
    assert len({base, first, two}) == 3
    assert [text(server, name) for name in (MODEL, "one", "two")] == [base, first, two]
    assert "unloaded" in change(server, "unload_lora_adapter", lora_name="two")
    assert server.complete(model="two", prompt="x").status == 404
    change(server, "load_lora_adapter", lora_name="two", lora_path=str(root / "one"))
    assert text(server, "two") == first
    change(server, "unload_lora_adapter", lora_name="two")
    metrics = server.send("GET", "/metrics").data.decode()
    assert f'ridgeline:adapters_loaded{{model_name="{MODEL}"}} 1.0' in metrics
    assert f'ridgeline:adapter_requests_total{{model_name="{MODEL}",lora_name="two"}} 3.0' in metrics


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_name": "x"}, "lora_path is missing"),
        ({"lora_name": "a=b", "lora_path": "x"}, "without ="),
        ({"lora_name": MODEL, "lora_path": "x"}, "the name of the model"),
        ({"lora_name": "one", "lora_path": "x"}, "unload it first"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "adapter_config.json cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_refused(server: Live, fields: dict[str, str], message: str) -> None:
    assert message in change(server, "load_lora_adapter", **fields)
    assert names(server) == [(MODEL, None), ("one", MODEL)]


@pytest.mark.long
def test_adapters_survive_the_engine(server: Live, root: Path) -> None:
    """A new engine gets the adapters that were loaded, not only those of the start."""
    change(server, "load_lora_adapter", lora_name="two", lora_path=str(root / "two"))
    change(server, "unload_lora_adapter", lora_name="one")
    expected = text(server, "two")
    os.kill(server.engine.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.complete(model="two", prompt="x", max_tokens=1).status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert names(server) == [(MODEL, None), ("two", MODEL)]
    assert text(server, "two") == expected
    change(server, "load_lora_adapter", lora_name="one", lora_path=str(root / "one"))
    change(server, "unload_lora_adapter", lora_name="two")
