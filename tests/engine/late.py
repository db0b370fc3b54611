"""A fake device whose transfers end when a test says so, and the memory that they read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.core.plan import StepPlan, Transfer
from ridgeline.core.spec import KvLayout
from ridgeline.kv.prefix import Source, chain_root, extend_chain
from tests.engine.fake import FakeRunner
from tests.engine.helpers import PLAIN, VOCAB, Bench

Ends = Callable[[Sequence[int]], dict[int, bool]]
"""Open tickets, oldest first -> those that end with this step, and whether their content arrives."""
GARBAGE = (-1, -1)


class HostMemory(Source):
    """Blocks of prefixes, each as what the fake device would hold in it: (position, token) of every slot."""

    origin = "host"

    def __init__(self, layout: KvLayout = PLAIN) -> None:
        self.pages: list[list[tuple[int, int] | None]] = [[]]  # page 0 means: lacking
        self._layout = layout
        self._places: dict[bytes, list[int]] = {}

    def keep(self, tokens: Sequence[int]) -> None:
        """All full blocks of a text."""
        size, keys = self._layout.page_tokens, list[bytes]()
        extend_chain(keys, array("i", tokens), size, chain_root("", "toy"))
        for index, key in enumerate(keys):
            first, groups = index * size, len(self._layout.groups)
            self._places[key] = list(range(len(self.pages), len(self.pages) + groups))
            self.pages += [list(enumerate(tokens[first : first + size], first)) for _ in range(groups)]

    def find(self, chain: Sequence[bytes], first: int) -> list[list[int]]:
        places = []
        for key in chain[first:]:
            if key not in self._places:
                break
            places.append(self._places[key])
        return places


class LateRunner(FakeRunner):
    """A transfer writes garbage to its blocks in every step until it ends: whoever reads them, or was given them, too early
    fails the fake device's assertions."""

    def __init__(self, layout: KvLayout, blocks: int, host: HostMemory, ends: Ends, fail_at: frozenset[int]) -> None:
        super().__init__(layout, blocks, vocab=VOCAB, fail_at=fail_at)
        self._host, self._ends, self._failing = host, ends, fail_at
        self.open: dict[int, Transfer] = {}
        self.empty = 0
        """Steps without rows."""

    def launch(self, plan: StepPlan) -> None:
        self.empty += not plan.rows
        assert all(row in self._rows for row in plan.leaves), "a row leaves that never joined"
        for ticket in plan.cancels:
            self.open.pop(ticket, None)
        if plan.step not in self._failing:
            self.open |= {transfer.ticket: transfer for transfer in plan.transfers}
        for transfer in self.open.values():
            assert transfer.origin == "host" and len(transfer.blocks) == len(transfer.pages)
            for block in transfer.blocks:
                self._memory[block] = [GARBAGE] * self._layout.page_tokens
        ended = self._ends(list(self.open))
        for ticket, arrived in ended.items():
            transfer = self.open.pop(ticket)
            for block, page in zip(transfer.blocks, transfer.pages, strict=True):
                if arrived:
                    self._memory[block] = list(self._host.pages[page])
        super().launch(plan)
        self._results[-1].transfers = ended


def never(tickets: Sequence[int]) -> dict[int, bool]:
    return {}


def at_once(tickets: Sequence[int]) -> dict[int, bool]:
    return dict.fromkeys(tickets, True)


class LateBench(Bench):
    """A Bench over a LateRunner. `ends` may be exchanged at any time."""

    def __init__(self, ends: Ends = never, **options: Any) -> None:
        layout = options.get("layout", PLAIN)
        self.host, self.ends = HostMemory(layout), ends
        super().__init__(**options)
        self.leases.source = self.host
        fails = frozenset(options.get("fail_at", ()))
        self.late = LateRunner(layout, self.leases.total, self.host, lambda tickets: self.ends(tickets), fails)
        self.loop.runner = self.runner = self.late
