"""The ledger over HTTP: rows, why, the dashboard's data."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from ridgeline.core.errors import RequestError
from ridgeline.core.slo import NAMES, NO_DEADLINE
from ridgeline.metrics.agent_runs import SILENCE_S
from ridgeline.service.declared import read_declared, read_run_id

from .conftest import CALL, THINKING
from .live import Live, behaviour, counts, live, says


def wait_for(server: Live, name: str) -> dict[str, Any]:
    """The row of a request; it is written right after the last byte of its answer."""
    for _ in range(200):
        answer = server.get(f"/requests/{name}")
        if answer.status == 200:
            return answer.json
    raise AssertionError(answer.json)


def test_an_ended_request_is_in_the_ledger(polite: Live) -> None:
    body = polite.chat().json
    row = wait_for(polite, body["id"])
    assert row["id"] == body["id"] and row["verdict"] == "good" and row["cut"] == ""
    assert row["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert row["output_tokens"] == body["usage"]["completion_tokens"]
    assert 0 < row["ttft_s"] <= row["publish_s"] <= row["e2e_s"]
    listed = polite.get("/requests?order=recent&limit=1").json["data"]
    assert [row["id"] for row in listed] == [body["id"]]


def test_a_request_is_known_by_the_id_of_its_body_and_of_its_header(polite: Live) -> None:
    answer = polite.chat({"x-request-id": "mine/1"})
    name = answer.json["id"]
    for path in (f"/requests/{name}", "/requests/mine%2F1"):
        row = wait_for(polite, path.removeprefix("/requests/"))
        assert (row["id"], row["request_id"]) == (name, "mine/1")
        explained = polite.get(path + "/why").json
        assert (explained["id"], explained["request_id"]) == (name, "mine/1")
    again = polite.chat({"x-request-id": "mine/1"}).json["id"]
    wait_for(polite, again)
    assert polite.get("/requests/mine%2F1").json["id"] == again, "the newest wins"
    assert polite.get(f"/requests/{name}").json["id"] == name


def test_ids_that_the_server_made_and_those_of_the_body_field(polite: Live) -> None:
    answer = polite.complete()
    ours = answer.headers["x-request-id"]
    assert ours.startswith("req_") and wait_for(polite, ours)["id"] == answer.json["id"]
    answer = polite.complete(request_id="of-the-body")
    assert answer.headers["x-request-id"] == "of-the-body"
    assert wait_for(polite, "of-the-body")["id"] == answer.json["id"]


def test_an_unknown_id_is_told_which_ids_there_are(polite: Live) -> None:
    message = polite.get("/requests/nobody").json["error"]["message"]
    assert "answer's body" in message and "x-request-id" in message and "4096" in message


def test_a_disconnect_is_no_miss() -> None:
    with live(behaviour(counts, delay=0.01), slo="ttft=60s,tpot=60s") as server:
        connection = server.connect()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}
        headers = {"content-type": "application/json", "x-request-id": "gone"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.readline()
        response.close()
        connection.close()
        server.until(lambda: server.server.front.metrics.live.find("gone") is not None)
        row = server.get("/requests/gone").json
        assert row["cut"] == row["verdict"] == "cancelled"
        explained = server.get("/requests/gone/why").json
        assert explained["blame"] == "" and explained["reasons"][0].startswith("Disconnected by the client after ")
        wait_for(server, server.chat(max_tokens=2).json["id"])
        data = server.get("/dashboard/data").json
        assert data["figures"]["slo_attainment"] == 1 and data["cut"] == {"cancelled": 1} and data["blamed"] == {}
        scraped = server.get("/metrics").data.decode()
        assert 'aborted_requests_total{engine="0",model_name="tiny-test",reason="cancelled"} 1' in scraped
        assert "slo_attainment{" in scraped and "slo_missed_requests{" not in scraped


def test_a_grammar_that_fails_midway_is_a_rejection_in_words() -> None:
    with live(behaviour(counts, fail_after=1, fails_as="refused")) as server:
        answer = server.chat({"x-request-id": "bad"}, response_format={"type": "json_object"})
        assert answer.status == 400
        wait_for(server, "bad")
        reasons = server.get("/requests/bad/why").json["reasons"]
        assert reasons[0].startswith("Rejected after ") and reasons[0].endswith(" (invalid grammar).")


STEP_S = 0.03
"""Seconds per token of an engine whose times a test tells apart."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_without_hidden_tokens_publish_equals_ttft(stream: bool) -> None:
    with live(behaviour(says("Hello"))) as server:
        for answer in (server.chat(stream=stream), server.complete(stream=stream)):
            row = wait_for(server, answer.events[0]["id"] if stream else answer.json["id"])
            assert row["publish_s"] == row["ttft_s"] > 0


