"""The ledger over HTTP: rows, why, the dashboard's data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.core.errors import RequestError
from ridgeline.service.declared import read_declared

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


def test_hidden_thoughts_delay_what_is_published(thoughtful: Live) -> None:
    row = wait_for(thoughtful, thoughtful.chat().json["id"])
    assert row["hidden_tokens"] > 0 and row["publish_s"] >= row["ttft_s"]


def test_why_in_words_and_numbers(polite: Live) -> None:
    name = polite.chat(stream=True).events[0]["id"]
    wait_for(polite, name)
    explained = polite.get(f"/requests/{name}/why").json
    assert explained["id"] == name and explained["verdict"] == "good" and "output tokens" in explained["summary"]
    assert explained["numbers"]["spent"]["decode_s"] >= 0 and set(explained["numbers"]["slo"]) == {
        "ttft",
        "tpot",
        "e2e",
    }


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
        assert explained["numbers"]["slo"] == {"ttft": pytest.approx(1e-6), "tpot": 60.0, "e2e": 60.0}
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
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"])
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
