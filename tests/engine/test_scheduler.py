"""The heart without a device: whatever is batched, chunked, preempted, cached, drafted or cancelled, every request gets
the tokens it would get alone, and every block returns."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.interface import Speculation
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.engine.helpers import PLAIN, WINDOWED, Bench, Guesser, oracle, prompts

LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])


@LAYOUTS
@DEPTHS
@pytest.mark.parametrize("step_tokens", [3, 7, 64])
@pytest.mark.parametrize("blocks", [24, 200])
def test_every_request_gets_what_it_would_get_alone(
    layout: KvLayout, depth: int, step_tokens: int, blocks: int
) -> None:
    """Chunked or whole, preempted (24 blocks are too few for all) or not, cached or not, 0, 1 or 3 steps in flight."""
    bench = Bench(layout=layout, depth=depth, step_tokens=step_tokens, blocks=blocks)
    wanted = prompts(step_tokens, 9)
    for index, prompt in enumerate(wanted):
        bench.submit(f"r{index}", prompt, max_tokens=20 + index)
    bench.run()
    for index, prompt in enumerate(wanted):
        assert bench.tokens[f"r{index}", 0] == oracle(prompt, 20 + index)
        assert bench.finish[f"r{index}", 0] == "length"
    if blocks == 24 and step_tokens == 64:
        assert bench.loop.take_counts().preempted > 0


@LAYOUTS
@DEPTHS
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    layout: KvLayout, depth: int, chance: float, trees: bool
) -> None:
    bench = Bench(layout=layout, depth=depth, blocks=40, speculation=Guesser(chance, 4, seed=5, trees=trees))
    wanted = prompts(3, 6)
    stop = () if chance == 1.0 else (3, 50)
    for index, prompt in enumerate(wanted):
        bench.submit(f"r{index}", prompt, max_tokens=17, stop_token_ids=stop)
    bench.run()
    for index, prompt in enumerate(wanted):
        assert bench.tokens[f"r{index}", 0] == oracle(prompt, 17, stop=stop)
    counts = bench.loop.take_counts()
    assert counts.drafted > 0
    assert sum(counts.accepted_at) == counts.accepted
    if trees or chance < 1.0:
        assert counts.accepted < counts.drafted
    else:
        assert counts.accepted == counts.drafted
    assert (counts.accepted > 0) is (chance > 0)


@LAYOUTS
@DEPTHS
@pytest.mark.parametrize("parents", [(), (-1, -1, 0, 0, 1, 2, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_what_the_device_drafts_needs_no_host(
    layout: KvLayout, depth: int, luck: float, parents: tuple[int, ...]
) -> None:
    """Drafts of a step in flight are verified by the next one, whose plan does not know them."""
    speculation = Speculator(None, DeviceTraits(5, parents, reads_tokens=True), Controller((0, 5), fixed=True))
    bench = Bench(layout=layout, depth=depth, blocks=60, speculation=speculation, luck=luck, parents=parents)
    wanted = prompts(3, 6)
    for index, prompt in enumerate(wanted):
        bench.submit(f"r{index}", prompt, max_tokens=17, stop_token_ids=(3, 50))
    bench.run()
    for index, prompt in enumerate(wanted):
        assert bench.tokens[f"r{index}", 0] == oracle(prompt, 17, stop=(3, 50))
    counts = bench.loop.take_counts()
    assert counts.drafted > 0
    assert (counts.accepted > 0) is (luck > 0)


def _speculations(most: int) -> list[Speculation]:
    """Host chains, host trees, device chains that wait for nobody."""
    device = Speculator(None, DeviceTraits(3, reads_tokens=True), Controller((0, 3), fixed=True))
    return [Guesser(0.5, most, seed=1), Guesser(0.5, most, seed=1, trees=True), device]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mix_of_arrivals_cancels_and_priorities(data: st.DataObject) -> None:
    """Random arrivals, cancels at random turns, n > 1, stops, priorities, few blocks, every policy."""
    bench = Bench(
        layout=data.draw(st.sampled_from([PLAIN, WINDOWED])),
        depth=data.draw(st.integers(0, 2)),
        blocks=data.draw(st.integers(26, 60)),
        rows=data.draw(st.integers(1, 6)),
        step_tokens=data.draw(st.integers(1, 20)),
        batching=data.draw(st.sampled_from(["continuous", "static:3", "dynamic:2,50"])),
        prefix_cache=data.draw(st.booleans()),
        speculation=data.draw(st.sampled_from(_speculations(data.draw(st.integers(0, 3))))),
        luck=0.5,
        pace_s=data.draw(st.sampled_from([0.0, 0.05, 10.0])),
    )
    wanted: dict[str, tuple[list[int], int, int]] = {}
    cancelled: set[str] = set()
    for index, prompt in enumerate(prompts(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 7)))):
        name, n, most = f"r{index}", data.draw(st.sampled_from([1, 1, 3])), data.draw(st.integers(1, 20))
        reader, priority = data.draw(st.booleans()), data.draw(st.integers(0, 2))
        bench.submit(name, prompt, n=n, max_tokens=most, priority=priority, stop_token_ids=(7,), has_reader=reader)
        wanted[name] = prompt, n, most
        for _ in range(data.draw(st.integers(0, 4))):
            bench.turn()
        if data.draw(st.integers(0, 3)) == 0:
            victim = f"r{data.draw(st.integers(0, index))}"
            bench.scheduler.cancel(victim)
            cancelled.add(victim)
    bench.run()
    for name, (prompt, n, most) in wanted.items():
        for choice in range(n):
            right = oracle(prompt, most, choice=choice, stop=(7,))
            got = bench.tokens[name, choice]
            if name in cancelled and bench.finish[name, choice] == "cancelled":
                assert got == right[: len(got)]
            else:
                assert got == right
                assert bench.finish[name, choice] == ("stop" if right[-1] == 7 else "length")


@DEPTHS
def test_cancel_at_every_point_of_a_request(depth: int) -> None:
    """Cancelled before, between and after any of its turns, a request leaves nothing behind and the others go on."""
    prompt = list(range(20))
    for turns in range(25):
        bench = Bench(depth=depth, step_tokens=6, blocks=30)
        bench.submit("gone", prompt, max_tokens=6, n=2)
        bench.submit("stays", prompt[::-1], max_tokens=6)
        for _ in range(turns):
            bench.turn()
        bench.scheduler.cancel("gone")
        bench.scheduler.cancel("gone")
        bench.run()
        assert bench.tokens["stays", 0] == oracle(prompt[::-1], 6)


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    bench = Bench(step_tokens=64)
    prompt = list(range(30))
    bench.submit("first", prompt, max_tokens=3)
    bench.run()
    bench.submit("again", prompt, max_tokens=3)
    bench.submit("longer", prompt + [5] * 9, max_tokens=3)
    bench.submit("stranger", prompt, max_tokens=3, salt="other tenant")
    bench.submit("private", prompt, max_tokens=3, cache=False)
    bench.run()
    assert bench.cached == {
        ("first", 0): 0,
        ("again", 0): 28,
        ("longer", 0): 28,
        ("stranger", 0): 0,
        ("private", 0): 0,
    }
    assert bench.tokens["again", 0] == bench.tokens["first", 0] == oracle(prompt, 3)


def test_only_what_was_looked_up_counts_as_a_query() -> None:
    for options, queries in (({}, 12), ({"cache": False}, 0), ({"prompt_logprobs": 0}, 0), ({"n": 3}, 12)):
        bench = Bench(step_tokens=64)
        bench.submit("a", list(range(12)), max_tokens=2, **options)  # type: ignore[arg-type]
        bench.run()
        assert bench.loop.take_counts().prefix_queries == queries
    bench = Bench(prefix_cache=False)
    bench.submit("a", list(range(12)), max_tokens=2)
    bench.run()
    assert bench.loop.take_counts().prefix_queries == 0


def test_answers_are_reused_as_prefixes_too() -> None:
    """The second turn of a chat finds the first turn's answer in the cache."""
    bench = Bench()
    prompt = list(range(10))
    bench.submit("turn 1", prompt, max_tokens=9)
    bench.run()
    follow = prompt + bench.tokens["turn 1", 0] + [1, 2, 3]
    bench.submit("turn 2", follow, max_tokens=4)
    bench.run()
    assert bench.cached["turn 2", 0] == 16
    assert bench.tokens["turn 2", 0] == oracle(follow, 4)


