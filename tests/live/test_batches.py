"""Files and batches on the real server, with the official client and the command line, and through the server's sudden death."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.cli.main import main

from .served import MODEL, TIMEOUT_S, Served, served

FLAGS = (
    *("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-memory", "5M"),
    *("--drain-s", "2"),
)
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def row(name: str, text: str = "Tell me a story.", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if url == CHAT else {"prompt": text}
    body = {"model": MODEL, **prompt, "max_tokens": 12, "temperature": 0, **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(rows: list[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in rows)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


def start(client: openai.OpenAI, rows: list[Any], endpoint: Any = CHAT, **options: Any) -> Any:
    file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="batch")
    options = {"completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)


def until(
    client: openai.OpenAI, batch_id: str, done: Callable[[Any], bool] = lambda batch: batch.status in ENDED
) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not done(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).read().splitlines()]


def test_a_batch_says_what_online_requests_say(server: Served, client: openai.OpenAI):
    texts = [f"Tell me a story about the number {number}." for number in range(6)]
    begun = start(client, [row(f"r{number}", text) for number, text in enumerate(texts)], metadata={"team": "a"})
    assert (begun.status, begun.object, begun.endpoint, begun.metadata) == ("validating", "batch", CHAT, {"team": "a"})
    assert begun.expires_at == begun.created_at + 24 * 3600 and len(begun.to_dict()) == 22
    batch = until(client, begun.id)
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 6, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.model == MODEL
    lines = results(client, batch.output_file_id)
    assert {line["custom_id"] for line in lines} == {f"r{number}" for number in range(6)}
    assert len({line["id"] for line in lines}) == 6 and all(line["id"].startswith("batch_req_") for line in lines)
    for line in lines:
        assert line["error"] is None and line["response"]["status_code"] == 200 and line["response"]["request_id"]
        text = texts[int(line["custom_id"][1:])]
        online = server.chat(text, max_tokens=12, temperature=0, model=MODEL).json
        assert line["response"]["body"]["choices"] == online["choices"]
    tokens = [line["response"]["body"]["usage"]["total_tokens"] for line in lines]
    assert batch.usage.total_tokens == sum(tokens) == batch.usage.input_tokens + batch.usage.output_tokens
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(client.files.content(output.id).read())
    ledger = server.send("GET", f"/requests/{lines[0]['response']['request_id']}").json
    assert ledger["batch"] and ledger["price_factor"] == 0.5
    assert server.metric("batch_rows_total") >= 6 and server.metric("batch_rows_running") == 0


def test_completions(client: openai.OpenAI):
    url = "/v1/completions"
    batch = until(client, start(client, [row("a", "Once", url), row("b", "Twice", url, n=2)], url).id)
    lines = {line["custom_id"]: line for line in results(client, batch.output_file_id)}
    assert batch.status == "completed" and len(lines["b"]["response"]["body"]["choices"]) == 2


def test_embeddings(server: Served, client: openai.OpenAI):
    url, inputs = "/v1/embeddings", {"a": "Once", "b": ["Once", "upon a time"]}
    rows = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"input": texts}} for name, texts in inputs.items()
    ]
    batch = until(client, start(client, rows, url).id)
    lines = {line["custom_id"]: line["response"]["body"] for line in results(client, batch.output_file_id)}
    assert batch.status == "completed" and lines.keys() == inputs.keys()
    for name, texts in inputs.items():
        online = server.send("POST", url, {"input": texts}).json
        assert lines[name]["usage"] == online["usage"] and len(lines[name]["data"]) == len(online["data"])
        pairs = zip(lines[name]["data"], online["data"], strict=True)
        assert all(ours["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5) for ours, theirs in pairs)
    tokens = sum(line["usage"]["total_tokens"] for line in lines.values())
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (tokens, 0)


def test_a_bad_line_fails_alone(client: openai.OpenAI):
    rows: list[Any] = [
        row("good"),
        b"{not json",
        row("hot", temperature=9),
        row("other", url="/v1/completions"),
        row("good"),
        row("stream", stream=True),
        {"custom_id": "bare"},
        row("model", model="gpt-4"),
        b"",
    ]
    batch = until(client, start(client, rows).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (8, 1, 7)
    errors = results(client, batch.error_file_id)
    assert all(line["error"] is None and line["response"]["body"]["error"]["message"] for line in errors)
    got = {
        line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]["error"]["param"])
        for line in errors
    }
    assert got == {
        None: (400, None),
        "hot": (400, "temperature"),
        "other": (400, "url"),
        "good": (400, "custom_id"),
        "stream": (400, "body.stream"),
        "bare": (400, "method"),
        "model": (404, "model"),
    }
    assert [line["custom_id"] for line in results(client, batch.output_file_id)] == ["good"]


def test_a_file_without_a_valid_line_fails(client: openai.OpenAI):
    batch = until(client, start(client, [b"a,b,c", b"1,2,3"]).id)
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert [problem.line for problem in batch.errors.data] == [1, 2]
    empty = until(client, start(client, [b""]).id)
    assert empty.status == "failed" and empty.errors.data[0].code == "empty_file"


def test_what_is_refused(client: openai.OpenAI):
    file = client.files.create(file=("rows.jsonl", jsonl([row("a")])), purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/nonsense"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 7}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "v" * 513}}, "metadata.a"),
        (
            {"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 5}}},
            "output_expires_after.seconds",
        ),
    ]
    for change, param in cases:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as raised:
            client.batches.create(**{**good, **change})
        assert raised.value.param == param and raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a", b"{}"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")


def test_files(server: Served, client: openai.OpenAI):
    data = jsonl([row("a")])
    policy: Any = {"anchor": "created_at", "seconds": 3600}
    made = [
        client.files.create(file=(f"{number}.jsonl", data), purpose="batch", expires_after=policy)
        for number in range(3)
    ]
    assert (
        made[0].expires_at == made[0].created_at + 3600 and made[0].bytes == len(data) and made[0].status == "processed"
    )
    assert [file.id for file in client.files.list(limit=2, purpose="batch").data] == [made[2].id, made[1].id]
    assert [file.id for file in client.files.list(after=made[0].id, order="asc").data] == [made[1].id, made[2].id]
    assert [file.id for file in client.files.list(limit=1)][:3] == [file.id for file in reversed(made)]
    assert client.files.content(made[0].id).read() == data
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    for query in ("limit=0", "limit=x", "order=up", "after=file-none"):
        assert server.send("GET", f"/v1/files?{query}").status in (400, 404)


def test_pages_of_batches(client: openai.OpenAI):
    made = [start(client, [row("a", max_tokens=1)]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [made[2], made[1]] and page.has_more
    assert [batch.id for batch in client.batches.list(limit=1)][:3] == made[::-1]


def test_cancel(client: openai.OpenAI):
    batch = start(
        client, [row(str(number), f"Story {number}", max_tokens=400, ignore_eos=True) for number in range(200)]
    )
    until(client, batch.id, lambda now: now.request_counts.completed > 0)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = until(client, batch.id)
    counts = ended.request_counts
    assert ended.status == "cancelled" and ended.cancelled_at >= ended.cancelling_at
    assert 0 < counts.completed < 200 and counts.completed + counts.failed == 200
    errors = results(client, ended.error_file_id)
    assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
    assert len(results(client, ended.output_file_id)) == counts.completed
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_the_command(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, output = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    path.write_bytes(jsonl([row("a"), row("b"), b"{"]))
    url = ("--url", server.url)
    assert main(["batch", "submit", str(path), *url, "--metadata", "team=a"]) == 0
    batch_id = capsys.readouterr().out.strip()
    assert main(["batch", "get", batch_id, *url, "--wait", "--output", str(output)]) == 0
    assert {json.loads(line)["custom_id"] for line in output.read_text().splitlines()} == {"a", "b"}
    assert main(["batch", "get", batch_id, *url, "--errors", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["response"]["status_code"] == 400
    capsys.readouterr()
    assert main(["batch", "status", batch_id, *url]) == 0
    assert "completed    2 of 3 done, 1 failed" in capsys.readouterr().out
    assert main(["batch", "cancel", batch_id, *url]) == 1
    assert "completed" in capsys.readouterr().err


@pytest.mark.long
def test_no_row_is_lost_or_repeated_when_the_server_is_killed(tmp_path: Path):
    """The server is killed with SIGKILL again and again while it runs a batch."""
    total = 120
    state = ("--batch-dir", str(tmp_path / "state"))
    rows = [row(str(number), f"Story {number}", max_tokens=40, ignore_eos=True) for number in range(total)]
    batch_id, kept = "", set[str]()
    for turn in range(4):
        with served(tmp_path, *FLAGS, *state) as server:
            client = client_of(server)
            if not batch_id:
                batch_id = start(client, rows).id
            before = client.batches.retrieve(batch_id).request_counts.completed
            assert before >= len(kept)
            if turn < 3:
                until(client, batch_id, lambda now, before=before: now.request_counts.completed >= before + 10)
                output = next(
                    path
                    for path in (tmp_path / "state" / "files").iterdir()
                    if b'"batch_req_' in path.read_bytes()[:20]
                )
                os.kill(server.process.pid, signal.SIGKILL)
                assert server.process.wait() == -signal.SIGKILL
                finished = {
                    json.loads(line)["custom_id"]
                    for line in output.read_bytes().splitlines(keepends=True)
                    if line.endswith(b"\n")
                }
                assert kept <= finished
                kept = finished
                continue
            batch = until(client, batch_id)
            names = [line["custom_id"] for line in results(client, batch.output_file_id)]
            assert batch.status == "completed" and batch.request_counts.completed == total
            assert sorted(names, key=int) == [str(number) for number in range(total)]
