"""The scheduler owns requests. `plan` distributes the query tokens of a step, `commit` applies its result.

There are no phases. A request has known tokens and computed tokens, and steps give it query tokens until all known tokens are
computed. This one rule covers prompts, prompt chunks, decoding, prefix hits and drafts. Requests run in the order of (priority,
arrival), and clients share service when requests wait. When blocks run out, the last running request in this order is preempted.
Every end of a request goes through `finish`. Its row and blocks are released when no step in flight holds them.

Most rows of a step only continue to decode. For them `plan` increments three numbers and `commit` appends a token. A row that
needs more (a block, a limit, a first token, a flag) takes the slow path: `_give` and `_commit_share`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import RidgelineError
from ridgeline.core.events import StepCounts, StepUpdates, Update
from ridgeline.core.plan import Flag, Logits, StepPlan, StepResult
from ridgeline.core.spec import KvLayout
from ridgeline.engine.deadlines import NO_DEADLINES, NoDeadlines
from ridgeline.engine.in_flight import Share, StepInFlight
from ridgeline.engine.leases import Leases
from ridgeline.engine.policy import Admission, Fairness, Limits
from ridgeline.engine.request import Constraint, Lease, Request, State, by_order
from ridgeline.metrics.account import Committed, Waste, waste_of
from ridgeline.speculation.interface import NO_SPECULATION, Speculation

_POLL_S = 0.0005
"""Seconds between two checks while all running requests wait for grammar masks or transfers."""


class Scheduler:
    """Plans steps within `limits`, with blocks from `leases` and the policy `admission`. It has no device and no clock: `now`
    (seconds) is an argument, so it also runs on a virtual clock."""

    def __init__(
        self,
        layout: KvLayout,
        leases: Leases,
        limits: Limits,
        admission: Admission,
        speculation: Speculation = NO_SPECULATION,
        deadlines: NoDeadlines = NO_DEADLINES,
    ) -> None:
        self.layout = layout
        self.leases = leases
        self.limits = limits
        self.counts = StepCounts()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._admission, self._fairness, self._deadlines = admission, Fairness(), deadlines
        self._speculation = speculation
        self._by_id: dict[str, dict[int, Request]] = {}
        self._free_rows = list(range(limits.rows, 0, -1))
        self._generation = 0
        self._next = StepInFlight(StepPlan(1))
        self.last_step = 0
        """Number of the last step committed."""
        self.committed = Committed((), StepPlan(0))
        """The last committed step."""
        self._price = 0.0
        """Accumulated device seconds of one query token in every step so far."""
        self._flight: deque[StepInFlight] = deque()
        self._recent_steps: deque[StepInFlight] = deque(maxlen=8)
        """Recent steps with different requests or shares; cleared when a request enters or leaves."""
        self._updates: list[Update] = []
        self._leaving = self._open = 0
        self._poll_at = -math.inf
        """Time from which a step without rows may check for transfers again."""

    # --- requests arrive and end ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self._by_id or self._flight or self._updates or self.leases.filling)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flight)

    @property
    def queued(self) -> int:
        """Number of choices that wait, including those that wait for the prompt of their leader."""
        return self._open - len(self.running)

    @property
    def adapters(self) -> set[int]:
        """Slots of the adapters of all requests."""
        return {request.adapter for choices in self._by_id.values() for request in choices.values()}

    def wait_seconds(self, now: float) -> float:
        """Seconds until there is work, unless a request arrives. Valid after a turn that did nothing."""
        if self._flight or self._updates:
            return 0.0
        if self.running or self.leases.filling:
            return _POLL_S
        return self._admission.opens_in(self.waiting, now) if self.waiting else math.inf

    def fits(self, request: Request) -> bool:
        """Whether the request could run without other requests."""
        most = request.limit + self._speculation.max_nodes + self._speculation.slots_ahead
        return self.layout.pages_for(most, self.limits.step_tokens) <= self.leases.total

    def add(self, request: Request) -> None:
        """Add a request. The first choice is the leader; other choices wait for its prompt and share its blocks."""
        choices = self._by_id.setdefault(request.id, {})
        choices[request.choice] = request
        self._fairness.add(request)
        self._open += 1
        request.expected = len(request.tokens)
        leader = choices.get(0)
        if leader is None or leader is request:
            insort(self.waiting, request, key=by_order)
        else:
            request.leader = leader
            leader.followers.append(request)

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """End all choices of a request. Unknown ids are ignored."""
        for request in list(self._by_id.get(request_id, {}).values()):
            self.finish(request, reason)

    def end_choice(self, request_id: str, choice: int, reason: str, kept: int) -> None:
        """End a choice for the service (a stop string). kept: output tokens that count; the others are counted as dropped."""
        request = self._by_id.get(request_id, {}).get(choice)
        if request is not None:
            self.counts.dropped += max(0, len(request.tokens) - request.prompt_len - kept)
            self.finish(request, reason)

    def finish(self, request: Request, reason: str, error: str = "") -> None:
        """End a request. Every end of a request goes through here. Idempotent."""
        if request.finish:
            return
        request.finish, request.error = reason, error
        self._release_followers(request)
        self._open -= 1
        choices = self._by_id[request.id]
        del choices[request.choice]
        if not choices:
            del self._by_id[request.id]
        if request.state is State.WAITING:
            self._forget_waiting(request)
            request.state = State.ENDED
        elif request.state is State.RUNNING:
            self._leave(request)
        if reason not in ("stop", "length"):
            self._updates.append(Update(request.id, request.choice, [], finish=reason, error=error))

    def take_updates(self) -> list[Update]:
        """Updates since the last call (ends of requests outside a commit)."""
        updates, self._updates = self._updates, []
        return updates

    def _forget_waiting(self, request: Request) -> None:
        if request.leader is not None and request in request.leader.followers:
            request.leader.followers.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release_followers(self, leader: Request) -> None:
        for follower in leader.followers:
            insort(self.waiting, follower, key=by_order)
        leader.followers = []

    def _leave(self, request: Request) -> None:
        """Remove from the running set. Row and blocks are released now, or when the last step or transfer that holds them ends."""
        self.running.remove(request)
        self._recent_steps.clear()
        request.state = State.LEAVING
        self._fairness.charge(request)
        request.pay_remaining(self._price)
        request.writable = request.watch = 0
        self._leaving += 1
        self.leases.stop(request, self._next.plan)
        if request.in_flight == 0 and request.lease is not Lease.FILLING:
            self._release_row(request)

    def _release_row(self, request: Request) -> None:
        """Release the row and blocks of a request that no step or transfer holds. A preempted request waits again."""
        self._leaving -= 1
        plan, joined = self._next.plan, request.lease is Lease.READY
        self.leases.release(request)
        if joined and not plan.withdraw(request.row, request.generation):
            plan.leaves.append(request.row)
        self._free_rows.append(request.row)
        request.row = 0
        if request.finish:
            request.state = State.ENDED
            return
        request.state = State.WAITING
        request.reached = max(request.reached, request.computed)
        request.computed, request.planned, request.expected, request.pooled = 0, 0, len(request.tokens), []
        if request.needs_scores:
            request.scores = []
        insort(self.waiting, request, key=by_order)

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step. Returns None if no request can run (no work, or all wait for steps in flight).

        If no request can run, a step without rows may start, cancel or check transfers. A plan without query tokens is kept for the
        next call, because it may already hold joins and pages.
        """
        step = self._next
        self.leases.pins.advance(now)
        self._speculation.limit(self.running)
        ahead, held = self._ahead(now), self.limits.held(self.running, self.steps_in_flight)
        budget = self._continue_running(
            step,
            self._deadlines.step_tokens(self.limits.step_tokens, self.running, self.waiting, self._flight, now),
            ahead | held,
        )
        if self.waiting:
            budget = self._admit(step, budget, now)
        if ahead and (self.waiting or not step.chunks):  # no prompt gains, or one waits for their rows and blocks
            self._continue_running(step, budget, held.union(step.requests))
        if step.requests:
            step.drop_drafts(self._speculation.limits.prompt_tokens)
            step.state_rows(self._recent_steps)
            step.drafts = self._speculation.begin_step(step.plan, step.requests)
        elif not (step.plan.transfers or step.plan.cancels or self._asks(now)):
            return None
        self.leases.start(step.plan)
        self._next = StepInFlight(StepPlan(step.plan.step + 1))
        self._flight.append(step)
        return step.plan

    def _asks(self, now: float) -> bool:
        """Whether a step without rows is due, to learn which transfers have ended."""
        asks = bool(self.leases.filling) and not self._flight and now >= self._poll_at
        if asks:
            self._poll_at = now + _POLL_S
        return asks

    def _ahead(self, now: float) -> set[Request]:
        """The running requests that are ahead of their readers, if there are prompts that may gain from their part of the step."""
        pace_s = self.limits.pace_s
        prompts = pace_s and (self.waiting or any(other.planned < len(other.tokens) - 1 for other in self.running))
        return {request for request in self.running if request.ahead(now, pace_s)} if prompts else set()

    def _continue_running(self, step: StepInFlight, budget: int, without: set[Request]) -> int:
        """Give each running request the tokens it needs. One token of the budget is reserved for each request after it."""
        idle, last = self._speculation.idle, len(self.running) - 1
        for place, request in enumerate(tuple(self.running)):
            planned, expected = request.planned, request.expected
            if planned >= expected or budget <= request.leaves or request in without:
                continue
            fast = planned + 1 == expected < request.limit and planned < request.writable
            if fast and request.constraint is None and (idle or self._speculation.skips(request)):
                request.planned = expected
                request.expected = expected + 1
                request.in_flight += 1
                step.requests.append(request)
                budget -= 1
            elif request.state is State.RUNNING:
                most = max(1, budget - request.leaves - last + place)
                budget -= self._give(step, request, min(expected - planned, most), most)
        return budget

    def _give(self, step: StepInFlight, request: Request, n_query: int, most: int) -> int:
        """Plan `n_query` tokens of a running request, and a draft up to `most` tokens in all. Returns how many: 0 if it waits."""
        plan, speculation = step.plan, self._speculation
        samples = request.planned + n_query == request.expected and request.sampling.pooling is None
        draft = EMPTY_DRAFT
        if (samples and request.limit <= request.expected) or not request.ready(samples, speculation.waits):
            return 0
        if samples:
            if n_query == 1:
                draft = speculation.propose(request, most - 1)
            if request.constraint is not None:
                allowed_draft = self._restricted(plan, request, request.constraint, draft)
                if allowed_draft is None:
                    return 0
                draft = allowed_draft
        after = request.planned + n_query + speculation.slots_ahead
        while not self.leases.extend(request, after + len(draft.tokens), plan):
            if draft.tokens:
                draft = EMPTY_DRAFT
                plan.unrestrict(request.row)
                if request.constraint is not None:
                    self._restricted(plan, request, request.constraint, draft)
            elif not self._make_room(request):
                plan.unrestrict(request.row)
                return 0
        total = n_query + len(draft.tokens)
        wanted = Logits.LAST if n_query == 1 and samples else step.wanted(request, total, samples)
        if not (total == 1 and samples and wanted is Logits.LAST):
            step.shares[len(step.requests)] = Share(total, draft, samples, wanted)
        step.requests.append(request)
        request.in_flight += 1
        request.planned += total
        if samples:
            request.expected += 1 + len(draft.tokens)
        return total

    def _restricted(self, plan: StepPlan, request: Request, constraint: Constraint, draft: Draft) -> Draft | None:
        """Write masks and biases after the last token and after each node into the plan. Returns the part of the draft that the
        constraint allows. A constraint that fails ends its request: None."""
        try:
            return constraint.restrict(plan, request.row, draft)
        except RidgelineError as error:
            self.finish(request, "refused", error.message)
            return None

    def _make_room(self, request: Request) -> bool:
        """Preempt the last running request of the same rank if it is after `request` in order. True: its blocks are free now.
        False: wait."""
        victim = next(other for other in reversed(self.running) if other.rank == request.rank)
        if self._leaving or victim.order <= request.order:
            return False
        return self._preempt(victim)

    def _preempt(self, victim: Request) -> bool:
        """Remove a request from the running set; it waits again. True if its row and blocks are released at once."""
        victim.preempted += 1
        self.counts.preempted += 1
        self._release_followers(victim)
        self._leave(victim)
        return victim.state is State.WAITING

    def _admit(self, step: StepInFlight, budget: int, now: float) -> int:
        """Admit waiting requests. Returns what is left of the budget."""
        allowed = self._admission.allowed(len(self.running), self.waiting, now)
        incomplete = (
            [other for other in self.running if other.planned < len(other.tokens) - 1] if allowed and budget > 0 else []
        )
        chunk = self.limits.step_tokens
        while allowed > 0 and self.waiting:
            place = self._fairness.first(self.waiting, allowed, self.running)
            request = self.waiting[place]
            most = budget - request.leaves
            if most <= 0:
                break
            if not self._free_rows or not self.leases.admits(request, self.running, incomplete, chunk):
                if self._gives_way(request):
                    continue
                break
            self.waiting.pop(place)
            self._enter(step.plan, request, now)
            allowed -= 1
            budget -= self._give(step, request, min(request.expected - request.planned, most), most)
            incomplete.append(request)
        return budget

    def _gives_way(self, request: Request) -> bool:
        """Preempt the last running request if its priority is less urgent than that of a waiting request."""
        last = self.running[-1] if self.running else None
        if last is None or self._leaving or last.order[0] <= request.order[0]:
            return False
        return self._preempt(last)

    def _enter(self, plan: StepPlan, request: Request, now: float) -> None:
        """Give a waiting request a row and the blocks that are computed already: a leader's, a prefix hit, or those of a source. It
        waits for the transfer from a source without delaying the requests after it."""
        self._generation += 1
        self._recent_steps.clear()
        request.row = self._free_rows.pop()
        request.generation = self._generation
        request.state = State.RUNNING
        request.speculation.reset_device()
        insort(self.running, request, key=by_order)
        request.computed = request.planned = self.leases.open(request, plan)
        if request.lease is Lease.READY:
            self._join(plan, request, now)

    def _join(self, plan: StepPlan, request: Request, now: float) -> None:
        """Add the join of a request that has a row and a ready lease to the plan."""
        self.leases.state(request, plan)
        hit = request.computed
        if request.cached < 0:
            request.cached = request.leader.cached if request.leader is not None else hit
            request.first_planned = now
            if request.leader is None and self.leases.looks_up(request):
                self.counts.prefix_queries += request.prompt_len
                self.counts.prefix_hits += hit
        plan.joins.append(request.join(hit))

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> StepUpdates:
        """Apply the result of the oldest step in flight. Returns the updates for the service."""
        step = self._flight.popleft()
        self.last_step = result.step
        self.counts.failed += result.error is not None
        for request, arrived in self.leases.ended(step.plan, result):
            self._end_transfer(request, arrived, now)
        gained, waste = list[Request](), list[Waste]()
        tokens, offset = result.tokens, 0
        updates = StepUpdates()
        self._deadlines.observe(step, result.device_s)
        before, self._price = self._price, self._price + result.device_s / max(1, step.plan.n_tokens)
        rows = zip(step.requests, step.plan.n_query, result.counts, result.flags, strict=True)
        for place, (request, n_query, count, flag) in enumerate(rows):
            request.in_flight -= 1
            computed = request.computed + 1
            if n_query == count == 1 and computed < request.watch and not flag:
                request.computed = computed
                request.tokens.append(tokens[offset])
                updates.tokens.append(tokens[offset])
                gained.append(request)
            else:
                if request.state is State.LEAVING:
                    self.counts.dropped += count
                    if request.in_flight == 0:
                        self._release_row(request)
                elif result.error is not None:
                    self.finish(request, "error", f"The step failed: {result.error}")
                elif place in result.lost:
                    self.finish(request, "error", "The device lost an upload of the request: send it again.")
                else:
                    request.pay(before, self._price, n_query)
                    self._commit_share(step, place, tokens[offset : offset + count], result, now, updates)
                waste += waste_of(place, n_query, computed - 1, request.computed, request.reached)
            offset += count
        if step.requests:
            self.counts.saved_s += self._speculation.end_step(step.drafts, step.plan, step.requests, result)
        self.committed = Committed([request.computed - request.dropped for request in step.requests], step.plan, waste)
        self.counts.output_tokens += len(gained)
        if gained:
            updates.ids, updates.choices = [request.id for request in gained], [request.choice for request in gained]
        updates.others += self.take_updates()
        return updates

    def _end_transfer(self, request: Request, arrived: bool, now: float) -> None:
        """The transfer of a request has ended. Content that did not arrive is computed."""
        if request.state is State.LEAVING:
            self._release_row(request)
            return
        if not arrived:
            request.computed = request.planned = self.leases.reopen(request)
        self._join(self._next.plan, request, now)

    def _commit_share(
        self, step: StepInFlight, place: int, tokens: list[int], result: StepResult, now: float, updates: StepUpdates
    ) -> None:
        """Commit one row (slow path: any number of query tokens, drafts and flags)."""
        request, plan = step.requests[place], step.plan
        n_draft = plan.n_draft[place]
        refused = n_draft and n_draft - max(0, len(tokens) - 1)
        before, request.computed = request.computed, request.computed + plan.n_query[place] - refused
        request.planned -= refused
        if plan.samples[place]:
            request.expected -= 1 + n_draft - len(tokens)
        if before < request.prompt_len:
            self.counts.prompt_tokens += min(request.computed, request.prompt_len) - before
        if place in result.scores:
            request.scores.extend(result.scores[place])
        request.pooled += result.pooled.get(place, ())
        request.tokens.extend(tokens)
        watch = request.watch if request.computed < request.watch else self.leases.committed(request, self._next.plan)
        if request.followers and request.computed >= request.prompt_len:
            self._release_followers(request)
        if tokens or (request.sampling.pooling is not None and request.computed == request.prompt_len):
            if n_draft:
                self.counts.verified(n_draft, len(tokens) - 1)
                request.speculation.count(n_draft, len(tokens) - 1)
                self._speculation.observe(request, step.shares[place].draft, tokens, result, place)
            self._take_tokens(request, place, tokens, result, now, updates)
        unconstrained = request.constraint is None and request.sampling.logprobs is None
        if request.cached_sent and unconstrained:
            request.watch = watch if request.state is State.RUNNING else 0

    def _take_tokens(
        self, request: Request, place: int, tokens: list[int], result: StepResult, now: float, updates: StepUpdates
    ) -> None:
        self.counts.output_tokens += len(tokens)
        update = Update(request.id, request.choice, tokens)
        updates.others.append(update)
        if request.first_token < 0:
            request.first_token = now
            update.times = request.times(now)
        if result.logprobs:
            update.logprobs = result.logprobs.get(place)
        if not request.cached_sent:
            request.cached_sent = True
            update.cached = request.cached
            update.pins = request.pins or None
            update.prompt_logprobs, update.pooled = request.scores or None, request.pooled or None
        flag = result.flags[place] if tokens else Flag.LIMIT  # a pooled prompt ends without a token
        if request.constraint is not None:
            try:
                request.constraint.accept(tokens)
            except RidgelineError as error:
                self.finish(request, "refused", error.message)
                return
            if request.constraint.finished:
                flag |= Flag.STOP
        if flag:
            update.finish = "stop" if flag & Flag.STOP else "length"
            if flag & Flag.STOP and tokens[-1] in request.stop_ids:
                update.stop_id = tokens[-1]
            update.times = request.times(now)
            self.finish(request, update.finish)
