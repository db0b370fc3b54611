"""How drafters of both kinds work together for a request, on the fake device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import cycle, pairwise

import pytest

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.speculation import speculator
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.host import repeats
from ridgeline.speculation.interface import RequestView
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.speculation.state import Reading, StepDrafts
from tests.engine.helpers import VOCAB, Bench, oracle


class Listener:
    """Remembers what it is told, proposes what `truth` says next in every second step."""

    def __init__(self, truth: Sequence[int], tokens: Sequence[int]) -> None:
        self.truth, self.text, self.asked = list(truth), list(tokens), 0
        self.drawn: list[tuple[Draft, list[int]]] = []

    def nodes(self, chain: int, cost: float) -> int:
        return chain

    def propose(self, nodes: int, depth: int) -> Draft:
        self.asked += 1
        assert self.text == self.truth[: len(self.text)]
        return Draft(tuple(self.truth[len(self.text) :][: min(nodes, depth, 3)])) if self.asked % 2 else EMPTY_DRAFT

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        self.text += tokens
        self.drawn.append((draft, list(drawn)))


class Host:
    needs_repeat = False

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = truth
        self.guesses: list[Listener] = []

    def start(self, tokens: Sequence[int]) -> Listener:
        self.guesses.append(Listener(self.truth, tokens))
        return self.guesses[-1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("device", [None, DeviceTraits(2, reads_tokens=True)])
def test_a_guess_knows_everything_that_was_said(depth: int, cache: bool, device: DeviceTraits | None) -> None:
    """Whoever drafted it, and however long nobody asked."""
    prompt = list(range(20))
    said = oracle(prompt, 60)
    host = Host(prompt + said)
    speculation = Speculator(host, device, Controller((0, 2), fixed=True))
    bench = Bench(depth=depth, speculation=speculation, luck=0.5, step_tokens=32)
    bench.submit("one", prompt, max_tokens=60, cache=cache)
    bench.run()
    assert bench.tokens["one", 0] == said
    assert host.guesses, "nobody was asked"
    for guess in host.guesses:
        assert guess.text == (prompt + said)[: len(guess.text)]
        assert all(len(drawn) == 1 + len(draft.tokens) for draft, drawn in guess.drawn if draft.tokens)
    assert any(draft.tokens for guess in host.guesses for draft, _ in guess.drawn)
    assert max(said) < VOCAB


def test_a_request_that_nothing_can_be_quoted_for_is_asked_now_and_then() -> None:
    class Silent(Host):
        def start(self, tokens: Sequence[int]) -> Listener:
            guess = super().start(tokens)
            guess.propose = self._nothing  # type: ignore[method-assign]
            return guess

        def _nothing(self, nodes: int, depth: int) -> Draft:
            self.asked += 1
            return EMPTY_DRAFT

        asked = 0

    host = Silent([])
    bench = Bench(speculation=Speculator(host, None, Controller((0, 4))), step_tokens=32)
    bench.submit("one", list(range(10)), max_tokens=128)
    bench.run()
    assert bench.tokens["one", 0] == oracle(list(range(10)), 128)
    assert 128 // 16 <= host.asked < 128 // 3


def test_a_glance_at_the_last_tokens() -> None:
    assert repeats(array("i", [1, 2, 3, 4, 1, 2, 3])) and not repeats(array("i", [1, 2, 3, 4, 1, 2]))
    assert not repeats(array("i", [1, 2])) and not repeats(array("i", range(9)))
    assert not repeats(array("i", [1, 2, 3, *range(4, 5000), 1, 2, 3])), "too long ago"


@pytest.mark.parametrize("needs_repeat", [False, True])
def test_who_quotes_is_asked_where_a_glance_promises_something(
    needs_repeat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "repeats", lambda tokens: tokens[-1] % 2 == 0)
    asked: list[int] = []

    class Silent(Host):
        def start(self, tokens: Sequence[int]) -> Listener:
            guess = super().start(tokens)

            def propose(nodes: int, depth: int) -> Draft:
                asked.append(guess.text[-1])
                return EMPTY_DRAFT

            guess.propose = propose  # type: ignore[method-assign]
            return guess

    host = Silent([])
    host.needs_repeat = needs_repeat
    bench = Bench(speculation=Speculator(host, None, Controller((0, 4))), step_tokens=32)
    bench.submit("one", list(range(10)), max_tokens=128)
    bench.run()
    assert bench.tokens["one", 0] == oracle(list(range(10)), 128)
    assert asked and any(token % 2 for token in asked) is not needs_repeat


@pytest.mark.parametrize("glances", [False, True])
def test_a_glance_ends_a_rest(glances: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins to repeat what was said is asked within a few steps, however long drafting was to be off; nobody else is."""

    class Idle(Controller):
        def idle_steps(self, rows: int, host: bool, device: bool) -> int:
            return 64

    monkeypatch.setattr(speculator, "repeats", lambda tokens: glances and len(tokens) >= 50)
    asked: list[int] = []

    class Noted(Host):
        def start(self, tokens: Sequence[int]) -> Listener:
            asked.append(len(tokens))
            return super().start(tokens)

    prompt = list(range(20))
    host = Noted(prompt + oracle(prompt, 80))
    host.needs_repeat = True
    bench = Bench(speculation=Speculator(host, None, Idle((0, 4)), sampled=Idle((0, 4))), step_tokens=32)
    bench.submit("one", prompt, max_tokens=80)
    bench.run()
    assert bench.tokens["one", 0] == oracle(prompt, 80)
    assert (50 <= asked[0] <= 56) if glances else not asked