def test_a_request_that_ends_with_its_first_token_leaves_its_prompt_in_the_cache() -> None:
    bench = Bench(step_tokens=64)
    bench.submit("a", list(range(12)), max_tokens=1)
    bench.run()
    bench.submit("b", list(range(12)), max_tokens=1)
    bench.run()
    assert bench.cached["b", 0] == 8


def test_resetting_the_prefix_cache_forgets_it() -> None:
    bench = Bench()
    bench.submit("a", list(range(12)), max_tokens=2)
    bench.run()
    assert bench.leases.reset_prefix_cache() == 3
    bench.submit("b", list(range(12)), max_tokens=2)
    bench.run()
    assert bench.cached["b", 0] == 0


@LAYOUTS
@DEPTHS
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_share_their_prompt(layout: KvLayout, depth: int, length: int, prefix_cache: bool) -> None:
    """The prompt is computed once; each choice then writes only into blocks of its own."""
    bench = Bench(layout=layout, depth=depth, prefix_cache=prefix_cache, step_tokens=32)
    prompt = list(range(length))
    bench.submit("r", prompt, n=4, max_tokens=9)
    bench.run()
    for choice in range(4):
        assert bench.tokens["r", choice] == oracle(prompt, 9, choice=choice)
    assert len({tuple(bench.tokens["r", choice]) for choice in range(4)}) > 1
    assert bench.loop.take_counts().prompt_tokens <= length + 3


