"""The router over HTTP with scripted replicas: what passes, what is sent again, what is refused."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from aiohttp import web

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.fleet.demand import prompt_bytes, read_demand
from ridgeline.service.fleet.options import RouterConfig, read_router, read_url
from ridgeline.service.fleet.server import serve_router
from ridgeline.service.listen import bind

from .replicas import CHAT, EVENTS, FakeReplica, breaks, drops, refuses, routed, streams, thinks, waits

SECRET = {"authorization": "Bearer secret"}


async def test_a_stream_passes_unchanged() -> None:
    async with routed(streams) as fleet:
        answer = await fleet.chat(headers={"x-request-id": "mine", "x-run-id": "r", "origin": fleet.server.url}, n=1)
        assert answer.status == 200 and answer.data == b"".join(EVENTS)
        assert answer.headers["content-type"] == "text/event-stream" and answer.headers["x-from"] == "replica"
        assert answer.headers["x-request-id"] == "mine" and answer.headers["x-ridgeline-replica"] == "replica-0"
        (replica,) = fleet.replicas
        assert replica.bodies == [{**CHAT, "n": 1}]
        assert replica.headers[0]["x-request-id"] == "mine" and replica.headers[0]["x-run-id"] == "r"
        assert replica.headers[0]["host"] == f"127.0.0.1:{replica.port}" and "origin" not in replica.headers[0]


async def test_events_pass_as_they_come() -> None:
    async with (
        routed(waits) as fleet,
        fleet.client.post(f"{fleet.server.url}/v1/chat/completions", json=CHAT) as reply,
    ):
        assert await reply.content.readany() == EVENTS[0]
        fleet.replicas[0].gate.set()
        assert await reply.read() == b"".join(EVENTS[1:])


async def test_the_id_of_the_body_goes_to_the_replica() -> None:
    async with routed(streams) as fleet:
        answer = await fleet.chat(request_id="from-the-body")
        assert answer.headers["x-request-id"] == fleet.replicas[0].headers[0]["x-request-id"] == "from-the-body"


async def test_a_target_with_a_host_goes_to_the_replica_by_its_path() -> None:
    """As a client behind a proxy sends it (RFC 9112, section 3.2.2)."""
    body = json.dumps(CHAT).encode()
    async with routed(streams) as fleet:
        host = fleet.server.url.removeprefix("http://")
        head = (
            f"POST http://{host}/v1/chat/completions?a=b HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert fleet.replicas[0].targets == ["/v1/chat/completions?a=b"]
        assert (await fleet.chat()).status == 200, "its circuit is closed"


async def test_requests_for_vectors_go_to_replicas() -> None:
    bodies = {
        "/v1/embeddings": {"input": ["a" * 400, "b" * 400]},
        "/v1/rerank": {"query": "a", "documents": ["a" * 800]},
        "/v1/score": {"text_1": "a", "text_2": "b" * 800},
    }
    async with routed(streams) as fleet:
        for path, body in bodies.items():
            assert read_demand({}, body).demand.tokens == read_demand({}, {"prompt": "c" * 800}).demand.tokens
            async with fleet.client.post(fleet.server.url + path, json=body) as reply:
                assert reply.status == 200
        assert fleet.replicas[0].bodies == list(bodies.values())


async def test_a_lost_connection_is_tried_elsewhere_and_not_twice_at_once() -> None:
    async with routed(drops, drops, streams, policy="round-robin") as fleet:
        answers = [await fleet.chat() for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        assert len(fleet.replicas[2].bodies) == 6
        assert len(fleet.replicas[0].bodies) <= 3 and len(fleet.replicas[1].bodies) <= 3, "their circuits are open"
        text = (await fleet.get("/metrics")).data.decode()
        retries = len(fleet.replicas[0].bodies) + len(fleet.replicas[1].bodies)
        assert f"ridgeline:router_retries_total{{}} {retries}.0" in text
        assert 'router_answers_total{replica="replica-2",result="ok"} 6.0' in text


async def test_a_request_that_every_replica_drops_gets_an_error() -> None:
    async with routed(drops, drops) as fleet:
        answer = await fleet.chat()
        assert answer.status == 500 and answer.json["error"]["code"] == "engine_failed"
        assert len(fleet.replicas[0].bodies) + len(fleet.replicas[1].bodies) == 3


async def test_an_answer_that_breaks_ends_with_an_error_event_and_is_not_repeated() -> None:
    async with routed(breaks, breaks) as fleet:
        for replica in fleet.replicas:
            replica.gate.set()
        answer = await fleet.chat()
        assert answer.status == 200
        events = answer.data.split(b"\n\n")
        assert events[0] + b"\n\n" == EVENTS[0]
        assert b"The replica was lost during the answer" in events[-2] and events[-1] == b""
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 1


async def test_an_error_of_a_replica_passes_and_is_not_repeated() -> None:
    async with routed(refuses(400), refuses(400)) as fleet:
        answer = await fleet.chat()
        assert answer.status == 400 and answer.json["error"]["message"] == "no"
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 1
    async with routed(refuses(500), refuses(500)) as fleet:
        assert (await fleet.chat()).status == 500, "the request itself may be the cause"
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 1


async def test_busy_and_unready_replicas_are_passed_over() -> None:
    async with routed(
        refuses(429, retry_after="30", x_ridgeline_queue="full"), refuses(503), streams, policy="round-robin"
    ) as fleet:
        for _ in range(4):
            answer = await fleet.chat()
            assert answer.status == 200 and answer.headers["x-ridgeline-replica"] == "replica-2"
        assert len(fleet.replicas[0].bodies) <= 1, "it has asked for 30 seconds"


async def test_the_429_of_the_last_replica_reaches_the_client() -> None:
    async with routed(refuses(429, retry_after_ms="1", retry_after="1", x_ridgeline_queue="full")) as fleet:
        answer = await fleet.chat()
        assert answer.status == 429 and answer.headers["retry-after"] == "1"


async def test_the_429_of_a_key_is_the_clients_alone() -> None:
    async with routed(refuses(429, retry_after="30"), refuses(429, retry_after="30")) as fleet:
        assert [(await fleet.chat()).status for _ in range(3)] == [429] * 3
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 3, "no replica is avoided, none is asked again"


async def test_requests_wait_in_the_router_and_are_refused_beyond_it() -> None:
    async with routed(thinks, replica_limit=1, service={"max_queue": 1}) as fleet:
        first = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        second = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 1)
        refused = await fleet.chat()
        assert refused.status == 429 and refused.json["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1 and int(refused.headers["retry-after-ms"]) > 0
        assert fleet.replicas[0].running == 1 and not second.done()
        fleet.replicas[0].gate.set()
        assert [(await task).status for task in (first, second)] == [200, 200]


async def test_a_wait_that_takes_too_long_ends_with_429() -> None:
    async with routed(thinks, replica_limit=1, queue_s=0.05) as fleet:
        first = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        assert (await fleet.chat()).status == 429
        fleet.replicas[0].gate.set()
        assert (await first).status == 200


@pytest.mark.parametrize("script", [waits, thinks])
async def test_a_client_that_leaves_ends_its_request_at_the_replica(script: object) -> None:
    async with routed(script) as fleet:
        request = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        request.cancel()
        await fleet.until(lambda: fleet.replicas[0].left == 1)
        await fleet.at_rest()
        assert fleet.balancer.router.replicas["replica-0"].breaker.closed


async def test_a_client_that_leaves_the_queue_is_never_sent() -> None:
    async with routed(thinks, replica_limit=1) as fleet:
        first = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        second = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 1)
        second.cancel()
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 0)
        fleet.replicas[0].gate.set()
        assert (await first).status == 200 and len(fleet.replicas[0].bodies) == 1


async def test_no_replica_up_is_503() -> None:
    async with routed(streams, streams) as fleet:
        assert (await fleet.get("/health")).json["replicas"] == {"up": 2, "total": 2}
        for replica in fleet.replicas:
            replica.health = (503, {"error": {"message": "Not healthy: draining."}})
        await fleet.until(lambda: fleet.state(0) == fleet.state(1) == "down")
        answer = await fleet.chat()
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        health = await fleet.get("/health")
        assert (
            health.status == 503 and "replica-1: its health check says: Not healthy: draining." in health.data.decode()
        )
        fleet.replicas[1].health = (200, {"status": "ok", "step": 0})
        await fleet.until(lambda: fleet.state(1) == "up")
        assert (await fleet.chat()).status == 200


async def test_requests_wait_for_an_engine_that_is_being_started() -> None:
    starts = {"x-ridgeline-engine": "starting"}
    refused: list[FakeReplica] = []

    async def then_streams(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if not refused:
            refused.append(replica)
            return await refuses(503, **starts)(replica, request)
        return await streams(replica, request)

    async with routed(then_streams) as fleet:
        (replica,) = fleet.replicas
        assert (await fleet.chat()).status == 200 and refused, "its health says up again"
        replica.health, replica.health_headers = (503, {"error": {"message": "Not healthy: lost."}}), starts
        await fleet.until(lambda: fleet.state(0) == "starting")
        waiting = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 1)
        assert (await fleet.get("/health")).status == 503
        replica.health, replica.health_headers = (200, {"status": "ok", "step": 0}), {}
        assert (await waiting).status == 200


async def test_a_replica_without_progress_gets_no_more_requests() -> None:
    async with routed(thinks, streams, stall_s=0.3, policy="least-work") as fleet:
        fleet.balancer.router.replicas["replica-1"].draining = True
        hung = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        fleet.balancer.router.replicas["replica-1"].draining = False
        await fleet.until(lambda: fleet.state(0) == "stalled")
        assert [(await fleet.chat()).headers["x-ridgeline-replica"] for _ in range(5)] == ["replica-1"] * 5
        fleet.replicas[0].steps = True
        await fleet.until(lambda: fleet.state(0) == "up")
        fleet.replicas[0].gate.set()
        assert (await hung).status == 200


async def test_requests_leave_a_replica_that_no_longer_answers() -> None:
    async with routed(thinks, streams, stall_s=0.1) as fleet:
        fleet.balancer.router.replicas["replica-1"].draining = True
        moved = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        fleet.balancer.router.replicas["replica-1"].draining = False
        fleet.replicas[0].deaf = True
        answer = await moved
        assert answer.status == 200 and answer.headers["x-ridgeline-replica"] == "replica-1"
        await fleet.until(lambda: fleet.replicas[0].left == 1)


async def test_an_idle_stream_is_given_up() -> None:
    async with routed(waits, idle_s=0.1, stall_s=5.0) as fleet:
        answer = await fleet.chat()
        assert answer.data.startswith(EVENTS[0]) and b"it makes no progress" in answer.data


async def test_one_key_is_checked_once_and_passed_on() -> None:
    async with routed(streams, service={"api_key": "secret"}) as fleet:
        for path in ("/v1/models", "/metrics", "/admin/replicas"):
            assert (await fleet.get(path)).status == 401
        assert (await fleet.chat()).status == 401 and not fleet.replicas[0].bodies
        assert (await fleet.get("/health")).status == 200
        assert (await fleet.chat(headers=SECRET)).status == 200
        assert fleet.replicas[0].headers[-1]["authorization"] == "Bearer secret"


async def test_operators_have_a_key_of_their_own() -> None:
    async with routed(streams, service={"admin_api_key": "boss"}) as fleet:
        assert (await fleet.chat(headers=SECRET)).status == 200, "the replicas check it"
        assert fleet.replicas[0].headers[-1]["authorization"] == SECRET["authorization"]
        assert (await fleet.get("/admin/replicas")).status in (401, 403)
        assert (await fleet.get("/admin/replicas", {"authorization": "Bearer boss"})).status == 200


async def test_a_router_without_keys_uses_no_replica_that_has_some() -> None:
    async with routed(streams, streams) as fleet:
        replica = fleet.replicas[1]
        replica.key, replica.health = "secret", (503, {})
        await fleet.until(lambda: fleet.state(1) == "down")
        replica.health = (200, {"status": "ok", "step": 0})
        trouble = fleet.balancer.upstreams["replica-1"]
        await fleet.until(lambda: trouble.trouble.startswith("it requires an API key and the router has none"))
        assert [(await fleet.chat()).headers["x-ridgeline-replica"] for _ in range(4)] == ["replica-0"] * 4
        with pytest.raises(ConfigError, match=f"The replica {replica.url} is not used: it requires an API key"):
            await fleet.balancer.check_keys()
        replica.key = ""
        await fleet.until(lambda: fleet.state(1) == "up")
        await fleet.balancer.check_keys()


@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
async def test_a_router_with_a_key_uses_replicas_that_have_some(option: str) -> None:
    async with routed(streams, service={option: "boss"}) as fleet:
        fleet.replicas[0].key = "another"
        fleet.balancer.add("again", fleet.replicas[0].url)
        async with asyncio.timeout(5):
            await fleet.balancer.until_up("again")
        await fleet.balancer.check_keys()


async def test_route_ends_at_the_start_before_a_replica_with_keys() -> None:
    async with FakeReplica(streams) as replica:
        replica.key = "secret"
        config, said = ServiceConfig(port=0), []
        with pytest.raises(ConfigError, match="give the router the replicas' --api-key, or --admin-api-key"):
            async with asyncio.timeout(5):
                await serve_router(config, RouterConfig(), [replica.url], bind(config.host, 0), said.append)
        assert not said


async def test_models_and_replicas() -> None:
    async with routed(streams, streams) as fleet:
        models = (await fleet.get("/v1/models", SECRET)).json
        assert [card["id"] for card in models["data"]] == ["m"]
        assert fleet.replicas[0].headers[-1]["authorization"] == "Bearer secret"
        assert (await fleet.get("/v1/models/root/m")).json["max_model_len"] == 8
        assert (await fleet.get("/v1/models/x")).status == 404
        rows = (await fleet.get("/admin/replicas")).json["data"]
        assert [(row["name"], row["state"], row["circuit_closed"]) for row in rows] == [
            ("replica-0", "up", True),
            ("replica-1", "up", True),
        ]


async def test_a_bad_body_and_a_foreign_page_stop_at_the_router() -> None:
    async with routed(streams) as fleet:
        url = f"{fleet.server.url}/v1/chat/completions"
        async with fleet.client.post(url, data=b"{", headers={"content-type": "application/json"}) as reply:
            assert reply.status == 400
        assert (await fleet.chat(headers={"origin": "https://other.example"})).status == 403
        assert (await fleet.get("/v1/batches")).status == 404
        assert not fleet.replicas[0].bodies


async def test_conversations_stay_where_their_prefix_is() -> None:
    async with routed(streams, streams, streams, streams) as fleet:
        homes = []
        for name in "abcdef":
            turns = [{"role": "user", "content": name * 4000}]
            seen = set()
            for _ in range(4):
                seen.add((await fleet.chat(messages=turns)).headers["x-ridgeline-replica"])
                turns = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": name * 2000}]
            homes.append(seen)
        assert all(len(seen) == 1 for seen in homes)
        assert len(set.union(*homes)) > 1
        hits = re.search(r"router_prefix_hit_tokens_total\{\} (\S+)", (await fleet.get("/metrics")).data.decode())
        assert hits is not None and float(hits[1]) > 6 * (1000 + 1500 + 2000) * 0.9


async def test_many_requests_all_end_while_replicas_come_and_go() -> None:
    async with routed(streams, streams, streams, service={"max_queue": 1000}) as fleet:
        balancer = fleet.balancer

        async def churn() -> None:
            for _ in range(5):
                await balancer.drain("replica-0", 5.0)
                balancer.remove("replica-0")
                balancer.add("replica-0", fleet.replicas[0].url)
                await balancer.until_up("replica-0")

        answers, _ = await asyncio.gather(asyncio.gather(*(fleet.chat() for _ in range(200))), churn())
        assert all(answer.data == b"".join(EVENTS) for answer in answers)
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 200
        assert sum(balancer.counts.answers.values()) == 200


async def test_a_large_body_passes() -> None:
    async with routed(streams) as fleet:
        assert (await fleet.chat(messages=[{"role": "user", "content": "x" * 2_000_000}])).status == 200
        assert len(fleet.replicas[0].bodies[0]["messages"][0]["content"]) == 2_000_000


def test_demand_of_bodies() -> None:
    demand = read_demand({"x-api-key": "k"}, {"prompt": "x" * 4000, "service_tier": "flex"}).demand
    assert (demand.tokens, len(demand.chunks), demand.priority) == (1000, 7, 10) and demand.tenant
    ids = read_demand({}, {"prompt": list(range(1000)), "priority": -3, "session_id": "s"}).demand
    assert (ids.tokens, len(ids.chunks), ids.priority, ids.session, ids.tenant) == (1000, 7, -3, "s", "")
    salted = read_demand({}, {"prompt": "x" * 4000, "cache_salt": "t"}).demand
    assert not set(salted.chunks) & set(demand.chunks)
    for odd in (
        [],
        {"prompt": None},
        {"prompt": ["a", [1, "x"], 2**80]},
        {"messages": 3},
        {"priority": "x", "service_tier": []},
    ):
        assert read_demand({}, odd).demand.tokens == 1


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    turns = [{"role": "user", "content": 'é\n"'}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    tools = [{"type": "function"}]
    shorter, longer = (
        prompt_bytes({"messages": turns[:1], "tools": tools}),
        prompt_bytes({"messages": turns, "tools": tools}),
    )
    assert longer.startswith(shorter) and len(longer) > len(shorter)


def test_options() -> None:
    assert read_router({"policy": "round-robin", "replica_limit": "8"}, "flag").capacity.limit == 8
    with pytest.raises(ConfigError, match="policy is 'x': give one of prefix, least-work, round-robin"):
        read_router({"policy": "x"}, "flag")
    with pytest.raises(ConfigError, match="replica_limit is 0: give 1 to"):
        read_router({"replica_limit": 0}, "flag")
    assert read_url("http://a:1/v1/") == "http://a:1"
    with pytest.raises(ConfigError, match="--replica is 'a:1': give an address"):
        read_url("a:1")
