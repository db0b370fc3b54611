"""Runs the rows of batches beside online requests, and carries each batch from state to state.

One task looks every `_LOOK_S` and whenever a row has its result: it starts rows while `Rows` has room, and never waits for a disk.
What does wait, reading input files and storing states, happens in a task of each batch. A withdrawn row starts again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ridgeline.service.access import Access
from ridgeline.service.batches.job import ATTEMPTS, Job, RowLost, run_row
from ridgeline.service.batches.objects import Conflict, StorageFull
from ridgeline.service.batches.rows import LaneMetrics, Rows
from ridgeline.service.batches.settings import DayWindow, batch_folder
from ridgeline.service.batches.store import Store, StoredBatch

_LOOK_S = 0.05
_SYNC_S = 0.25
"""Seconds between two waits for the disk: results of this time are written to it together."""
_STARTS = 8
"""Rows started at a time, so that their tokenization does not delay online requests."""
_OPEN = 8
"""Batches whose files are open. Later ones wait in the state validating."""
_PURGE_S = 60.0
_RETRY_S = 5.0
"""Seconds until a state that could not be stored is stored again."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def run_lane(access: Access, rows: Rows, metrics: LaneMetrics) -> AsyncIterator[Lane | None]:
    """Open the batch folder and run its batches until the block ends. None: the server has no such folder."""
    config = access.config
    folder = batch_folder(config)
    if folder is None:
        yield None
        return
    store = await asyncio.to_thread(Store, folder, int(config.batch_max_gb * (1 << 30)))
    lane = Lane(access, store, rows, metrics, DayWindow.parse(config.batch_window))
    await lane.load()
    running = asyncio.get_running_loop().create_task(lane.run())
    try:
        yield lane
    finally:
        running.cancel()
        await asyncio.wait({running})
        await lane.close()


