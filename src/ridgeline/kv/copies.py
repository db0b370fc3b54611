"""Copies between the pool and the tiers below it: runs the stores and transfers of plans, for the runner.

On a CPU a copy is a plain copy of memory. On a GPU copies run on streams of their own through pinned memory, one each way. A store
first copies its pages on the device, in the order of the steps, so that the step that reuses the blocks does not wait for the link.
Pages of blocks that the same plan fills from the tiers leave without that copy: only the page that comes waits for the one that
goes, and the steps for neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Protocol

import torch

from ridgeline.core.plan import StepPlan, Transfer
from ridgeline.kv.offload import OFFLOAD
from ridgeline.kv.store import KvStore, Transfers, zeros

log = logging.getLogger(__name__)

READERS = 4
"""Threads that read pages."""
RUN = 8
"""Most pages of a copy: the pages that come wait for those that leave a copy at a time."""
STAGING_BYTES = 64 << 20
"""Device memory through which evicted pages leave, in two halves."""
MEASURED_BYTES = 64 << 20
"""Bytes that `measure` copies at least, if there are so many."""


class Event(Protocol):
    """A point in the order of copies."""

    def query(self) -> bool:
        """Whether all copies before it have ended."""

    def wait(self) -> None:
        """Later steps run after it."""


class Link(Protocol):
    """Copies between blocks of the pool and rows of host memory."""

    def down(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], refilled: Set[int] = frozenset()) -> Event:
        """Copy blocks to rows. refilled: blocks that only the next `up` writes to, which comes before the next step."""

    def up(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> Event:
        """Copy rows to blocks."""


class Past:
    """The copies have ended already."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainLink:
    """The pool is in the memory of the CPU."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def down(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], refilled: Set[int] = frozenset()) -> Event:
        for block, row in zip(blocks, rows, strict=True):
            row.copy_(self._pages[block])
        return Past()

    def up(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> Event:
        for row, block in zip(rows, blocks, strict=True):
            self._pages[block].copy_(row)
        return Past()


class CudaLink:
    """The pool is on a GPU. Rows are pinned memory."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages
        self._down, self._up = torch.cuda.Stream(pages.device), torch.cuda.Stream(pages.device)
        half = max(1, STAGING_BYTES // 2 // pages.shape[1])
        self._staging = [torch.empty(half, pages.shape[1], dtype=torch.uint8, device=pages.device) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]
        """Recorded when the half has left the device."""
        self._half = 0
        self._leaving: dict[int, torch.cuda.Event] = {}
        """Block that the next `up` fills -> recorded when its page has left."""

    def down(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], refilled: Set[int] = frozenset()) -> Event:
        pairs = list(zip(blocks, rows, strict=True))
        self._stage([pair for pair in pairs if pair[0] not in refilled])
        self._down.wait_stream(self._steps)
        with torch.cuda.stream(self._down):
            for block, row in joined(pair for pair in pairs if pair[0] in refilled):
                row.copy_(self._pages[block : block + len(row)], non_blocking=True)
                self._leaving.update(dict.fromkeys(range(block, block + len(row)), _mark(self._down)))
        return _mark(self._down)

    def _stage(self, pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy blocks to rows by way of the staging memory: later steps may write to the blocks."""
        steps, size = self._steps, self._staging[0].shape[0]
        for first in range(0, len(pairs), size):
            half, part = self._half, pairs[first : first + size]
            self._half = 1 - half
            steps.wait_event(self._free[half])
            staged = self._staging[half][: len(part)]
            blocks = torch.tensor([block for block, _ in part], device=self._pages.device)
            torch.index_select(self._pages, 0, blocks, out=staged)
            self._down.wait_stream(steps)
            with torch.cuda.stream(self._down):
                for place, row in joined((place, row) for place, (_, row) in enumerate(part)):
                    row.copy_(staged[place : place + len(row)], non_blocking=True)
                self._free[half].record(self._down)

    def up(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> Event:
        # Steps that were launched before may still read what the blocks held.
        self._up.wait_stream(self._steps)
        with torch.cuda.stream(self._up):
            for block, row in joined(zip(blocks, rows, strict=True)):
                leaving = [self._leaving.pop(each, None) for each in range(block, block + len(row))]
                for event in {event for event in leaving if event is not None}:
                    self._up.wait_event(event)
                self._pages[block : block + len(row)].copy_(row, non_blocking=True)
        return _mark(self._up)

    @property
    def _steps(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._pages.device)


def joined(pairs: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Rows [bytes] with their places, as few pieces [rows, bytes] of at most RUN rows, each with its first place: rows that follow
    each other in memory and in their places are one piece, because a call takes as long for one page as for many."""
    runs: list[list[tuple[int, torch.Tensor]]] = []
    for place, row in sorted(pairs, key=itemgetter(0)):
        if runs and len(runs[-1]) < RUN:
            before, last = runs[-1][-1]
            same = row.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            if same and (place, row.storage_offset()) == (before + 1, last.storage_offset() + len(last)):
                runs[-1].append((place, row))
                continue
        runs.append([(place, row)])
    pieces = []
    for run in runs:
        place, row = run[0]
        pieces.append((place, row.as_strided((len(run), len(row)), (len(row), 1))))
    return pieces


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


@dataclass(slots=True)
class Load:
    """A transfer under way. event: of the copies so far. reads: pages of the reader on their way to memory, with their blocks.
    has_arrived: whether the content is valid, asked after the copies."""

    event: Event
    blocks: Sequence[int] = ()
    reads: list[Future[torch.Tensor | None]] = field(default_factory=list)
    has_arrived: Callable[[], bool] = lambda: True


class Reader(Protocol):
    """Pages that are not in host memory: files, or pools of other engines."""

    def read(self, number: int, target: memoryview) -> bool:
        """Copy a page. False: it cannot be served. Runs in a thread."""

    def close(self) -> None:
        """No page is read any more."""


class TierTransfers(Transfers):
    """Copies between the pool and host memory of `slots` pages, and from a reader of pages. reader: None: there is none. origin: of
    the transfers that it runs."""

    def __init__(self, store: KvStore, slots: int, reader: Reader | None = None, *, origin: str = OFFLOAD) -> None:
        super().__init__(store)
        pages = store.flat.view(store.pages, -1)
        self._pinned, page_bytes = pages.is_cuda, pages.shape[1]
        size = (slots + 1) * page_bytes
        memory = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._pinned else zeros(size, torch.device("cpu"))
        )
        self.memory = memory.view(slots + 1, page_bytes)
        self._link: Link = CudaLink(pages) if self._pinned else PlainLink(pages)
        self._reader, self.origin = reader, origin
        # Pinned memory belongs to the current device of the thread.
        initializer = partial(torch.cuda.set_device, pages.device) if self._pinned else None
        self._threads = ThreadPoolExecutor(READERS, "kv-read", initializer)
        self.loads: dict[int, Load] = {}
        self._stores: dict[int, Event] = {}

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot of host memory."""
        return self.memory[slot].numpy().data

    @property
    def busy(self) -> bool:
        return bool(self.loads or self._stores)

    @torch.inference_mode()
    def measure(self) -> float:
        """Bytes per second from host memory to the pool, of the fastest of three copies to the scratch page."""
        rows = self.memory[: 1 + MEASURED_BYTES // self.memory.shape[1]]
        rows.zero_()  # memory that was never touched has no pages of its own
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            event = self._link.up(list(rows), [0] * len(rows))
            while not event.query():
                pass
            seconds.append(time.perf_counter() - started)
        return rows.nbytes / min(seconds)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> dict[int, bool]:
        ended: dict[int, bool] = {}
        for ticket in plan.cancels:
            self._cancel(ticket)
        tiered = [transfer for transfer in plan.transfers if transfer.origin == self.origin]
        # Pages of a reader come after later steps, so their blocks are staged.
        refilled = {block for part in tiered for block, page in zip(part.blocks, part.pages, strict=True) if page > 0}
        for transfer in plan.stores:
            try:
                rows = [self.memory[slot] for slot in transfer.pages]
                self._stores[transfer.ticket] = self._link.down(transfer.blocks, rows, refilled)
            except Exception:
                log.exception("%d evicted blocks are not kept", len(transfer.blocks))
                ended[transfer.ticket] = False
        for transfer in tiered:
            self.begin(transfer)
        local = [transfer for transfer in plan.transfers if transfer.origin != self.origin]
        return ended | self.store.transfer(local) | self._take_ended()

    def begin(self, transfer: Transfer) -> None:
        """Start the copies of a transfer."""
        pairs = list(zip(transfer.pages, transfer.blocks, strict=True))
        near = [(self.memory[page], block) for page, block in pairs if page > 0]
        far = [(-page, block) for page, block in pairs if page < 0]
        event = self._link.up([row for row, _ in near], [block for _, block in near])
        reads = [self._threads.submit(self._read, number) for number, _ in far]
        self.loads[transfer.ticket] = Load(event, [block for _, block in far], reads)

    def _read(self, number: int) -> torch.Tensor | None:
        """A page of the reader; None: it cannot be served. Runs in a thread."""
        assert self._reader is not None
        page = torch.empty(self.memory.shape[1], dtype=torch.uint8, pin_memory=self._pinned)
        return page if self._reader.read(number, page.numpy().data) else None

    def _take_ended(self) -> dict[int, bool]:
        """Stores and transfers that have ended. Pages of the reader are copied on when all of a transfer have been
        read."""
        ended = {ticket: True for ticket, event in self._stores.items() if event.query()}
        for ticket in ended:
            del self._stores[ticket]
        for ticket, load in list(self.loads.items()):
            if load.reads and all(read.done() for read in load.reads) and not self._copy_on(load):
                ended[ticket] = False
                self._cancel(ticket)
            elif not load.reads and load.event.query():
                ended[ticket] = load.has_arrived()
                del self.loads[ticket]
        return ended

    def _copy_on(self, load: Load) -> bool:
        """Copy the pages that were read to their blocks. False: the content does not arrive. An error does not fail the step: what
        else has ended with it would be lost, and the next step would meet the error again."""
        try:
            rows = [page for read in load.reads if (page := read.result()) is not None]
            if len(rows) < len(load.reads):
                return False
            load.event, load.reads = self._link.up(rows, load.blocks), []
        except Exception:
            log.exception("pages from %s are not loaded", self.origin)
            return False
        return True

    def _cancel(self, ticket: int) -> None:
        """Nothing writes to the blocks of the transfer after the copies that have begun, and later steps run after those."""
        load = self.loads.pop(ticket, None)
        if load is not None:
            load.event.wait()
            for read in load.reads:
                read.cancel()

    def forget(self, plan: StepPlan) -> None:
        # The step may have failed before it cancelled anything.
        for ticket in (*plan.cancels, *(transfer.ticket for transfer in plan.transfers)):
            self._cancel(ticket)
        for transfer in plan.stores:
            self._stores.pop(transfer.ticket, None)

    def close(self) -> None:
        for ticket in list(self.loads):
            self._cancel(ticket)
        self._threads.shutdown(cancel_futures=True)
        if self._reader is not None:
            self._reader.close()
