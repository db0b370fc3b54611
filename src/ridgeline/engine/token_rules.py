"""Rules that change logits of single tokens by the tokens before: words that must not appear, and sequences that repeat.

A rule follows one output. It is told each token, and takes tokens of drafts back. It is computed on the host, so a request with a
rule is planned only when its last token is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ridgeline.core.dry import LONGEST_MATCH, Dry

BAN = -1e9
"""Bias of a token that must not be drawn. Finite, so that it can be drawn if a grammar allows no other token."""


class TokenRule(Protocol):
    """The state of one output under a rule."""

    def push(self, token: int) -> None:
        """The output gained a token."""

    def pop(self) -> None:
        """Take the last token back."""

    def biases(self) -> Iterable[tuple[int, float]]:
        """(token, bias) of the next token, each token at most once."""


class BadWords:
    """Bans the last token of each word when the output ends with the tokens before it. Tokens of the prompt do not count.

    Source: vLLM, vllm/v1/sample/ops/bad_words.py (the same rule, with -inf).
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._output: list[int] = []
        self._always = {word[0] for word in words if len(word) == 1}
        self._after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """By the last token before its last one: these tokens, and its last one."""
        for *before, last in words:
            if before:
                self._after[before[-1]].append((before, last))

    def push(self, token: int) -> None:
        self._output.append(token)

    def pop(self) -> None:
        self._output.pop()

    def biases(self) -> Iterable[tuple[int, float]]:
        banned = self._always
        if self._output and (words := self._after.get(self._output[-1])):
            banned = banned | {last for before, last in words if self._output[-len(before) :] == before}
        return [(token, BAN) for token in sorted(banned)]


class DryPenalty:
    """The DRY penalty (core.dry.Dry).

    A match is an earlier place whose last tokens equal the last tokens of the text. A new token keeps the matches after which it
    came before, one token longer, and begins one at every other place where it occurs. So a token costs one comparison with the
    tokens so far and work for its occurrences, not a search per match.
    """

    def __init__(self, dry: Dry, prompt: Sequence[int]) -> None:
        self._dry, self._breakers = dry, frozenset(dry.breakers)
        self._count = len(prompt)
        self._tokens = np.zeros(2 * len(prompt) + 64, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._lengths = np.zeros(len(self._tokens), dtype=np.int32)
        """Length of the match that ends at each place; 0 for none."""
        self._matches = self._first_matches()
        """The places where matches end."""
        self._before: list[tuple[np.ndarray, np.ndarray]] = []
        """For each token that was pushed, its predecessor's matches and their lengths."""

    def push(self, token: int) -> None:
        if self._count == len(self._tokens):
            self._tokens, self._lengths = (
                np.append(part, np.zeros_like(part)) for part in (self._tokens, self._lengths)
            )
        places = np.zeros(0, dtype=np.int64)
        if token not in self._breakers:
            places = np.flatnonzero(self._tokens[: self._count] == token)
        lengths = np.where(places > 0, self._lengths[places - 1], 0) + 1
        self._before.append((self._matches, self._lengths[self._matches]))
        self._replace(places, np.minimum(lengths, LONGEST_MATCH))
        self._tokens[self._count] = token
        self._count += 1

    def pop(self) -> None:
        self._replace(*self._before.pop())
        self._count -= 1

    def biases(self) -> Iterable[tuple[int, float]]:
        dry, places = self._dry, self._matches
        begin = 0 if dry.window < 0 else max(0, self._count - dry.window)
        lengths = np.minimum(self._lengths[places], places - begin + 1)
        followers = self._tokens[places[long := lengths >= dry.allowed_length] + 1]
        longest: dict[int, int] = dict(
            divmod(pair, LONGEST_MATCH + 1)
            for pair in np.unique(followers.astype(np.int64) * (LONGEST_MATCH + 1) + lengths[long]).tolist()
        )
        return [
            (token, max(BAN, -dry.multiplier * dry.base ** (length - dry.allowed_length)))
            for token, length in longest.items()
            if token not in self._breakers
        ]

    def _replace(self, places: np.ndarray, lengths: np.ndarray) -> None:
        self._lengths[self._matches] = 0
        self._lengths[places] = lengths
        self._matches = places

    def _first_matches(self) -> np.ndarray:
        """Find the matches of the prompt's end and their lengths: each token further back keeps a part of the places."""
        tokens, last = self._tokens, self._count - 1
        places = matches = np.zeros(0, dtype=np.int64)
        for length in range(LONGEST_MATCH):
            if length > last or int(tokens[last - length]) in self._breakers:
                break
            if length == 0:
                places = matches = np.flatnonzero(tokens[:last] == tokens[last])
            else:
                places = places[(places >= length) & (tokens[places - length] == tokens[last - length])]
            self._lengths[places] += 1
        return matches
