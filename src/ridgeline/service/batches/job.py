"""One batch while it runs: its input, its results, and which rows are still to be run."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ridgeline.core.errors import Overloaded, RequestError, RidgelineError, Unavailable
from ridgeline.core.logs import REQUEST_ID as LOGGED_ID
from ridgeline.service.batches.input import InputIndex, Row, answered, not_run, read_row, read_span, row_id, scan
from ridgeline.service.batches.objects import Batch, Problem, RequestCounts, Status, StoredFile
from ridgeline.service.batches.results import Results
from ridgeline.service.batches.rows import RowAnswer, RowRequest, Rows
from ridgeline.service.batches.store import Store, StoredBatch
from ridgeline.service.errors import as_ridgeline, error_body
from ridgeline.service.keys.keyring import Holder

ATTEMPTS = 3
"""Losses of an engine after which a row fails: it may be the row that the engine does not survive."""
_NOT_RUN: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class RowLost(Exception):
    """A row has no answer, and not because of its request: an engine was lost, there is no room, or the server drains."""

    def __init__(self, error: RidgelineError) -> None:
        super().__init__(error.message)
        self.counts = not isinstance(error, Overloaded | Unavailable)
        """Whether the row may be to blame."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row's line in one of the files. usage: None for an error."""

    line: bytes
    usage: Mapping[str, Any] | None


class Pending:
    """Rows to run, in their order, by the model that each names."""

    def __init__(self, rows: Iterable[int] = (), models: Mapping[int, str] = MappingProxyType({})) -> None:
        self._models = models
        self._rows: dict[str | None, deque[int]] = {}
        """Without models that have no row left."""
        self._count = 0
        for row in rows:
            self._rows.setdefault(models.get(row), deque()).append(row)
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def first(self, passed: Collection[str | None] = ()) -> int | None:
        """The first row of a model that is not in `passed`."""
        return next((rows[0] for model, rows in self._rows.items() if model not in passed), None)

    def remove_first(self, model: str | None) -> int:
        """Remove the first row of a model, and return it."""
        rows = self._rows[model]
        row = rows.popleft()
        self._count -= 1
        if not rows:
            del self._rows[model]
        return row

    def put_back(self, row: int) -> None:
        """Add a row that runs again, before the others of its model."""
        model = self._models.get(row)
        if model not in self._rows:
            self._rows = {model: deque(), **self._rows}
        self._rows[model].appendleft(row)
        self._count += 1