def test_an_empty_answer_is_published_with_its_end_token() -> None:
    with live(behaviour(says(""))) as server:
        row = wait_for(server, server.chat().json["id"])
        assert row["output_tokens"] == 1 and row["publish_s"] == row["ttft_s"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_reasoning_delays_publish(stream: bool) -> None:
    with live(behaviour(says("<think>hm, hm</think>Yes."), delay=STEP_S), chat_template=THINKING) as server:
        rows = []
        for fields in ({}, {"include_reasoning": False}, {"include_reasoning": True}):
            answer = server.chat(stream=stream, **fields)
            rows.append(wait_for(server, answer.events[0]["id"] if stream else answer.json["id"]))
        for row in rows[:2]:
            assert row["hidden_tokens"] >= 6 and row["publish_s"] - row["ttft_s"] > 6 * STEP_S
        shown = rows[2]
        assert shown["publish_s"] - shown["ttft_s"] < 4 * STEP_S, "who asks for the reasoning reads it"


def test_a_tool_call_is_published_with_its_first_delta() -> None:
    with live(behaviour(says(CALL), delay=STEP_S)) as server:
        answer = server.chat(stream=True, tools=TOOLS)
        row = wait_for(server, answer.events[0]["id"])
        assert any("tool_calls" in choice["delta"] for event in answer.events for choice in event["choices"])
        planning = row["publish_s"] - row["ttft_s"]
        assert 10 * STEP_S < planning < row["e2e_s"] - 5 * STEP_S, "after its name, before its arguments"


def test_goodput_judges_by_publish() -> None:
    """The first hidden token is quick enough; what the user sees comes too late."""
    plan = behaviour(says("<think>hm, hm</think>Yes."), delay=STEP_S)
    with live(plan, chat_template=THINKING, slo=f"publish={3 * STEP_S}s,p50(publish)<=60s") as server:
        row = wait_for(server, server.chat().json["id"])
        assert row["ttft_s"] < 3 * STEP_S and row["verdict"].startswith("publish ")
        assert server.get(f"/requests/{row['id']}/why").json["blame"] == "decode"
        data = server.get("/dashboard/data").json
        assert data["figures"]["slo_attainment"] == 0 and data["blamed"] == {"decode": 1} and data["slo_broken"] == []
        assert data["latencies"]["publish"]["p50"] == pytest.approx(row["publish_s"], rel=0.011)
        scraped = server.get("/metrics").data.decode()
        assert re.search(r'latency_window_seconds\{[^}]*latency="publish",quantile="0.95"\} ', scraped)
        generous = wait_for(server, server.chat({"x-slo-publish-ms": "60000"}).json["id"])
        assert generous["verdict"] == "good"


def test_the_engine_gets_the_limits_and_a_caller_may_only_loosen_them() -> None:
    with live(behaviour(says("Yes.")), slo="ttft=200ms,p99(tpot)<=50ms", keep_slo=True) as server:
        for headers in ({}, {"x-slo-ttft-ms": "900", "x-slo-tpot-ms": "1"}):
            assert server.chat(headers).status == 200
        limits = [submit.deadline for submit in server.engine.submits]
        assert limits == [(0.2, 0.05), (0.9, 0.05)]
    with live(behaviour(says("Yes.")), slo="ttft=200ms") as server:
        assert server.chat({"x-slo-ttft-ms": "1"}).status == 200
        assert server.engine.submits[0].deadline == NO_DEADLINE


def test_calls_of_one_run_id_are_one_agent_run() -> None:
    with live(behaviour(says("<think>hm</think>Yes."), delay=0.01), chat_template=THINKING) as server:
        runs = server.server.front.metrics.live.agent_runs
        rows = [wait_for(server, server.chat({"x-run-id": "trip/1"}).json["id"]) for _ in range(3)]
        wait_for(server, server.chat().json["id"])
        run = server.get("/runs/trip%2F1").json
        assert (run["id"], run["calls"], run["open_calls"], run["cut_calls"], run["ended"]) == (
            "trip/1",
            3,
            0,
            0,
            False,
        )
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "hidden_tokens", "joules", "cost"):
            assert run[name] == pytest.approx(sum(row[name] for row in rows)), name
        first, last = rows[0], rows[2]
        assert run["publish_s"] == pytest.approx(last["arrived_at"] + last["publish_s"] - first["arrived_at"])
        assert run["publish_s"] > first["e2e_s"] and run["e2e_s"] >= run["publish_s"]
        assert run["requests"] == [row["id"] for row in rows] and {row["run_id"] for row in rows} == {"trip/1"}
        figures = server.get("/dashboard/data").json["figures"]
        assert figures["open_agent_runs"] == 1
        server.until(lambda: runs.tick(time.perf_counter() + SILENCE_S) is None)
        assert server.get("/runs/trip%2F1").json["ended"]
        data = server.get("/dashboard/data").json
        assert data["agent_runs"]["calls"]["p50"] == pytest.approx(3, rel=0.011)
        assert data["agent_runs"]["publish_seconds"]["p95"] == pytest.approx(run["publish_s"], rel=0.011)
        scraped = server.get("/metrics").data.decode()
        assert 'agent_run_calls{engine="0",model_name="tiny-test",quantile="0.5"}' in scraped
        assert "trip" not in scraped, "labels are never per run"


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "é"])
def test_a_run_id_that_is_none_is_refused_by_name(polite: Live, value: str) -> None:
    answer = polite.chat({"x-run-id": value.encode().decode("latin-1")})
    assert answer.status == 400 and answer.error["param"] == "x-run-id" and "128" in answer.error["message"]


