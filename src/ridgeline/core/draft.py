"""What a draft is, and what makes one on the host. Every draft is verified (ops.verify), so a drafter decides how fast a
request is and never what it says.

A draft is a tree of tokens behind the last known one. Each node takes a query token of the next step; the target draws once
behind each, and the path that agrees with its draws is kept. A chain is the tree whose every node hangs on the one before.

Two kinds of drafters. A *host* drafter reads what was said (`Guess`, one per request) and needs the last step's tokens first.
A *device* drafter (decoding.drafters) computes its tokens at the end of a step, so that the host never waits for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 63
"""Nodes of a draft: with the last known token they are the 64 query tokens whose ancestors a mask of 64 bits can name."""
DEVICE = -1
"""The token of a node that the device has drafted itself and the host does not know."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Nodes in an order in which parents come before children, so that any prefix of them is a draft too.

    tokens: an id per node, or DEVICE. parents: the index of each node's parent, -1 for the last known token; empty for a
    chain. Siblings have different tokens.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        """A tree without branches is stated as a chain, which takes fewer operations to verify."""
        branches = any(parent != node - 1 for node, parent in enumerate(parents))
        return cls(tuple(tokens), tuple(parents) if branches else ())

    def first(self, nodes: int) -> Draft:
        """Its first `nodes` nodes."""
        return self if len(self.tokens) <= nodes else Draft.of(self.tokens[:nodes], self.parents[:nodes])

    def chain(self) -> Draft:
        """The path from the root that takes the first child everywhere."""
        if not self.parents:
            return self
        kept: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (kept[-1] if kept else -1):
                kept.append(node)
        return Draft(tuple(self.tokens[node] for node in kept))


NOTHING = Draft()


class Guess(Protocol):
    """One request's state of a host drafter."""

    def propose(self, nodes: int, depth: int) -> Draft:
        """A draft of at most `nodes` nodes and at most `depth` levels behind the last token it has heard of. The likeliest
        nodes come first."""

    def hear(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """The request gained `tokens`, at least one. draft: what was verified in that step. drawn: what the target would say
        behind the last known token and behind each node, 1 + len(draft.tokens) ids."""


GRAM, GLANCE = 3, 4096


def repeats(tokens: array[int]) -> bool:
    """Whether the last GRAM tokens, four bytes each, stand somewhere before among the last GLANCE: a search of a microsecond or
    two, which may mistake neighbours' bytes for tokens."""
    text = tokens[-GLANCE:].tobytes()
    return 0 <= text.find(text[-4 * GRAM :]) < len(text) - 4 * GRAM


class HostDrafter(Protocol):
    """quotes: it has nothing to say where a request's last tokens are new (`repeats`), so asking then is in vain."""

    quotes: bool

    def start(self, tokens: Sequence[int]) -> Guess:
        """For a request that knows these tokens, its prompt."""
