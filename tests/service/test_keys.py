"""Servers with API keys: who gets in, limits, budgets, use, files that change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.batches.rows import ROW
from ridgeline.service.keys.keyring import Keyring
from ridgeline.service.keys.settings import check_keys

from .live import MODEL, Live, behaviour, counts, live, says
from .test_batch_lane import form, line

ADMIN = {"authorization": "Bearer root"}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def write(path: Path, **keys: dict[str, Any]) -> str:
    """A file of keys; the secret of each is its name in capitals unless it says another."""
    path.write_text(json.dumps({name: {"key": name.upper(), **settings} for name, settings in keys.items()}))
    return str(path)


@contextmanager
def server(
    tmp_path: Path, script: Any = None, plan: Any = None, keys: dict[str, Any] | None = None, **config: Any
) -> Iterator[Live]:
    file = write(tmp_path / "keys.json", **(keys or {"ann": {}, "bob": {}}))
    settings = {"api_keys": file, "admin_api_key": "root", "usage_file": str(tmp_path / "usage.sqlite"), **config}
    with live(plan or behaviour(script or says("Hello")), **settings) as running:
        yield running


def test_every_route_but_the_open_ones_needs_a_known_key(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        for headers in ({}, bearer("WRONG"), {"x-api-key": "ann"}):
            for path in ("/v1/models", "/v1/usage", "/metrics", "/requests", "/admin/stats", "/v1/files"):
                answer = running.send("GET", path, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
            assert running.chat(headers).status == running.complete(headers).status == 401
        assert running.get("/health").status == running.get("/openapi.json").status == 200
        assert running.chat(bearer("ANN")).status == running.chat({"x-api-key": "BOB"}).status == 200
        assert running.chat(ADMIN).status == 200


def test_routes_of_operators_need_the_key_of_operators(tmp_path: Path) -> None:
    routes = ("/requests", "/requests/x", "/runs/x", "/admin/stats", "/dashboard/data")
    with server(tmp_path) as running:
        for path in routes:
            answer = running.send("GET", path, headers=bearer("ANN"))
            assert (answer.status, answer.error["code"]) == (403, "admin_key_required"), path
            assert running.send("GET", path, headers=ADMIN).status in (200, 404)
        assert running.send("POST", "/reset_prefix_cache", headers=bearer("ANN")).status == 403
        assert running.send("POST", "/reset_prefix_cache", headers=ADMIN).status == 200
        assert running.engine.orders.count("reset_prefix_cache") == 1


def test_the_key_of_operators_beside_none_or_one() -> None:
    with live(behaviour(says("hi")), admin_api_key="root") as running:
        assert running.chat().status == 200 and running.get("/admin/stats").status == 401
        assert running.send("GET", "/admin/stats", headers=ADMIN).status == 200
    with live(behaviour(says("hi")), admin_api_key="root", api_key="all") as running:
        assert running.chat().status == 401 and running.chat(bearer("all")).status == 200
        assert running.send("GET", "/admin/stats", headers=bearer("all")).status == 403
    with live(behaviour(says("hi")), api_key="all") as running:
        assert running.send("GET", "/admin/stats", headers=bearer("all")).status == 200
        assert running.send("GET", "/v1/usage", headers=bearer("all")).status == 404


def test_expired_keys_and_other_models(tmp_path: Path) -> None:
    keys = {"old": {"expires": "2020-01-01"}, "ann": {"models": ["other"]}, "bob": {"models": [MODEL]}}
    with server(tmp_path, keys=keys) as running:
        answer = running.chat(bearer("OLD"))
        assert answer.status == 401 and "has expired" in answer.error["message"]
        answer = running.chat(bearer("ANN"))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (403, "model_not_allowed", "model")
        assert running.chat(bearer("BOB")).status == running.chat(bearer("BOB"), model=None).status == 200


def test_requests_per_minute(tmp_path: Path) -> None:
    with server(tmp_path, keys={"ann": {"requests_per_minute": 2}, "bob": {}}) as running:
        first, second, third = (running.chat(bearer("ANN")) for _ in range(3))
        assert (first.status, second.status, third.status) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert (
            first.headers["x-ratelimit-remaining-requests"] == "1"
            and third.headers["x-ratelimit-remaining-requests"] == "0"
        )
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert third.error["code"] == "rate_limit_exceeded" and "2 requests per minute" in third.error["message"]
        assert 25_000 < int(third.headers["retry-after-ms"]) <= 30_000 and int(third.headers["retry-after"]) <= 30
        other = running.chat(bearer("BOB"))
        assert other.status == 200 and "x-ratelimit-limit-requests" not in other.headers


def test_a_client_cannot_pass_limits_by_as_a_row_of_a_batch(tmp_path: Path) -> None:
    with server(tmp_path, keys={"ann": {"requests_per_minute": 1}}) as running:
        first, second = (running.chat({**bearer("ANN"), ROW: "1"}) for _ in range(2))
        assert (first.status, second.status) == (200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "1"


def test_tokens_per_minute_count_prompt_and_answer(tmp_path: Path) -> None:
    with server(tmp_path, keys={"ann": {"tokens_per_minute": 40}}, script=counts) as running:
        answer = running.complete(bearer("ANN"), prompt=[5] * 10, max_tokens=50, stream=True)
        assert answer.status == 200 and answer.headers["x-ratelimit-remaining-tokens"] in ("30", "31")
        running.until(lambda: rows_of(running) == {"ann"})
        refused = running.complete(bearer("ANN"), prompt=[5] * 10)
        assert refused.status == 429 and "40 tokens per minute" in refused.error["message"]
        assert 25_000 < int(refused.headers["retry-after-ms"]) <= 45_000  # 20 in debt, and 10 are needed


def test_concurrent_requests(tmp_path: Path) -> None:
    keys = {"ann": {"concurrent_requests": 1}, "bob": {}}
    with server(tmp_path, plan=behaviour(counts, delay=0.01), keys=keys) as running:
        connection = running.connect()
        body = json.dumps({"prompt": "hi", "max_tokens": 1000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **bearer("ANN")})
        running.until(lambda: running.engine.open == 1)
        refused = running.complete(bearer("ANN"), max_tokens=1)
        assert (
            refused.status == 429
            and "at most 1 may" in refused.error["message"]
            and "retry-after-ms" in refused.headers
        )
        assert running.complete(bearer("BOB"), max_tokens=1).status == 200
        connection.close()
        running.until(lambda: running.engine.open == 0)
        assert running.complete(bearer("ANN"), max_tokens=1).status == 200


def test_priorities_are_bounded_by_the_key(tmp_path: Path) -> None:
    with server(tmp_path, keys={"ann": {"priority": 3}, "bob": {}}) as running:
        assert "x-ridgeline-ignored-fields" not in running.chat(bearer("ANN")).headers
        assert running.chat(bearer("ANN"), priority=-9).headers["x-ridgeline-ignored-fields"] == "priority"
        running.chat(bearer("ANN"), priority=7)
        running.chat(bearer("BOB"), service_tier="priority")
        running.chat(ADMIN, priority=-9)
        assert [submit.priority for submit in running.engine.submits] == [3, 3, 7, 0, -9]
        assert [submit.client for submit in running.engine.submits] == ["ann", "ann", "ann", "bob", "admin"]


def test_keys_share_no_prefixes_if_isolated(tmp_path: Path) -> None:
    for isolated in (False, True):
        with server(tmp_path, isolate_keys=isolated) as running:
            for secret in ("ANN", "BOB", "ANN"):
                running.chat(bearer(secret), cache_salt="s")
            first, second, third = [submit.salt for submit in running.engine.submits]
            assert first == third and (first != second) == isolated and (first == "s") != isolated


# --- budgets and use ------------------------------------------------------------------------------------------------------


def spends(running: Live, key: str, usd: float) -> None:
    """Let a key have spent."""
    keys = running.server.front.keys
    holder = keys.payer(key)
    row = running.send("GET", "/requests", headers=ADMIN).json["data"]
    assert row, "a request has ended"
    record = running.server.front.metrics.live.rows("recent", 1)[0]
    running.loop.call_soon_threadsafe(holder.charge, record, usd)
    running.until(lambda: keys.usage.spent(key, 4e9)["total"] >= usd)


def test_a_budget_ends_and_outlives_the_server(tmp_path: Path) -> None:
    keys = {"ann": {"budget": {"month": 0.5, "total": 9}}, "bob": {}}
    with server(tmp_path, keys=keys, price_per_hour=3.0) as running:
        assert running.chat(bearer("ANN")).status == 200
        spends(running, "ann", 0.5)
        answer = running.chat(bearer("ANN"))
        assert (answer.status, answer.error["code"], answer.error["type"]) == (
            429,
            "insufficient_quota",
            "insufficient_quota",
        )
        assert "0.5 USD (month): it is renewed at 20" in answer.error["message"]
        assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
        with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="ANN", max_retries=2) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="hi")
            assert caught.value.code == "insufficient_quota"
        assert running.chat(bearer("BOB")).status == 200
    with server(tmp_path, keys=keys, price_per_hour=3.0) as running:
        assert running.chat(bearer("ANN")).status == 429


def test_a_budget_needs_a_price(tmp_path: Path) -> None:
    ring = Keyring(config_of(tmp_path, ann={"budget": {"day": 1}}))
    ring.set_price(2.0)
    with pytest.raises(ConfigError, match="'ann' has a budget, .*--price-per-hour"):
        ring.set_price(0.0)


def test_use_is_counted_by_key(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        for secret in ("ANN", "ANN", "BOB"):
            assert running.complete(bearer(secret), prompt=[5] * 40, max_tokens=5).status == 200

        def rows(headers: dict[str, str], query: str = "") -> dict[str, tuple[int, ...]]:
            data = running.send("GET", f"/v1/usage{query}", headers=headers).json["data"]
            names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
            return {row["key"]: tuple(row[name] for name in names) for row in data}

        running.until(lambda: sum(row[2].requests for row in running.server.front.keys.usage.hours(None, 0, 4e9)) == 3)
        both = {"ann": (2, 80, 32, 10), "bob": (1, 40, 16, 5)}
        for by in ("hour", "day", "month", "total"):
            assert rows(ADMIN, f"?by={by}") == both
        assert rows(bearer("ANN")) == {"ann": both["ann"]} == rows(bearer("ANN"), "?key=ann")
        assert rows(ADMIN, "?key=bob") == {"bob": both["bob"]}
        assert rows(ADMIN, "?since=2100-01-01") == {} == rows(ADMIN, "?until=100")
        assert running.send("GET", "/v1/usage?key=bob", headers=bearer("ANN")).status == 404
        for wrong in ("by=week", "since=yesterday", "until=-1", "since=nan"):
            assert running.send("GET", f"/v1/usage?{wrong}", headers=ADMIN).status == 400
    with server(tmp_path) as running:
        assert {row["key"] for row in running.send("GET", "/v1/usage", headers=ADMIN).json["data"]} == {"ann", "bob"}


def rows_of(running: Live) -> set[str]:
    return {key for _, key, _ in running.server.front.keys.usage.hours(None, 0, 4e9)}


def test_the_command_shows_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.cli.main import main

    with server(tmp_path) as running:
        running.complete(bearer("ANN"), max_tokens=5)
        running.until(lambda: rows_of(running) == {"ann"})
        url = f"http://127.0.0.1:{running.port}"
        assert main(["usage", "--url", url, "--api-key", "root", "--by", "hour"]) == 0
        shown = capsys.readouterr().out
        assert "ann" in shown and "USD" in shown
        assert main(["usage", "--url", url, "--api-key", "ANN", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["data"][0]["requests"] == 1
        assert main(["usage", "--url", url, "--api-key", "WRONG"]) == 1
        assert "API key is missing or wrong" in capsys.readouterr().err


# --- the file changes -----------------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, **keys: dict[str, Any]) -> ServiceConfig:
    return ServiceConfig(api_keys=write(tmp_path / "keys.json", **keys), usage_file="off")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    ring = Keyring(config_of(tmp_path, ann={"requests_per_minute": 1}, bob={}))
    assert not ring.reload()
    ann = ring.holder("ANN", anonymous=False)
    write(tmp_path / "keys.json", ann={"requests_per_minute": 70}, cat={})
    assert ring.reload() and not ring.reload()
    assert ring.holder("ANN", anonymous=False) is ann and ann.headers()["x-ratelimit-limit-requests"] == "70"
    assert ring.holder("CAT", anonymous=False).name == "cat"
    with pytest.raises(Exception, match="missing or wrong"):
        ring.holder("BOB", anonymous=False)
    assert ring.payer("bob").name == "bob", "its requests and batches go on"


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"ann": {"key": ""}}', '{"ann": {"key": "A", "budget": {"day": 1}}}', None]
)
def test_a_bad_file_keeps_the_keys_and_says_so(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring, file = Keyring(config_of(tmp_path, ann={})), tmp_path / "keys.json"
    ring.set_price(0.0)
    if text is None:
        os.remove(file)
    else:
        file.write_text(text)
    assert not ring.reload()
    assert "the API keys stay as they were" in caplog.text and len(caplog.records) == 1
    assert not ring.reload() and len(caplog.records) == 1, "once"
    assert ring.holder("ANN", anonymous=False).name == "ann"
    write(file, ann={}, bob={})
    assert ring.reload() and ring.holder("BOB", anonymous=False).name == "bob"


def test_a_running_server_reads_its_file_again(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        assert running.chat(bearer("CAT")).status == 401
        write(tmp_path / "keys.json", cat={}, ann={})
        deadline = time.monotonic() + 10
        while running.chat(bearer("CAT")).status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert running.chat(bearer("BOB")).status == 401


def test_options_that_need_a_file_of_keys() -> None:
    for options in ({"isolate_keys": True}, {"usage_file": "usage.sqlite"}):
        with pytest.raises(ConfigError, match="give --api-keys FILE"):
            check_keys(ServiceConfig(**options))
    with pytest.raises(ConfigError, match="Cannot read"):
        check_keys(ServiceConfig(api_keys="/nowhere/keys.yaml"))


# --- batches --------------------------------------------------------------------------------------------------------------


def test_a_key_sees_its_own_files_and_batches(tmp_path: Path) -> None:
    keys = {"ann": {"models": [MODEL]}, "bob": {}}
    with server(tmp_path, keys=keys, batch_dir=str(tmp_path / "batches")) as running:
        body, headers = form(("purpose", b"batch", ""), ("file", line("a") + line("b", model="other"), "rows.jsonl"))
        file = running.send("POST", "/v1/files", body, {**headers, **bearer("ANN")}).json
        assert "owner" not in file
        create = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert running.send("POST", "/v1/batches", create, bearer("BOB")).status == 404
        batch = running.send("POST", "/v1/batches", create, bearer("ANN")).json

        def get(path: str, secret: str) -> Any:
            return running.send("GET", path, headers=bearer(secret))

        running.until(lambda: len(rows_of(running)) == 1)
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
            assert (get(path, "ANN").status, get(path, "root").status, get(path, "BOB").status) == (200, 200, 404), path
            unknown = get(path.replace(path.split("/")[3], "none"), "BOB").error["message"]
            assert get(path, "BOB").error["message"] == unknown.replace("none", path.split("/")[3])
        assert running.send("POST", f"/v1/batches/{batch['id']}/cancel", {}, bearer("BOB")).status == 404
        assert running.send("DELETE", f"/v1/files/{file['id']}", headers=bearer("BOB")).status == 404
        for secret, count in (("ANN", 1), ("root", 1), ("BOB", 0)):
            assert len(get("/v1/batches", secret).json["data"]) == count
            assert bool(get("/v1/files", secret).json["data"]) == bool(count)
        assert rows_of(running) == {"ann"}


def test_rows_are_charged_for_their_answers_only(tmp_path: Path) -> None:
    """Each row once, however often it began, and none that was cut off when its batch was cancelled."""
    keys = {"ann": {"tokens_per_minute": 100_000}}
    plan = behaviour(counts, rows=4, delay=0.002)
    with server(tmp_path, keys=keys, plan=plan, batch_dir=str(tmp_path / "batches")) as running:
        usage = running.server.front.keys.usage
        batch = submit(running, *(line(str(row), max_tokens=40) for row in range(6)))
        running.until(lambda: running.engine.said > 10)
        running.run(running.engine.die())
        engine = running.replace_engine()
        finished(running, batch, "completed")
        assert len(running.engine.submits) + len(engine.submits) > 6, "rows ran again"
        (used,) = [row[2] for row in usage.hours(None, 0, 4e9)]
        assert (used.requests, used.output_tokens) == (6, 240)
        bucket, said = running.server.front.keys.payer("ann")._buckets["tokens"], engine.said
        level = bucket.level(time.monotonic())
        batch = submit(running, line("long", max_tokens=1500))
        running.until(lambda: engine.said > said + 20)
        running.send("POST", f"{batch}/cancel", {}, ADMIN)
        finished(running, batch, "cancelled")
        assert [row[2] for row in usage.hours(None, 0, 4e9)] == [used]
        assert bucket.level(time.monotonic()) >= level, "nor does it count in the tokens per minute"


def finished(running: Live, batch: str, status: str) -> None:
    """Wait until a batch has this status."""
    deadline = time.monotonic() + 10
    while (now := running.send("GET", batch, headers=ADMIN).json)["status"] != status:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def submit(running: Live, *rows: bytes) -> str:
    """Start a batch of the key ANN; returns its path."""
    body, headers = form(("purpose", b"batch", ""), ("file", b"".join(rows), "rows.jsonl"))
    file = running.send("POST", "/v1/files", body, {**headers, **bearer("ANN")}).json
    create = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return f"/v1/batches/{running.send('POST', '/v1/batches', create, bearer('ANN')).json['id']}"
