"""The index of the tiers below the real scheduler, over a fake device that checks every read: no block is lost, doubled or read
before its content has come, however late and in whatever order copies end."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.events import TierCounts
from ridgeline.core.plan import StepPlan, Transfer
from ridgeline.core.spec import KvLayout
from ridgeline.kv.offload import OFFLOAD, Offload, Part
from tests.engine.fake import FakeRunner
from tests.engine.helpers import PLAIN, VOCAB, WINDOWED, Bench, oracle, prompts
from tests.engine.late import GARBAGE

Page = list[tuple[int, int] | None]


class Memory:
    """Pages of host memory and of files, as the fake device would hold them."""

    def __init__(self) -> None:
        self.slots: dict[int, Page] = {}
        self.files: dict[int, Page] = {}

    def read(self, place: int) -> Page:
        return list(self.slots[place] if place > 0 else self.files[-place])


class LateFiles:
    """The files of an Offload. A page is read from its slot only when the test ends the writing."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        self.counts = TierCounts("disk", 1)
        self._memory, self._capacity = memory, capacity
        self._numbers: dict[Part, int] = {}
        self._held: list[int] = []
        self.writing: list[tuple[Part, int]] = []
        self._written: list[int] = []
        self._last = 0

    def find(self, part: Part) -> int:
        return self._numbers.get(part, 0)

    def hold(self, numbers: Sequence[int]) -> None:
        self._held += numbers

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.remove(number)

    def write(self, part: Part, slot: int) -> bool:
        if part in self._numbers or any(part == other for other, _ in self.writing):
            return False
        self.writing.append((part, slot))
        return True

    def end_writing(self) -> None:
        part, slot = self.writing.pop(0)
        self._last += 1
        self._memory.files[self._last] = list(self._memory.slots[slot])
        self._numbers[part] = self._last
        self._written.append(slot)
        unread = [part for part, number in self._numbers.items() if number not in self._held]
        for other in unread[: max(0, len(self._numbers) - self._capacity)]:
            del self._memory.files[self._numbers.pop(other)]

    def written(self) -> list[int]:
        slots, self._written = self._written, []
        return slots

    def clear(self) -> None:
        self._numbers.clear()
        self._written += [slot for _, slot in self.writing]
        self.writing.clear()


class TierRunner(FakeRunner):
    """A device whose stores and transfers end in random order. A store writes its slot, and a transfer reads its places, only when
    it ends; until then the blocks of a transfer hold garbage. Some fail."""

    def __init__(
        self, layout: KvLayout, blocks: int, memory: Memory, chance: random.Random, fail_at: frozenset[int]
    ) -> None:
        super().__init__(layout, blocks, vocab=VOCAB, fail_at=fail_at)
        self._host, self._dice, self._failing = memory, chance, fail_at
        self.loads: dict[int, Transfer] = {}
        self.stores: dict[int, tuple[Transfer, list[Page]]] = {}
        self.patience = 0.3

    def launch(self, plan: StepPlan) -> None:
        for ticket in plan.cancels:
            self.loads.pop(ticket, None)
        if plan.step not in self._failing:
            for store in plan.stores:
                assert store.origin == OFFLOAD
                self.stores[store.ticket] = store, [list(self._memory[block]) for block in store.blocks]
            self.loads |= {transfer.ticket: transfer for transfer in plan.transfers}
        for transfer in self.loads.values():
            for block in transfer.blocks:
                self._memory[block] = [GARBAGE] * self._layout.page_tokens
        ended = self._end()
        super().launch(plan)
        self._results[-1].transfers = ended

    def _end(self) -> dict[int, bool]:
        ended = {
            ticket: self._dice.random() < 0.9
            for ticket in (*self.loads, *self.stores)
            if self._dice.random() < self.patience
        }
        for ticket, arrived in ended.items():
            if ticket in self.stores:
                store, pages = self.stores.pop(ticket)
                for slot, page in zip(store.pages, pages, strict=True):
                    self._host.slots[slot] = page if arrived else [GARBAGE] * self._layout.page_tokens
            else:
                transfer = self.loads.pop(ticket)
                for block, place in zip(transfer.blocks, transfer.pages, strict=True):
                    if arrived:
                        self._memory[block] = self._host.read(place)
        return ended


