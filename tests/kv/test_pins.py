"""Pinned prefixes on a virtual clock: lifetimes, the budget, losses and their reasons; the books of the pool balance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.events import PinOutcome
from ridgeline.core.spec import KvGroup
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.pins import Pins
from ridgeline.kv.prefix import PrefixIndex
from tests.kv.test_prefix import SIZE, chain_of

BOOK = list(range(16))


class Cache:
    """A prefix cache without a model: `compute` publishes the full blocks of a prompt and frees them."""

    def __init__(self, total: int, budget: int, window: int | None = None) -> None:
        groups = [KvGroup((0,), None, 8)] + ([KvGroup((1,), window, 8)] if window else [])
        self.groups = len(groups)
        self.index = PrefixIndex(groups, SIZE)
        self.pool = BlockPool(total, self.evict)
        self.pins = Pins(self.pool, self.index, budget, SIZE)
        self.pins.advance(0.0)

    def evict(self, block: int) -> None:
        self.index.evict(block)
        self.pins.evicted(block)

    def compute(self, tokens: list[int], *, salt: str = "") -> list[bytes]:
        chain = chain_of(tokens, salt)
        held = []
        for key in chain:
            for group in range(self.groups):
                entry = self.index.get(key)
                if entry and entry[group]:
                    self.pool.share(entry[group])
                    held.append(entry[group])
                elif self.pool.free:
                    held.append(self.pool.take())
                    self.index.insert(key, group, held[-1])
        for block in reversed(held):
            self.pool.release(block, keep=self.index.holds(block))
        return chain

    def pin(self, tokens: list[int], ttl_s: float = 300.0, *, salt: str = "") -> PinOutcome:
        chain = self.compute(tokens, salt=salt)
        (outcome,) = self.pins.reach(chain, [(len(tokens), ttl_s)], len(chain))
        return outcome

    def hit(self, tokens: list[int], salt: str = "") -> int:
        chain = chain_of(tokens, salt)
        return self.index.match(chain, len(chain))[0] * SIZE


def test_a_pinned_prefix_outlives_newer_ones_and_ends_with_its_lifetime() -> None:
    cache = Cache(total=8, budget=4)
    assert cache.pin(BOOK) == PinOutcome(16, "written", token_s=16 * 300.0)
    for number in range(20):
        cache.compute([100 + number] * 8)
    assert cache.hit(BOOK) == 16
    cache.pins.advance(299.9)
    assert cache.pins.blocks == 4
    cache.pins.advance(300.0)
    assert cache.pins.blocks == 0
    assert cache.hit(BOOK) == 16, "it is still cached, as any other prefix"
    for number in range(4):
        cache.compute([200 + number] * 8)
    assert cache.hit(BOOK) < 16
    assert cache.pin(BOOK).lost == "lifetime"
    assert cache.pin(BOOK).lost == "", "the reason is told once"


def test_each_use_renews_the_lifetime_and_pays_for_the_time_it_adds() -> None:
    cache = Cache(total=8, budget=4)
    cache.pin(BOOK, 300.0)
    cache.pins.advance(200.0)
    assert cache.pin(BOOK, 300.0) == PinOutcome(16, "renewed", token_s=16 * 200.0)
    cache.pins.advance(400.0)
    assert len(cache.pins) == 1
    assert cache.pin(BOOK, 3600.0).token_s == 16 * (3600.0 - 100.0)
    assert cache.pin(BOOK, 300.0).token_s == 0.0, "a shorter lifetime does not shorten a longer one"
    cache.pins.advance(3999.0)
    assert len(cache.pins) == 1


def test_nested_prefixes_count_their_blocks_once() -> None:
    cache = Cache(total=8, budget=4)
    assert cache.pin(BOOK[:8], 3600.0).state == "written"
    assert cache.pin(BOOK, 300.0) == PinOutcome(16, "written", token_s=8 * 300.0)
    assert cache.pins.blocks == 4
    cache.pins.advance(300.0)
    assert (len(cache.pins), cache.pins.blocks) == (1, 2)


def test_the_budget_refuses_and_leaves_older_pins_alone() -> None:
    cache = Cache(total=12, budget=5)
    assert cache.pin(BOOK).state == "written"
    assert cache.pin([50] * 8) == PinOutcome(8, "refused", "budget")
    assert cache.pin([60] * 4).state == "written"
    assert cache.pin([1, 2]) == PinOutcome(0, "refused", "short")
    assert cache.pins.blocks == 5
    assert cache.pins.counts == {
        ("written", ""): 2,
        ("refused", "budget"): 1,
        ("refused", "short"): 1,
    }


def test_running_requests_take_pinned_blocks_last_and_the_loss_has_a_reason() -> None:
    cache = Cache(total=6, budget=5)
    cache.pin(BOOK)
    cache.pin([50] * 4)
    held = [cache.pool.take()]
    assert len(cache.pins) == 2, "a block without a pin was free"
    held.append(cache.pool.take())
    assert len(cache.pins) == 1, "the least recently used pin is lost"
    held += [cache.pool.take() for _ in range(3)]
    assert len(cache.pins) == 1, "the other blocks of a lost pin go first"
    for block in held:
        cache.pool.release(block, keep=False)
    assert cache.pin(BOOK).lost == "pressure"


def test_a_reset_drops_all_pins_and_tells_why() -> None:
    cache = Cache(total=8, budget=4)
    cache.pin(BOOK)
    cache.pins.clear("reset")
    for block in cache.index.clear():
        cache.pool.forget(block)
    assert cache.pool.cached == 0
    assert cache.pin(BOOK).lost == "reset"


def test_salts_have_pins_of_their_own() -> None:
    cache = Cache(total=12, budget=12)
    cache.pin(BOOK, salt="a")
    assert cache.pin(BOOK, salt="b") == PinOutcome(16, "written", token_s=16 * 300.0)
    assert cache.pins.blocks == 8
    cache.pins.clear("reset")
    assert cache.pin(BOOK, salt="c").lost == ""


def test_a_group_with_a_window_pins_what_a_hit_needs() -> None:
    cache = Cache(total=16, budget=16, window=5)
    assert cache.pin(BOOK).token_s == 16 * 300.0
    assert cache.pins.blocks == 5, "four blocks of the whole group, one that the window sees"


PROMPTS = [BOOK, BOOK[:8], [50] * 12, [50] * 4 + [51] * 8, [60] * 20]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "pin", "advance", "take", "release", "reset"]),
        st.integers(0, 19),
        st.sampled_from([1.0, 5.0, float("inf")]),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(total=st.integers(4, 14), budget=st.integers(0, 8), window=st.sampled_from([None, 5]), operations=OPERATIONS)
def test_free_plus_used_is_total_with_pins(
    total: int, budget: int, window: int | None, operations: list[tuple[str, int, float]]
) -> None:
    cache, now, held = Cache(total, budget, window), 0.0, list[int]()
    pool, pins = cache.pool, cache.pins
    for name, number, seconds in operations:
        prompt = PROMPTS[number % len(PROMPTS)]
        if name == "compute":
            cache.compute(prompt)
        elif name == "pin":
            cache.pin(prompt, seconds)
        elif name == "advance":
            now += min(seconds, 2.0)
            pins.advance(now)
        elif name == "take" and pool.free:
            held.append(pool.take())
        elif name == "release" and held:
            pool.release(held.pop(number % len(held)), keep=False)
        elif name == "reset":
            pins.clear("reset")
            for block in cache.index.clear():
                pool.forget(block)
        pool.check()
        assert pool.free + pool.used == pool.total
        assert pins.blocks <= budget
        assert pins.blocks == sum(pool.is_pinned(block) for block in range(1, total + 1))
        assert all(cache.index.holds(block) for block in range(1, total + 1) if pool.is_pinned(block))