def test_an_unknown_run_and_a_run_id_that_is_sent_twice(polite: Live) -> None:
    answer = polite.get("/runs/nowhere")
    assert answer.status == 404 and "x-run-id" in answer.error["message"]
    with pytest.raises(RequestError, match="twice"):
        read_run_id(["a", "b"])


def test_requests_per_minute() -> None:
    with live(behaviour(says("Hello there"))) as server:
        for _ in range(3):
            wait_for(server, server.chat().json["id"])
        assert server.chat(temperature=9).status == 400
        figures = server.get("/dashboard/data").json["figures"]
        assert figures["arriving_requests_per_minute"] == figures["completed_requests_per_minute"] > 0
        assert figures["completed_requests_per_minute"] == pytest.approx(60 * figures["requests_per_second"])
        assert "ridgeline:arriving_requests_per_minute{" in server.get("/metrics").data.decode()


def test_why_in_words_and_numbers(polite: Live) -> None:
    name = polite.chat(stream=True).events[0]["id"]
    wait_for(polite, name)
    explained = polite.get(f"/requests/{name}/why").json
    assert explained["id"] == name and explained["verdict"] == "good" and "output tokens" in explained["summary"]
    assert explained["numbers"]["spent"]["decode_s"] >= 0 and list(explained["numbers"]["slo"]) == list(NAMES)


def test_a_missed_limit_is_named() -> None:
    with live(behaviour(says("slow")), slo="ttft=0.001ms") as server:
        row = wait_for(server, server.chat().json["id"])
        assert row["verdict"].startswith("ttft ")
        figures = server.get("/dashboard/data").json["figures"]
        assert figures["slo_attainment"] == 0
        assert "ridgeline:slo_attainment" in server.get("/metrics").data.decode()