class TierBench(Bench):
    """A Bench with tiers below its pool."""

    def __init__(
        self, chance: random.Random, slots: int = 40, files: int = 0, ttl_s: float = 0.0, **options: object
    ) -> None:
        super().__init__(**options)
        layout = self.scheduler.layout
        self.memory = Memory()
        self.files = LateFiles(self.memory, files) if files else None
        self.offload = Offload(
            layout, slots, lambda *work: chance.random() < 0.9, self.files, ttl_s=ttl_s, clock=lambda: self.clock.now
        )
        self.leases.source = self.offload
        fails = frozenset(options.get("fail_at", ()))  # type: ignore[call-overload]
        self.tiers = TierRunner(layout, self.leases.total, self.memory, chance, fails)
        self.loop.runner = self.runner = self.tiers
        self._dice = chance

    def turn(self) -> None:
        super().turn()
        if self.files is not None and self.files.writing and self._dice.random() < 0.3:
            self.files.end_writing()
        self.offload.check()


def test_an_evicted_prompt_comes_back() -> None:
    bench = TierBench(random.Random(1), blocks=12)
    bench.offload._pays = lambda *work: True
    bench.tiers._dice = random.Random(5)
    bench.tiers._dice.random = lambda: 0.0  # type: ignore[method-assign]
    for index in range(6):
        bench.submit(f"r{index}", list(range(index, index + 20)), max_tokens=2)
        bench.run()
    bench.submit("again", list(range(20)), max_tokens=2)
    bench.run()
    assert bench.cached["again", 0] == 16
    assert bench.tokens["again", 0] == oracle(range(20), 2)
    host, *_ = bench.offload.tiers()
    assert host.loaded == 4 and host.stored >= 20


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_mix_of_evictions_reloads_and_ends(data: st.DataObject) -> None:
    """Few blocks, slots and files; random arrivals of prompts with equal beginnings, cancels, resets of the cache, failed steps."""
    chance = data.draw(st.randoms(use_true_random=False))
    layout = data.draw(st.sampled_from([PLAIN, WINDOWED]))
    bench = TierBench(
        chance,
        slots=data.draw(st.integers(1, 60)),
        files=data.draw(st.sampled_from([0, 0, 5, 100])),
        ttl_s=data.draw(st.sampled_from([0.0, 0.0, 0.5])),
        layout=layout,
        depth=data.draw(st.integers(0, 2)),
        blocks=data.draw(st.integers(26, 45)),
        rows=data.draw(st.integers(1, 6)),
        step_tokens=data.draw(st.integers(1, 20)),
        fail_at=data.draw(st.sampled_from([(), (), (2,), (3, 9, 15)])),
    )
    texts = prompts(data.draw(st.integers(0, 99)), 3)
    wanted: dict[str, tuple[list[int], int, int]] = {}
    for index in range(data.draw(st.integers(1, 12))):
        name, n, most = f"r{index}", data.draw(st.sampled_from([1, 1, 3])), data.draw(st.integers(1, 12))
        text = data.draw(st.sampled_from(texts))
        prompt = text[: data.draw(st.integers(1, len(text)))]
        bench.submit(name, prompt, n=n, max_tokens=most, priority=data.draw(st.integers(0, 2)))
        wanted[name] = prompt, n, most
        for _ in range(data.draw(st.integers(0, 12))):
            bench.turn()
        if data.draw(st.integers(0, 5)) == 0:
            bench.scheduler.cancel(f"r{data.draw(st.integers(0, index))}")
        if data.draw(st.integers(0, 8)) == 0:
            bench.leases.reset_prefix_cache()
    bench.tiers.patience = 1.0
    bench.run()
    assert not bench.leases.filling and not bench.tiers.loads
    for name, (prompt, n, most) in wanted.items():
        for choice in range(n):
            right, tokens = oracle(prompt, most, choice=choice), bench.tokens[name, choice]
            assert tokens == (right if bench.finish[name, choice] == "length" else right[: len(tokens)])
