"""A target without a model: a function of the tokens so far. What a drafter is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.core.draft import Draft
from ridgeline.speculation.host import HostDrafter, Proposer

Target = Callable[[Sequence[int]], int]


def parents_of(draft: Draft) -> Sequence[int]:
    return draft.parents or range(-1, len(draft.tokens) - 1)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    branches: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, parents_of(draft), strict=True):
        branches.append((*(branches[parent] if parent >= 0 else ()), token))
    return branches


def check(draft: Draft, nodes: int, depth: int) -> None:
    """What every draft keeps to."""
    parents = parents_of(draft)
    assert len(draft.tokens) <= nodes
    assert all(-1 <= parent < node for node, parent in enumerate(parents)), "parents before children"
    branches = paths(draft)
    assert len(set(branches)) == len(branches), "siblings differ"
    assert all(len(path) <= depth for path in branches)


def verify(target: Target, text: Sequence[int], draft: Draft) -> tuple[list[int], list[int]]:
    """(tokens gained, the word behind the last token and behind each node)."""
    branches = paths(draft)
    drawn = [target([*text, *path]) for path in [(), *branches]]
    nodes = {path: node for node, path in enumerate(branches)}
    gained: list[int] = []
    at: int | None = -1
    while at is not None:
        gained.append(drawn[at + 1])
        at = nodes.get(tuple(gained))
    return gained, drawn


def plain(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(target(text))
    return text[len(prompt) :]


@dataclass
class Run:
    """A request that is speculated on. steps: verifications so far; drafted: nodes of them all."""

    guess: Proposer
    target: Target
    text: list[int]
    output: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return len(self.output) - len(self.drafts)

    def step(self, nodes: int, depth: int, kept: int | None = None) -> None:
        """kept: how many nodes of the draft are verified; None for all."""
        draft = self.guess.propose(nodes, depth)
        check(draft, nodes, depth)
        draft = draft if kept is None else draft.first(kept)
        gained, drawn = verify(self.target, self.text, draft)
        self.text += gained
        self.output += gained
        self.drafts.append(draft)
        self.guess.observe(gained, draft, drawn)


def speculate(drafter: HostDrafter, target: Target, prompt: Sequence[int], count: int) -> Run:
    run = Run(drafter.start(prompt), target, list(prompt))
    while len(run.output) < count:
        run.step(nodes=32, depth=12)
    return run


def hashed(vocab: int, order: int) -> Target:
    """A word that depends on the last `order` tokens and on nothing else; without pattern."""

    def target(text: Sequence[int]) -> int:
        state = 17
        for token in text[-order:]:
            state = (state * 1_000_003 + token + 1) % 2_147_483_647
        return (state >> 7) % vocab

    return target
