"""Leases of ranks that divide requests (--data-parallel-size): each rank has blocks and cached prefixes of its own.

The blocks of all ranks have different numbers: rank r of N ranks with B blocks each has r B + 1 .. r B + B. A plan states these
numbers, and each rank reads its own (engine.divided_runner). A request belongs to one rank from its admission on, so that all of
its blocks are there; after a preemption it may enter another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import StepPlan
from ridgeline.core.sizing import MemoryPlan
from ridgeline.core.spec import KvLayout
from ridgeline.engine.leases import Leases
from ridgeline.engine.request import Request, State
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.pins import Pins
from ridgeline.kv.prefix import Source
from ridgeline.kv.retention import Retention


def open_leases(config: EngineConfig, plan: MemoryPlan, source: Source, retention: Retention) -> Leases:
    """The leases of an engine: of each rank if ranks divide requests."""
    caching, pinned = config.enable_prefix_caching, config.cache_pin_share
    if (ranks := config.data_parallel_size) > 1:
        return DividedLeases(plan.layout, plan.n_pages, ranks, caching, pinned)
    return Leases(plan.layout, plan.n_pages, prefix_cache=caching, source=source, retention=retention, pin_share=pinned)


class DividedLeases(Leases):
    """Leases of `ranks` ranks with `total` blocks each. `total` is the number that one request can have.

    Sources and retention are not supported (core.compatibility refuses them).
    """

    def __init__(self, layout: KvLayout, total: int, ranks: int, prefix_cache: bool, pin_share: float) -> None:
        super().__init__(layout, 0, prefix_cache=prefix_cache)
        self.parts = tuple(Leases(layout, total, prefix_cache=prefix_cache, pin_share=pin_share) for _ in range(ranks))
        for rank, part in enumerate(self.parts):
            part.pool.number_after(rank * total)
        self.pool = _AllBlocks([part.pool for part in self.parts])
        self.pins = _AllPins(self, [part.pins for part in self.parts])

    @property
    def total(self) -> int:
        return self.parts[0].total

    def admits(self, request: Request, running: Sequence[Request], incomplete: Sequence[Request], chunk: int) -> bool:
        """Whether a rank admits the request, which then belongs to it.

        A step takes as long as its rank with most tokens, so ranks with clearly more requests than another come last. Of the others
        the rank with the longest cached prefix comes first, then the one with fewest requests. A choice that forks goes to the rank
        of its leader.
        """
        requests = [[other for other in running if other.rank == rank] for rank in range(len(self.parts))]
        counts = list(map(len, requests))
        most = min(counts) + 1 + min(counts) // _SLACK
        ranks = range(len(self.parts))
        if request.leader is not None and request.leader.state is State.RUNNING:
            ranks = range(request.leader.rank, request.leader.rank + 1)
        places = [(counts[rank] > most, -self.parts[rank]._hit(request)[0], counts[rank], rank) for rank in ranks]
        for *_, rank in sorted(places):
            others = [other for other in incomplete if other.rank == rank]
            if self.parts[rank].admits(request, requests[rank], others, chunk):
                request.rank = rank
                return True
        return False

    def open(self, request: Request, plan: StepPlan | None = None) -> int:
        return self.parts[request.rank].open(request, plan)

    def extend(self, request: Request, length: int, plan: StepPlan) -> bool:
        return self.parts[request.rank].extend(request, length, plan)

    def committed(self, request: Request, plan: StepPlan) -> int:
        return self.parts[request.rank].committed(request, plan)

    def release(self, request: Request) -> None:
        self.parts[request.rank].release(request)

    def reset_prefix_cache(self) -> int:
        return sum(part.reset_prefix_cache() for part in self.parts)


_SLACK = 8
"""To use a cached prefix, a rank may have one request more than the rank with fewest, and one more for each so many of these."""


class _AllBlocks(BlockPool):
    """The blocks of several pools, to be counted."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        super().__init__(0, lambda block: None)
        self.total, self._pools = sum(pool.total for pool in pools), pools

    @property
    def spare(self) -> int:
        return sum(pool.spare for pool in self._pools)

    @property
    def free(self) -> int:
        return sum(pool.free for pool in self._pools)

    @property
    def cached(self) -> int:
        return sum(pool.cached for pool in self._pools)

    def check(self) -> None:
        for pool in self._pools:
            pool.check()


class _AllPins(Pins):
    """The pins of several pools."""

    def __init__(self, leases: Leases, pins: Sequence[Pins]) -> None:
        super().__init__(leases.pool, leases.prefix, sum(each.budget for each in pins), leases.layout.page_tokens)
        self._each = pins

    def __len__(self) -> int:
        return sum(map(len, self._each))

    @property
    def blocks(self) -> int:
        return sum(each.blocks for each in self._each)

    def readings(self) -> list[tuple[str, str, int]]:
        self.counts.clear()
        for each in self._each:
            self.counts.update(each.counts)
        return super().readings()

    def advance(self, now: float) -> None:
        for each in self._each:
            each.advance(now)
