"""Rules that change logits of single tokens by the tokens before: words that must not appear.

A rule follows one output. It is told each token, and takes tokens of drafts back. It is computed on the host, so a request with a
rule is planned only when its last token is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

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
