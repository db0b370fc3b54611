"""Lookahead decoding: the target's own words behind its guesses become the next guesses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import ConfigError
from ridgeline.speculation import lookahead
from ridgeline.speculation.first_of import FirstOf
from ridgeline.speculation.lookahead import SHAPE, DraftShape, Ladder, Lookahead, Pool, read_shape
from ridgeline.speculation.ngram import NGram
from tests.speculation.simulated import Run, Target, hashed, paths, plain, speculate, verify

prompts = st.lists(st.integers(0, 5), min_size=1, max_size=20)
shapes = st.tuples(st.integers(1, 5), st.integers(2, 5), st.integers(1, 4))
steps = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 8), st.integers(0, 24)), max_size=12)


@given(prompt=prompts, shape=shapes, order=st.integers(0, 3), steps=steps)
def test_a_guess_keeps_to_its_bounds(
    prompt: list[int], shape: tuple[int, int, int], order: int, steps: list[tuple[int, int, int]]
) -> None:
    columns, ngram, candidates = shape
    run = Run(Lookahead(DraftShape(*shape)).start(prompt), hashed(6, order), list(prompt))
    for nodes, depth, kept in steps:
        run.step(nodes, depth, kept)
        assert len(run.drafts[-1].tokens) <= (columns + candidates) * (ngram - 1)


@given(prompt=prompts, shape=shapes, order=st.integers(0, 3), vocab=st.integers(1, 5))
def test_the_answer_is_the_plain_one(prompt: list[int], shape: tuple[int, int, int], order: int, vocab: int) -> None:
    target = hashed(vocab, order)
    run = speculate(Lookahead(DraftShape(*shape)), target, prompt, 60)
    assert run.output[:60] == plain(target, prompt, 60)


def never_twice(text: Sequence[int]) -> int:
    """Depends on the position alone, and no word comes twice."""
    return 1000 + len(text)


def periodic(text: Sequence[int]) -> int:
    return 100 + len(text) % 7


def markov(text: Sequence[int]) -> int:
    """One of two words, by the last word and a coin of the position: a draw with noise."""
    coin = hashed(2, 1)([len(text)])
    return hashed(12, 2)([text[-1], coin])


@pytest.mark.parametrize("target", [periodic, markov])
def test_the_pool_learns(target: Target) -> None:
    """The second hundred tokens take fewer steps than the first, and both fewer than a hundred."""
    run = speculate(Lookahead(DraftShape(5, 4, 3)), target, [1, 2, 3], 100)
    first = len(run.drafts)
    while len(run.output) < 200:
        run.step(32, 12)
    assert len(run.drafts) - first < first < 90
    assert run.output[:200] == plain(target, [1, 2, 3], 200)


def test_only_the_window_can_guess_what_was_never_said() -> None:
    """Under a target that goes by position the window holds the words to come; a pool of what was said holds none."""
    said = Pool(3, 4)
    said.read(plain(never_twice, [1, 2, 3], 100))
    assert said.behind(never_twice(range(103))) == []
    assert speculate(Lookahead(DraftShape(4, 3, 3)), never_twice, [1, 2, 3], 100).accepted > 50


def test_the_pool_takes_what_the_target_says_behind_a_guess() -> None:
    """A column holds 1, then what the target says behind 1, and behind that: an n-gram, though nobody has said it."""
    window = Lookahead(DraftShape(2, 3, 4)).start([1, 2, 3])
    run = Run(window, lambda text: text[-1] + 10, [1, 2, 3])
    for _ in range(2):
        run.step(64, 16)
    assert window.pool.behind(1) == [(11, 21), (2, 3)]


def test_the_first_step_is_a_chain_and_each_step_adds_a_level() -> None:
    """What the target says behind a column's last guess becomes its next level, until it has ngram - 1 of them."""
    run = Run(Lookahead(DraftShape(3, 4, 1)).start([1, 2, 3]), never_twice, [1, 2, 3])
    run.step(64, 16)
    assert [len(path) for path in paths(run.drafts[0])] == [1, 2, 3]
    run.step(64, 16)
    assert sorted(len(path) for path in paths(run.drafts[1])) == [1, 2, 2, 3, 3, 4]
    assert (1, 1004) in paths(run.drafts[1]), "the word of position 4, as the first guess stood at position 3"


def test_a_window_that_was_not_verified_stays() -> None:
    guess = Lookahead(DraftShape(2, 3, 1)).start([1, 2, 3, 4])
    first = guess.propose(64, 16)
    guess.observe([50], EMPTY_DRAFT, [50])
    assert guess.propose(64, 16) == first
    guess.observe([51], EMPTY_DRAFT, [51])
    assert guess.propose(64, 16) == first


def test_candidates_are_the_most_recent_ngrams() -> None:
    pool = Pool(3, 2)
    pool.read([1, 2, 3, 1, 4, 5, 1, 2, 3, 1, 6, 7])
    assert pool.behind(1) == [(6, 7), (2, 3)]
    assert pool.behind(9) == []


def test_a_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOL_KEYS", 16)
    pool = Pool(3, 2)
    for turn in range(20):
        pool.read([hashed(1000, 1)([turn, place]) for place in range(100)])
        pool.read([token * turn % 50 for token in range(100)])
    assert len(pool) <= 16 * 2