def test_a_request_is_judged_by_the_limits_it_declares() -> None:
    with live(behaviour(says("slow")), slo="ttft=60s,e2e=60s") as server:
        name = server.chat({"X-SLO-TTFT-ms": "0.001", "x-slo-tpot-ms": "60000"}).json["id"]
        wait_for(server, name)
        explained = server.get(f"/requests/{name}/why").json
        assert explained["verdict"].startswith("ttft ") and explained["verdict"].endswith("> 0.001 ms")
        assert explained["numbers"]["slo"] == {
            "ttft": pytest.approx(1e-6),
            "publish": None,
            "tpot": 60.0,
            "e2e": 60.0,
        }
        assert server.get("/dashboard/data").json["figures"]["slo_attainment"] == 0
        assert wait_for(server, server.complete().json["id"])["verdict"] == "good"
        assert server.get("/dashboard/data").json["figures"]["slo_attainment"] == 0.5


def test_goodput_of_those_who_declare_limits_where_the_server_has_none() -> None:
    with live(behaviour(says("fine"))) as server:
        wait_for(server, server.chat().json["id"])
        assert "slo_attainment" not in server.get("/dashboard/data").json["figures"]
        wait_for(server, server.chat({"x-slo-e2e-ms": "6e4"}).json["id"])
        assert server.get("/dashboard/data").json["figures"]["slo_attainment"] == 1


@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "200ms", "1,2"])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-publish-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"])
def test_a_declared_limit_that_is_none_is_refused_by_name(polite: Live, name: str, value: str) -> None:
    answer = polite.chat({name: value})
    assert answer.status == 400 and answer.error["param"] == name and "milliseconds" in answer.error["message"]


def test_a_limit_declared_twice_or_unknown() -> None:
    with pytest.raises(RequestError, match="twice"):
        read_declared([("x-slo-ttft-ms", "1"), ("X-Slo-Ttft-Ms", "2")])
    with live(behaviour(says("a"))) as server:
        answer = server.chat({"x-slo-itl-ms": "5"}, surprise=1)
        assert answer.status == 200
        assert answer.headers["x-ridgeline-ignored-fields"] == "surprise, x-slo-itl-ms"


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/requests/nobody", 404, "id"),
        ("/requests/nobody/why", 404, "id"),
        ("/requests?order=fastest", 400, "order"),
        ("/requests?limit=0", 400, "limit"),
        ("/requests?limit=many", 400, "limit"),
        ("/dashboard/data?since=yesterday", 400, "since"),
        ("/dashboard/data?since=-1", 400, "since"),
        ("/dashboard/data?since=nan", 400, "since"),
    ],
)
def test_bad_questions_are_told_what_to_ask(polite: Live, path: str, status: int, param: str) -> None:
    answer = polite.get(path)
    assert answer.status == status and answer.json["error"]["param"] == param


def test_dashboard_data(polite: Live) -> None:
    name = polite.chat().json["id"]
    wait_for(polite, name)
    data = polite.get("/dashboard/data").json
    assert data["healthy"] and data["now"]["running"] >= 0 and 0 <= data["now"]["kv_used"] <= 1
    assert {"p50", "p90", "p95", "p99"} <= set(data["latencies"]["ttft"])
    assert name in {row["id"] for row in data["slowest"]}
    assert data["figures"]["requests_per_second"] > 0
    assert data["model"] == "tiny-test" and "readings" not in data


def test_the_servers_readings_fill_the_charts(polite: Live) -> None:
    polite.chat()
    live_figures = polite.server.front.metrics.live
    polite.until(lambda: len(live_figures.history.readings) > 0)
    readings = polite.get("/dashboard/data?since=0").json["readings"]
    assert set(readings[0]) == {"at", "latencies", "figures", "now", "point"}
    assert polite.get(f"/dashboard/data?since={readings[-1]['at']!r}").json["readings"] == []


def test_the_clock_ticks_without_requests() -> None:
    with live(behaviour(says("hi"))) as server:
        server.until(lambda: len(server.server.front.metrics.live.history.readings) > 0)


def test_what_is_declared_in_words() -> None:
    with live(behaviour(says("hi")), slo="ttft=200ms") as server:
        assert server.get("/dashboard/data").json["slo_text"] == "ttft=200ms"
    with live(behaviour(says("hi"))) as server:
        assert server.get("/dashboard/data").json["slo_text"] == ""
