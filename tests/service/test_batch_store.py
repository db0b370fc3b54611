"""States, input files, results and the store of batches, without a server."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.core.errors import ConfigError, NotFound
from ridgeline.service.batches import input as batch_input
from ridgeline.service.batches.input import answered, not_run, prefix_key, row_id, row_of, scan
from ridgeline.service.batches.objects import (
    TRANSITIONS,
    Batch,
    BatchUsage,
    Conflict,
    Status,
    StorageFull,
    StoredFile,
    new_id,
)
from ridgeline.service.batches.results import Results
from ridgeline.service.batches.store import Store, StoredBatch

CHAT = "/v1/chat/completions"
LIMIT = 1 << 20


def batch(**changes: Any) -> Batch:
    fields = {
        "id": new_id("batch_"),
        "endpoint": CHAT,
        "input_file_id": "file-input",
        "completion_window": "24h",
        "created_at": 1000,
        "expires_at": 2000,
    }
    return Batch(**{**fields, **changes})


def line(name: str, text: str = "hi", **body: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    value = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}
    return json.dumps(value).encode() + b"\n"


class States(RuleBasedStateMachine):
    """Any sequence of moves: only the drawn ones succeed, and each sets its time once."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = batch()
        self.now = 1000
        self.entered: dict[str, int] = {}

    @rule(status=st.sampled_from(get_args(Status)), seconds=st.integers(1, 100))
    def move(self, status: Status, seconds: int) -> None:
        self.now += seconds
        before = msgspec.to_builtins(self.batch)
        if status in TRANSITIONS[self.batch.status]:
            self.batch.move(status, self.now)
            self.entered[status] = self.now
        else:
            with pytest.raises(Conflict):
                self.batch.move(status, self.now)
            assert msgspec.to_builtins(self.batch) == before

    @precondition(lambda self: self.batch.ended)
    @rule(status=st.sampled_from(get_args(Status)))
    def nothing_follows_an_end(self, status: Status) -> None:
        with pytest.raises(Conflict):
            self.batch.move(status, self.now)

    @invariant()
    def times_say_what_happened(self) -> None:
        for status in get_args(Status):
            if status != "validating":
                assert getattr(self.batch, f"{status}_at") == self.entered.get(status)

    @invariant()
    def it_has_22_fields(self) -> None:
        assert len(msgspec.to_builtins(self.batch)) == 22


TestStates = States.TestCase
TestStates.settings = settings(max_examples=50, stateful_step_count=12, deadline=None)


def test_every_state_is_reached_and_the_last_ones_are_final():
    reached, todo = {"validating"}, ["validating"]
    while todo:
        for status in TRANSITIONS[todo.pop()]:  # type: ignore[index]
            if status not in reached:
                reached.add(status)
                todo.append(status)
    assert reached == set(get_args(Status))


# --- input --------------------------------------------------------------------------------------------------------------


def test_rows_with_a_common_prefix_are_neighbours(tmp_path: Path):
    systems = [letter * 300 for letter in "abcd"]
    lines = [
        line(f"{group}-{index}", systems[group] + f" question {index}") for group in range(4) for index in range(20)
    ]
    random.Random(3).shuffle(lines)
    path = tmp_path / "input"
    path.write_bytes(b"".join(lines))
    index = scan(path, CHAT, LIMIT)
    assert sorted(index.order) == list(range(80)) and not index.bad and not index.problems
    groups = [json.loads(lines[row])["custom_id"].split("-")[0] for row in index.order]
    assert sum(first != second for first, second in pairwise(groups)) == 3


def test_prefix_keys_agree_as_far_as_prompts_do():
    first, second = ({"messages": [{"role": "user", "content": "a" * 600 + tail}]} for tail in ("b", "c"))
    assert prefix_key(first)[:16] == prefix_key(second)[:16] and prefix_key(first) != prefix_key(second)