def test_windows_free_the_blocks_behind_them() -> None:
    """A windowed group of a long sequence holds its window and one step's tokens, not the whole past."""
    bench = Bench(layout=WINDOWED, blocks=64, prefix_cache=False)
    bench.submit("long", list(range(5)), max_tokens=90)
    most = 0
    while not bench.scheduler.idle:
        bench.turn()
        for request in bench.scheduler.running:
            most = max(most, len(request.tables[1]) - request.freed[1])
    assert most <= 3
    assert bench.tokens["long", 0] == oracle(range(5), 90)


def test_urgent_requests_go_first() -> None:
    """Lower number first: an urgent request overtakes those that wait, and makes a less urgent one give way."""
    bench = Bench(rows=1, depth=1)
    bench.submit("slow", [1, 2, 3], max_tokens=30, priority=5)
    for _ in range(6):
        bench.turn()
    bench.submit("later", [4, 5], max_tokens=5, priority=5)
    bench.submit("urgent", [6, 7], max_tokens=5, priority=-1)
    ends = []
    while not bench.scheduler.idle:
        bench.turn()
        ends.extend(name for name, _ in bench.finish if name not in ends)
    assert ends == ["urgent", "slow", "later"]
    assert bench.tokens["slow", 0] == oracle([1, 2, 3], 30)


@DEPTHS
def test_what_fits_alone_never_waits_for_its_own_past(depth: int) -> None:
    """In a cache of exactly the pages that `fits` asks for, a window is left behind in time."""
    for window, size, chunk, prompt, most in itertools.product((3, 6, 11), (4, 5, 8), (2, 3, 5), (27, 42), (1, 10)):
        layout = KvLayout((KvGroup((0,), None, 8), KvGroup((1,), window, 8)), size, 64, KV_FORMATS["float32"])
        blocks = layout.pages_for(prompt + most, chunk)
        bench = Bench(layout=layout, depth=depth, blocks=blocks, step_tokens=chunk, prefix_cache=False)
        bench.submit("alone", list(range(prompt)), max_tokens=most)
        assert bench.scheduler.fits(bench.scheduler.waiting[0])
        bench.run(turns=500)
        assert bench.tokens["alone", 0] == oracle(range(prompt), most)


def test_a_request_that_can_never_fit_is_recognized() -> None:
    bench = Bench(blocks=5)
    bench.submit("big", list(range(18)), max_tokens=9)
    (request,) = bench.scheduler.waiting
    assert not bench.scheduler.fits(request)
    request.limit = 20
    assert bench.scheduler.fits(request)


def test_prompt_scores_come_once_and_whole_however_the_prompt_is_cut() -> None:
    for step_tokens in (2, 5, 64):
        bench = Bench(step_tokens=step_tokens, depth=1)
        bench.submit("r", list(range(12)), max_tokens=2, prompt_logprobs=0)
        bench.run()
        assert bench.scores["r"] == 11
        assert bench.tokens["r", 0] == oracle(range(12), 2)


@pytest.mark.parametrize(("batching", "at_once"), [("continuous", 5), ("static:4", 4), ("dynamic:2,1000", 2)])
def test_policies_differ_only_in_who_enters_when(batching: str, at_once: int) -> None:
    """A static or dynamic batch admits nobody until it has drained; continuous batching admits at every step."""
    bench = Bench(batching=batching, step_tokens=64)
    sizes = set()
    for index in range(5):
        bench.submit(f"r{index}", [index + 1] * 3, max_tokens=2 + 3 * index)
    entered_while_running = False
    before: set[str] = set()
    while not bench.scheduler.idle:
        bench.turn()
        names = {request.id for request in bench.scheduler.running}
        entered_while_running |= bool(before) and not names <= before
        before = names
        sizes.add(len(names))
        if not names:
            bench.clock.now += 0.2
    assert max(sizes) == at_once or batching == "continuous"
    if batching != "continuous":
        assert not entered_while_running
    for index in range(5):
        assert bench.tokens[f"r{index}", 0] == oracle([index + 1] * 3, 2 + 3 * index)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_newcomer_never_takes_a_cancelled_members_place(depth: int) -> None:
    """One row: the second member of a batch still waits when it is cancelled, and the third request must wait for its own
    batch."""
    bench = Bench(batching="static:2", rows=1, depth=depth)
    for name in ("first", "second", "third", "fourth"):
        bench.submit(name, [1, 2, 3], max_tokens=6)
    bench.turn()
    bench.scheduler.cancel("second")
    while ("first", 0) not in bench.finish:
        assert {request.id for request in bench.scheduler.running} <= {"first"}
        bench.turn()
    bench.run()
    assert bench.tokens["fourth", 0] == oracle([1, 2, 3], 6)