class Job:
    """A batch that has not ended. max_row_bytes: largest line. holder: the client that pays for its rows."""

    def __init__(self, stored: StoredBatch, store: Store, max_row_bytes: int, holder: Holder) -> None:
        self._stored, self._store, self._max_row_bytes = stored, store, max_row_bytes
        self.holder = holder
        self.batch: Batch = stored.batch
        self.index = InputIndex()
        self.results: Results | None = None
        """None until the batch was prepared."""
        self.pending = Pending()
        self.running: set[int] = set()
        self.lock = asyncio.Lock()
        """Held while the state of the batch changes."""
        self.ending = False
        """Whether the rows are withdrawn for good: none starts any more."""
        self.reported = 0, 0
        """Completed and failed rows that the metrics have."""
        self.retry_at = 0.0
        self.storage_error: OSError | None = None
        """Why a result could not be stored."""

    def next_row(self, passed: Collection[str | None] = ()) -> int | None:
        """The row to start next, of a model that is not in `passed`; None if there is none, or if rows may not start."""
        runs = self.batch.status in ("in_progress", "finalizing") and not self.ending
        return self.pending.first(passed) if runs else None

    def choices(self, row: int) -> int:
        """Choices that a row asks for."""
        return self.index.choices.get(row, 1)

    def place(self, row: int) -> tuple[int, str | None]:
        """The choices that a row asks for, and the model that it names (`Rows.take`)."""
        return self.choices(row), self.index.models.get(row)

    def due(self, now: float) -> bool:
        """Whether the state of the batch has to change now."""
        if time.monotonic() < self.retry_at:
            return False
        if (
            self.results is None
            or self.storage_error is not None
            or self.batch.status == "cancelling"
            or self.batch.ended
        ):
            return True
        expired = self.batch.status == "in_progress" and now >= self.batch.expires_at
        return expired or not (self.pending or self.running)

    async def prepare(self, now: float) -> None:
        """Read input and results. A new batch begins, or fails if its file is not valid."""
        path = self._store.path(self.batch.input_file_id)
        self.index = await asyncio.to_thread(scan, path, self.batch.endpoint, self._max_row_bytes)
        batch, index = self.batch, self.index
        batch.request_counts.total = len(index.spans)
        if batch.status == "validating":
            if index.problems:
                batch.fail(index.problems, now)
                return
            models = set(index.models.values())
            batch.model = next(iter(models)) if len(models) == 1 else None
            batch.move("in_progress", now)
            await asyncio.to_thread(self._store.save, self.current())
        await asyncio.to_thread(self._open_results)

    def _open_results(self) -> None:
        """Read the results of an earlier run, add those of bad rows, and list the rows that have none."""
        results = Results.open(*map(self._store.path, (self._stored.output, self._stored.errors)))
        self.reported = results.completed, results.failed
        self.results = results
        for row, bad in self.index.bad.items():
            if row not in results.done:
                body = error_body(bad.error)
                results.fail(row, answered(self.result_id(row), bad.custom_id, bad.error.status, body, _request_id()))
        self.pending = Pending((row for row in self.index.order if row not in results.done), self.index.models)

    def current(self) -> StoredBatch:
        """The batch with its present counts."""
        if self.results is not None:
            results, counts = self.results, self.batch.request_counts
            self.batch.request_counts = RequestCounts(counts.total, results.completed, results.failed)
            self.batch.usage = results.usage
        return self._stored

    def read(self, row: int) -> Row:
        """A row to run. Reads the file: call it in a thread."""
        with self._store.path(self.batch.input_file_id).open("rb") as file:
            value = read_row(read_span(file, self.index.spans[row]), self.batch.endpoint)
        assert isinstance(value, Row)  # bad rows are never pending
        return value

    def result_id(self, row: int) -> str:
        return row_id(self.batch.id, row)

    def store_result(self, row: int, result: RowResult) -> None:
        """Append a row's result to its file. Raises OSError if the disk is full."""
        assert self.results is not None
        if result.usage is None:
            self.results.fail(row, result.line)
        else:
            self.results.complete(row, result.line, result.usage)

    async def finish(self, status: Status, now: float) -> None:
        """Write what was not run to the error file and enter a final state. The caller stores it."""
        assert self.results is not None
        await asyncio.to_thread(self._write_rest, status)
        self._name_files()
        self.batch.move(status, now)

    def _write_rest(self, status: Status) -> None:
        """Results for all rows without one, then wait for the disk."""
        assert self.results is not None
        if status in _NOT_RUN:
            code, message = _NOT_RUN[status]
            with self._store.path(self.batch.input_file_id).open("rb") as file:
                for row, span in self.index.spans.items():
                    if row not in self.results.done:
                        value = read_row(read_span(file, span), self.batch.endpoint)
                        self.results.fail(row, not_run(self.result_id(row), value.custom_id, code, message))
        self.results.sync()

    def storage_failed(self, error: Exception, now: float) -> None:
        """End because results cannot be stored. Those that were stored stay available."""
        if not self.batch.ended:
            message = f"Results cannot be stored ({error}). Finished rows are in the output file."
            self.batch.fail([Problem("storage_full", message)], now)
        self._name_files()

    def _name_files(self) -> None:
        """Name those result files in the batch that contain something."""
        if self.results is not None:
            self.batch.output_file_id = self._stored.output if self.results.output.size else None
            self.batch.error_file_id = self._stored.errors if self.results.errors.size else None

    def files(self) -> tuple[StoredFile, ...]:
        """The result files of a batch that has ended."""
        batch, results = self.batch, self.results
        if not batch.ended or results is None:
            return ()
        now = int(time.time())
        sizes = (
            (batch.output_file_id, "output", results.output.size),
            (batch.error_file_id, "error", results.errors.size),
        )
        return tuple(
            StoredFile(
                file_id,
                size,
                now,
                f"{batch.id}_{name}.jsonl",
                "batch_output",
                now + self._stored.result_expiry_s,
                self._stored.owner,
            )
            for file_id, name, size in sizes
            if file_id is not None
        )

    def close(self) -> None:
        """Close the result files, and delete empty ones of a batch that has ended."""
        if self.results is not None:
            self.results.close()
            if self.batch.ended:
                self.results.delete_empty()


async def run_row(rows: Rows, job: Job, row: int, last_attempt: bool) -> RowResult:
    """Answer one row. last_attempt: a loss of the engine is its result. Raises RowLost if it has to run again, OSError if it cannot
    be read."""
    request_id, result_id = _request_id(), job.result_id(row)
    LOGGED_ID.set(request_id)
    value = await asyncio.to_thread(job.read, row)
    request = RowRequest(job.batch.endpoint, value.body, job.choices(row), job.holder, request_id)
    try:
        answer = await rows.run(request)
    except Exception as failure:
        error = as_ridgeline(failure)
        temporary = isinstance(error, Overloaded | Unavailable)  # no room, or a queue of grammars to compile
        if temporary or not (last_attempt or isinstance(error, RequestError)):
            raise RowLost(error) from failure
        answer = RowAnswer(error.status, error_body(error), None)
    line = answered(result_id, value.custom_id, answer.status, answer.body, request_id)
    return RowResult(line, answer.usage)


def _request_id() -> str:
    return f"req_{uuid.uuid4().hex}"