def test_what_the_device_drafted_is_verified_once() -> None:
    """Even if the steps that follow draft nothing and tell nobody so."""
    speculation = Speculator(None, DeviceTraits(3, (-1, -1, 0)), Controller((0, 3), fixed=True))
    bench = Bench(speculation=speculation, luck=1.0, parents=(-1, -1, 0))
    bench.submit("one", [1, 2, 3], max_tokens=30)
    bench.turn()
    (request,) = bench.scheduler.running
    assert request.speculation.device_nodes == 3
    assert len(speculation.propose(request, 8).tokens) == 3
    assert speculation.propose(request, 8) == EMPTY_DRAFT


def test_steps_that_verify_alike_have_the_same_arrays() -> None:
    """A step whose drafts are as those of one of late takes that one's arrays, and a bound of its own."""
    speculation = Speculator(None, DeviceTraits(3, (-1, -1, 0)), Controller((0, 3), fixed=True))
    bench = Bench(speculation=speculation, luck=0.5, parents=(-1, -1, 0))
    plans = bench.runner.plans
    for number in range(2):
        bench.submit(str(number), [number] * 3, max_tokens=40)
    while not bench.scheduler.idle:
        known = [request.planned for request in bench.scheduler.running]
        bench.turn()
        assert all(plans[-1].bound >= tokens + 1 for tokens in known if len(plans[-1].rows) == len(known))
    assert all(bench.tokens[str(number), 0] == oracle([number] * 3, 40) for number in range(2))
    alike = [(plan, other) for plan, other in pairwise(plans) if list(other.n_draft) == list(plan.n_draft) == [3, 3]]
    assert len(alike) > 5
    for plan, other in alike:
        assert other.rows is plan.rows and other.tree is plan.tree and other.drafts is plan.drafts
        assert plan.bound < other.bound <= plan.bound + 8 and other.pages is not plan.pages
    changed = [other for plan, other in pairwise(plans) if list(other.n_draft) != list(plan.n_draft)]
    assert all(len(plan.drafts) == len(plan.tree) == sum(plan.n_draft) for plan in plans) and changed


def test_a_request_brings_one_grant_however_many_choices_it_has() -> None:
    admitted: list[int] = []

    class Watched(Controller):
        def admit(self, rows: int, new: int) -> None:
            admitted.append(new)

    bench = Bench(speculation=Speculator(None, DeviceTraits(2), Watched((0, 2)), sampled=Watched((0, 2))))
    bench.submit("one", [1, 2, 3], max_tokens=30, n=4)
    bench.submit("two", [4, 5, 6], max_tokens=30)
    bench.run()
    assert bench.tokens["one", 3] == oracle([1, 2, 3], 30, choice=3)
    assert sum(admitted) == 2


def test_a_request_brings_its_grant_while_speculation_is_idle() -> None:
    admitted: list[int] = []

    class Idle(Controller):
        def admit(self, rows: int, new: int) -> None:
            admitted.append(new)

        def choose(self, rows: int, most: int) -> int:
            return 0

        def idle_steps(self, rows: int, host: bool, device: bool) -> int:
            return 40

    speculation = Speculator(None, DeviceTraits(2), Idle((0, 2)), sampled=Idle((0, 2)))
    bench = Bench(speculation=speculation)
    bench.submit("one", [1, 2, 3], max_tokens=60)
    for _ in range(10):
        bench.turn()
    assert speculation.idle and sum(admitted) == 1
    bench.submit("two", [4, 5, 6], max_tokens=60)
    bench.run()
    assert sum(admitted) == 2


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("nodes", [0, 2])
def test_a_step_is_measured_by_the_controller_that_chose_its_drafts(depth: int, nodes: int) -> None:
    """Although the next step, which is planned before this one is committed, has another controller."""
    measured: set[tuple[Controller, int]] = set()

    class Watched(Controller):
        def choose(self, rows: int, most: int) -> int:
            return nodes

        def idle_steps(self, rows: int, host: bool, device: bool) -> int:
            return 0

        def measure_undrafted(self, rows: int, seconds: float, steps: int = 1) -> None:
            measured.add((self, rows))

        def measure(self, step: Reading) -> tuple[float, float]:
            measured.add((self, step.rows))
            return 0.0, 0.0

    greedy = Watched((0, 2))
    bench = Bench(depth=depth, speculation=Speculator(None, DeviceTraits(2), greedy, sampled=Watched((0, 2))), luck=0.5)
    bench.submit("greedy", [1, 2, 3], max_tokens=90, temperature=0.0)
    for _ in range(12):
        bench.turn()
    bench.submit("sampled", [4, 5, 6], max_tokens=20, temperature=1.0)
    bench.run()
    assert {rows for controller, rows in measured if controller is greedy} == {1}
    assert {rows for controller, rows in measured if controller is not greedy} == {2}


