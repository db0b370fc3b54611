"""Several host drafters for one request: the first that has a guess is asked, all of them follow the text."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.draft import NOTHING, Draft, Guess, HostDrafter


class FirstOf:
    """The drafter. drafters: best first; one that proposes only where it is sure (decoding.reference) belongs before one
    that always proposes (decoding.lookahead)."""

    def __init__(self, drafters: Sequence[HostDrafter]) -> None:
        self._drafters = tuple(drafters)
        self.quotes = all(one.quotes for one in drafters)

    def start(self, tokens: Sequence[int]) -> FirstGuess:
        return FirstGuess([drafter.start(tokens) for drafter in self._drafters])


class FirstGuess:
    """One request. Implements `Guess`."""

    def __init__(self, guesses: Sequence[Guess]) -> None:
        self._guesses = tuple(guesses)

    def propose(self, nodes: int, depth: int) -> Draft:
        for guess in self._guesses:
            draft = guess.propose(nodes, depth)
            if draft.tokens:
                return draft
        return NOTHING

    def hear(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """A drafter knows its own draft when it hears it, and learns nothing but the text from another's."""
        for guess in self._guesses:
            guess.hear(tokens, draft, drawn)
