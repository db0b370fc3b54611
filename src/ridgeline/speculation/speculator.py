"""The Speculator decides which requests verify drafts in a step, of which drafter, and with how many nodes.

Drafting pays if the tokens it gains are worth more than the time it adds to a step. The controller measures both and switches
speculation off and on (Leviathan et al. 2023, section 3.3, use the same formulas with known rates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ridgeline.core.draft import DEVICE, EMPTY_DRAFT, Draft
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.host import HostDrafter, repeats
from ridgeline.speculation.interface import RequestView, Speculation
from ridgeline.speculation.state import (
    NO_STEP_DRAFTS,
    UNREAD_TAIL,
    DraftLimits,
    Reading,
    SpeculationState,
    StepDrafts,
)

_TEMPERATURE = attrgetter("sampling.temperature")
_WEIGHT = 0.2
"""Weight of a new draft in the moving averages of a request."""
_IDLE_STRIDE = 8
"""While speculation is idle, one step in _IDLE_STRIDE is measured."""
_PROBE_INTERVAL = 32
"""Tokens of a request between two probes of the host drafter."""
_REPEAT_STRIDE, _REPEAT_GAIN = 4, 0.5
"""Idle steps between two searches for repeated text; expected tokens gained by a call of the host drafter on repeated text."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device drafter that the host needs."""

    max_nodes: int
    parents: tuple[int, ...] = ()
    """Parents of the largest draft's nodes; empty for chains."""
    reads_tokens: bool = False
    """It has its own keys and values, and reads tokens that rows gained while drafting was off before it drafts again."""
    follows_target: bool = False
    """It has its own keys and values, and writes those of every token in the step in which the target reads it."""
    cuts: bool = False
    """It returns how many of its nodes are worth verifying."""

    @property
    def writes_slots(self) -> bool:
        """Drafting writes keys and values of nodes, in slots after the row's."""
        return self.reads_tokens or self.follows_target

    @property
    def chain_nodes(self) -> int:
        """Number of leading nodes of the largest draft that form a chain."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), self.max_nodes)


class Speculator(Speculation):
    """Proposes drafts of a host drafter, of a device drafter, or of both; a draft of the host goes first.

    Args:
        controller: chooses draft sizes and calls of the host drafter in greedy steps.
        limits: sizes up to which steps have drafts.
        sampled: the controller of steps that sample; None: one of the same sizes.
    """

    def __init__(
        self,
        host: HostDrafter | None,
        device: DeviceTraits | None,
        controller: Controller,
        limits: DraftLimits = DraftLimits(),
        sampled: Controller | None = None,
    ) -> None:
        self.max_nodes = controller.sizes[-1]
        self.slots_ahead = self.max_nodes if device is not None and device.writes_slots else 0
        self.idle, self.limits = False, limits
        self._host, self._device, self._controller = host, device, controller
        self._controllers = controller, sampled or Controller(controller.sizes, controller.fixed)
        """Of greedy steps, whose drafts are kept more often, and of steps that sample."""
        traits = DeviceTraits(0) if device is None else device
        self._drafts = [Draft((DEVICE,) * nodes, traits.parents[:nodes]) for nodes in range(traits.max_nodes + 1)]
        self._chain_nodes = traits.chain_nodes
        self._rows = self._rows_before = 1
        """Rows of the last step, with and without the requests that missed it because they waited."""
        self._next_nodes, self._logit_rows, self._host_nodes = 0, limits.logits, self.max_nodes
        """Nodes drafted for the next step; its most logits rows if it verifies drafts; most nodes of a host draft."""
        self._idle_steps = self._waiting = self._new = 0
        self._undrafted = controller, 0, 0
        """Consecutive steps without drafts that are not yet measured: (controller, rows, number)."""
        self._called: list[SpeculationState] = []
        self._probe_gain = 0.0
        """Moving average of `call_gain` over probes: the expectation for a new request."""

    def limit(self, running: Sequence[RequestView]) -> None:
        # No graph has drafts beside logits processors.
        processed = (view.constraint is not None or not view.sampling.fused for view in running if not self.idle)
        self._logit_rows = 0 if self.limits.prompt_tokens and any(processed) else self.limits.logits
        self._host_nodes = min(self._logit_rows, self.limits.host_tokens) // max(1, len(running)) - 1

    def waits(self, request: RequestView) -> bool:
        """Whether the host drafter will be called: while calls pay, and from time to time as a probe."""
        if self._host is None or self.idle or self._host_nodes <= 0:
            return False
        state, known = request.speculation, len(request.tokens)
        if state.probe_until < 0:
            # On repeated text a request is called without a probe: in a batch one probe would carry the cost of all rows.
            state.probe_until, state.call_gain = 0, max(self._probe_gain, _REPEAT_GAIN * self._host.needs_repeat)
        if self._host.needs_repeat and not (self._controller.fixed or state.last_gain or repeats(request.tokens)):
            return False
        asks = known < state.probe_until or (state.call_gain > 0 and self._controller.may_call(self._rows))
        due = not state.probe_until or known >= state.probe_until + _PROBE_INTERVAL
        if not asks and due and (tokens := self._controller.probe_calls(self._rows, new=not state.probe_until)):
            state.probe_until, asks = known + tokens, True
        self._waiting += asks
        return asks

    def skips(self, request: RequestView) -> bool:
        # A draft model writes to slots beyond the known tokens, which only `Scheduler._give` leases.
        state = request.speculation
        state.proposal = None
        if self.slots_ahead or state.device_nodes:
            return False
        if self._host is None or not self.waits(request):
            return True
        if request.in_flight:
            return False
        state.proposal = self._ask(self._host, request)
        return not state.proposal.tokens  # an empty proposal costs only the call

    def propose(self, request: RequestView, nodes: int) -> Draft:
        # Only the next step can verify a device draft: later, other tokens are in its places.
        state = request.speculation
        offered, state.device_nodes = min(nodes, state.device_nodes, self._logit_rows), 0
        # The host does not know the device draft, so a grammar cannot check it.
        if request.constraint is not None:
            offered = 0
        draft, state.proposal = state.proposal, None
        if draft is None and self._host is not None and self.waits(request):
            draft = self._ask(self._host, request)
        if draft is not None and (draft := draft.first(nodes)).tokens:
            expected = sum(state.acceptance ** (node + 1) for node in range(len(draft.tokens)))
            if not offered or expected > self._controller.expected(offered) - 1:
                return draft
        if request.sampling.penalized:  # see _ask
            return Draft(self._drafts[offered].tokens[: self._chain_nodes])
        return self._drafts[offered]

    def _ask(self, host: HostDrafter, request: RequestView) -> Draft:
        """Call the host drafter. First it observes the tokens that other steps gained."""
        state, tokens = request.speculation, request.tokens
        self._called.append(state)
        state.last_gain = 0
        if state.proposer is None:
            state.proposer = host.start(tokens)
        elif state.observed < len(tokens):
            new_tokens = tokens[state.observed :]
            state.proposer.observe(new_tokens, EMPTY_DRAFT, new_tokens[:1])
        state.observed = len(tokens)
        capacity = min(self.max_nodes, self._host_nodes, request.limit - request.expected - 1)
        nodes = min(capacity, state.proposer.nodes(*self._controller.host_nodes(self._rows, state.acceptance)))
        draft = state.proposer.propose(nodes, nodes) if nodes > 0 else EMPTY_DRAFT
        # Penalties count the tokens of a row from its start, which requires a chain.
        return draft.chain() if request.sampling.penalized else draft

    def begin_step(self, plan: StepPlan, requests: Sequence[RequestView]) -> StepDrafts:
        self._new += sum(join.choice == 0 for join in plan.joins)
        if self.idle:
            self._idle_steps -= 1
            self.idle = self._idle_steps > 0 and not (plan.joins or self._finds_repeat(requests))
            return NO_STEP_DRAFTS
        device, rows = self._device, sum(plan.samples)
        # Requests that wait for their last token miss a step, which the host drafter must make up for.
        self._rows, self._rows_before = max(1, rows, self._waiting and self._rows_before), rows
        self._controller = self._controllers[any(map(_TEMPERATURE, requests))]
        if rows and self._new:
            self._controller.admit(rows, self._new)
            self._new = 0
        nodes, self._next_nodes = self._next_nodes, 0
        called, self._called = self._called, []
        waiting, self._waiting = self._waiting, 0
        if device is not None and rows and not _host_drafts_suffice(plan, requests):
            max_nodes = min(device.max_nodes, max(0, self._logit_rows // rows - 1))
            self._next_nodes = self._controller.choose(rows, max_nodes)
        plan.ahead = self._next_nodes
        active = bool(nodes or plan.ahead or called or plan.drafts)
        if device is not None and (active or device.reads_tokens):
            self._offer(plan, requests, device)
        counts = device is not None and device.reads_tokens
        if rows and not (active or waiting or plan.joins or counts):
            self._idle_steps = self._controller.idle_steps(rows, host=self._host is not None, device=device is not None)
            self.idle = self._idle_steps > 0
        return StepDrafts(nodes, called, active or self._rows > rows, self._rows)

    def _finds_repeat(self, requests: Sequence[RequestView]) -> bool:
        """Whether the text of a request repeats, so that a call of the host drafter may pay before the idle steps end."""
        due = self._host is not None and self._host.needs_repeat and not self._idle_steps % _REPEAT_STRIDE
        return (
            due
            and self._controller.may_call(self._rows)
            and any(request.speculation.call_gain > 0 and repeats(request.tokens) for request in requests)
        )

    def _offer(self, plan: StepPlan, requests: Sequence[RequestView], device: DeviceTraits) -> None:
        """Record what the device drafts in the step for each request."""
        first = 0
        for place, (request, n_draft) in enumerate(zip(requests, plan.n_draft, strict=True)):
            state, samples = request.speculation, plan.samples[place]
            state.device_nodes = plan.ahead if samples else 0
            if device.reads_tokens:
                verifies_own = n_draft > 0 and plan.drafts[first] == DEVICE
                state.unread = _unread(state.unread, plan, place, verifies_own)
                if samples and plan.ahead:
                    plan.unread.append(min(state.unread, len(request.tokens) + 1))
                    state.unread = 0
            first += n_draft

    def observe(
        self, request: RequestView, draft: Draft, tokens: Sequence[int], result: StepResult, place: int
    ) -> None:
        state, kept = request.speculation, result.kept.get(place, [])
        if draft.tokens[0] == DEVICE:
            self._controllers[request.sampling.temperature > 0].observe(len(draft.tokens) + state.cut_nodes, kept)
            return
        tried = min(len(draft.tokens), len(kept) + 1)
        state.acceptance += _WEIGHT * (len(kept) / tried - state.acceptance)
        state.last_gain = len(kept)
        if state.proposer is not None:
            state.proposer.observe(tokens, draft, result.drawn[place])
            state.observed = len(request.tokens)

    def end_step(
        self, drafts: StepDrafts, plan: StepPlan, requests: Sequence[RequestView], result: StepResult
    ) -> float:
        rows, controller = len(requests), self._controllers[any(map(_TEMPERATURE, requests))]
        if not drafts.active:
            self._undrafted = controller, rows, 1 + self._undrafted[2] * (self._undrafted[:2] == (controller, rows))
        if self.idle and not drafts.active and self._idle_steps % _IDLE_STRIDE:
            return 0.0
        self._cut(requests, result)
        if result.error is not None or 0 in plan.samples or sum(plan.n_query) != rows + len(plan.drafts):
            return 0.0
        seconds = result.device_s + result.gap_s
        if not drafts.active:
            if not result.fresh:
                controller.measure_undrafted(rows, seconds, self._undrafted[2])
                self._undrafted = controller, rows, 0
            return 0.0
        return self._measure(drafts, plan, result, seconds, controller)

    def _cut(self, requests: Sequence[RequestView], result: StepResult) -> None:
        """Limit the device drafts to the nodes that the device found worth verifying."""
        for place, worth in result.worth.items():
            state = requests[place].speculation
            state.cut_nodes = 0
            if (
                worth < state.device_nodes and not requests[place].in_flight
            ):  # otherwise a later step has drafted for it
                if not worth:
                    self._controllers[requests[place].sampling.temperature > 0].observe(state.device_nodes, [])
                state.cut_nodes, state.device_nodes = worth and state.device_nodes - worth, worth

    def _measure(
        self, drafts: StepDrafts, plan: StepPlan, result: StepResult, seconds: float, controller: Controller
    ) -> float:
        """Report time and gain of a step with drafts to the controller. Returns the seconds saved."""
        rows, called = drafts.rows, drafts.called
        host_tokens = sum(state.last_gain for state in called) + len(plan.rows) - rows
        saved, price = controller.measure(
            Reading(
                rows,
                seconds,
                len(result.tokens) / rows,
                drafts.nodes,
                plan.ahead,
                (len(plan.drafts) - plan.drafts.count(DEVICE)) / rows,
                host_tokens / rows,
                len(called) / rows,
                result.fresh,
                sum(max(0, count - UNREAD_TAIL) for count in plan.unread) / rows,
            )
        )
        for state in called:
            state.call_gain += _WEIGHT * (state.last_gain - price - state.call_gain)
            if state.observed <= state.probe_until:  # the call was a probe
                self._probe_gain += _WEIGHT / 4 * (state.last_gain - price - self._probe_gain)
        return saved


def _host_drafts_suffice(plan: StepPlan, requests: Sequence[RequestView]) -> bool:
    """Whether host drafts gain so much for all requests that a device draft would seldom be verified."""
    all_of_host = bool(plan.drafts) and min(plan.drafts) >= 0
    return all_of_host and min(request.speculation.call_gain for request in requests) > 1


def _unread(before: int, plan: StepPlan, place: int, verifies_own: bool) -> int:
    """Number of tokens of a request that a draft model has not read after the step, if it drafts nothing in the step.

    before: the number before the step. verifies_own: the step verifies drafts of the draft model.
    """
    n_query, n_draft = plan.n_query[place], plan.n_draft[place]
    if n_query > 1 + n_draft:  # a prompt chunk: the draft model reads it in the same step
        return plan.samples[place]
    # After its own draft, it has not read its last node and the token drawn after the draft.
    return before + (2 if verifies_own else 1 + n_draft)
