"""The ledger over HTTP: rows, why, the dashboard's data."""

from __future__ import annotations

from typing import Any

import pytest

from .live import Live, behaviour, live, says


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
    assert [one["id"] for one in listed] == [body["id"]]


def test_hidden_thoughts_delay_what_is_published(thoughtful: Live) -> None:
    row = wait_for(thoughtful, thoughtful.chat().json["id"])
    assert row["hidden_tokens"] > 0 and row["publish_s"] >= row["ttft_s"]


def test_why_in_words_and_numbers(polite: Live) -> None:
    name = polite.chat(stream=True).events[0]["id"]
    wait_for(polite, name)
    told = polite.get(f"/requests/{name}/why").json
    assert told["id"] == name and told["verdict"] == "good" and "tokens in" in told["summary"]
    assert told["numbers"]["spent"]["decode_s"] >= 0 and set(told["numbers"]["slo"]) == {"ttft", "tpot", "e2e"}


def test_a_missed_limit_is_named() -> None:
    with live(behaviour(says("slow")), slo="ttft=0.001ms") as server:
        row = wait_for(server, server.chat().json["id"])
        assert row["verdict"].startswith("ttft ")
        figures = server.get("/dashboard/data").json["figures"]
        assert figures["slo_attainment"] == 0
        assert "ridgeline:slo_attainment" in server.get("/metrics").data.decode()


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/requests/nobody", 404, "id"),
        ("/requests/nobody/why", 404, "id"),
        ("/requests?order=fastest", 400, "order"),
        ("/requests?limit=0", 400, "limit"),
        ("/requests?limit=many", 400, "limit"),
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
    assert name in {one["id"] for one in data["slowest"]}
    assert data["figures"]["requests_per_second"] > 0