def test_rows_are_lines(tmp_path: Path):
    path = tmp_path / "input"
    path.write_bytes(b"\n" + line("a") + b"  \n" + b"x" * 3_000_000 + b"\n" + line("b") + line("c").rstrip())
    index = scan(path, CHAT, LIMIT)
    data = path.read_bytes()
    assert list(index.spans) == [1, 3, 4, 5] and list(index.bad) == [3]
    names = [
        json.loads(data[offset : offset + size])["custom_id"] for row, (offset, size) in index.spans.items() if row != 3
    ]
    assert names == ["a", "b", "c"] and index.bad[3].problem(4).code == "body_too_large"


@given(st.binary(max_size=300))
def test_no_line_stops_the_others(data: bytes):
    value = batch_input.read_row(data, CHAT)
    assert isinstance(value, batch_input.BadRow) and value.error.message


@pytest.mark.long
def test_too_many_lines(tmp_path: Path):
    path = tmp_path / "input"
    path.write_bytes(line("a") * (batch_input.MAX_LINES + 1))
    assert [problem.code for problem in scan(path, CHAT, LIMIT).problems] == ["too_many_lines"]


# --- results ------------------------------------------------------------------------------------------------------------

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
BODY = json.dumps({"usage": USAGE, "choices": []}).encode()


def test_usage_of_every_endpoint():
    usage = BatchUsage()
    usage.add(USAGE)
    usage.add({"input_tokens": 4, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 1, "total_tokens": 5})
    usage.add({"prompt_tokens": 6, "total_tokens": 6})
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (13, 3, 16)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 1)


def open_results(folder: Path) -> Results:
    return Results.open(folder / "output", folder / "errors")


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30),
    st.integers(0, 400),
    st.sampled_from(["cut", "zeros"]),
)
@settings(deadline=None, max_examples=60)
def test_results_survive_any_torn_end(tmp_path_factory: Any, rows: list[tuple[int, bool]], lost: int, how: str):
    """Whatever the last moments wrote: a row is finished once, or it runs again."""
    folder = tmp_path_factory.mktemp("results")
    results = open_results(folder)
    for row, good in rows:
        if row not in results.done:
            name = row_id("batch_" + "a" * 24, row)
            if good:
                results.complete(row, answered(name, str(row), 200, BODY, "req_1"), USAGE)
            else:
                results.fail(row, not_run(name, str(row), "batch_expired", "late"))
    results.sync()
    results.close()
    size = results.output.size
    kept = max(0, size - lost)
    os.truncate(folder / "output", kept)
    if how == "zeros":  # blocks that a file system has allocated and not written
        os.truncate(folder / "output", size)
    again = open_results(folder)
    text = (folder / "output").read_bytes()
    assert text == (text[: text.rfind(b"\n") + 1])
    done = [row_of(json.loads(part)["id"]) for part in text.splitlines()]
    assert len(done) == len(set(done)) == again.completed and set(done) <= again.done
    assert (
        again.usage.total_tokens == 5 * again.completed
        and again.usage.output_tokens_details.reasoning_tokens == len(done)
    )
    assert again.failed == results.failed
    for row in set(range(10)) - again.done:
        again.complete(row, answered(row_id("batch_" + "a" * 24, row), str(row), 200, BODY, "req_2"), USAGE)
    again.close()
    final = open_results(folder)
    assert final.done == set(range(10)) and final.completed + final.failed == 10
    final.close()


# --- store --------------------------------------------------------------------------------------------------------------


def stored(**changes: Any) -> StoredBatch:
    return StoredBatch(batch(**changes), new_id("file-"), new_id("file-"), 3600)


def add_file(store: Store, name: str = "rows.jsonl", **changes: Any) -> StoredFile:
    file = StoredFile(
        **{"id": new_id("file-"), "bytes": 3, "created_at": 1, "filename": name, "purpose": "batch", **changes}
    )
    store.reserve(file.id, 3)
    store.path(file.id).write_bytes(b"abc")
    store.add_file(file)
    store.release(file.id)
    return file


