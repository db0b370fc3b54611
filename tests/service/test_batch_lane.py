"""The batch lane beside a fake engine: expiry, engines that die, a full disk, a full queue, hours of the day, odd uploads."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, Overloaded
from ridgeline.service.access import Access
from ridgeline.service.batches.input import answered, not_run, row_id
from ridgeline.service.batches.job import ATTEMPTS, Pending
from ridgeline.service.batches.lane import run_lane
from ridgeline.service.batches.rows import PRIORITY, LaneCounts, NoRoom, RowAnswer, RowRequest
from ridgeline.service.batches.schemas import BATCH_ANSWERS
from ridgeline.service.batches.store import Store
from ridgeline.service.keys.keyring import Holder

from .live import MODEL, Live, Reply, behaviour, counts, live, says
from .test_batch_store import BODY, CHAT, add_file, line, stored

LIMIT = 1 << 30
ENDED = ("completed", "failed", "expired", "cancelled")


def valid(name: str, value: Any) -> None:
    """Hold an answer against its schema."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": BATCH_ANSWERS}}
    jsonschema.validate(value, schema, Draft202012Validator)


def form(*parts: tuple[str, bytes, str]) -> tuple[bytes, dict[str, str]]:
    """A multipart body of (field, value, filename), and its header."""
    lines = []
    for name, value, filename in parts:
        disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
        lines.append(f"--edge\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + value + b"\r\n")
    return b"".join(lines) + b"--edge--\r\n", {"content-type": "multipart/form-data; boundary=edge"}


def upload(server: Live, data: bytes) -> Reply:
    body, headers = form(("purpose", b"batch", ""), ("file", data, "rows.jsonl"))
    return server.send("POST", "/v1/files", body, headers)


def start(server: Live, data: bytes, **fields: Any) -> str:
    file = upload(server, data).json
    valid("File", file)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = server.send("POST", "/v1/batches", body)
    assert answer.status == 200, answer.data
    valid("Batch", answer.json)
    return str(answer.json["id"])


def get(server: Live, batch_id: str) -> dict[str, Any]:
    value: dict[str, Any] = server.get(f"/v1/batches/{batch_id}").json
    valid("Batch", value)
    return value


def until(server: Live, batch_id: str, *states: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while (batch := get(server, batch_id))["status"] not in (states or ENDED):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def lines(server: Live, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in server.get(f"/v1/files/{file_id}/content").data.splitlines()]


def test_rows_have_the_lowest_priority(tmp_path: Path):
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        until(server, start(server, line("a") + line("b", priority=-5) + line("c", service_tier="priority")))
        server.chat(priority=(1 << 31) - 1)
        *rows, online = [submit.priority for submit in server.engine.submits]
        ledger = server.get("/requests?order=batch").json["data"]
        assert [(row["batch"], row["price_factor"]) for row in ledger] == [(True, 0.5)] * 3
        assert sorted(rows) == [PRIORITY - 10, PRIORITY - 5, PRIORITY] and online < min(rows)


def test_rows_may_ask_for_responses(tmp_path: Path):
    """Each is answered on its own: nothing is kept, so no row goes on from another."""
    url = "/v1/responses"
    bodies = {"a": {"input": "hi", "model": MODEL}, "b": {"input": "hi", "previous_response_id": "resp_1"}}
    rows = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        batch = until(server, start(server, b"".join(json.dumps(row).encode() + b"\n" for row in rows), endpoint=url))
        (answered,) = lines(server, batch["output_file_id"])
        (refused,) = lines(server, batch["error_file_id"])
        response = answered["response"]["body"]
        assert response["output"][0]["content"][0]["text"] == "done"
        assert server.get(f"{url}/{response['id']}").status == 404
    assert "previous_response_id" in refused["response"]["body"]["error"]["message"]
    assert batch["usage"]["output_tokens"] == response["usage"]["output_tokens"] > 0


def test_online_requests_are_not_refused_because_of_rows(tmp_path: Path):
    with live(behaviour(counts, rows=2, delay=0.005), batch_dir=str(tmp_path), max_queue=1) as server:
        batch_id = start(server, b"".join(line(str(row), max_tokens=2000) for row in range(9)))
        server.until(lambda: server.engine.submits)
        assert server.chat(max_tokens=3).status == 200
        (ledger,) = server.get("/requests").json["data"]
        assert not ledger["batch"] and ledger["price_factor"] == 1.0
        assert "ridgeline:batch_rows_queued" in server.get("/metrics").data.decode()
        assert server.send("POST", f"/v1/batches/{batch_id}/cancel", {}).json["status"] in ("cancelling", "cancelled")
        until(server, batch_id, "cancelled")


def test_an_expired_batch_keeps_what_it_has(tmp_path: Path):
    """The server was off while the window passed."""
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a") + line("b"))
    late = stored(input_file_id=file.id, expires_at=int(time.time()) - 5)
    store.add_batch(late)
    store.close()
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        batch = until(server, late.batch.id)
        assert batch["status"] == "expired" and batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        errors = lines(server, batch["error_file_id"])
        assert {row["custom_id"]: (row["response"], row["error"]["code"]) for row in errors} == {
            "a": (None, "batch_expired"),
            "b": (None, "batch_expired"),
        }


@pytest.mark.parametrize(("status", "end", "ran"), [("finalizing", "completed", 2), ("cancelling", "cancelled", 1)])
def test_a_server_that_was_killed_at_the_end_of_a_batch_ends_it(tmp_path: Path, status: Any, end: str, ran: int):
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a") + line("b"))
    left = stored(input_file_id=file.id, expires_at=int(time.time()) + 1000, status=status)
    store.add_batch(left)
    answers = [answered(row_id(left.batch.id, row), "ab"[row], 200, BODY, "req_1") for row in range(ran)]
    store.path(left.output).write_bytes(b"".join(answers) + b'{"id": "torn')
    store.close()
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        batch = until(server, left.batch.id)
        assert batch["status"] == end and not server.engine.submits
        assert batch["request_counts"] == {"total": 2, "completed": ran, "failed": 2 - ran}
        assert [row["custom_id"] for row in lines(server, batch["output_file_id"])] == ["a", "b"][:ran]
        assert (batch["error_file_id"] is None) == (ran == 2)


def test_a_row_that_a_power_failure_took_runs_again(tmp_path: Path):
    """The state says that all rows are done, and the disk has one of them only."""
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a") + line("b"))
    left = stored(input_file_id=file.id, expires_at=int(time.time()) + 1000, status="finalizing")
    store.add_batch(left)
    store.path(left.output).write_bytes(answered(row_id(left.batch.id, 0), "a", 200, BODY, "req_1"))
    store.close()
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        batch = until(server, left.batch.id)
        assert batch["status"] == "completed" and len(server.engine.submits) == 1
        assert [row["custom_id"] for row in lines(server, batch["output_file_id"])] == ["a", "b"]


def test_choices_count_and_not_rows(tmp_path: Path):
    with live(behaviour(counts, rows=8, delay=0.002), batch_dir=str(tmp_path)) as server:
        batch_id = start(server, b"".join(line(str(row), max_tokens=400, n=3) for row in range(9)))
        most = 0

        def enough() -> bool:
            nonlocal most
            most = max(most, server.engine.open)
            return server.engine.said > 400

        server.until(enough)
        assert 3 < most <= 8
        server.send("POST", f"/v1/batches/{batch_id}/cancel", {})
        until(server, batch_id, "cancelled")
        large = until(server, start(server, line("large", max_tokens=5, n=20)))  # more than the engine runs at once
        assert large["request_counts"]["completed"] == 1


def test_one_batch_does_not_stop_the_others(tmp_path: Path):
    """Another program has written into its results."""
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a"))
    broken = stored(input_file_id=file.id, expires_at=int(time.time()) + 1000)
    store.add_batch(broken)
    store.path(broken.output).write_bytes(not_run(row_id(broken.batch.id, 0), "a", "code", "message"))
    store.close()
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        assert until(server, start(server, line("b")))["status"] == "completed"
        assert get(server, broken.batch.id)["status"] == "in_progress"


def test_a_client_that_leaves_while_its_batch_is_made(tmp_path: Path):
    """A batch that was stored runs, whether or not its client has heard of it."""
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        file = upload(server, line("a")).json
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        for _ in range(20):
            connection = server.connect()
            connection.request("POST", "/v1/batches", json.dumps(body), {"content-type": "application/json"})
            connection.close()
        last = until(server, start(server, line("b")))
        assert last["status"] == "completed"
        for batch in server.get("/v1/batches?limit=100").json["data"]:
            assert until(server, batch["id"])["status"] == "completed"


def test_rows_outlive_their_engine(tmp_path: Path):
    plan = behaviour(counts, rows=4, delay=0.002)
    with live(plan, batch_dir=str(tmp_path)) as server:
        batch_id = start(server, b"".join(line(str(row), max_tokens=40) for row in range(12)))
        server.until(lambda: server.engine.said > 10)
        server.run(server.engine.die())
        server.replace_engine()
        batch = until(server, batch_id)
        assert batch["status"] == "completed" and batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        names = [row["custom_id"] for row in lines(server, batch["output_file_id"])]
        assert sorted(names, key=int) == [str(row) for row in range(12)]


def test_a_row_that_the_engine_does_not_survive_fails(tmp_path: Path):
    with live(behaviour(counts, fail_after=2), batch_dir=str(tmp_path)) as server:
        batch = until(server, start(server, line("a")))
        assert batch["status"] == "completed" and batch["request_counts"]["failed"] == 1
        (row,) = lines(server, batch["error_file_id"])
        assert row["response"]["status_code"] == 500 and row["response"]["body"]["error"]["code"] == "engine_failed"
        assert len(server.engine.submits) == 3


def test_a_row_runs_again_after_its_grammar_had_no_time(tmp_path: Path):
    """The compilers of the service and of the engine are busy with others, or the engine fell asleep meanwhile."""
    plan = behaviour(says("a"), fail_after=0, fails_as="unavailable")
    with live(plan, batch_dir=str(tmp_path)) as server:
        grammars = server.server._service.grammars
        check, tries = grammars.check, []

        async def busy(*given: Any) -> None:
            tries.append(given)
            if len(tries) <= ATTEMPTS:
                raise Overloaded("The grammar was not compiled within 10 s.", retry_after_s=10.0)
            await check(*given)

        grammars.check = busy
        batch_id = start(server, line("a", guided_regex="a+"))
        server.until(lambda: len(server.engine.submits) > ATTEMPTS)
        server.engine.behaviour.fail_after = None
        batch = until(server, batch_id)
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 1, "completed": 1, "failed": 0})


