"""Grammars in the engine: followed, refused, waited for, and never at the expense of others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar
from ridgeline.engine import engine as engine_module
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Cancel
from tests.engine.constrained import Grammars, OneTwo, make, submit


def test_a_grammar_is_followed_token_by_token_and_ends_the_answer() -> None:
    """The mask travels with the plan; with a step in flight the row waits until its last token is known."""
    engine = make(depth=1)
    masks: list[dict[int, bytes]] = []
    launch = engine.loop.runner.launch
    engine.loop.runner.launch = lambda plan: (masks.append(dict(plan.masks)), launch(plan))[1]  # type: ignore[method-assign]
    local = LocalEngine(engine)
    news = list(local.run([submit("a", [1, 2], max_tokens=9, ignore_eos=True, grammar=Grammar("regex", "[12]{3}"))]))
    assert sum(len(delta.tokens) for delta in news) == 3 and news[-1].finish == "stop"
    assert len([mask for mask in masks if mask]) == 3


@pytest.mark.parametrize("where", ["mask", "accept"])
def test_a_grammar_that_breaks_ends_its_own_request_only(where: str) -> None:
    engine = make(depth=1)
    local = LocalEngine(engine)
    news = list(
        local.run(
            [
                submit("broken", [1, 2], max_tokens=9, grammar=Grammar("lark", where)),
                submit("whole", [1, 2], max_tokens=9, seed=1, ignore_eos=True),
            ]
        )
    )
    ends = {delta.id: delta for delta in news if delta.finish}
    assert ends["broken"].finish == "refused" and "outgrew" in ends["broken"].error
    assert ends["whole"].finish == "length"
    assert engine.idle and engine.loop.scheduler.leases.pool.used == 0


def test_a_request_waits_for_its_grammar_and_nobody_else_does() -> None:
    """While a grammar is compiled, others gain tokens; then the request runs as ever."""
    engine = make(depth=1)
    grammars = Grammars(at_once=False)
    engine.setup = dataclasses.replace(engine.setup, grammars=grammars)
    grammar = Grammar("regex", "[12]{3}")
    engine.handle(submit("bound", [1, 2], max_tokens=9, ignore_eos=True, grammar=grammar))
    engine.handle(submit("free", [1, 2], max_tokens=30, ignore_eos=True))
    news = [delta for _ in range(20) if (frame := engine.turn()) for delta in frame.each()]
    assert {delta.id for delta in news} == {"free"} and not engine.idle
    assert 0 < engine.wait_seconds() < 0.1 or engine.loop.wait_seconds() == 0, (
        "the loop may not sleep until a message comes"
    )
    grammars.finish(grammar)
    news = [delta for _ in range(30) if (frame := engine.turn()) for delta in frame.each()]
    bound = [delta for delta in news if delta.id == "bound"]
    assert sum(len(delta.tokens) for delta in bound) == 3 and bound[-1].finish == "stop" and engine.idle


def test_an_engine_with_nothing_but_a_grammar_to_wait_for_looks_again_soon() -> None:
    engine = make()
    engine.setup = dataclasses.replace(engine.setup, grammars=Grammars(at_once=False))
    assert engine.wait_seconds() == math.inf
    engine.handle(submit("a", [1], max_tokens=2, grammar=Grammar("regex", "x")))
    assert engine.turn() is None and 0 < engine.wait_seconds() < 0.1 and not engine.idle


def test_a_cancel_reaches_a_request_that_waits_for_its_grammar() -> None:
    engine = make()
    grammars = Grammars(at_once=False)
    engine.setup = dataclasses.replace(engine.setup, grammars=grammars)
    grammar = Grammar("regex", "x")
    engine.handle(submit("a", [1], max_tokens=2, grammar=grammar))
    engine.handle(Cancel("a"))
    assert engine.idle
    grammars.finish(grammar)
    assert engine.turn() is None and engine.loop.scheduler.leases.pool.used == 0


def test_a_grammar_that_is_refused_or_comes_too_late_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    grammars = Grammars(at_once=False)
    engine.setup = dataclasses.replace(engine.setup, grammars=grammars)
    bad, late = Grammar("regex", "bad"), Grammar("regex", "late")
    engine.handle(submit("bad", [1], max_tokens=2, n=2, grammar=bad))
    engine.handle(submit("late", [1], max_tokens=2, grammar=late))
    grammars.compiling[bad].set_exception(BadGrammar("This regex is too large."))
    frame = engine.turn()
    assert frame is not None
    assert [(delta.id, delta.choice, delta.finish, delta.error) for delta in frame.each()] == [
        ("bad", choice, "refused", "This regex is too large.") for choice in (0, 1)
    ]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: math.inf)
    frame = engine.turn()
    assert frame is not None
    (refused,) = frame.each()
    assert (refused.id, refused.finish) == ("late", "unavailable") and "within 10 s" in refused.error and engine.idle


def test_a_slow_mask_holds_up_its_own_request_only() -> None:
    """A state that is not ready is not planned; the others are, and it goes on when its mask is there."""
    engine = make(depth=1)
    state = OneTwo()
    engine.setup = dataclasses.replace(engine.setup, grammars=Grammars(lambda grammar: state))
    engine.handle(submit("slow", [1, 2], max_tokens=9, ignore_eos=True, grammar=Grammar("regex", "[12]{3}")))
    while not state.seen:
        engine.turn()
    state.ready = False
    engine.handle(submit("free", [1, 2], max_tokens=8, ignore_eos=True))
    news = [delta for _ in range(20) if (frame := engine.turn()) for delta in frame.each()]
    assert sum(len(delta.tokens) for delta in news if delta.id == "free") == 8
    assert len(state.seen) == 1 and engine.turn() is None and 0 < engine.wait_seconds() < 0.1
    state.ready = True
    news = [delta for _ in range(20) if (frame := engine.turn()) for delta in frame.each()]
    assert news[-1].finish == "stop" and len(state.seen) == 3 and engine.idle


def test_closing_the_engine_closes_its_grammars() -> None:
    engine = make()
    LocalEngine(engine).close()
    assert engine.setup.grammars is not None and engine.setup.grammars.closed  # type: ignore[attr-defined]


def test_an_end_token_that_the_grammar_forbids_is_no_end() -> None:
    """Nothing may be drawn (allowed_token_ids and grammar exclude each other): an error, never an answer cut short."""

    class Strict(OneTwo):
        def accept(self, tokens: Sequence[int]) -> None:
            super().accept(tokens)
            if not set(tokens) <= {1, 2}:
                raise BadGrammar("the output left its grammar")

    engine = make()
    engine.setup = dataclasses.replace(
        engine.setup, eos_ids=tuple(range(3, 19)), grammars=Grammars(lambda grammar: Strict())
    )
    grammar = Grammar("regex", "[12]{3}")
    runs = [submit(f"r{seed}", [1, 2], max_tokens=9, seed=seed, grammar=grammar) for seed in range(40)]
    ends = [delta for delta in LocalEngine(engine).run(runs) if delta.finish]
    assert all(delta.finish == "refused" and "left its grammar" in delta.error for delta in ends)
