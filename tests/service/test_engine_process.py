"""The real engine in its own process, on a tiny random model: it answers, and is replaced when it is killed."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig, ServiceConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.service.launch import launch
from ridgeline.service.supervisor import Supervisor

from .live import EOS, MODEL, Live, Reply, tokenizer
from .real import model_of, real_server, write_checkpoint

OPERATOR = {"x-api-key": "operator"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    config = ServiceConfig(port=0, served_model_name=MODEL, drain_s=1.0, admin_api_key="operator")
    with real_server(folder, config, EngineConfig(device="cpu", max_num_seqs=4, threads=1)) as running:
        yield running


def test_answers(real: Live):
    body = real.chat(max_tokens=6, ignore_eos=True, logprobs=True).json
    assert body["usage"]["completion_tokens"] == 6 == len(body["choices"][0]["logprobs"]["content"])
    first, second = (real.complete(temperature=0, max_tokens=12).json["choices"][0]["text"] for _ in range(2))
    assert first == second
    choice = real.complete(prompt="hello the", echo=True, logprobs=1, max_tokens=0).json["choices"][0]
    assert choice["text"] == "hello the" and len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert real.chat(structured_outputs={"choice": ["yes", "no"]}).json["choices"][0]["message"]["content"] in (
        "yes",
        "no",
    )


def test_a_budget_ends_reasoning(real: Live):
    """A model that would open its reasoning again for ever: after five tokens it has to answer."""
    asks = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 30, "max_thinking_tokens": 5}
    body = real.chat(**asks, temperature=0, logit_bias={str(tokenizer().token_id("<think>")): 100}).json
    message = body["choices"][0]["message"]
    assert message["content"] in ("yes", "no") and message["reasoning_content"] == "<think>" * 5
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] in (6, 7)  # with the tags


def test_the_prefix_cache_shows_in_usage_and_can_be_reset(real: Live):
    prompt = [7] * 100
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    other = real.complete(prompt=prompt, max_tokens=2, cache_salt="other").json
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert real.send("POST", "/reset_prefix_cache", headers=OPERATOR).json["forgotten"] > 0
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_nothing_is_held_when_nobody_asks(real: Live):
    assert real.complete(prompt=["a", "b", "c"], n=2, max_tokens=5, stop=EOS).status == 200
    stats = real.send("GET", "/admin/stats", headers=OPERATOR).json
    assert stats["free"] + stats["used"] == stats["total"]
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path):
    write_checkpoint(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")

    async def start() -> None:
        process = await launch(model_of(tmp_path), EngineConfig(device="cpu"))
        try:
            with pytest.raises(UnsupportedModel, match="Mamba"):
                await process.client.wait_ready()
        finally:
            await process.stop()
        assert process.process.returncode == 2

    asyncio.run(asyncio.wait_for(start(), 60))


def test_a_launch_that_is_cancelled_leaves_no_process(tmp_path: Path):
    """As SIGTERM does in the middle of a restart."""

    async def start() -> None:
        before, files = children(), os.listdir("/proc/self/fd")
        task = asyncio.ensure_future(launch(model_of(tmp_path), EngineConfig(device="cpu")))
        await asyncio.sleep(0)
        assert len(children() - before) == 1, "it has begun, and nobody speaks to it yet"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert children() == before and len(os.listdir("/proc/self/fd")) == len(files)

    asyncio.run(asyncio.wait_for(start(), 60))


def children() -> set[str]:
    """Processes that this one has started and not yet seen end."""
    names = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                names.add(stat.parent.name)
    return names


@pytest.mark.long
def test_a_stopped_process_is_silent_and_is_killed(tmp_path: Path):
    write_checkpoint(tmp_path)

    async def start() -> None:
        config = EngineConfig(device="cpu", max_num_seqs=4, threads=1)
        begin = partial(launch, model_of(tmp_path), config, silence_s=2.0)
        first = await begin()
        supervisor = Supervisor(first, begin, ServiceConfig())
        try:
            await first.client.wait_ready()
            first.process.send_signal(signal.SIGSTOP)
            assert "the engine has been silent" in await supervisor.wait_lost()
            client = await supervisor.restart()
            assert first.process.returncode == -signal.SIGKILL
            assert (await client.wait_ready())["max_len"] == 512
        finally:
            await supervisor.stop()
        assert supervisor.engine.process.returncode == 0

    asyncio.run(asyncio.wait_for(start(), 120))


def test_a_killed_engine_is_told_by_its_streams_and_replaced(real: Live):
    seen: list[bytes] = []

    def ask() -> None:
        seen.append(real.complete(max_tokens=400, ignore_eos=True, stream=True, n=4).data)

    asking = threading.Thread(target=ask)
    asking.start()
    real.until(lambda: real.server.front.client.open_choices > 0)
    process: subprocess.Popen[bytes] = real.engine.process
    process.send_signal(signal.SIGKILL)
    asking.join(20)
    assert seen[0].count(b'"error"') == 1 and b"[DONE]" not in seen[0]
    assert process.wait(20) == -signal.SIGKILL
    health = real.send("GET", "/health")
    assert health.status == 503 and "SIGKILL" in health.error["message"]
    real.until(lambda: real.server.front.trouble is None, 60)
    assert real.complete(max_tokens=3).json["usage"]["completion_tokens"] == 3
    stats = real.send("GET", "/admin/stats", headers=OPERATOR).json
    assert stats["free"] + stats["used"] == stats["total"]


# --- profiles -------------------------------------------------------------------------------------------------------


def profile(real: Live, **body: object) -> Reply:
    return real.send("POST", "/debug/profile", body, OPERATOR)


def test_a_profile_of_steps(real: Live):
    busy = threading.Thread(target=real.complete, kwargs={"max_tokens": 400, "ignore_eos": True})
    busy.start()
    answer = profile(real, steps=4, with_stack=True)
    busy.join()
    assert answer.status == 200 and answer.headers["content-disposition"].endswith("trace.json.gz")
    names = [event.get("name", "") for event in json.loads(gzip.decompress(answer.data))["traceEvents"]]
    assert sum(name.endswith(": commit") and "scheduler.py" in name for name in names) >= 4


def test_profiles_exclude_each_other_and_end_with_their_client(real: Live):
    connection = real.connect()
    connection.request("POST", "/debug/profile", '{"seconds": 60}', {"content-type": "application/json", **OPERATOR})
    real.until(lambda: real.server.front.active == 1)
    refused = profile(real, seconds=0.01)
    assert refused.status == 409 and "is being recorded" in refused.error["message"]
    connection.close()
    real.until(lambda: real.server.front.active == 0)
    answer = profile(real, seconds=0.01)
    assert answer.status == 200 and json.loads(gzip.decompress(answer.data))["traceEvents"]


def test_profiles_need_the_key_of_operators(real: Live, polite: Live):
    assert real.send("POST", "/debug/profile", {}).status == 401
    without = polite.send("POST", "/debug/profile", {})
    assert without.status == 403 and "--admin-api-key" in without.error["message"]
    assert profile(real, seconds=1, steps=1).error["param"] == "steps"
    assert profile(real, seconds=61).error["param"] == "seconds"
