"""A step between its plan and its commit, as the scheduler remembers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.core.draft import Draft
from ridgeline.core.plan import Logits, StepPlan
from ridgeline.engine.request import Request


class Share(NamedTuple):
    """What a request got of a step, if that is not one query token that draws; a tuple, because steps compare theirs."""

    n_query: int
    draft: Draft
    samples: bool
    logits: Logits


@dataclass(slots=True)
class FlyingStep:
    """A step that is being planned or in flight. requests: who holds its rows, in the plan's order. shares: of those that
    got anything but one query token that draws, by place in the step. size: nodes per row that were chosen for it. asked: requests
    that a host drafter was asked for. drafting: something is drafted, asked or verified."""

    plan: StepPlan
    requests: list[Request] = field(default_factory=list)
    shares: dict[int, Share] = field(default_factory=dict)
    size: int = 0
    asked: list[Request] = field(default_factory=list)
    drafting: bool = False
