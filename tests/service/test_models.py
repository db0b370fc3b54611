"""Several models in one server, over HTTP: loaded when a request names them, asleep or unloaded when others need the memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import resolve
from ridgeline.metrics.exposition import merged
from ridgeline.models.hub import resolve_model, shipped_model
from ridgeline.service.address import Address
from ridgeline.service.app import make_app
from ridgeline.service.batches.rows import ENDPOINTS, RowRequest
from ridgeline.service.keys.errors import ModelNotAllowed
from ridgeline.service.listen import bind
from ridgeline.service.models.file import read_models
from ridgeline.service.models.front import ModelsFront
from ridgeline.service.models.model import Model
from ridgeline.service.models.rows import ModelRows
from ridgeline.service.server import listen

from .live import Live
from .real import write_checkpoint

SMALL = {"device": "cpu", "threads": 1, "max_num_seqs": 4, "kv_cache_memory": 32 << 20}
PROMPT = "Once upon a time"


def write(folder: Path, models: dict[str, Any], name: str = "models.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"models": models}))
    return path


@contextmanager
def serving(path: Path, **flags: Any) -> Iterator[Live]:
    """A server with the models of a file."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start():
        config = resolve({"port": 0, "drain_s": 1.0, "batch_dir": "off", **flags}).service
        entries = read_models(path, {"drain_s": 1.0, **flags}, {})
        front = ModelsFront(config, [Model(entry, resolve_model(entry.resolved.model)) for entry in entries])
        rows = ModelRows(front, None)
        return front, rows, await listen(make_app(front, rows), Address.read(config), bind(config.host, 0))

    front, rows, runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)

    async def stop() -> None:
        await front.drain()
        await runner.cleanup()
        await front.end()

    try:
        yield Live(runner.addresses[0][1], loop, SimpleNamespace(front=front, rows=rows), None)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def states_of(server: Live) -> dict[str, str]:
    return {name: model.state for name, model in server.server.front.models.items()}


def states(server: Live) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.get("/v1/models").json["data"]}