class Lane:
    """All batches that have not ended."""

    def __init__(
        self, access: Access, store: Store, rows: Rows, metrics: LaneMetrics, window: DayWindow = DayWindow()
    ) -> None:
        """window: hours in which rows run."""
        self.store = store
        self._access, self._rows, self._metrics, self._window = access, rows, metrics, window
        self._clock = time.time
        """Unix seconds. Intervals are measured by time.monotonic, so that a clock that jumps does not stop the lane."""
        self._jobs: dict[str, Job] = {}
        self._changed = asyncio.Event()
        self._running: dict[asyncio.Task[None], tuple[Job, int]] = {}
        """Rows in flight, the oldest first."""
        self._moving: dict[str, asyncio.Task[None]] = {}
        """Changes of state that are under way, by batch."""
        self._attempts: dict[tuple[str, int], int] = {}

    # --- what routes call -------------------------------------------------------------------------------------------

    async def submit(self, stored: StoredBatch) -> None:
        """Store a new batch and run it. Shield it: a batch that is stored and not run would wait for the server's next start."""
        await asyncio.to_thread(self.store.add_batch, stored)
        self.add(stored)

    def add(self, stored: StoredBatch) -> None:
        """Run a batch that the store has."""
        holder = self._access.keys.payer(stored.owner)
        self._jobs[stored.batch.id] = Job(stored, self.store, int(self._access.config.max_body_mb * (1 << 20)), holder)
        self._changed.set()

    def current(self, stored: StoredBatch) -> StoredBatch:
        """The batch as it is now: one that has not ended is ahead of the store."""
        job = self._jobs.get(stored.batch.id)
        return stored if job is None else job.current()

    async def cancel(self, batch_id: str) -> StoredBatch:
        """Begin to cancel. Raises NotFound, and Conflict for a batch whose state does not allow it."""
        stored = await asyncio.to_thread(self.store.batch, batch_id)
        job = self._jobs.get(batch_id)
        if job is None:
            raise Conflict(f"Batch {batch_id} is {stored.batch.status}: it cannot be cancelled.", param="status")
        async with job.lock:
            if job.batch.status != "cancelling":
                job.batch.move("cancelling", self._clock())
                await self._save(job)
                self._changed.set()
            return job.current()

    async def load(self) -> None:
        """Go on with the batches that an earlier server has left."""
        for stored in await asyncio.to_thread(self.store.unfinished):
            self.add(stored)

    # --- the task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled."""
        maintaining = asyncio.get_running_loop().create_task(self._maintain())
        try:
            while True:
                self._changed.clear()
                try:
                    self._look()
                except Exception:
                    log.exception("the batch lane goes on after an error")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S if self._jobs else 1.0):
                        await self._changed.wait()
        finally:
            await _cancel({maintaining, *self._moving.values()})

    async def close(self) -> None:
        """Withdraw all rows and close the files. Batches go on when the server starts again."""
        await _cancel(set(self._running))
        for job in self._jobs.values():
            await asyncio.to_thread(job.close)
        await asyncio.to_thread(self.store.close)

    def _look(self) -> None:
        now = self._clock()
        opened = 0
        for job in self._jobs.values():
            first = opened < _OPEN or job.batch.status == "cancelling" or now >= job.batch.expires_at
            if first and job.due(now) and job.batch.id not in self._moving:
                task = asyncio.get_running_loop().create_task(self._advance(job, now))
                self._moving[job.batch.id] = task
                task.add_done_callback(partial(self._moved, job.batch.id))
            opened += not job.batch.ended
        self._fill(now)
        self._report()

    def _moved(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._moving[batch_id]
        self._changed.set()

    async def _advance(self, job: Job, now: float) -> None:
        """Move one batch on. After an error it is tried again later, and other batches are not delayed."""
        async with job.lock:
            try:
                await self._change_state(job, now)
            except (OSError, StorageFull) as error:
                await self._storage_failed(job, error, now)
            except Exception:
                log.exception("batch %s: trying again in %g s", job.batch.id, _RETRY_S)
                job.retry_at = time.monotonic() + _RETRY_S

    async def _change_state(self, job: Job, now: float) -> None:
        if job.storage_error is not None:
            raise job.storage_error
        if job.results is None:
            await job.prepare(now)
        batch = job.batch
        if batch.status == "in_progress" and now >= batch.expires_at:
            await self._withdraw_all(job)
            await job.finish("expired", now)
        elif batch.status == "cancelling":
            await self._withdraw_all(job)
            await job.finish("cancelled", now)
        elif job.results is not None and not job.pending and not job.running and not batch.ended:
            if batch.status == "in_progress":
                await asyncio.to_thread(job.results.sync)  # the disk has every row before the state says so
                batch.move("finalizing", now)
                await self._save(job)
            await job.finish("completed", self._clock())
        if batch.ended:
            await self._save(job)
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Forget a batch that has ended and is stored."""
        self._count(job)
        job.close()
        self._jobs.pop(job.batch.id, None)
        self._attempts = {key: count for key, count in self._attempts.items() if key[0] != job.batch.id}

    async def _storage_failed(self, job: Job, error: Exception, now: float) -> None:
        """End a batch whose results cannot be stored. If even that cannot be stored, try again later."""
        log.error("batch %s: %s", job.batch.id, error)
        await self._withdraw_all(job)
        job.storage_failed(error, now)
        job.retry_at = time.monotonic() + _RETRY_S
        try:
            await self._save(job)
            self._drop(job)
        except (OSError, StorageFull):
            log.error("the state of batch %s cannot be stored; trying again in %g s", job.batch.id, _RETRY_S)

    async def _withdraw_all(self, job: Job) -> None:
        """Withdraw the rows of a batch that ends, for good."""
        job.ending = True
        await _cancel({task for task, (owner, _) in self._running.items() if owner is job})

    async def _save(self, job: Job) -> None:
        await asyncio.to_thread(self.store.save, job.current(), job.files())

    async def _maintain(self) -> None:
        """Wait for the disk to have all results, again and again, and delete files whose time is over."""
        purged_at = -math.inf
        while True:
            await asyncio.sleep(_SYNC_S)
            for job in list(self._jobs.values()):
                if not job.lock.locked():  # a change of state waits for the disk itself
                    async with job.lock:
                        await self._sync(job)
            if time.monotonic() - purged_at >= _PURGE_S:
                purged_at = time.monotonic()
                try:
                    await asyncio.to_thread(self.store.delete_expired, self._clock())
                except Exception:
                    log.exception("expired files of batches cannot be deleted; trying again in %g s", _PURGE_S)

    async def _sync(self, job: Job) -> None:
        if job.results is not None and job.batch.id in self._jobs:
            try:
                await asyncio.to_thread(job.results.sync)
            except OSError as error:
                job.storage_error = error

    # --- rows -------------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> None:
        """Start rows while there is room, or withdraw all when their hours are over."""
        local = time.localtime(now)
        if not self._window.open(60 * local.tm_hour + local.tm_min):
            self._rows.wait(0)
            for task in self._running:
                task.cancel()
            return
        self._rows.wait(sum(len(job.pending) for job in self._jobs.values() if job.next_row() is not None))
        starts = 0
        passed: set[str | None] = set()
        """Models that have no room, and whose rows others may pass."""
        for job in self._jobs.values():
            while (row := job.next_row(passed)) is not None:
                if starts == _STARTS:
                    self._changed.set()  # the rest follows when the event loop has served others
                    return
                choices, model = job.place(row)
                if self._rows.take(choices, model, job.holder):
                    self._start(job, model)
                    starts += 1
                elif self._rows.may_pass(model):
                    passed.add(model)
                else:
                    return

    def _start(self, job: Job, model: str | None) -> None:
        row = job.pending.remove_first(model)
        job.running.add(row)
        task = asyncio.get_running_loop().create_task(self._run_row(job, row))
        self._running[task] = job, row
        task.add_done_callback(self._ended)

    async def _run_row(self, job: Job, row: int) -> None:
        """Run one row and store its result."""
        key = job.batch.id, row
        try:
            last = self._attempts.get(key, 0) == ATTEMPTS - 1
            job.store_result(row, await run_row(self._rows, job, row, last))
        except RowLost as lost:
            self._attempts[key] = self._attempts.get(key, 0) + lost.counts
        except OSError as error:
            job.storage_error = error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A row has ended. Without a result (it was withdrawn, or its engine was lost) it is to be run again."""
        job, row = self._running.pop(task)
        self._rows.give_back(*job.place(row))
        job.running.discard(row)
        lost = job.results is not None and row not in job.results.done
        if lost:
            job.pending.put_back(row)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a row of a batch failed unexpectedly", exc_info=error)
            job.storage_error = OSError(str(error))
        if not lost:  # a lost row would be lost again at once: it waits for the next look
            self._changed.set()

    def _report(self) -> None:
        """Show the lane's rows in the metrics."""
        for job in self._jobs.values():
            self._count(job)
        waiting = sum(len(job.pending) for job in self._jobs.values())
        self._metrics.batch_lane(waiting, len(self._running), len(self._jobs))

    def _count(self, job: Job) -> None:
        """Add a batch's new results to the counters."""
        if job.results is not None:
            completed, failed = job.results.completed, job.results.failed
            self._metrics.batch_rows(completed - job.reported[0], failed - job.reported[1])
            job.reported = completed, failed


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
