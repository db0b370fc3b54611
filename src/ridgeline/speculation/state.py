"""Records of speculation: per request, per step in flight, and per committed step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.core.draft import Draft
from ridgeline.speculation.host import Proposer


class DraftLimits(NamedTuple):
    """Sizes of steps up to which they have drafts. Larger ones exceed the memory of logits or, on a GPU, have no CUDA graph: then
    Python launches each kernel, which takes up to twenty times as long."""

    logits: int = 1 << 30
    """Most logits rows of a step with drafts. The more rows a step has, the fewer nodes each verifies."""
    host_tokens: int = 1 << 30
    """Most query tokens of a step with host drafts."""
    prompt_tokens: int = 0
    """Query tokens up to which a step with a prompt chunk has a graph, but none with drafts. 0: steps have no graphs."""


@dataclass(slots=True)
class SpeculationState:
    """Speculation state of a request. The scheduler reads the first two counters; the other fields belong to the speculator."""

    drafted: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes kept."""

    proposer: Proposer | None = None
    """State of the host drafter, which has observed the request's first `observed` tokens."""
    observed: int = 0
    proposal: Draft | None = None
    """Draft of the host drafter for the next step, made before that step was planned."""
    acceptance: float = 0.7
    """Moving average: acceptance of host nodes, given that the parent was accepted."""
    call_gain: float = 0.0
    """Moving average: tokens gained by a call of the host drafter, minus those of undrafted steps in the time of the call."""
    last_gain: int = 0
    """Tokens gained by the last call of the host drafter."""
    probe_until: int = -1
    """Number of known tokens up to which the host drafter is called as a probe; -1 before the first decision."""

    device_nodes: int = 0
    """Nodes that the device drafts for the request at the end of its last planned step."""
    cut_nodes: int = 0
    """Further nodes that the device found not worth verifying."""
    unread: int = 0
    """Tokens that a draft model has not read (an upper bound)."""

    def count(self, drafted: int, accepted: int) -> None:
        """A step verified `drafted` nodes and kept `accepted` of them."""
        self.drafted += drafted
        self.accepted += accepted

    def reset_device(self) -> None:
        """The request gets a new row, for which the device holds no drafts."""
        self.device_nodes = self.unread = 0


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Speculation's record of a step in flight. The default is a step without drafts."""

    nodes: int = 0
    """Device nodes per row that the step verifies."""
    called: list[SpeculationState] = field(default_factory=list)
    """Requests for which the host drafter was called."""
    active: bool = False
    """The step drafts, verifies drafts, called the host drafter, or runs without requests that wait for it."""
    rows: int = 0
    """Rows of the step, with the requests that miss it because they wait for the host drafter."""


NO_STEP_DRAFTS = StepDrafts()


UNREAD_TAIL = 2
"""Tokens of a row that a draft model reads when it starts to draft: the last two."""


class Reading(NamedTuple):
    """A committed step. Tokens gained, nodes verified and calls of the host drafter are per row. drafted: device nodes for the next
    step. host_tokens: gained by host nodes. fresh: the first step of its shape, whose time is not representative. missed:
    tokens per row that a draft model also read, because it was off."""

    rows: int
    seconds: float
    tokens: float
    nodes: int = 0
    drafted: int = 0
    host_nodes: float = 0.0
    host_tokens: float = 0.0
    calls: float = 0.0
    fresh: bool = False
    missed: float = 0.0
