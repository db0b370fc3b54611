"""Leases: which KV blocks each request holds. Writes the page table entries, copies and transfers of a plan.

A lease is ready unless a source has tokens of the request. Then it is reserved (blocks are taken, and a plan that is not
launched yet holds their transfer), filling (the device may write to the blocks), and ready when the transfer ends, with or
without the content.

Ownership: only this module writes a request's tables. Each table entry holds one reference to its block. A block with more than
one reference is never written: `extend` first gives the writer a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from ridgeline.core.plan import Compaction, StepPlan, StepResult, Transfer
from ridgeline.core.spec import KvLayout
from ridgeline.engine.request import Lease, Request, State
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.pins import Pins
from ridgeline.kv.prefix import PrefixIndex, Source, extend_chain
from ridgeline.kv.retention import KEEP_ALL, NEVER, Retention


class Leases:
    """Blocks of all requests. prefix_cache: other requests may reuse committed blocks, from the pool and from `source`. retention:
    which slots stay when a prompt is computed. pin_share: share of the blocks that requests may pin."""

    def __init__(
        self,
        layout: KvLayout,
        total: int,
        *,
        prefix_cache: bool = True,
        source: Source = Source(),
        retention: Retention = KEEP_ALL,
        pin_share: float = 0.0,
    ) -> None:
        self.layout = layout
        self.prefix = PrefixIndex(layout.groups, layout.page_tokens)
        self.pool = BlockPool(total, self._evict)
        self.pins = Pins(self.pool, self.prefix, int(total * pin_share), layout.page_tokens)
        self.filling: dict[int, Request] = {}
        """Ticket -> request that waits for its transfer. Includes requests that are leaving."""
        self.source, self._prefix_cache, self._retention = source, prefix_cache, retention
        self._measured = deque[tuple[Request, int]]()
        """Requests of measures in flight, each with its generation, in the order of the plans."""
        self._tickets = count(1)
        self._size = layout.page_tokens
        self._windows = [group.window for group in layout.groups]
        self._windowed = any(window is not None for window in self._windows)

    @property
    def total(self) -> int:
        return self.pool.total

    # --- entering ---------------------------------------------------------------------------------------------------

    def admits(self, request: Request, running: Sequence[Request], incomplete: Sequence[Request], chunk: int) -> bool:
        """Whether enough blocks are free to admit the request.

        Counted are the blocks for all tokens that the request knows, the blocks that `incomplete` running requests still need for
        their known tokens, and one block for each running request, so that an admission does not preempt at once. Blocks that the
        request can share with another one are not needed.
        """
        if not running:
            return True
        missing = self.layout.pages_for(len(request.tokens), chunk) + len(running) - self.pool.spare
        for other in incomplete:
            if other.state is State.RUNNING:
                leased = sum(len(table) - freed for table, freed in zip(other.tables, other.freed, strict=True))
                missing += max(0, self.layout.pages_for(len(other.tokens), chunk) - leased)
        return missing <= 0 or missing <= self._shareable(request)

    def open(self, request: Request, plan: StepPlan | None = None) -> int:
        """Fill the request's tables with blocks that are computed already; returns how many tokens they cover.

        plan: receives the transfer of further blocks that the source has; the request is ready when the transfer ends. None: the
        source is not used.
        """
        request.tables = [[] for _ in self._windows]
        request.freed = [0] * len(self._windows)
        request.writable = request.dropped = 0
        if request.leader is not None and self._forkable(request.leader):
            request.leader.writable = 0
        covered, tables = self._computed_blocks(request)
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                if block:
                    self.pool.share(block)
                else:
                    request.freed[group] = index + 1
            request.tables[group] = list(table)
        request.published = covered // self._size
        if plan is None or covered % self._size or not self.looks_up(request):
            return covered
        return self._reserve(request, plan)

    def state(self, request: Request, plan: StepPlan) -> None:
        """Mark the lease ready and write its pages into the plan."""
        request.lease = Lease.READY
        for group, table in enumerate(request.tables):
            for index, block in enumerate(table):
                if block:
                    plan.pages.extend((request.row, group, index, block))

    def _computed_blocks(self, request: Request) -> tuple[int, Sequence[Sequence[int]]]:
        """How many tokens are computed already, and the blocks of each group that hold them: the leader's, or a prefix hit."""
        leader = request.leader
        if leader is not None and self._forkable(leader):
            covered = request.prompt_len - 1
            return covered, [table[: -(-covered // self._size)] for table in leader.tables]
        return self._hit(request)

    def _shareable(self, request: Request) -> int:
        """Number of full blocks that other requests or pins hold and that this request would share. Groups with a window are
        excluded: there a shared block is soon released, and the request needs a block of its own."""
        covered, tables = self._computed_blocks(request)
        full_blocks = (
            table[: covered // self._size] for table, window in zip(tables, self._windows, strict=True) if not window
        )
        pool = self.pool
        return sum(pool.refs(block) > 0 or pool.is_pinned(block) for table in full_blocks for block in table)

    def _forkable(self, leader: Request) -> bool:
        """Whether the leader still holds every block that the last prompt token attends to."""
        if leader.state is not State.RUNNING or leader.computed < leader.prompt_len or leader.dropped:
            return False
        last = leader.prompt_len - 1
        return all(
            freed * self._size <= max(0, last - (window or last + 1) + 1)
            for freed, window in zip(leader.freed, self._windows, strict=True)
        )

    def looks_up(self, request: Request) -> bool:
        """Whether this request uses the prefix cache. A prompt to be scored does not."""
        return self._prefix_cache and request.cache and not request.needs_scores

    def _hit(self, request: Request) -> tuple[int, list[list[int]]]:
        """The longest cached prefix that leaves at least one token to compute."""
        if not self.looks_up(request):
            return 0, [[] for _ in self._windows]
        extend_chain(request.chain, request.tokens, self._size, request.root)
        blocks, tables = self.prefix.match(request.chain, (len(request.tokens) - 1) // self._size)
        return blocks * self._size, tables

    # --- filling ----------------------------------------------------------------------------------------------------

    def _reserve(self, request: Request, plan: StepPlan) -> int:
        """Take blocks for the tokens that the source has, and add the transfer that fills them to the plan. Returns how many tokens
        will be covered; at least one token is left to compute. Blocks that the pool has beyond the prefix hit are shared."""
        source = self.source
        first, most = request.published, (len(request.tokens) - 1) // self._size
        chain = request.chain[:most]
        places = source.find(chain, first)
        if not any(map(any, places)):
            return first * self._size
        length, held = self.prefix.extend(chain, first, places)
        if length == first:
            return first * self._size
        for table in request.tables:
            table.extend([0] * (length - first))
        request.computed = length * self._size
        self._free_behind(request)
        lacking = self._share_held(request, first, held)
        pages = [places[index - first][group] for group, index in lacking]
        if len(pages) > self.pool.spare or not source.pays(first * self._size, request.computed, pages):
            return self.reopen(request)
        request.lease, request.ticket = Lease.RESERVED, next(self._tickets)
        source.begins(request.ticket, pages)  # before blocks are taken, because the source takes what these evict
        blocks = sorted(self.pool.take() for _ in lacking)  # blocks that follow each other are copied together
        for (group, index), block in zip(lacking, blocks, strict=True):
            request.tables[group][index] = block
        self.filling[request.ticket] = request
        plan.transfers.append(Transfer(request.ticket, blocks, source.origin, pages))
        return request.computed

    def _share_held(self, request: Request, first: int, held: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Share the blocks that the index has from block `first` on. Returns those that it lacks: (group, index)."""
        lacking = []
        for group, (table, freed) in enumerate(zip(request.tables, request.freed, strict=True)):
            for index in range(max(first, freed), len(table)):
                if block := held[index - first][group]:
                    self.pool.share(block)
                    table[index] = block
                else:
                    lacking.append((group, index))
        return lacking

    def _evict(self, block: int) -> None:
        self.source.evicted(*self.prefix.evict(block), block)
        self.pins.evicted(block)

    def reopen(self, request: Request) -> int:
        """Release the blocks and open the request again without the source, if its blocks will not be filled."""
        self.release(request)
        return self.open(request)

    def start(self, plan: StepPlan) -> None:
        """The plan is launched: from now on its transfers may write. Before them, evicted blocks are copied to the source."""
        plan.stores = self.source.stores(self._tickets)
        for transfer in plan.transfers:
            self.filling[transfer.ticket].lease = Lease.FILLING

    def stop(self, request: Request, plan: StepPlan) -> None:
        """The request leaves. A transfer that was not launched is withdrawn. A launched transfer is cancelled in `plan`, and its
        blocks return when that step ends."""
        if request.lease is Lease.FILLING:
            plan.cancels.append(request.ticket)
        elif request.lease is Lease.RESERVED:
            del self.filling[request.ticket]
            self.source.ended(request.ticket, False)
            plan.transfers = [transfer for transfer in plan.transfers if transfer.ticket != request.ticket]

    def ended(self, plan: StepPlan, result: StepResult) -> Iterator[tuple[Request, bool]]:
        """The requests whose transfers ended with a step, each with whether the content arrived."""
        if plan.measures:
            self._note_blocks(plan, result)
        if not (result.transfers or plan.transfers or plan.stores or plan.cancels):
            return
        failed = [] if result.error is None else [transfer.ticket for transfer in (*plan.stores, *plan.transfers)]
        for ticket, arrived in (result.transfers | dict.fromkeys([*plan.cancels, *failed], False)).items():
            self.source.ended(ticket, arrived)
            request = self.filling.pop(ticket, None)
            if request is not None:
                yield request, arrived

    # --- growing ----------------------------------------------------------------------------------------------------

    def extend(self, request: Request, length: int, plan: StepPlan) -> bool:
        """Lease blocks for `length` tokens, and copy shared blocks that will be written. False: too few blocks are free."""
        if length <= request.writable:
            return True
        first = (request.planned - request.dropped) // self._size
        missing = -(-(length - request.dropped) // self._size) - len(request.tables[0])
        shared = []
        if request.planned % self._size:
            shared = [group for group, table in enumerate(request.tables) if self.pool.refs(table[first]) > 1]
        need = max(0, missing) * len(self._windows) + len(shared)
        if need > self.pool.free and self._windowed:
            # _publish frees blocks behind a window only when a block fills. Meanwhile the window may have passed another block.
            self._free_behind(request)
        if need > self.pool.free:
            return False
        for group in shared:
            self._copy(request, group, first, plan)
        for group, table in enumerate(request.tables):
            for _ in range(missing):
                block = self.pool.take()
                plan.pages.extend((request.row, group, len(table), block))
                table.append(block)
        request.writable = len(request.tables[0]) * self._size + request.dropped
        return True

    def _copy(self, request: Request, group: int, index: int, plan: StepPlan) -> None:
        table = request.tables[group]
        source, target = table[index], self.pool.take()
        plan.copies.extend((source, target))
        plan.pages.extend((request.row, group, index, target))
        table[index] = target
        self._give_back(source)

    # --- after a commit ---------------------------------------------------------------------------------------------

    def committed(self, request: Request, plan: StepPlan) -> int:
        """Publish blocks that became full, and free blocks that no later token attends to. Returns the number of computed tokens
        from which this must be called again."""
        again = request.limit
        if not request.dropped and (self._windowed or (self._prefix_cache and request.cache)):
            full = request.computed // self._size
            grown = full > request.published
            if grown:
                self._publish(request, full)
            request.pins += self.pins.reach(request.chain, request.breakpoints[len(request.pins) :], full)
            if grown and self._windowed:
                self._free_behind(request)
            again = (full + 1) * self._size
        return min(again, self._retain(request, plan))

    def _retain(self, request: Request, plan: StepPlan) -> int:
        """Drop the slots that the retention policy no longer keeps. Later keys depend on what was dropped, so their blocks are not
        published. Returns the number of computed tokens from which this must be called again."""
        policy = self._retention
        if request.computed < (due := policy.due(request.prompt_len, request.dropped)):
            return due
        computed = request.measured or request.computed
        slots = computed - request.dropped
        first, stop, kept = policy.cut(slots)
        pages = [table[: -(-slots // self._size)] for table in request.tables]
        order = Compaction(request.row, computed, slots, policy.observed, stop, pages, share=policy.share)
        if policy.share:
            kept = request.kept
            if not request.measured:
                request.measured = computed
                plan.measures.append(order)
                self._measured.append((request, request.generation))
            if not 0 < kept < stop:
                return NEVER
        if kept * len(request.tables) > self.pool.free:
            return request.computed + self._size
        targets = [[self.pool.take() for _ in range(kept)] for _ in request.tables]
        if kept:
            plan.compactions.append(replace(order, targets=targets))
        for group, table in enumerate(request.tables):
            for block in table[first:stop]:
                self._give_back(block)
            table[first:stop] = targets[group]
            for index in range(first, len(table)):
                plan.pages.extend((request.row, group, index, table[index]))
        gone = (stop - first - kept) * self._size
        plan.drops.extend((request.row, gone))
        request.dropped += gone
        return policy.due(request.prompt_len, request.dropped)

    def _note_blocks(self, plan: StepPlan, result: StepResult) -> None:
        """The device has said how many blocks the requests keep that were measured. After a failed step they are measured again."""
        for blocks in result.blocks or [0] * len(plan.measures):
            request, generation = self._measured.popleft()
            if request.measured and request.generation == generation:
                request.kept, request.watch = blocks, 0
                request.measured = request.measured if blocks else 0

    def _publish(self, request: Request, full: int) -> None:
        if self._prefix_cache and request.cache:
            extend_chain(request.chain, request.tokens, self._size, request.root)
            for index in range(request.published, full):
                for group, table in enumerate(request.tables):
                    if index >= request.freed[group] and not self.prefix.holds(table[index]):
                        self.prefix.insert(request.chain[index], group, table[index])
        request.published = full

    def _free_behind(self, request: Request) -> None:
        """Free blocks behind windows. Followers that will fork still need the blocks that the last prompt token attends to."""
        upto = min(request.computed, request.prompt_len - 1) if request.followers else request.computed
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            table = request.tables[group]
            unseen = max(0, upto - window + 1) // self._size
            for index in range(request.freed[group], min(unseen, len(table))):
                if table[index]:
                    self._give_back(table[index])
                table[index] = 0
                request.freed[group] = index + 1

    def release(self, request: Request) -> None:
        """Release every block, the last ones first, so that the beginning of the sequence stays cached longest."""
        for table in request.tables:
            for block in reversed(table):
                if block:
                    self._give_back(block)
        request.tables = []
        request.freed = []
        request.dropped = request.measured = request.kept = 0
        request.lease = Lease.READY

    def _give_back(self, block: int) -> None:
        self.pool.release(block, keep=self.prefix.holds(block))

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; running requests keep their blocks. Returns how many blocks were in the cache."""
        self.pins.clear("reset")
        blocks = self.prefix.clear()
        for block in blocks:
            self.pool.forget(block)
        self.source.clear()
        return len(blocks)

    def waste_inside(self, running: Sequence[Request]) -> float:
        """Share of leased slots that hold no token."""
        slots = tokens = 0
        for request in running:
            for table, freed in zip(request.tables, request.freed, strict=True):
                slots += (len(table) - freed) * self._size
                tokens += max(0, request.planned - request.dropped - freed * self._size)
        return 1 - tokens / slots if slots else 0.0