def test_a_store_is_created_by_its_first_file(tmp_path: Path):
    store = Store(tmp_path / "state", LIMIT)
    assert store.files(None, None, 10, ascending=False) == ([], False) and not (tmp_path / "state").exists()
    file = add_file(store)
    assert store.file(file.id) == file
    with pytest.raises(ConfigError) as used:
        Store(tmp_path / "state", LIMIT)
    assert used.value.param == "batch_dir"
    store.close()
    again = Store(tmp_path / "state", LIMIT)
    assert again.file(file.id) == file
    again.close()


def test_what_a_crash_has_left_is_removed(tmp_path: Path):
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    running = stored(input_file_id=file.id)
    store.add_batch(running)
    for name in (running.output, running.errors, "file-upload"):
        store.path(name).write_bytes(b"x")
    store.close()
    again = Store(tmp_path, LIMIT)
    assert {entry.name for entry in (tmp_path / "files").iterdir()} == {file.id, running.output, running.errors}
    again.close()


def test_files_expire_and_inputs_stay(tmp_path: Path):
    store = Store(tmp_path, LIMIT)
    old, needed, young = (add_file(store, expires_at=at) for at in (10, 10, 100))
    job = stored(input_file_id=needed.id)
    store.add_batch(job)
    with pytest.raises(Conflict):
        store.delete_file(needed.id)
    store.delete_expired(50.0)
    assert [file.id for file in store.files(None, None, 9, ascending=True)[0]] == [needed.id, young.id]
    assert not store.path(old.id).exists()
    job.batch.move("failed", 60)
    store.save(job)
    store.delete_expired(50.0)
    with pytest.raises(NotFound):
        store.file(needed.id)
    store.close()


def test_a_batch_needs_its_input_when_it_is_stored(tmp_path: Path):
    """Its file may have been deleted since the request was checked."""
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    store.delete_file(file.id)
    with pytest.raises(NotFound) as missing:
        store.add_batch(stored(input_file_id=file.id))
    assert missing.value.param == "input_file_id" and not store.unfinished()
    store.close()


def test_pages(tmp_path: Path):
    store = Store(tmp_path, LIMIT)
    file = add_file(store)
    made = [stored(input_file_id=file.id) for _ in range(5)]
    for entry in made:
        store.add_batch(entry)
    ids = [entry.batch.id for entry in made]
    page, more = store.batches(None, 2)
    assert [entry.batch.id for entry in page] == [ids[4], ids[3]] and more
    page, more = store.batches(ids[3], 3)
    assert [entry.batch.id for entry in page] == [ids[2], ids[1], ids[0]] and not more
    with pytest.raises(NotFound) as unknown:
        store.batches("batch_none", 3)
    for listed, other in ((store.batches, ids[0]), (partial(store.files, None, ascending=True), file.id)):
        with pytest.raises(NotFound) as foreign:
            listed(after=other, limit=3, owner="somebody else")
        assert foreign.value.message == unknown.value.message.replace("batch_none", other)
    store.close()


def test_a_file_that_goes_meanwhile_takes_no_space(tmp_path: Path):
    store = Store(tmp_path, LIMIT)
    add_file(store)
    store.path("file-gone").symlink_to(tmp_path / "nowhere")
    assert store.reserve("file-new", LIMIT) == LIMIT - 3
    store.close()


def test_space_is_bounded(tmp_path: Path):
    store = Store(tmp_path, 5)
    add_file(store)
    add_file(store)
    with pytest.raises(StorageFull):
        store.reserve("file-new", 1)
    store.close()


def test_uploads_at_the_same_time_share_the_space(tmp_path: Path):
    store = Store(tmp_path, 10)
    assert store.reserve("file-a", 6) == 6
    store.path("file-a").write_bytes(b"abcd")  # these are bytes of its reservation
    assert store.reserve("file-b", 6) == 4
    with pytest.raises(StorageFull):
        store.reserve("file-a", 1)
    store.release("file-b")
    assert store.reserve("file-a", 1) == 7
    store.release("file-a")
    assert store.reserve("file-c", 10) == 6
    store.close()
