"""The interface between the scheduler and speculation, which proposes drafts and observes their results.

The scheduler holds one Speculation and calls it before a step for each request (`skips`, `waits`, `propose`), when a step is
planned (`begin_step`), and when it is committed (`observe` for each verified draft, `end_step`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.speculation.state import NO_STEP_DRAFTS, DraftLimits, SpeculationState, StepDrafts


class RequestView(Protocol):
    """The part of a request that speculation reads. It writes only to the field `speculation`."""

    @property
    def speculation(self) -> SpeculationState:
        """Written by speculation; the scheduler reads its counters."""

    @property
    def tokens(self) -> array[int]:
        """Prompt and committed output."""

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn."""

    @property
    def constraint(self) -> object | None:
        """A grammar, which must approve every draft token."""

    @property
    def limit(self) -> int:
        """Tokens at which the request ends."""

    @property
    def expected(self) -> int:
        """Tokens known, with all that the steps in flight may add."""

    @property
    def in_flight(self) -> int:
        """Steps in flight that hold the request."""


class Speculation:
    """The protocol, with a default that proposes nothing."""

    max_nodes = 0
    """Nodes of the largest draft."""
    slots_ahead = 0
    """Slots that device drafting writes beyond all tokens that a step may gain."""
    limits = DraftLimits()
    """Sizes up to which steps may have drafts."""
    idle = True
    """The next steps decode without drafts: the scheduler need not call `skips`."""

    def limit(self, running: Sequence[RequestView]) -> None:
        """A step with any of the `running` requests is about to be planned: limit its drafts to sizes that have a graph."""

    def waits(self, request: RequestView) -> bool:
        """Whether the request can be planned only after its last token is committed."""
        return False

    def skips(self, request: RequestView) -> bool:
        """Whether the request's next step has no draft. May prepare the draft that `propose` returns."""
        return not self.waits(request)

    def propose(self, request: RequestView, nodes: int) -> Draft:
        """A draft of at most `nodes` nodes for the request's next step."""
        return EMPTY_DRAFT

    def begin_step(self, plan: StepPlan, requests: Sequence[RequestView]) -> StepDrafts:
        """A step is planned. Writes the number of nodes to draft on the device into the plan. requests: in the order of the plan's
        rows."""
        return NO_STEP_DRAFTS

    def observe(
        self, request: RequestView, draft: Draft, tokens: Sequence[int], result: StepResult, place: int
    ) -> None:
        """The request verified `draft` in a step, at index `place`, and gained `tokens`, which `request.tokens` already has."""

    def end_step(
        self, drafts: StepDrafts, plan: StepPlan, requests: Sequence[RequestView], result: StepResult
    ) -> float:
        """The step of `begin_step` is committed. Returns the seconds that its drafts saved."""
        return 0.0


NO_SPECULATION = Speculation()
"""No request verifies drafts."""