def test_a_full_disk_ends_the_batch_and_not_the_server(tmp_path: Path):
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a"))
    doomed = stored(input_file_id=file.id, expires_at=int(time.time()) + 1000)
    store.add_batch(doomed)
    store.path(doomed.output).symlink_to("/dev/full")
    store.close()
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        batch = until(server, doomed.batch.id)
        assert batch["status"] == "failed" and batch["output_file_id"] is None
        assert [problem["code"] for problem in batch["errors"]["data"]] == ["storage_full"]
        assert server.chat().status == 200
        assert until(server, start(server, line("b")))["status"] == "completed"


def test_rows_wait_for_their_hours(tmp_path: Path):
    now = time.localtime()
    later = (now.tm_hour + 2) % 24
    window = f"{later:02}:00-{(later + 1) % 24:02}:00"
    with live(behaviour(says("done")), batch_dir=str(tmp_path), batch_window=window) as server:
        batch_id = start(server, line("a"))
        until(server, batch_id, "in_progress")
        time.sleep(0.2)
        assert get(server, batch_id)["request_counts"]["completed"] == 0 and not server.engine.submits
        server.send("POST", f"/v1/batches/{batch_id}/cancel", {})
        until(server, batch_id, "cancelled")


def test_a_stopped_server_goes_on_where_it_was(tmp_path: Path):
    data = b"".join(line(str(row), max_tokens=60) for row in range(10))
    with live(behaviour(counts, rows=2, delay=0.002), batch_dir=str(tmp_path)) as server:
        batch_id = start(server, data)
        server.until(lambda: server.engine.said > 150)
    with live(behaviour(counts, rows=2), batch_dir=str(tmp_path)) as server:
        assert get(server, batch_id)["status"] in ("in_progress", "finalizing", "completed")
        batch = until(server, batch_id)
        assert batch["status"] == "completed"
        names = [row["custom_id"] for row in lines(server, batch["output_file_id"])]
        assert sorted(names, key=int) == [str(row) for row in range(10)]
        assert len(server.engine.submits) < 10


