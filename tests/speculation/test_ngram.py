"""Inference with reference: a guess is what followed the same tokens before, exact or behind one edit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.draft import EMPTY_DRAFT
from ridgeline.speculation.ngram import EDIT_BEHIND, PLACES, REACH, NGram, Text
from tests.speculation.simulated import Run, check, hashed, paths, plain, speculate

SOURCE = list(range(10, 26))
few = st.integers(0, 3)
texts = st.lists(few, max_size=40)
steps = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 12)), max_size=12)


def said(text: Sequence[int], path: tuple[int, ...]) -> bool:
    """Whether `path` stands in the text; it may run over its end, where the text repeats itself."""
    both = (*text, *path)
    return any(both[start : start + len(path)] == path for start in range(len(text)))


@given(prompt=texts, documents=st.lists(texts, max_size=3), order=st.integers(0, 3), steps=steps)
def test_a_guess_keeps_to_its_bounds_and_was_said_before(
    prompt: list[int], documents: list[list[int]], order: int, steps: list[tuple[int, int, int]]
) -> None:
    run = Run(NGram(documents).start(prompt), hashed(4, order), list(prompt))
    for nodes, depth, kept in steps:
        before = list(run.text)
        run.step(nodes, depth, kept)
        for path in paths(run.drafts[-1]):
            assert said(before, path) or any(said(document, path) for document in documents)


@given(prompt=texts, order=st.integers(0, 4), vocab=st.integers(1, 5))
def test_the_answer_is_the_plain_one(prompt: list[int], order: int, vocab: int) -> None:
    target = hashed(vocab, order)
    run = speculate(NGram(), target, prompt, 60)
    assert run.output[:60] == plain(target, prompt, 60)


def first_chain(tokens: list[int], depth: int = 4) -> list[int]:
    """The path of likeliest nodes."""
    draft = NGram().start(tokens).propose(32, depth)
    check(draft, 32, depth)
    longest: tuple[int, ...] = ()
    for path in paths(draft):
        if path[:-1] == longest:
            longest = path
    return list(longest)


def test_the_longest_match_comes_before_the_most_recent() -> None:
    long, recent = [1, 2, 3, 4, 5, 6, 7, 90, 91, 92], [60, 6, 7, 80, 81, 82]
    assert first_chain([*long, *recent, 50, 1, 2, 3, 4, 5, 6, 7], 3) == [90, 91, 92]
    assert first_chain([5, 6, 7, 70, 71, 60, 5, 6, 7, 80, 81, 50, 5, 6, 7], 1) == [80]


def test_of_two_long_matches_the_longer_one_is_followed() -> None:
    long, recent = SOURCE[:8], [*SOURCE[1:8], 80, 81]
    assert first_chain([*long, 90, 91, 60, *recent, 61, *long], 2) == [90, 91]


def test_each_further_place_is_less_likely() -> None:
    """One of them can be right at most, so what is left for the next place shrinks."""
    tokens = [token for follower in range(70, 76) for token in (5, 6, 7, follower)]
    assert NGram().start([*tokens, 5, 6, 7]).propose(8, 1).tokens == (75, 74, 73)


def test_several_places_make_a_tree() -> None:
    tokens = [5, 6, 7, 70, 60, 5, 6, 7, 80, 61, 5, 6, 7]
    draft = NGram().start(tokens).propose(8, 1)
    assert draft.tokens == (80, 70) and draft.parents == (-1, -1)
    assert NGram().start(tokens).propose(1, 1).tokens == (80,), "the likeliest first"


@pytest.mark.parametrize("behind", range(EDIT_BEHIND))
@pytest.mark.parametrize(
    ("edit", "goes_on"), [([99], 9), ([99], 8), ([SOURCE[9]], 10)], ids=["replaced", "put in", "left out"]
)
def test_a_copy_goes_on_behind_one_edit(edit: list[int], goes_on: int, behind: int) -> None:
    """Eight tokens are copied, then the ninth is replaced, gets one before it, or is left out; then `behind` more are copied."""
    end = goes_on + behind
    drafts = paths(NGram().start([*SOURCE, 0, *SOURCE[:8], *edit, *SOURCE[goes_on:end]]).propose(32, 2))
    assert (SOURCE[end],) in drafts
    if behind or edit != [99]:
        assert tuple(SOURCE[end : end + 2]) in drafts, "a match with tokens behind its edit is trusted further"


def test_an_edit_needs_a_copy_before_it() -> None:
    assert NGram().start([*SOURCE, 0, *SOURCE[6:8], 99]).propose(32, 4) == EMPTY_DRAFT
    assert NGram().start([*SOURCE, 0, *SOURCE[5:8], 99]).propose(32, 4) != EMPTY_DRAFT


def test_two_edits_are_one_too_many() -> None:
    assert NGram().start([*SOURCE, 0, *SOURCE[:8], 98, 99]).propose(32, 4) == EMPTY_DRAFT


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    draft = NGram().start([1, 2, 3] * 4).propose(10, 10)
    assert draft.tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_documents_are_quoted_up_to_their_end() -> None:
    drafter = NGram([SOURCE[:10], SOURCE[10:]])
    assert drafter.start([0, 1, *SOURCE[2:8]]).propose(8, 8).tokens == tuple(SOURCE[8:10])
    assert drafter.start([0, *SOURCE[4:10]]).propose(8, 8) == EMPTY_DRAFT
    assert drafter.start([0, *SOURCE[4:10], 99]).propose(8, 8) == EMPTY_DRAFT


def test_requests_share_documents_and_not_what_they_say() -> None:
    drafter = NGram([SOURCE])
    request = drafter.start(SOURCE[:8])
    request.observe([77, 78, 79], EMPTY_DRAFT, [77])
    assert request.propose(1, 1).tokens == ()
    assert drafter.start([0, 77, 78]).propose(8, 8) == EMPTY_DRAFT
    assert drafter.start([0, *SOURCE[:8]]).propose(1, 1).tokens == (SOURCE[8],)


def test_matches_that_fail_are_no_longer_followed() -> None:
    """Each time the same two tokens come, something else follows."""
    guess = NGram().start([1, 2, 3])
    drafted = []
    for turn in range(60):
        guess.observe([1, 2], EMPTY_DRAFT, [1])
        draft = guess.propose(8, 1)
        drafted.append(len(draft.tokens))
        guess.observe([100 + turn], draft, [100 + turn] * (1 + len(draft.tokens)))
    assert drafted[0] == 1 and drafted[-1] == 0


def test_a_copy_takes_few_steps() -> None:
    passage = [token * 37 % 1009 for token in range(400)]
    run = speculate(NGram(), lambda text: passage[(len(text) - 404) % 400], [*passage, *range(2000, 2004)], 390)
    assert len(run.drafts) < 390 / 10
    assert run.output[:390] == passage[:390]


def test_only_the_end_of_a_long_prompt_is_searched() -> None:
    near, far = list(range(1000, 1000 + REACH // 2)), list(range(1000, 1000 + REACH))
    assert NGram().start([*SOURCE, *near, *SOURCE[:8]]).propose(1, 1).tokens == (SOURCE[8],)
    assert NGram().start([*SOURCE, *far, *SOURCE[:8]]).propose(1, 1) == EMPTY_DRAFT


@pytest.mark.parametrize("prompt", [[7] * 3000, [7, 8] * 1500, [7, 8, 9, 7, 8, 6] * 500])
def test_the_work_of_a_guess_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> None:
    compared = []
    shared = Text.shared

    def counted(self: Text, place: int, tokens: list[int], end: int) -> int:
        compared.append(place)
        return shared(self, place, tokens, end)

    monkeypatch.setattr(Text, "shared", counted)
    guess = NGram().start([*prompt, 5, 7, 8])
    guess.propose(16, 8)
    assert 0 < len(compared) <= (PLACES + 1) * (1 + EDIT_BEHIND)
    assert len(prompt) > 10 * len(compared)


@given(st.lists(st.lists(few, max_size=6), max_size=8))
def test_an_index_grown_in_pieces_is_that_of_the_whole(pieces: list[list[int]]) -> None:
    grown, whole = Text(), Text([token for piece in pieces for token in piece])
    for piece in pieces:
        grown.extend(piece)
    for first in range(4):
        for second in range(4):
            places = list(whole.places((first, second)))
            assert places == list(grown.places((first, second)))
            assert places == [
                place for place in range(len(whole.tokens), 1, -1) if whole.tokens[place - 2 : place] == [first, second]
            ]
