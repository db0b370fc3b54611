"""Files, batches, stored responses and /requests at a router before two servers with fake engines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.batches.rows import PRIORITY, ROW
from ridgeline.service.fleet.options import RouterConfig, check_shared
from ridgeline.service.fleet.server import routing
from ridgeline.service.listen import bind

from .live import MODEL, Caller, Live, behaviour, counts, live, says
from .test_batch_lane import lines, start, until
from .test_batch_store import line

RESPONSES = "/v1/responses"


@contextmanager
def router(*servers: Live, policy: str = "round-robin", **config: Any) -> Iterator[Caller]:
    """A router in a thread of its own, before these servers, all up."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    service = check_shared(ServiceConfig(**{"port": 0, "drain_s": 0.2, **config}))
    block = routing(service, RouterConfig(policy=policy), bind("127.0.0.1", 0))

    async def begin() -> Caller:
        running = await block.__aenter__()
        for number, server in enumerate(servers):
            running.balancer.add(f"replica-{number}", f"http://127.0.0.1:{server.port}")
        for number in range(len(servers)):
            await running.balancer.until_up(f"replica-{number}")
        return Caller(int(running.url.rpartition(":")[2]))

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(block.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@contextmanager
def two(tmp_path: Path, script: Any = None, options: dict[str, Any] | None = None, **plan: Any) -> Iterator[Any]:
    """Two servers and their router. options: of the router."""
    with ExitStack() as stack:
        servers = [stack.enter_context(live(behaviour(script or says("done"), **plan))) for _ in range(2)]
        folder = {"batch_dir": str(tmp_path / "state")}
        yield stack.enter_context(router(*servers, **{**folder, **(options or {})})), servers


def names(server: Caller, batch: dict[str, Any]) -> list[str]:
    return sorted(row["custom_id"] for row in lines(server, batch["output_file_id"]))


def test_rows_go_to_all_replicas_with_the_lowest_priority(tmp_path: Path) -> None:
    with two(tmp_path, counts, delay=0.002) as (server, replicas):
        data = b"".join(line(f"{row:02}", max_tokens=20) for row in range(24))
        data += line("first", max_tokens=20, priority=-5)
        batch = until(server, start(server, data))
        assert names(server, batch) == [*(f"{row:02}" for row in range(24)), "first"]
        assert batch["usage"]["output_tokens"] == sum(
            row["response"]["body"]["usage"]["completion_tokens"] for row in lines(server, batch["output_file_id"])
        )
        priorities = [[submit.priority for submit in replica.engine.submits] for replica in replicas]
        assert all(priorities) and sorted(priorities[0] + priorities[1]) == [PRIORITY - 5, *[PRIORITY] * 24]
        ledger = server.get("/requests?order=batch&limit=100").json["data"]
        assert {row["replica"] for row in ledger} == {"replica-0", "replica-1"}
        assert [(row["batch"], row["price_factor"]) for row in ledger] == [(True, 0.5)] * 25
        metrics = server.get("/metrics").data.decode()
        assert 'ridgeline:batch_rows_total{result="completed"} 25' in metrics
        assert not server.get("/requests").json["data"], "rows are no online requests"


def test_errors_are_those_of_one_server(tmp_path: Path) -> None:
    data = b"".join(
        [
            line("good"), b"{not json\n", line("hot", temperature=9), line("good"), line("stream", stream=True),
            line("model", model="other"), line("long", "word " * 4000), line("odd", n="x"),
        ]
    )  # fmt: skip

    def errors(server: Caller) -> dict[str | None, Any]:
        batch = until(server, start(server, data))
        answers = {row["custom_id"]: row["response"] for row in lines(server, batch["error_file_id"])}
        assert all(
            answer["body"].pop("request_id", answer["request_id"]) == answer.pop("request_id")
            for answer in answers.values()
        )
        return answers

    with two(tmp_path) as (server, _), live(behaviour(says("done")), batch_dir=str(tmp_path / "own")) as single:
        ours = errors(server)
        assert ours == errors(single) and len(ours) == 7
        for caller in (server, single):
            assert caller.send("POST", "/v1/batches", {"endpoint": "/v1/none"}).error["param"] == "input_file_id"
            assert caller.get("/v1/files/file-none").status == 404


def test_online_requests_push_rows_out_and_these_run_later(tmp_path: Path) -> None:
    with two(tmp_path, counts, rows=2, delay=0.01) as (server, replicas):
        batch_id = start(server, b"".join(line(str(row), max_tokens=60) for row in range(4)))
        for replica in replicas:
            replica.until(lambda replica=replica: len(replica.engine.submits) >= 2)
        threads = [threading.Thread(target=server.chat, kwargs={"max_tokens": 40}) for _ in range(4)]
        for thread in threads:
            thread.start()
        for replica in replicas:
            replica.until(lambda replica=replica: replica.engine.cancels)
        for thread in threads:
            thread.join()
        batch = until(server, batch_id)
        assert names(server, batch) == ["0", "1", "2", "3"]
        assert sum(len(replica.engine.submits) for replica in replicas) > 8


def test_rows_outlive_a_replica(tmp_path: Path) -> None:
    with two(tmp_path, counts, rows=4, delay=0.005) as (server, (lost, other)):
        batch_id = start(server, b"".join(line(f"{row:02}", max_tokens=40) for row in range(24)))
        for replica in (lost, other):
            replica.until(lambda replica=replica: replica.engine.said > 10)
        lost.run(lost.server.stop())
        batch = until(server, batch_id)
        assert batch["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        assert names(server, batch) == [f"{row:02}" for row in range(24)]


def test_a_router_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(live(behaviour(counts, rows=2, delay=0.005))) for _ in range(2)]
        with router(*servers, batch_dir=str(tmp_path)) as first:
            batch_id = start(first, b"".join(line(f"{row:02}", max_tokens=60) for row in range(20)))
            while (done := first.get(f"/v1/batches/{batch_id}").json["request_counts"]["completed"]) < 4:
                time.sleep(0.02)
        ran = sum(len(server.engine.submits) for server in servers)
        with router(*servers, batch_dir=str(tmp_path)) as second:
            assert second.get(f"/v1/batches/{batch_id}").json["request_counts"]["completed"] >= done
            batch = until(second, batch_id)
            assert names(second, batch) == [f"{row:02}" for row in range(20)]
        assert ran < 20 and sum(len(server.engine.submits) for server in servers) <= 20 + 4, (
            "only those in flight run twice"
        )


def response(server: Caller, text: str, previous: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "previous_response_id": previous, **fields}
    reply = server.send("POST", RESPONSES, body)
    assert reply.status == 200, reply.data
    if not fields.get("stream"):
        return dict(reply.json)
    *_, last = (event for event in reply.data.decode().split("\n\n") if event)
    return dict(json.loads(last.partition("data: ")[2])["response"])


def test_a_stored_response_goes_on_at_any_replica(tmp_path: Path) -> None:
    with two(tmp_path) as (server, replicas):
        first = response(server, "one")
        second = response(server, "two", first["id"], stream=True)
        third = response(server, "three", second["id"], max_output_tokens=1)
        fourth = response(server, "four", third["id"])
        assert [len(replica.engine.submits) for replica in replicas] == [2, 2], "both have answered"
        assert fourth["previous_response_id"] == third["id"] and third["status"] == "incomplete" and third["store"]
        prompts = [submit.tokens for replica in replicas for submit in replica.engine.submits]
        assert len(set(map(len, prompts))) == 4, "each prompt has all turns before it"
        kept = server.get(f"{RESPONSES}/{second['id']}").json
        assert kept == second
        items = server.get(f"{RESPONSES}/{fourth['id']}/input_items").json["data"]
        assert [item["content"][0]["text"] for item in items] == ["one", "done", "two", "done", "three", "d", "four"]
        assert all(replica.get(f"{RESPONSES}/{fourth['id']}").status == 404 for replica in replicas)
        assert server.send("DELETE", f"{RESPONSES}/{first['id']}").json["deleted"]
        gone = server.send("POST", RESPONSES, {"input": "x", "previous_response_id": first["id"]})
        assert gone.status == 400 and gone.error["param"] == "previous_response_id"
        hidden = response(server, "hidden", store=False)
        assert server.get(f"{RESPONSES}/{hidden['id']}").status == 404


def test_bad_responses_are_refused_as_on_one_server(tmp_path: Path) -> None:
    with two(tmp_path) as (server, (replica, _)):
        for body in ({}, {"input": 7}, {"input": [7]}, {"input": "x", "previous_response_id": 7}, {"input": []}):
            ours, theirs = (caller.send("POST", RESPONSES, body) for caller in (server, replica))
            assert ours.status == theirs.status == 400 and ours.error == theirs.error
        asked = {"input": [{"role": "nobody", "content": "x"}], "previous_response_id": response(server, "one")["id"]}
        assert server.send("POST", RESPONSES, asked).error["param"] == "input[0].role"


def test_the_requests_of_all_replicas(tmp_path: Path) -> None:
    with two(tmp_path) as (server, _):
        ids = [server.chat().json["id"] for _ in range(4)]
        rows = server.get("/requests?limit=3").json["data"]
        assert [row["id"] for row in rows] == ids[:0:-1] and {row["replica"] for row in rows} == {
            "replica-0",
            "replica-1",
        }
        slowest = [row["e2e_s"] for row in server.get("/requests?order=slowest").json["data"]]
        assert len(slowest) == 4 and slowest == sorted(slowest, reverse=True)
        assert server.get(f"/requests/{ids[1]}").json["replica"] == rows[2]["replica"]
        assert "summary" in server.get(f"/requests/{ids[0]}/why").json
        assert server.get("/requests/none").error["param"] == "id"
        assert server.get("/requests?limit=0").error["param"] == "limit"


def test_only_the_router_says_what_a_row_is(tmp_path: Path) -> None:
    with two(tmp_path) as (server, (replica, _)):
        assert server.chat(headers={ROW: "1"}).status == 200
        assert [row["batch"] for row in server.get("/requests").json["data"]] == [False]
        assert replica.chat(headers={ROW: "1"}, stream=True).error["param"] == "stream"
        assert replica.chat(headers={ROW: "1"}).status == 200
        assert len(replica.get("/requests?order=batch").json["data"]) == 1


def test_keys_own_files_and_responses(tmp_path: Path) -> None:
    keyed = {"api_key": "secret", "admin_api_key": "chief"}
    with ExitStack() as stack:
        replica = stack.enter_context(live(behaviour(says("done")), **keyed))
        server = stack.enter_context(router(replica, batch_dir=str(tmp_path), **keyed))
        key, chief = {"authorization": "Bearer secret"}, {"authorization": "Bearer chief"}
        assert server.get("/v1/files").status == server.get("/requests").status == 401
        assert server.send("GET", "/v1/files", headers=key).json["data"] == []
        assert server.send("GET", "/requests", headers=key).status == 403
        assert server.chat(headers=key).status == 200
        assert len(server.send("GET", "/requests", headers=chief).json["data"]) == 1
    with live(behaviour(says("done"))) as replica, router(replica, admin_api_key="chief") as server:
        reply = server.send("POST", RESPONSES, {"input": "x"}, {"authorization": "Bearer a"})
        path = f"{RESPONSES}/{reply.json['id']}"
        assert server.send("GET", path, headers={"authorization": "Bearer a"}).status == 200
        assert server.send("GET", path, headers={"authorization": "Bearer b"}).status == 404
        assert server.get("/v1/files").error["code"] == "not_found", (
            "nobody owns files whose key the router does not know"
        )
    with pytest.raises(ConfigError, match="batch_dir is '/b', but with admin_api_key alone"):
        check_shared(ServiceConfig(admin_api_key="chief", batch_dir="/b"))
    with pytest.raises(ConfigError, match="batch-window"):
        check_shared(ServiceConfig(batch_window="noon"))
