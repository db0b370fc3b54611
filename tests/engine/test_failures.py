"""What fails ends its own requests, with a reason, and nothing else."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import BadGrammar
from ridgeline.core.plan import StepPlan
from ridgeline.engine.constraints import GrammarAndRules
from ridgeline.engine.loop import Loop
from ridgeline.engine.result import without
from ridgeline.engine.scheduler import Scheduler
from tests.engine.fake import FakeRunner
from tests.engine.helpers import PLAIN, WINDOWED, Bench, oracle, prompts


def test_a_failed_step_ends_its_requests_with_a_reason_and_not_the_engine() -> None:
    bench = Bench(fail_at=[3])
    bench.submit("doomed", [1, 2, 3], max_tokens=9)
    bench.run()
    assert bench.finish["doomed", 0] == "error"
    bench.submit("next", [1, 2, 3], max_tokens=9)
    bench.run()
    assert bench.tokens["next", 0] == oracle([1, 2, 3], 9)


class Forgetful(FakeRunner):
    """As a runner whose uploads fail at `lost`: rows and pages of those plans never reach it, and later steps go without the
    rows that it does not know."""

    lost: frozenset[int] = frozenset()
    touched: set[tuple[str, int]]
    """Choices that a lost plan was for."""
    scheduler: Scheduler

    def launch(self, plan: StepPlan) -> None:
        known = {row: held.join.generation for row, held in self._rows.items() if row not in plan.leaves}
        known |= {join.row: join.generation for join in plan.joins}
        if plan.step in self.lost:
            changed = {*(join.row for join in plan.joins), *plan.pages[::4]}
            for row in (*plan.leaves, *changed):
                self._rows.pop(row, None)
            running = self.scheduler.running
            self.touched |= {
                (request.id, request.choice) for request in running if request.row in changed | set(plan.rows)
            }
            self._results.append(without(plan, "lost"))
            return
        held = [known.get(row) == generation for row, generation in zip(plan.rows, plan.generations, strict=True)]
        pages = [plan.pages[at : at + 4] for at in range(0, len(plan.pages), 4) if plan.pages[at] in known]
        part = {name: array("i", itertools.compress(getattr(plan, name), held)) for name in PER_ROW}
        super().launch(replace(plan, pages=array("i", itertools.chain.from_iterable(pages)), **part))
        result = self._results[-1]
        for name in ("counts", "flags"):
            left = iter(getattr(result, name))
            setattr(result, name, [next(left) if drawn else 0 for drawn in held])
        result.lost = [place for place, drawn in enumerate(held) if not drawn]


PER_ROW = ("rows", "generations", "n_query", "n_draft", "logits", "samples")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_failed_steps_end_their_own_requests_only(data: st.DataObject) -> None:
    """Whatever fails and when, every request ends, every block and row returns, and no token is wrong."""
    bench = Bench(
        layout=data.draw(st.sampled_from([PLAIN, WINDOWED])),
        depth=data.draw(st.integers(0, 2)),
        blocks=data.draw(st.integers(26, 60)),
        rows=data.draw(st.integers(1, 6)),
        step_tokens=data.draw(st.integers(1, 20)),
    )
    bench.runner.__class__ = Forgetful
    bench.runner.touched, bench.runner.scheduler = set(), bench.scheduler  # type: ignore[attr-defined]
    failing = data.draw(st.frozensets(st.integers(1, 40), max_size=3))
    if data.draw(st.booleans()):
        bench.runner.lost = failing  # type: ignore[attr-defined]
    else:
        bench.runner.fail_at = failing
    wanted = prompts(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 6)))
    for index, prompt in enumerate(wanted):
        priority = data.draw(st.integers(0, 2))
        made = bench.submit(f"r{index}", prompt, n=1 + index % 2, max_tokens=9, priority=priority)
        if data.draw(st.booleans()):
            for request in made:
                request.constraint = GrammarAndRules(Fragile(data.draw(st.integers(0, 9))), ())
        for _ in range(data.draw(st.integers(0, 4))):
            bench.turn()
    bench.run()
    for (name, choice), finish in bench.finish.items():
        right, got = oracle(wanted[int(name[1:])], 9, choice=choice), bench.tokens[name, choice]
        assert got == right if finish == "length" else got == right[: len(got)]
    if bench.runner.lost:  # type: ignore[attr-defined]
        ended = {key for key, finish in bench.finish.items() if finish == "error"}
        assert ended <= bench.runner.touched  # type: ignore[attr-defined]
    assert rows_that_join(bench) == list(range(1, bench.scheduler.limits.rows + 1))


def rows_that_join(bench: Bench) -> list[int]:
    """The rows that short requests get, as many as there are rows and one more, which has to wait."""
    rows = bench.scheduler.limits.rows
    bench.scheduler.limits = replace(bench.scheduler.limits, step_tokens=rows + 1)
    for index in range(rows + 1):
        bench.submit(f"next {index}", [index], max_tokens=1)
    plan = bench.scheduler.plan(bench.clock())
    assert plan is not None and len(bench.scheduler.waiting) == 1
    return sorted(join.row for join in plan.joins)


class Fragile:
    """A grammar that allows everything and breaks after so many tokens (9: never)."""

    finished = False

    ready = True

    def __init__(self, left: int) -> None:
        self._left = left

    def mask(self) -> bytes:
        if self._left == 0:
            raise BadGrammar("outgrown")
        return b"\xff" * 16

    def accept(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)


def test_who_leaves_before_its_join_went_out_is_never_heard_of() -> None:
    """A grammar that breaks at once, in the plan in which its request enters: its row can be used again."""
    bench = Bench(rows=1, depth=1)
    bench.submit("broken", [1, 2, 3], max_tokens=3)
    bench.scheduler.waiting[0].constraint = GrammarAndRules(Fragile(0), ())
    bench.submit("whole", [4, 5, 6], max_tokens=3)
    bench.run()
    assert bench.finish == {("broken", 0): "refused", ("whole", 0): "length"}


def test_a_heart_that_turns_without_moving_anything_shows_no_progress() -> None:
    """/health reads `turns`: requests that run and are never planned must not look like work."""

    class Stuck:
        steps_in_flight = 0

        def plan(self, now: float) -> None: ...

        def wait_seconds(self, now: float) -> float:
            return self.due

        def take_updates(self) -> list[object]:
            return []

        due = 0.0

    scheduler = Stuck()
    loop = Loop(scheduler, None)  # type: ignore[arg-type]
    loop.turn()
    assert loop.turns == 0
    scheduler.due = 1.0
    loop.turn()
    assert loop.turns == 1, "a batch that waits for its window is no trouble"