def test_choices_fill_a_static_batch_and_enter_it_together() -> None:
    """n = 4 fills static:4 at once, although three of its choices wait for the first one's prompt."""
    bench = Bench(batching="static:4")
    bench.submit("r", [1, 2, 3], n=4, max_tokens=6)
    most = 0
    while not bench.scheduler.idle:
        bench.turn()
        most = max(most, len(bench.scheduler.running))
    assert most == 4 and bench.clock.now < 1.0
    assert all(bench.tokens["r", choice] == oracle([1, 2, 3], 6, choice=choice) for choice in range(4))


def test_running_rows_are_planned_alike_while_they_decode() -> None:
    """Rows that go on decoding keep their order, so that a plan can be compared with the one before it."""
    bench = Bench(step_tokens=64)
    for index in range(4):
        bench.submit(f"r{index}", [index] * 4, max_tokens=8)
    bench.turn()
    first = bench.scheduler.plan(1.0)
    assert first is not None and list(first.n_query) == [1, 1, 1, 1] and not first.joins
    bench.runner.launch(first)
    bench.scheduler.commit(bench.runner.collect(), 1.0)
    second = bench.scheduler.plan(1.0)
    assert second is not None and second.repeats(first) and second.rows is first.rows
    assert (first.bound, second.bound) == (5, 6)


def test_who_enters_again_in_the_place_he_left_is_stated_anew() -> None:
    """The same requests in the same order, but with other rows: the last plan's arrays must not be taken."""
    bench = Bench(step_tokens=64)
    for name in ("a", "b"):
        bench.submit(name, list(range(9)), max_tokens=9)
    bench.turn()
    bench.turn()
    assert bench.scheduler._preempt(bench.scheduler.running[-1])
    bench.run()
    assert bench.tokens["b", 0] == bench.tokens["a", 0] == oracle(range(9), 9)


def test_choices_that_wait_for_their_prompt_are_queued() -> None:
    bench = Bench(step_tokens=4)
    bench.submit("r", list(range(10)), n=3, max_tokens=2)
    bench.submit("s", [1, 2], max_tokens=2)
    seen = []
    while not bench.scheduler.idle:
        seen.append((len(bench.scheduler.running), bench.scheduler.queued))
        bench.turn()
    assert seen[:3] == [(0, 4), (1, 3), (1, 3)] and seen[-1][1] == 0
    assert all(running + queued <= 4 for running, queued in seen)


@pytest.mark.parametrize(("layout", "free"), [(PLAIN, 2), (WINDOWED, 12)])
def test_blocks_that_somebody_holds_need_not_be_free(layout: KvLayout, free: int) -> None:
    """A request whose prompt somebody has computed shares nine blocks of ten, and one is kept for who runs. Behind a window
    it would give them up and need others, so there they count."""
    prompt = list(range(40))
    bench = Bench(layout=layout, blocks=60, step_tokens=64)
    bench.submit("first", prompt, max_tokens=12)
    bench.turn()
    bench.submit("second", prompt, max_tokens=5)
    pool, (second,) = bench.leases.pool, bench.scheduler.waiting
    taken = [pool.take() for _ in range(pool.free - free)]
    assert bench.leases.admits(second, bench.scheduler.running, [], 64)
    taken.append(pool.take())
    assert not bench.leases.admits(second, bench.scheduler.running, [], 64)
    for block in taken:
        pool.release(block, keep=False)
    bench.run()
    assert bench.tokens["second", 0] == oracle(prompt, 5)


def test_tokens_behind_an_end_are_counted_as_dropped() -> None:
    bench = Bench(depth=1)
    bench.submit("r", [1, 2, 3], max_tokens=20)
    for _ in range(6):
        bench.turn()
    assert len(bench.tokens["r", 0]) == 5
    bench.scheduler.end_choice("r", 0, "stop", 3)
    bench.run()
    assert bench.loop.take_counts().dropped == 3, "two beyond the three that count, and the one in flight"
