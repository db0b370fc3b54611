"""Drafts: tokens proposed after the last known token of a request.

A draft is a tree. Each node takes one query token of the next step. The target model draws one token after each node, and the
path that agrees with the draws is kept (ops.verify). A chain is a tree in which each node is the child of the node before it.
Drafts change the speed of a request and never its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAFT = 63
"""Maximum nodes of a draft. With the last known token they are 64 query tokens: a 64-bit mask holds the ancestors of each."""
DEVICE = -1
"""Token id of a node that the device drafted itself. The host does not know its token."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of nodes. Parents come before their children, so any prefix of the nodes is a draft too.

    tokens: an id per node, or DEVICE. parents: the index of each node's parent, -1 for the last known token; empty for a
    chain. Siblings have different tokens.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        """Make a draft. A tree without branches becomes a chain, which takes fewer operations to verify."""
        branches = any(parent != node - 1 for node, parent in enumerate(parents))
        return cls(tuple(tokens), tuple(parents) if branches else ())

    def first(self, nodes: int) -> Draft:
        """The draft of the first `nodes` nodes."""
        return self if len(self.tokens) <= nodes else Draft.of(self.tokens[:nodes], self.parents[:nodes])

    def chain(self) -> Draft:
        """The path from the root that follows the first child of each node."""
        if not self.parents:
            return self
        kept: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (kept[-1] if kept else -1):
                kept.append(node)
        return Draft(tuple(self.tokens[node] for node in kept))


EMPTY_DRAFT = Draft()