def text(server: Live, model: str, **fields: Any) -> str:
    reply = server.send(
        "POST", "/v1/completions", {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    )
    assert reply.status == 200, reply.data
    assert reply.json["model"] == model
    return str(reply.json["choices"][0]["text"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a small model with random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return {**SMALL, "model": str(folder), "load_format": "dummy", "dtype": "float32"}


@pytest.fixture(scope="module")
def pair(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The small model under two names, of which one is awake at a time. Tests end its engines."""
    with serving(write(tmp_path_factory.mktemp("pair"), {"a": tiny, "b": tiny})) as server:
        yield server


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The shipped model under two names, of which one is awake at a time. In float32, where answers do not depend on how many
    requests a step has.
    """
    shipped = {**SMALL, "model": str(shipped_model()), "dtype": "float32"}
    models = {"first": shipped, "second": {**shipped, "max-model-len": 256}}
    with serving(write(tmp_path_factory.mktemp("two"), models)) as server:
        yield server


def test_a_request_loads_its_model_and_the_other_one_sleeps_meanwhile(two: Live):
    assert states(two) == {"first": "unloaded", "second": "unloaded"}
    assert two.get("/health").status == 200
    first = text(two, "first")
    assert states(two) == {"first": "awake", "second": "unloaded"}
    assert text(two, "second") == first
    assert states(two) == {"first": "asleep", "second": "awake"}
    process = two.server.front.models["first"].front.client
    assert text(two, "first", cache_salt="computed again") == first
    assert two.server.front.models["first"].front.client is process  # woken up, not started again
    assert states(two) == {"first": "awake", "second": "asleep"}
    assert two.server.front.models["first"].loads == two.server.front.models["second"].loads == 1


def test_each_model_has_its_own_options_card_and_series(two: Live):
    text(two, "second")
    assert two.get("/v1/models/second").json["max_model_len"] == 256
    assert two.get("/v1/models/first").json["max_model_len"] > 256
    reply = two.send("POST", "/v1/completions", {"model": "second", "prompt": PROMPT, "max_tokens": 300})
    assert reply.status == 400 and "256" in reply.json["error"]["message"]
    series = two.get("/metrics").data.decode()
    assert 'ridgeline:model_state{model_name="second",state="awake"} 1.0' in series
    assert 'ridgeline:model_state{model_name="first",state="asleep"} 1.0' in series
    assert series.count("# TYPE ridgeline:prompt_tokens_total counter") == 1
    assert all(
        f'ridgeline:prompt_tokens_total{{engine="0",model_name="{name}"}}' in series for name in ("first", "second")
    )


def test_a_model_sleeps_and_wakes_by_its_name(two: Live):
    text(two, "first")
    assert two.send("POST", "/sleep?model=first&level=2").json["is_sleeping"]
    assert states(two) == {"first": "asleep", "second": "asleep"}
    assert two.send("POST", "/tokenize", {"model": "first", "prompt": "hi"}).status == 200
    assert two.send("POST", "/wake_up?model=second").status == 200
    assert states(two) == {"first": "asleep", "second": "awake"}
    assert two.get("/is_sleeping?model=first").json["is_sleeping"]


def test_an_unknown_model_is_refused_and_names_the_known_ones(two: Live):
    for method, path, body in (
        ("POST", "/v1/completions", {"model": "third", "prompt": "hi"}),
        ("GET", "/v1/models/third", None),
        ("POST", "/sleep?model=third", None),
    ):
        reply = two.send(method, path, body)
        assert reply.status == 404 and "'first', 'second'" in reply.json["error"]["message"]


def test_requests_to_two_models_at_once_are_all_answered(two: Live):
    """Each model waits until the other one is idle, so that neither starves."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: text(two, ("first", "second")[number % 2], max_tokens=30), range(8)))
    assert len(set(answers)) == 1
    assert sorted(states(two).values()) == ["asleep", "awake"]


@pytest.mark.long
def test_models_that_fit_stay_awake_and_the_least_recently_used_gives_way(tiny: dict[str, Any], tmp_path: Path):
    models = {name: {**tiny, "memory_gb": 1} for name in ("a", "b")} | {
        "c": {**tiny, "memory_gb": 1, "evict": "unload"}
    }
    with serving(write(tmp_path, models), models_memory_gb=2) as server:
        for name in ("a", "b", "a", "c"):
            text(server, name)
        assert states(server) == {"a": "awake", "b": "asleep", "c": "awake"}
        text(server, "a")
        text(server, "b")
        assert states(server) == {"a": "awake", "b": "awake", "c": "unloaded"}
        process = server.server.front.models["a"]._supervisor.engine.process
        os.kill(process.pid, signal.SIGKILL)
        server.until(lambda: server.server.front.models["a"]._supervisor.engine.process is not process)
        server.until(lambda: server.server.front.models["a"].front.trouble is None, 20)
        assert text(server, "a") == text(server, "b")


def test_a_model_that_cannot_be_loaded_gets_503_with_the_reason(tiny: dict[str, Any], tmp_path: Path):
    (tmp_path / "broken").mkdir()
    write_checkpoint(tmp_path / "broken", model_type="unheard-of", architectures=["Unheard"])
    models = {"broken": {**SMALL, "model": str(tmp_path / "broken")}, "good": tiny}
    with serving(write(tmp_path, models)) as server:
        reply = server.send("POST", "/v1/completions", {"model": "broken", "prompt": "hi"})
        assert reply.status == 503 and "retry-after" in reply.headers
        assert "cannot be loaded" in reply.json["error"]["message"] and "Unheard" in reply.json["error"]["message"]
        assert states(server) == {"broken": "failed", "good": "unloaded"}
        assert "Unheard" in server.get("/v1/models/broken").json["problem"]
        assert server.get("/health").status == 200


@pytest.mark.parametrize(
    ("price", "status"), [({}, 503), pytest.param({"price_per_hour": 2.0}, 200, marks=pytest.mark.long)]
)
def test_budgets_need_a_price(price: dict[str, float], status: int, tiny: dict[str, Any], tmp_path: Path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"ann": {"key": "ANN", "budget": {"day": 1}}}))
    options = {"api_keys": str(keys), "usage_file": "off"}
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 2}
    with serving(write(tmp_path, {"a": tiny}), **options, **price) as server:
        reply = server.send("POST", "/v1/completions", body, {"authorization": "Bearer ANN"})
        assert reply.status == status, reply.data
        model = server.server.front.models["a"]
        assert (model.state == "failed") == (status == 503)
        assert status == 200 or (
            "'ann' has a budget" in reply.error["message"] and "--price-per-hour" in reply.error["message"]
        )


@pytest.mark.long
def test_a_sleeping_model_whose_engine_is_lost_comes_back_on_demand(pair: Live):
    """Another model has its memory by then."""
    text(pair, "a")
    engine = pair.server.front.models["a"]._supervisor.engine
    text(pair, "b")
    os.kill(engine.process.pid, signal.SIGKILL)
    pair.until(lambda: states_of(pair)["a"] != "asleep", 10)
    time.sleep(0.5)
    assert states_of(pair) == {"a": "unloaded", "b": "awake"}
    text(pair, "a")
    assert states_of(pair) == {"a": "awake", "b": "asleep"}


def test_a_model_whose_engine_is_lost_on_its_way_to_sleep_gives_its_memory_all_the_same(
    pair: Live, monkeypatch: pytest.MonkeyPatch
):
    evict, lost = Model.evict, []

    async def dies(model: Model) -> None:
        if not lost:
            lost.append(model.name)
            os.kill(model._supervisor.engine.process.pid, signal.SIGKILL)
        await evict(model)

    text(pair, "a")
    monkeypatch.setattr(Model, "evict", dies)
    text(pair, "b")
    assert lost == ["a"] and states_of(pair)["b"] == "awake" != states_of(pair)["a"]


@pytest.mark.long
def test_a_request_does_not_wait_longer_than_it_may(tiny: dict[str, Any], tmp_path: Path):
    with serving(write(tmp_path, {"slow": tiny}), models_load_s=0.05) as server:
        reply = server.send("POST", "/v1/completions", {"model": "slow", "prompt": "hi"})
        assert reply.status == 503 and "retry-after" in reply.headers
        server.until(lambda: server.server.front.models["slow"].state == "awake", 30)  # the load goes on
        text(server, "slow")


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        ({"a": {"modell": "x"}}, {}, "model 'a' .*Unknown option.*model"),
        ({"a": {"port": 1}}, {}, "port is the same for all models"),
        ({"a": {"evict": "never"}}, {}, "evict is 'never': give sleep or unload"),
        ({"a": {}}, {"models_memory_gb": 4}, "memory_gb of model 'a'"),
        ({"a": {"memory_gb": 5}}, {"models_memory_gb": 4}, "at most 4"),
        ({"a": {}}, {"model": "x"}, "--model and --models exclude each other"),
        ({"a": {"enable_sleep_mode": False, "evict": "sleep"}}, {"device": "cpu"}, "use evict: unload"),
        ({"a": {"evict": "sleep", "tensor_parallel_size": 2}}, {"device": "cpu"}, "several ranks .* use evict: unload"),
        ({"a": 3}, {}, "options of model 'a'"),
        ({}, {}, "must have one key, models"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(models: Any, flags: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        read_models(write(tmp_path, models), flags, {})


def test_options_of_the_file_precede_those_of_the_command_line(tmp_path: Path):
    first, second = read_models(write(tmp_path, {"a": {"threads": 2}, "b": {}}), {"threads": "3", "device": "cpu"}, {})
    assert (first.resolved.engine.threads, second.resolved.engine.threads) == (2, 3)
    assert first.resolved.engine.device == second.resolved.engine.device == "cpu"
    assert first.resolved.service.served_model_name == "a" and first.resolved.engine.enable_sleep_mode


def test_a_model_that_cannot_sleep_is_unloaded(tmp_path: Path):
    models = {"a": {}, "b": {"tensor_parallel_size": 2}}
    first, second = read_models(write(tmp_path, models), {"device": "cpu"}, {})
    assert (first.evict, second.evict) == ("sleep", "unload")
    assert first.resolved.engine.enable_sleep_mode and not second.resolved.engine.enable_sleep_mode


def test_merged_series_keep_each_family_together():
    text = '# HELP x Text.\n# TYPE x gauge\nx{m="%s"} 1.0\n# HELP y Text.\n# TYPE y gauge\ny{m="%s"} 2.0\n'
    assert merged([text % ("a", "a"), text % ("b", "b")]) == (
        '# HELP x Text.\n# TYPE x gauge\nx{m="a"} 1.0\nx{m="b"} 1.0\n# HELP y Text.\n# TYPE y gauge\ny{m="a"} 2.0\ny{m="b"} 2.0\n'
    )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two models that nobody may load, and the keys of three clients."""
    folder = tmp_path_factory.mktemp("guarded")
    models = {"first": {"model": str(shipped_model())}, "second": {"model": str(shipped_model())}}
    keys = {
        "ann": {"key": "ANN", "models": ["third"]},
        "bob": {"key": "BOB", "budget": {"day": 1}},
        "cat": {"key": "CAT"},
    }
    (folder / "keys.json").write_text(json.dumps(keys))
    with serving(write(folder, models), api_keys=str(folder / "keys.json"), usage_file="off") as server:
        server.folder = folder
        yield server


HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ROUTES = [
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", HELLO),
    ("/v1/messages/count_tokens", {"messages": HELLO["messages"]}),
    ("/api/chat", HELLO),
    ("/api/embed", {"input": "x"}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=[route for route, _ in ROUTES])
@pytest.mark.parametrize(
    ("model", "status"),
    [("first", 403), ("second:latest", 403), (None, 403), ("unknown", 404), ("unknown:latest", 404)],
)
def test_a_key_loads_no_model_that_it_may_not_use(
    guarded: Live, route: str, body: dict[str, Any], model: str | None, status: int
) -> None:
    reply = guarded.send("POST", route, {**body, "model": model}, {"authorization": "Bearer ANN"})
    assert reply.status == status, reply.data
    assert {model.state for model in guarded.server.front.models.values()} == {"unloaded"}


def test_rows_of_a_key_load_no_model_that_it_may_not_use(guarded: Live) -> None:
    rows, ann = guarded.server.rows, guarded.server.front.keys.payer("ann")

    async def run() -> None:
        assert rows.take(1, "first", ann)
        row = RowRequest(ENDPOINTS[1], {"model": "first", "prompt": "x"}, 1, ann, "r")
        with pytest.raises(ModelNotAllowed):
            await rows.run(row)
        rows.give_back(1, "first")
        await asyncio.sleep(0)
        assert {model.state for model in guarded.server.front.models.values()} == {"unloaded"}

    guarded.run(run())


def test_a_key_that_is_gone_ends_although_other_keys_have_budgets(guarded: Live) -> None:
    """The file was refused, because a server with several models did not know the price of its device."""
    cat = {"authorization": "Bearer CAT"}
    assert guarded.send("GET", "/v1/models", headers=cat).status == 200
    keys = json.loads((guarded.folder / "keys.json").read_text())
    del keys["cat"]
    (guarded.folder / "keys.json").write_text(json.dumps(keys))
    deadline = time.monotonic() + 10
    while guarded.send("GET", "/v1/models", headers=cat).status != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