def test_pages_of_other_sites_may_not_upload(tmp_path: Path):
    body, headers = form(("purpose", b"batch", ""), ("file", b"{}", "a.jsonl"))
    with live(behaviour(says("done")), batch_dir=str(tmp_path), api_key="secret") as server:
        key = {"authorization": "Bearer secret"}
        assert server.send("POST", "/v1/files", body, headers).status == 401
        assert (
            server.send("POST", "/v1/files", body, {**headers, **key, "origin": "https://evil.example"}).status == 403
        )
        assert server.send("POST", "/v1/files", body, {**headers, **key}).status == 200


def test_a_server_without_a_folder_says_so():
    with live(behaviour(says("done"))) as server:
        assert "--batch-dir" in server.get("/v1/batches").error["message"]


def test_a_folder_has_one_server(tmp_path: Path):
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        upload(server, b"{}")
        with pytest.raises(ConfigError) as used, live(behaviour(says("done")), batch_dir=str(tmp_path)):
            pass
        assert used.value.param == "batch_dir"


def test_beams_of_a_row_are_no_online_requests(tmp_path: Path):
    body = {"prompt": "hi", "model": MODEL, "use_beam_search": True, "best_of": 4, "max_tokens": 40}
    data = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    with live(behaviour(counts, rows=8, delay=0.005), batch_dir=str(tmp_path)) as server:
        batch_id = start(server, data, endpoint="/v1/completions")
        server.until(lambda: len(server.engine.submits) > 12)
        room = {server.get("/health").json["batch_rows"] for _ in range(20)}
        assert until(server, batch_id)["request_counts"]["completed"] == 1
    assert room == {8}