@pytest.mark.parametrize("shape", [(-1, 3, 3), (3, 1, 3), (3, 3, 0)])
def test_sizes_that_make_no_draft_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="n-grams of at least 2"):
        Lookahead(DraftShape(*shape))


def test_without_columns_there_is_the_pool() -> None:
    assert Lookahead(DraftShape(0, 3, 3)).start([1, 2, 3]).propose(8, 8) == EMPTY_DRAFT
    assert Lookahead(DraftShape(0, 3, 3)).start([1, 2, 3, 1]).propose(8, 8) == Draft((2, 3))


@pytest.mark.parametrize("nodes", range(2, 25, 2))
def test_few_nodes_hold_whole_columns(nodes: int) -> None:
    """A part of a column would be verified in vain: it adds no n-gram."""
    window = Lookahead(DraftShape(6, 3, 6)).start([1, 2, 3] * 4)
    run = Run(window, never_twice, [1, 2, 3] * 4)
    for _ in range(12):
        assert window.propose(nodes + 1, 24) == window.propose(nodes, 24)
        run.step(nodes, 24)


def test_sizes_within_fewer_nodes_keep_their_proportion() -> None:
    assert DraftShape(7, 5, 7).within(56) == (7, 5, 7)
    assert DraftShape(7, 5, 7).within(28) == (3, 5, 4)
    assert DraftShape(7, 5, 7).within(3) == (0, 5, 1)
    assert DraftShape(12, 3, 4).within(16) == (6, 3, 2)


def test_the_option_gives_sizes() -> None:
    assert read_shape("") == SHAPE
    assert read_shape("w=7,n=5,g=6") == (7, 5, 6)
    assert read_shape("N=2, g=30") == (SHAPE.columns, 2, 30)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("w=7,n=five", "'n=five' is not one of w=, n= and g= with a whole number"),
        ("7,5,7", "'7' is not one of"),
        ("w=3,w=4", "'w=4' is not one of w=, n= and g= with a whole number, each at most once"),
        ("w=15,n=5,g=15", r"verifies \(w \+ g\)\(n - 1\) = 120 tokens .* at most 63: with n=5, w \+ g may be up to 15"),
        ("n=80", "use a smaller n"),
        ("n=1", "n-grams of at least 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_shape(text)


def chosen(ladder: Ladder, cost: float, gain: Callable[[int], float], choices: int = 400) -> int:
    """The number of nodes chosen most often in the last half of the choices, if n nodes gain `gain(n)` tokens on average."""
    counts = Counter[int]()
    for turn in range(choices):
        place = ladder.choose(cost)
        for draft in range(32):
            share = gain(ladder.nodes[place])
            ladder.observe(place, int(share) + (hashed(1000, 3)([turn, draft]) < 1000 * (share % 1)))
        counts[ladder.nodes[place]] += turn >= choices // 2
    return counts.most_common(1)[0][0]


@pytest.mark.parametrize("cost", [0.002, 0.02, 0.08, 0.4])
@pytest.mark.parametrize("growth", [0.1, 0.5, 1.0])
def test_the_size_with_the_highest_rate_is_used(cost: float, growth: float) -> None:
    """By measured gains that grow with the logarithm of the nodes, as in the paper; more load makes a node dearer."""
    ladder = Ladder(56, 8)

    def gain(nodes: int) -> float:
        return 0.5 + growth * math.log2(nodes / 7)

    def rate(nodes: int) -> float:
        return (1 + gain(nodes)) / (1 + cost * nodes)

    assert ladder.nodes == [14, 28, 56] or ladder.nodes == [7, 14, 28, 56]
    assert rate(chosen(ladder, cost, gain)) > 0.97 * max(map(rate, ladder.nodes))


def test_under_load_drafts_shrink_and_grow_again() -> None:
    ladder = Ladder(56, 8)
    quiet, busy, again = (chosen(ladder, cost, lambda nodes: math.log2(nodes) / 3) for cost in (0.001, 0.3, 0.001))
    assert quiet == again == 56 and busy == ladder.nodes[0]


def test_a_small_budget_still_moves_the_window() -> None:
    """Only the columns that fit are verified, and those go on."""
    run = Run(Lookahead(DraftShape(6, 3, 2)).start([1, 2, 3]), never_twice, [1, 2, 3])
    for _ in range(60):
        run.step(6, 3)
    assert run.accepted > 20


@given(prompt=prompts, order=st.integers(0, 3), steps=steps)
def test_together_the_first_with_a_guess_is_asked(
    prompt: list[int], order: int, steps: list[tuple[int, int, int]]
) -> None:
    target, text = hashed(5, order), list(prompt)
    reference, both = NGram().start(prompt), FirstOf([NGram(), Lookahead()]).start(prompt)
    for nodes, depth, _ in steps:
        first, draft = reference.propose(nodes, depth), both.propose(nodes, depth)
        assert draft == first if first.tokens else draft.tokens or nodes < 2, "Lookahead always has a guess"
        gained, drawn = verify(target, text, draft)
        text += gained
        reference.observe(gained, draft, drawn)
        both.observe(gained, draft, drawn)
    assert text == prompt + plain(target, prompt, len(text) - len(prompt))
