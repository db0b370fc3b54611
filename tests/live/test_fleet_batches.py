"""Files, batches, stored responses and /requests of `ridgeline up`: two real servers, the official client, and sudden deaths."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .served import MODEL, Served
from .test_batches import client_of, results, row, start, until
from .test_fleet import FILE, fleet, until_all_are_up

pytestmark = pytest.mark.long
SERVE = {**FILE["serve"], "max_model_len": 512, "kv_cache_memory": "5M"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fleet-batches")
    router = {"port": 0, "drain_s": 2.0, "batch_dir": str(folder / "state")}
    with fleet(folder, replicas=2, serve=SERVE, router=router) as running:
        until_all_are_up(running)
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def served_by(server: Served, order: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.send("GET", f"/requests?order={order}&limit=100").json["data"]
    return rows


def test_both_replicas_run_the_rows_and_say_what_online_requests_say(server: Served, client: openai.OpenAI) -> None:
    texts = [f"Tell me a story about the number {number}." for number in range(24)]
    batch = until(client, start(client, [row(str(number), text) for number, text in enumerate(texts)]).id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 24, 24, 0)
    lines = {line["custom_id"]: line["response"] for line in results(client, batch.output_file_id)}
    for number in (0, 11, 23):
        online = server.chat(texts[number], max_tokens=12, temperature=0, model=MODEL).json
        assert lines[str(number)]["body"]["choices"] == online["choices"]
    ledger = {entry["request_id"]: entry for entry in served_by(server, "batch")}
    entries = [ledger[line["request_id"]] for line in lines.values()]
    assert {entry["replica"] for entry in entries} == {"replica-0", "replica-1"}
    assert {(entry["batch"], entry["price_factor"]) for entry in entries} == {(True, 0.5)}
    assert batch.usage.output_tokens == sum(entry["output_tokens"] for entry in entries)
    assert server.metric("batch_rows_total") >= 24 and server.metric("batch_rows_running") == 0


def test_a_bad_line_fails_alone_as_on_one_server(client: openai.OpenAI) -> None:
    rows: list[Any] = [
        row("good"), b"{not json", row("hot", temperature=9), row("other", url="/v1/completions"), row("good"),
        row("stream", stream=True), {"custom_id": "bare"}, row("model", model="gpt-4"), row("long", "word " * 600),
    ]  # fmt: skip
    batch = until(client, start(client, rows).id)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (9, 1, 8)
    errors = {line["custom_id"]: line["response"] for line in results(client, batch.error_file_id)}
    got = {name: (answer["status_code"], answer["body"]["error"]["param"]) for name, answer in errors.items()}
    assert got == {
        None: (400, None), "hot": (400, "temperature"), "other": (400, "url"), "good": (400, "custom_id"),
        "stream": (400, "body.stream"), "bare": (400, "method"), "model": (404, "model"), "long": (400, "messages"),
    }  # fmt: skip
    assert errors["hot"]["body"]["request_id"] == errors["hot"]["request_id"]


def test_a_stored_response_goes_on_at_any_replica(server: Served, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=4)
    replicas, previous = set(), first.id
    for _ in range(6):
        *_, last = client.responses.create(
            model=MODEL, input="And then?", previous_response_id=previous, max_output_tokens=4, stream=True
        )
        assert last.type in ("response.completed", "response.incomplete")
        response = last.response
        assert response.previous_response_id == previous and response.usage is not None
        previous = response.id
        replicas |= {entry["replica"] for entry in served_by(server, "recent")}
    assert replicas == {"replica-0", "replica-1"}
    stored = client.responses.retrieve(previous)
    assert stored.output_text == response.output_text
    texts = [
        part["text"] for item in client.responses.input_items.list(previous).data for part in item.to_dict()["content"]
    ]
    assert texts[0] == "Hello!" and texts[1] == first.output_text and texts.count("And then?") == 6
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"
    hidden = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_the_requests_of_all_replicas(server: Served) -> None:
    ids = [server.chat(max_tokens=2, temperature=0).json["id"] for _ in range(8)]
    rows = served_by(server, "recent")
    assert [entry["id"] for entry in rows][: len(ids)] == ids[::-1]
    slowest = [entry["e2e_s"] for entry in served_by(server, "slowest")]
    assert slowest == sorted(slowest, reverse=True)
    for number in (0, -1):
        entry = server.send("GET", f"/requests/{ids[number]}").json
        assert (entry["id"], entry["output_tokens"]) == (ids[number], 2)
        assert server.send("GET", f"/requests/{ids[number]}/why").json["replica"] == entry["replica"]
    assert server.send("GET", "/requests/none").status == 404
    assert server.send("GET", "/requests?order=odd").error["param"] == "order"


def test_no_row_is_lost_or_repeated_when_replicas_and_router_are_killed(tmp_path: Path) -> None:
    """In turn a replica and the router get SIGKILL while a batch runs."""
    total, batch_id, kept = 160, "", set[str]()
    rows = [row(str(number), f"Story {number}", max_tokens=40, ignore_eos=True) for number in range(total)]
    router = {"port": 0, "drain_s": 2.0, "batch_dir": str(tmp_path / "state")}
    for turn in range(3):
        with fleet(tmp_path, replicas=2, serve=SERVE, router=router) as server:
            until_all_are_up(server)
            client = client_of(server)
            batch_id = batch_id or start(client, rows).id
            for victim in (server.children()[0], server.process.pid):
                before = client.batches.retrieve(batch_id).request_counts.completed
                assert before >= len(kept)
                if turn == 2:
                    break
                until(client, batch_id, lambda now, before=before: now.request_counts.completed >= before + 20)
                os.kill(victim, signal.SIGKILL)
                kept = written(tmp_path / "state") | kept
            if turn < 2:
                assert server.process.wait() == -signal.SIGKILL
                assert kept <= written(tmp_path / "state")
                continue
            batch = until(client, batch_id)
            names = [line["custom_id"] for line in results(client, batch.output_file_id)]
            assert (batch.status, batch.request_counts.completed) == ("completed", total)
            assert sorted(names, key=int) == [str(number) for number in range(total)]


def written(state: Path) -> set[str]:
    """Rows with a whole line in the result files."""
    lines = [line for path in (state / "files").iterdir() for line in path.read_bytes().splitlines(keepends=True)]
    return {
        json.loads(line)["custom_id"] for line in lines if line.startswith(b'{"id":"batch_req_') and line[-1:] == b"\n"
    }