class FullRows:
    """Says that it has room, and has none."""

    def __init__(self) -> None:
        self.ran = 0

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        return True

    def give_back(self, choices: int, model: str | None) -> None: ...

    def may_pass(self, model: str | None) -> bool:
        return False

    def wait(self, count: int) -> None: ...

    async def run(self, row: RowRequest) -> RowAnswer:
        self.ran += 1
        raise NoRoom


async def test_a_row_that_finds_no_room_waits_before_it_tries_again(tmp_path: Path):
    """Two replicas may have room for a row together, and none of them for all of it."""
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.path(file.id).write_bytes(line("a"))
    store.add_batch(stored(input_file_id=file.id, expires_at=int(time.time()) + 60))
    store.close()
    rows = FullRows()
    async with run_lane(Access(ServiceConfig(port=0, batch_dir=str(tmp_path))), rows, LaneCounts()):
        await asyncio.sleep(0.4)
    assert 0 < rows.ran < 20


class BusyModel(FullRows):
    """Answers rows of one model, and has no room for those of another one."""

    def __init__(self, passes: bool) -> None:
        self.passes, self.models = passes, []

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        return model == "b"

    def may_pass(self, model: str | None) -> bool:
        return self.passes

    async def run(self, row: RowRequest) -> RowAnswer:
        self.models.append(row.body["model"])
        return RowAnswer(200, b"{}", {})


@pytest.mark.parametrize("passes", [True, False])
async def test_rows_may_pass_those_of_a_model_without_room(tmp_path: Path, passes: bool):
    """In the same batch and in later ones, if its model takes nothing from them."""
    store = Store(tmp_path, LIMIT)
    for _ in range(2):
        file = add_file(store)
        store.path(file.id).write_bytes(line("1", model="a") + line("2", model="b") + line("3", model="a"))
        store.add_batch(stored(input_file_id=file.id, expires_at=int(time.time()) + 60))
    store.close()
    rows = BusyModel(passes)
    async with run_lane(Access(ServiceConfig(port=0, batch_dir=str(tmp_path))), rows, LaneCounts()):
        await asyncio.sleep(0.3)
    assert rows.models == (["b", "b"] if passes else [])


def test_rows_that_run_again_precede_others():
    pending = Pending([4, 2, 1], {4: "a", 2: "b", 1: "b"})
    assert (pending.first(), pending.first({"a"}), pending.first({"a", "b"}), len(pending)) == (4, 2, None, 3)
    assert pending.remove_first("a") == 4 and pending.first() == 2
    assert pending.remove_first("b") == 2
    pending.put_back(2)
    pending.put_back(4)
    assert [pending.remove_first(model) for model in ("a", "b", "b")] == [4, 2, 1] and not pending
