"""Drafts: tokens proposed behind the last known token of a request.

A draft is a tree. Each node takes one query token of the next step. The target draws one token behind each node, and the path
that agrees with the draws is kept (ops.verify). A chain is a tree whose every node hangs on the one before. Drafts change
the speed of a request and never its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