def test_steps_that_verify_as_one_of_late_have_its_arrays() -> None:
    """Whatever the steps between them verified, until somebody comes; who comes sits in rows of the new step's own."""
    turns = cycle((1, 0, 2, 3))

    class InTurns(Controller):
        def choose(self, rows: int, most: int) -> int:
            return next(turns)

    bench = Bench(
        speculation=Speculator(None, DeviceTraits(3), InTurns((0, 1, 2, 3)), sampled=InTurns((0, 1, 2, 3))), luck=0.5
    )
    plans = bench.runner.plans
    for number in range(2):
        bench.submit(str(number), [number] * 3, max_tokens=60)
        bench.turn()
        for _ in range(12):
            bench.turn()
            known = {request.row: request.planned for request in bench.scheduler.running}
            assert plans[-1].bound >= max(known.values()) - max(plans[-1].n_draft)
    bench.run()
    assert all(bench.tokens[str(number), 0] == oracle([number] * 3, 60) for number in range(2))
    both = [plan for plan in plans if len(plan.rows) == 2 and not plan.joins]
    of = {tuple(plan.n_draft): {id(other.rows) for other in both if other.n_draft == plan.n_draft} for plan in both}
    assert len(of) > 2 and all(len(rows) <= 2 for rows in of.values())
    assert not {id(plan.rows) for plan in both} & {id(plan.rows) for plan in plans if len(plan.rows) == 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drawn_and_what_is_not_have_their_own_records(temperature: float) -> None:
    taught: list[Controller] = []

    class Watched(Controller):
        def observe(self, nodes: int, kept: list[int]) -> None:
            taught.append(self)
            super().observe(nodes, kept)

    greedy = Watched((0, 3), fixed=True)
    hoped = greedy.expected(3)
    bench = Bench(speculation=Speculator(None, DeviceTraits(3), greedy, sampled=Watched((0, 3), fixed=True)), luck=0.0)
    for number in range(3):
        bench.submit(str(number), [1, 2, 3], max_tokens=30, temperature=temperature)
    bench.run()
    assert all(controller is taught[0] for controller in taught) and taught[0].expected(3) < 1.2 < hoped
    assert (taught[0] is greedy) == (temperature == 0.0)
    if temperature:
        assert greedy.expected(3) == hoped, "nothing drawn counts for it"


@pytest.mark.parametrize("depth", [0, 1])
def test_all_plain_steps_are_counted_though_few_are_measured(depth: int) -> None:
    """While speculation is idle one measured step stands for several."""
    counted: list[int] = []
    plain: list[bool] = []

    class Watched(Controller):
        def measure_undrafted(self, rows: int, seconds: float, steps: int = 1) -> None:
            counted.append(steps)
            super().measure_undrafted(rows, seconds, steps)

        def choose(self, rows: int, most: int) -> int:
            return 2 if len(plain) % 3 == 1 else 0

        def idle_steps(self, rows: int, host: bool, device: bool) -> int:
            return 13

    class Noting(Speculator):
        def end_step(
            self, drafts: StepDrafts, plan: StepPlan, requests: Sequence[RequestView], result: StepResult
        ) -> float:
            plain.append(not drafts.active)
            return super().end_step(drafts, plan, requests, result)

    bench = Bench(
        depth=depth, speculation=Noting(None, DeviceTraits(2), Watched((0, 2)), sampled=Watched((0, 2))), luck=0.5
    )
    for number in range(4):
        bench.submit(f"{number}", list(range(20)), max_tokens=60)
        bench.run()
        assert bench.tokens[f"{number}", 0] == oracle(list(range(20)), 60)
    assert sum(plain) < len(plain), "some draft"
    assert max(counted) >= 8 and len(counted) < 0.4 * sum(plain)
    assert 0.9 * sum(plain) < sum(counted) <= sum(plain)
