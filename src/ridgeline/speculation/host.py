"""Host drafters: they read the tokens of a request on the host and need the last committed token before they propose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.draft import Draft


class Proposer(Protocol):
    """The state of a host drafter for one request."""

    def nodes(self, chain: int, cost: float) -> int:
        """Most nodes of a draft that pay. chain: nodes of a chain that pay by what the request kept so far; cost: time of a node,
        in undrafted steps (0: nodes are free)."""

    def propose(self, nodes: int, depth: int) -> Draft:
        """A draft of at most `nodes` nodes and at most `depth` levels behind the last observed token, likeliest nodes first."""

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """The request gained `tokens` (at least one).

        Args:
            draft: the draft that the step verified.
            drawn: the target's draws behind the last known token and behind each node, 1 + len(draft.tokens) ids.
        """


class HostDrafter(Protocol):
    needs_repeat: bool
    """It proposes nothing unless the last tokens of the request occurred before (`repeats`), so a call without that is wasted."""

    def start(self, tokens: Sequence[int]) -> Proposer:
        """A proposer for a request that knows `tokens`."""


MATCH_TOKENS, SEARCHED_TOKENS = 3, 4096


def repeats(tokens: array[int]) -> bool:
    """Whether the last MATCH_TOKENS tokens occur earlier among the last SEARCHED_TOKENS.

    A search in bytes (four per token) of one to two microseconds. It may match across token borders.
    """
    text = tokens[-SEARCHED_TOKENS:].tobytes()
    return 0 <= text.find(text[-4 * MATCH_TOKENS :]) < len(text) - 4 * MATCH_TOKENS
