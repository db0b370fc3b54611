"""Rules of single tokens: what they ban, with drafts, in batches and beside grammars."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ridgeline.core.draft import Draft
from ridgeline.core.dry import LONGEST_MATCH, Dry
from ridgeline.core.errors import RequestError
from ridgeline.core.plan import StepPlan
from ridgeline.engine.constraints import GrammarAndRules, Rules, start_constraint
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.rank_link import decode_step, encode_step
from ridgeline.engine.token_rules import BAN, BadWords, DryPenalty
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.speculator import Speculator
from ridgeline.wire.messages import Submit
from tests.engine.constrained import OneTwo, make, submit
from tests.engine.runners import PROMPT, DeviceBench, alone

WORDS = ((3,), (1, 2), (1, 1, 2), (2, 1, 0))


def banned(words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """The rule as it is defined."""
    return {
        last
        for *before, last in words
        if list(output[len(output) - len(before) :]) == before and len(before) <= len(output)
    }


def test_the_last_token_of_a_word_is_banned_after_the_others() -> None:
    draw = random.Random(0)
    for _ in range(50):
        rule, output = BadWords(WORDS), [draw.randrange(4) for _ in range(12)]
        for end, token in enumerate(output):
            assert dict(rule.biases()) == dict.fromkeys(banned(WORDS, output[:end]), BAN)
            rule.push(token)


@pytest.mark.parametrize("parents", [(), (-1, 0, 0, -1, 3)])
def test_each_node_of_a_draft_has_the_biases_of_its_path(parents: tuple[int, ...]) -> None:
    rules, plan = Rules([BadWords(WORDS)]), StepPlan(1)
    rules.accept([2, 1])
    tokens = [1, 2, 0, 2, 1]
    above = parents or (-1, 0, 1, 2, 3)
    for _ in range(2):  # the second time shows that the first left nothing behind
        assert rules.restrict(plan, 4, Draft(tuple(tokens), parents)).tokens == tuple(tokens)
        for node in range(-1, 5):
            path, at = [], node
            while at >= 0:
                path.insert(0, tokens[at])
                at = above[at]
            got = {token for place, token, bias in plan.biases[4] if place == node + 1 and bias == BAN}
            assert got == banned(WORDS, [2, 1, *path])


def test_biases_reach_the_ranks() -> None:
    plan = StepPlan(3, biases={2: [(0, 5, -1.5), (1, 7, BAN)]}, rows=array("i", [2]))
    assert decode_step(encode_step("e", 1, 0, plan), "e", 1)[0].biases == plan.biases


class Remembers:
    """A host drafter that knows the answer. Every third draft has a wrong token in the middle."""

    needs_repeat = False

    def __init__(self, known: Sequence[int]) -> None:
        self._known, self._at, self._drafts = known, len(PROMPT), 0

    def start(self, tokens: Sequence[int]) -> Remembers:
        self._at = len(tokens)
        return self

    def nodes(self, chain: int, cost: float) -> int:
        return chain

    def propose(self, nodes: int, depth: int) -> Draft:
        draft = list(self._known[self._at : self._at + nodes])
        self._drafts += 1
        if self._drafts % 3 == 0 and len(draft) > 1:
            draft[1] += 1
        return Draft(tuple(draft), ())

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        self._at += len(tokens)


def bad_words(words: tuple[tuple[int, ...], ...]) -> Rules:
    made = start_constraint(Submit("a", [1], submit("a", [1], bad_word_ids=words).sampling, 0.0), None)
    assert made is not None
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_banned_word_is_not_drawn_with_drafts_or_without(temperature: float) -> None:
    """A batch, steps in flight and drafts of the host give the tokens of the request alone."""
    options = {"temperature": temperature, "seed": 3, "max_tokens": 40}
    free = alone(**options)
    words = ((free[5], free[6]), (free[0],), (free[9], free[10], free[11]))
    lone = DeviceBench()
    lone.submit("bound", constraint=bad_words(words), **options)
    lone.run()
    tokens = lone.tokens["bound", 0]
    assert not any(tuple(tokens[at:][: len(word)]) == word for word in words for at in range(40))
    batch = DeviceBench(depth=1)
    batch.submit("bound", constraint=bad_words(words), **options)
    batch.submit("free", **options)
    batch.run()
    assert (batch.tokens["bound", 0], batch.tokens["free", 0]) == (tokens, free)
    host = Remembers([*PROMPT, *tokens])
    drafting = DeviceBench(speculation=Speculator(host, None, Controller((0, 3), fixed=True)))
    drafting.submit("bound", constraint=bad_words(words), **options)
    drafting.run()
    assert drafting.tokens["bound", 0] == tokens and drafting.scheduler.counts.accepted > 10


def test_a_grammar_holds_beside_a_rule() -> None:
    state, plan = OneTwo(), StepPlan(1)
    both = GrammarAndRules(state, [BadWords(((1, 2),))])
    both.restrict(plan, 1, Draft())
    assert plan.masks[1] == state.mask() and not plan.biases
    both.accept([1])
    both.restrict(plan, 1, Draft())
    assert plan.masks[1] and plan.biases[1] == [(0, 2, BAN)] and not both.finished
    plan.unrestrict(1)
    assert not plan.masks and not plan.biases
    both.accept([1, 1])
    assert both.finished


def test_choices_have_rules_of_their_own() -> None:
    engine = make(depth=1)
    request = submit("a", [1, 2], max_tokens=12, n=3, seed=1, ignore_eos=True, bad_word_ids=((7,), (8, 9)))
    deltas = list(LocalEngine(engine).run([request]))
    assert {delta.finish for delta in deltas if delta.finish} == {"length"} and engine.idle
    constraints = [choice.constraint for choice in engine._requests(request, None)]
    assert len(set(map(id, constraints))) == 3


def penalties(dry: Dry, tokens: list[int]) -> dict[int, float]:
    """The algorithm as its author wrote it down: a search per step."""
    tokens = tokens if dry.window < 0 else tokens[len(tokens) - min(dry.window, len(tokens)) :]
    lengths: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length = 0
        while (
            length < min(LONGEST_MATCH, place + 1)
            and tokens[place - length] == tokens[-1 - length]
            and tokens[place - length] not in dry.breakers
        ):
            length += 1
        follower = tokens[place + 1]
        if length and follower not in dry.breakers:
            lengths[follower] = max(length, lengths.get(follower, 0))
    return {
        token: max(BAN, -dry.multiplier * dry.base ** (length - dry.allowed_length))
        for token, length in lengths.items()
        if length >= dry.allowed_length
    }


@pytest.mark.parametrize("dry", [Dry(0.8), Dry(2.0, 1.1, 1, 20), Dry(1.0, 3.0, 3, breakers=(2,)), Dry(100, 100, 1)])
@pytest.mark.parametrize("prompt", [[0, 1, 2, 0, 1], [3] * 70, [1], [2, 2, 1, 2]])
def test_the_penalty_of_repeated_sequences(dry: Dry, prompt: list[int]) -> None:
    draw, tokens = random.Random(len(prompt)), list(prompt)
    rule = DryPenalty(dry, prompt)
    for _ in range(90):
        assert dict(rule.biases()) == pytest.approx(penalties(dry, tokens))
        drafted = [draw.randrange(3) for _ in range(draw.randrange(3))]
        for token in drafted:
            rule.push(token)
        assert dict(rule.biases()) == pytest.approx(penalties(dry, tokens + drafted))
        for _ in drafted:
            rule.pop()
        tokens.append(draw.randrange(3))
        rule.push(tokens[-1])


def test_a_loop_ends_with_the_penalty() -> None:
    free = alone(PROMPT * 3, max_tokens=60)
    request = submit("a", PROMPT * 3, dry=Dry(4.0, 2.0, 1))
    bench = DeviceBench(depth=1)
    bench.submit("bound", PROMPT * 3, constraint=start_constraint(request, None), max_tokens=60)
    bench.run()
    tokens = PROMPT * 3 + bench.tokens["bound", 0]
    pairs = [tuple(tokens[at : at + 4]) for at in range(30, len(tokens) - 4)]
    assert len(set(pairs)) == len(pairs) and bench.tokens["bound", 0] != free


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((-1,), "multiplier"),
        ((True,), "multiplier"),
        ((1, 0.5), "base"),
        ((1, 2, 0), "allowed_length"),
        ((1, 2, 1.5), "allowed_length"),
        ((1, 2, LONGEST_MATCH + 1), "allowed_length"),
        ((1, 2, 2, -2), "penalty_last_n"),
        ((1, 2, 2, -1, ("a",)), "sequence_breakers"),
    ],
)
def test_wrong_parameters_are_named(values: tuple[Any, ...], field: str) -> None:
    """Also a length that no match reaches, with which nothing would be penalized, and what the engine's process could not read."""
    with pytest.raises(RequestError, match=f"dry_{field} is .*: give (a number|an integer|token ids)"):
        Dry(*values)
