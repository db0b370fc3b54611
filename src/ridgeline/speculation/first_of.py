"""Combines host drafters: the first non-empty draft is used, and all drafters observe the text."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.draft import EMPTY_DRAFT, MAX_DRAFT, Draft
from ridgeline.speculation.host import HostDrafter, Proposer


class FirstOf:
    """drafters: in order of preference. A drafter that proposes only with confidence (speculation.ngram) precedes one that
    always proposes (speculation.lookahead)."""

    def __init__(self, drafters: Sequence[HostDrafter]) -> None:
        self._drafters = tuple(drafters)
        self.needs_repeat = all(drafter.needs_repeat for drafter in drafters)

    def start(self, tokens: Sequence[int]) -> FirstProposer:
        return FirstProposer([drafter.start(tokens) for drafter in self._drafters])


class FirstProposer:
    """One request. Implements `Proposer`."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)
        self._nodes = [MAX_DRAFT] * len(proposers)
        """What each drafter found worth its nodes when it was last asked."""

    def nodes(self, chain: int, cost: float) -> int:
        self._nodes = [proposer.nodes(chain, cost) for proposer in self._proposers]
        return max(self._nodes)

    def propose(self, nodes: int, depth: int) -> Draft:
        for most, proposer in zip(self._nodes, self._proposers, strict=True):
            draft = proposer.propose(min(nodes, most), min(depth, most))
            if draft.tokens:
                return draft
        return EMPTY_DRAFT

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """Each drafter recognises its own draft. From a draft of another one it learns only the text."""
        for proposer in self._proposers:
            proposer.observe(tokens, draft, drawn)
