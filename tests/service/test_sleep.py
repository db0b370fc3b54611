"""A server with the shipped model gives its memory back, wakes up with the same answers, and takes other weights, over HTTP."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.models.hub import shipped_model

from .live import MODEL, Live
from .real import real_server, write_checkpoint

ENGINE = EngineConfig(device="cpu", max_num_seqs=4, threads=1, kv_cache_memory=64 << 20, enable_sleep_mode=True)
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def sleepy() -> Iterator[Live]:
    folder = shipped_model()
    config = ServiceConfig(port=0, served_model_name=MODEL, drain_s=1.0, answer_cache_mb=1.0)
    with real_server(folder, config, ENGINE, ModelConfig(str(folder))) as running:
        yield running


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The shipped model with other weights."""
    folder = shutil.copytree(shipped_model(), tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    flipped = {name: value.flip(0) if "mlp" in name else value for name, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in flipped.items()}, folder / "model.safetensors")
    return folder


def text(server: Live, **fields: object) -> str:
    body = server.complete(prompt=PROMPT, temperature=0, max_tokens=16, **fields).json
    return str(body["choices"][0]["text"])


def resident(server: Live) -> int:
    """Bytes of the engine's process in memory."""
    pages = Path(f"/proc/{server.engine.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_gives_memory_back_and_wakes_with_equal_answers(sleepy: Live, level: int):
    before, full = text(sleepy), resident(sleepy)
    slept = sleepy.send("POST", f"/sleep?level={level}").json
    assert slept["is_sleeping"] and slept["level"] == level
    assert full - resident(sleepy) > 25 << 20  # the weights are 28 MB
    assert slept["released_bytes"] > 25 << 20
    assert sleepy.get("/is_sleeping").json == {"is_sleeping": True, "level": level}
    assert sleepy.send("POST", "/wake_up").json["is_sleeping"] is False
    assert sleepy.get("/is_sleeping").json == {"is_sleeping": False, "level": 0}
    assert text(sleepy, cache_salt="computed again") == before


def test_a_request_wakes_a_sleeping_model_and_finds_no_cached_prefix(sleepy: Live):
    prompt = [7] * 200
    for _ in range(2):
        cached = sleepy.complete(prompt=prompt, max_tokens=2, temperature=1.0).json["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] > 0
    assert sleepy.send("POST", "/sleep").status == 200
    assert sleepy.send("POST", "/tokenize", {"prompt": "hi"}).json["count"] > 0
    assert sleepy.get("/is_sleeping").json["is_sleeping"]  # a tokenizer needs no weights
    reply = sleepy.complete(prompt=prompt, max_tokens=2, temperature=1.0)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert not sleepy.get("/is_sleeping").json["is_sleeping"]


def test_other_weights_take_effect_and_cached_answers_are_dropped(sleepy: Live, changed: Path):
    before = text(sleepy)
    reply = sleepy.send("POST", "/update_weights_from_disk", {"model_path": str(changed)})
    assert reply.status == 200 and reply.json["success"]
    assert text(sleepy) != before
    config = ServiceConfig(port=0, served_model_name=MODEL)
    with real_server(changed, config, ENGINE, ModelConfig(str(changed))) as other:
        assert text(sleepy) == text(other)
    assert sleepy.send("POST", "/sleep?level=2").status == 200  # update_weights wakes it up
    assert sleepy.send("POST", "/update_weights_from_disk", {"model_path": str(shipped_model())}).status == 200
    assert not sleepy.get("/is_sleeping").json["is_sleeping"]
    assert text(sleepy) == before


def test_another_architecture_is_refused_by_its_field_and_the_old_weights_stay(
    sleepy: Live, changed: Path, tmp_path: Path
):
    before = text(sleepy)
    write_checkpoint(tmp_path)
    for folder, field in ((tmp_path, "vocab_size"), (tmp_path / "none", "config.json")):
        reply = sleepy.send("POST", "/update_weights_from_disk", {"model_path": str(folder)})
        assert reply.status == 400 and reply.json["error"]["param"] == "model_path"
        assert field in reply.json["error"]["message"]
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    reply = sleepy.send("POST", "/update_weights_from_disk", {"model_path": str(changed)})
    assert reply.status == 400 and "safetensors" in reply.json["error"]["message"]
    assert text(sleepy) == before


@pytest.mark.long
def test_an_engine_that_replaces_a_lost_one_has_the_weights_of_the_last_update(changed: Path):
    folder = shipped_model()
    config = ServiceConfig(port=0, served_model_name=MODEL)
    with real_server(folder, config, ENGINE, ModelConfig(str(folder))) as server:
        assert server.send("POST", "/update_weights_from_disk", {"model_path": str(changed)}).status == 200
        after = text(server)
        lost = server.server.front.client
        os.kill(server.engine.process.pid, signal.SIGKILL)
        server.until(lambda: server.server.front.client is not lost and server.server.front.trouble is None, 30)
        assert text(server) == after


def test_sleep_waits_for_running_requests_or_ends_them(sleepy: Live):
    answers: list[object] = []

    def ask() -> None:
        answers.append(sleepy.complete(prompt=PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0))

    for mode in ("wait", "abort"):
        asking = threading.Thread(target=ask)
        asking.start()
        sleepy.until(lambda: sleepy.server.front.client.open_choices > 0)
        if mode == "wait":
            assert sleepy.send("POST", "/sleep?timeout_s=0").status == 503
        assert sleepy.send("POST", f"/sleep?mode={mode}").status == 200
        asking.join()
        assert sleepy.send("POST", "/wake_up").status == 200
    finished, ended = answers
    assert finished.status == 200 and finished.json["usage"]["completion_tokens"] == 400
    assert ended.status == 500 and "operator" in ended.json["error"]["message"]


def test_wrong_values_are_refused(sleepy: Live):
    for query, param in (("level=3", "level"), ("mode=never", "mode"), ("timeout_s=x", "timeout_s")):
        reply = sleepy.send("POST", f"/sleep?{query}")
        assert reply.status == 400 and reply.json["error"]["param"] == param
    assert sleepy.send("POST", "/sleep?model=other").status == 404
    assert sleepy.send("POST", "/update_weights_from_disk", {}).json["error"]["param"] == "model_path"


def test_an_idle_model_goes_to_sleep_and_refuses_requests_if_it_is_told_to(tmp_path: Path):
    write_checkpoint(tmp_path)
    options = {"idle_sleep_minutes": 0.001, "asleep_requests": "refuse"}
    with real_server(tmp_path, ServiceConfig(port=0, served_model_name=MODEL, **options), ENGINE) as server:
        deadline = time.monotonic() + 10
        while not server.get("/is_sleeping").json["is_sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        reply = server.chat()
        assert reply.status == 503 and "retry-after" in reply.headers and "wake" in reply.json["error"]["message"]


@pytest.mark.long
def test_without_the_option_the_routes_say_so(tmp_path: Path):
    write_checkpoint(tmp_path)
    engine = EngineConfig(device="cpu", threads=1)
    with real_server(tmp_path, ServiceConfig(port=0, served_model_name=MODEL), engine) as server:
        reply = server.send("POST", "/sleep")
        assert reply.status == 400 and "--enable-sleep-mode" in reply.json["error"]["message"]
        assert server.get("/is_sleeping").json["is_sleeping"] is False
