"""The scheduler's record of a step between plan and commit."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.plan import Logits, StepPlan
from ridgeline.engine.request import Request
from ridgeline.speculation.state import NO_STEP_DRAFTS, StepDrafts


class Share(NamedTuple):
    """A request's part of a step, unless it is one query token that draws. A tuple, because steps compare their shares."""

    n_query: int
    draft: Draft
    samples: bool
    logits: Logits


@dataclass(slots=True)
class StepInFlight:
    """A step that is being planned or in flight. requests: in the order of the plan's rows. shares: place in the step -> Share, for
    requests with anything but one query token that draws. drafts: speculation's record of the step."""

    plan: StepPlan
    requests: list[Request] = field(default_factory=list)
    shares: dict[int, Share] = field(default_factory=dict)
    drafts: StepDrafts = NO_STEP_DRAFTS

    def wanted(self, request: Request, total: int, samples: bool) -> Logits:
        """Which logits the next `total` tokens of a request need. Writes the prompt tokens to score or to pool into the plan."""
        read = request.planned < request.prompt_len and (request.needs_scores or request.sampling.pooling is not None)
        if read and max(ids := request.score_ids(total)) >= 0:
            self.plan.score_ids[request.row] = ids
            return Logits.ALL
        return Logits.LAST if samples else Logits.NONE

    @property
    def chunks(self) -> int:
        """Prompt tokens of the step, without the last one of each prompt."""
        return sum(share.n_query - len(share.draft.tokens) - share.samples for share in self.shares.values())

    def drop_drafts(self, most: int) -> None:
        """Plan a step with prompt chunks without its drafts, if it then has at most `most` query tokens."""
        if not 0 < self.chunks <= most - len(self.requests):
            return
        for place, share in self.shares.items():
            request, nodes = self.requests[place], len(share.draft.tokens)
            request.planned, request.expected = request.planned - nodes, request.expected - nodes
            self.shares[place] = share._replace(n_query=share.n_query - nodes, draft=EMPTY_DRAFT)

    def state_rows(self, recent: deque[StepInFlight]) -> None:
        """Write the rows into the plan. recent: recent steps, one of each set of requests and shares; an equal step shares its
        arrays."""
        plan, requests, shares = self.plan, self.requests, self.shares
        for place, earlier in enumerate(recent):
            if shares == earlier.shares and requests == earlier.requests:
                plan.share_arrays(earlier.plan)
                recent[place], follows = self, earlier.plan.step + 1 == plan.step and not shares
                plan.bound = earlier.plan.bound + 1 if follows else max([request.planned for request in requests])
                return
        recent.append(self)
        count = len(requests)
        plan.rows = array("i", [request.row for request in requests])
        plan.generations = array("i", [request.generation for request in requests])
        plan.n_query, plan.n_draft = array("i", [1]) * count, array("i", [0]) * count
        plan.logits, plan.samples = array("b", [Logits.LAST]) * count, array("b", [1]) * count
        for place, share in shares.items():
            plan.n_query[place], plan.n_draft[place] = share.n_query, len(share.draft.tokens)
            plan.logits[place], plan.samples[place] = share.logits, share.samples
            plan.drafts.extend(share.draft.tokens)
        if any(share.draft.parents for share in shares.values()):
            for share in shares.values():
                plan.tree.extend(share.draft.parents or range(-1, len(share.draft.tokens) - 1))
        plan.bound = max([request.planned for request in requests])
