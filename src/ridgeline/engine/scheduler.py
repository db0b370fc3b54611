"""The scheduler owns requests. `plan` gives each the query tokens it lacks, `commit` learns what became of them.

One rule, no phases: a request has tokens it knows and tokens it has computed, and a step gives it query tokens until
they meet. Prompts, chunks of prompts, decoding, prefix hits and drafts are this one rule. Requests run in the order of
(priority, arrival); when blocks run out, the last in that order gives way and comes back later.

Every end of a request goes through `finish`; its row and blocks return when no step in flight holds them.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Protocol

from ridgeline.core.errors import RidgelineError
from ridgeline.core.events import StepCounts, Update
from ridgeline.core.plan import Flag, Join, Logits, StepPlan, StepResult
from ridgeline.core.spec import KvLayout
from ridgeline.engine.leases import Leases
from ridgeline.engine.policy import Admission
from ridgeline.engine.request import Constraint, Request, State


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler plans within. rows: device rows (row 0 is scratch and not counted)."""

    rows: int
    step_tokens: int
    max_len: int


class Drafter(Protocol):
    """Proposes tokens ahead on the host. A drafter with `waits` needs the last token committed before it can."""

    waits: bool

    def propose(self, request: Request, room: int) -> Sequence[int]: ...


class NoDrafts:
    waits = False

    def propose(self, request: Request, room: int) -> Sequence[int]:
        return ()


@dataclass(slots=True)
class _Share:
    """What one request got of a step in flight."""

    request: Request
    n_query: int
    n_draft: int
    samples: bool


class Scheduler:
    """Plans steps within `limits`, leasing blocks from `leases`, admitting by `admission`. Knows no device and no clock:
    `now` comes as an argument (seconds), so that it runs on a virtual clock as well."""

    def __init__(
        self, layout: KvLayout, leases: Leases, limits: Limits, admission: Admission, drafter: Drafter | None = None
    ) -> None:
        self.layout = layout
        self.leases = leases
        self.limits = limits
        self.counts = StepCounts()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._admission = admission
        self._drafter = drafter or NoDrafts()
        self._by_id: dict[str, dict[int, Request]] = {}
        self._free_rows = list(range(limits.rows, 0, -1))
        self._generation = 0
        self._next = StepPlan(1)
        self.last_step = 0
        """Number of the last step committed."""
        self._flight: deque[list[_Share]] = deque()
        self._updates: list[Update] = []
        self._leaving = 0

    # --- requests come and go ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self._by_id or self._flight or self._updates)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flight)

    def fits(self, request: Request) -> bool:
        """Whether the request could run if it were alone."""
        return self.layout.pages_for(request.limit, self.limits.step_tokens) <= self.leases.total

    def add(self, request: Request) -> None:
        """Take over a request. Choices after the first wait for the first one's prompt and share its blocks."""
        choices = self._by_id.setdefault(request.id, {})
        choices[request.choice] = request
        request.expected = len(request.tokens)
        leader = choices.get(0)
        if leader is None or leader is request:
            insort(self.waiting, request, key=_order)
        else:
            request.leader = leader
            leader.followers.append(request)

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """End all choices of a request; unknown ids are fine."""
        for request in list(self._by_id.get(request_id, {}).values()):
            self.finish(request, reason)

    def end_choice(self, request_id: str, choice: int, reason: str) -> None:
        """The service ended this choice itself (a stop string)."""
        request = self._by_id.get(request_id, {}).get(choice)
        if request is not None:
            self.finish(request, reason)

    def finish(self, request: Request, reason: str, error: str = "") -> None:
        """The one end of every request, whatever the reason. Idempotent."""
        if request.finish:
            return
        request.finish = reason
        request.error = error
        self._release_followers(request)
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
        """News since the last call (ends of requests outside a commit)."""
        updates, self._updates = self._updates, []
        return updates

    def _forget_waiting(self, request: Request) -> None:
        if request.leader is not None and request in request.leader.followers:
            request.leader.followers.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release_followers(self, leader: Request) -> None:
        for follower in leader.followers:
            insort(self.waiting, follower, key=_order)
        leader.followers = []

    def _leave(self, request: Request) -> None:
        """Out of the running set; row and blocks return now, or when the last step that holds them is committed."""
        self.running.remove(request)
        request.state = State.LEAVING
        self._leaving += 1
        if request.in_flight == 0:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """No step holds it any more: give back what it held; a preempted request waits again."""
        self._leaving -= 1
        self.leases.release(request)
        if not self._withdraw(request):
            self._next.leaves.append(request.row)
        self._free_rows.append(request.row)
        request.row = 0
        if request.finish:
            request.state = State.ENDED
            return
        request.state = State.WAITING
        request.computed = request.planned = 0
        request.expected = len(request.tokens)
        if request.needs_scores:
            request.scores = []
        insort(self.waiting, request, key=_order)

    def _withdraw(self, request: Request) -> bool:
        """Take back a join that has not gone to the device yet; False if the device knows the request."""
        plan = self._next
        if all(join.generation != request.generation for join in plan.joins):
            return False
        plan.joins = [join for join in plan.joins if join.generation != request.generation]
        kept = [plan.pages[at : at + 4] for at in range(0, len(plan.pages), 4) if plan.pages[at] != request.row]
        plan.pages = array("i", chain.from_iterable(kept))
        return True

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run (nothing to do, or all wait for steps in flight).

        A plan that gave nobody a query token yet is kept: it may hold joins and pages already.
        """
        plan = self._next
        shares: list[_Share] = []
        budget = self._continue_running(plan, shares, self.limits.step_tokens)
        if self.waiting:
            self._admit(plan, shares, budget, now)
        if not shares:
            return None
        self._next = StepPlan(plan.step + 1)
        self._flight.append(shares)
        return plan

    def _continue_running(self, plan: StepPlan, shares: list[_Share], budget: int) -> int:
        """Every running request gets what it needs; one token is kept back for each request behind it."""
        behind = len(self.running)
        for request in list(self.running):
            behind -= 1
            if request.state is not State.RUNNING:
                continue
            need = request.expected - request.planned
            if need > 0 and budget > 0:
                budget -= self._give(plan, shares, request, min(need, max(1, budget - behind)))
        return budget

    def _give(self, plan: StepPlan, shares: list[_Share], request: Request, n_query: int) -> int:
        """Plan `n_query` tokens of a running request; returns how many it got (0: not ready, or no blocks)."""
        samples = request.planned + n_query == request.expected
        drafts: Sequence[int] = ()
        if samples:
            room = request.limit - request.expected
            if room <= 0 or (request.in_flight and (request.constraint is not None or self._drafter.waits)):
                return 0
            if request.constraint is not None and not self._masked(plan, request, request.constraint):
                return 0
            drafts = self._drafter.propose(request, room - 1) if room > 1 else ()
        total = n_query + len(drafts)
        while not self.leases.extend(request, request.planned + total, plan):
            if drafts:
                drafts, total = (), n_query
            elif not self._make_room(request):
                plan.masks.pop(request.row, None)
                return 0
        self._state_share(plan, request, total, drafts, samples)
        shares.append(_Share(request, total, len(drafts), samples))
        request.in_flight += 1
        request.planned += total
        if samples:
            request.expected += 1 + len(drafts)
        return total

    def _state_share(self, plan: StepPlan, request: Request, total: int, drafts: Sequence[int], samples: bool) -> None:
        """Write one row of the plan."""
        plan.rows.append(request.row)
        plan.generations.append(request.generation)
        plan.n_query.append(total)
        plan.n_draft.append(len(drafts))
        plan.samples.append(samples)
        plan.bound.append(request.planned + total)
        plan.drafts.extend(drafts)
        wanted = Logits.LAST if samples else Logits.NONE
        if request.planned < request.prompt_len - 1 and request.needs_scores:
            wanted = Logits.ALL
            after = request.tokens[request.planned + 1 : min(request.planned + total + 1, request.prompt_len)]
            plan.score_ids[request.row] = after + [-1] * (total - len(after))
        plan.logits.append(wanted)

    def _masked(self, plan: StepPlan, request: Request, constraint: Constraint) -> bool:
        """State the tokens a grammar allows next; a grammar that cannot go on ends its own request."""
        try:
            plan.masks[request.row] = constraint.mask()
        except RidgelineError as error:
            self.finish(request, "refused", error.message)
            return False
        return True

    def _make_room(self, request: Request) -> bool:
        """Preempt the last running request if it comes after `request`. True: its blocks are free already; False:
        wait, because nobody comes after, or because somebody is leaving with a step in flight."""
        victim = self.running[-1]
        if self._leaving or victim.order <= request.order:
            return False
        return self._preempt(victim)

    def _preempt(self, victim: Request) -> bool:
        """Out of the running set, to come back later. True if its row and blocks returned at once."""
        victim.preempted += 1
        self.counts.preempted += 1
        self._release_followers(victim)
        self._leave(victim)
        return victim.state is State.WAITING

    def _admit(self, plan: StepPlan, shares: list[_Share], budget: int, now: float) -> None:
        allowed = self._admission.allowed(len(self.running), self.waiting, now)
        while allowed > 0 and budget > 0 and self.waiting:
            request = self.waiting[0]
            if not self._free_rows or not self.leases.admits(request, self.running, self.limits.step_tokens):
                if self._gives_way(request):
                    continue
                return
            self.waiting.pop(0)
            self._enter(plan, request, now)
            allowed -= 1
            budget -= self._give(plan, shares, request, min(request.expected - request.planned, budget))

    def _gives_way(self, request: Request) -> bool:
        """Preempt a running request of a less urgent priority for one that waits."""
        last = self.running[-1] if self.running else None
        if last is None or self._leaving or last.order[0] <= request.order[0]:
            return False
        return self._preempt(last)

    def _enter(self, plan: StepPlan, request: Request, now: float) -> None:
        """Give a waiting request its row and whatever is computed already: a leader's blocks or a prefix hit."""
        self._generation += 1
        request.row = self._free_rows.pop()
        request.generation = self._generation
        request.state = State.RUNNING
        insort(self.running, request, key=_order)
        hit = self.leases.open(request, plan)
        request.computed = request.planned = hit
        if request.cached < 0:
            request.cached = request.leader.cached if request.leader is not None else hit
            request.first_planned = now
            if request.leader is None and self.leases.looks_up(request):
                self.counts.prefix_queries += request.prompt_len
                self.counts.prefix_hits += hit
        plan.joins.append(
            Join(
                request.row,
                request.generation,
                tuple(request.tokens),
                request.prompt_len,
                hit,
                request.limit,
                request.stop_ids,
                request.seed,
                request.choice,
                request.sampling,
            )
        )

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Update]:
        """Learn what the oldest step in flight did; returns the news for the service."""
        updates: list[Update] = []
        offset = 0
        self.last_step = result.step
        self.counts.failed += result.error is not None
        for index, share in enumerate(self._flight.popleft()):
            count = result.counts[index] if result.error is None else 0
            tokens = list(result.tokens[offset : offset + count])
            offset += count
            request = share.request
            request.in_flight -= 1
            if request.state is State.LEAVING:
                if request.in_flight == 0:
                    self._settle(request)
            elif result.error is not None:
                self.finish(request, "error", f"The step failed: {result.error}")
            else:
                self._commit_share(share, index, tokens, result, now, updates)
        return updates + self.take_updates()

    def _commit_share(
        self, share: _Share, index: int, tokens: list[int], result: StepResult, now: float, updates: list[Update]
    ) -> None:
        request = share.request
        refused = share.n_draft - result.accepted[index] if share.n_draft else 0
        before = request.computed
        request.computed += share.n_query - refused
        request.planned -= refused
        if share.samples:
            request.expected -= 1 + share.n_draft - len(tokens)
        self.counts.prompt_tokens += max(0, min(request.computed, request.prompt_len) - before)
        if index in result.scores:
            request.scores.extend(result.scores[index])
        request.tokens.extend(tokens)
        self.leases.committed(request)
        if request.followers and request.computed >= request.prompt_len:
            self._release_followers(request)
        if tokens:
            self._take_tokens(share, index, tokens, result, now, updates)

    def _take_tokens(
        self, share: _Share, index: int, tokens: list[int], result: StepResult, now: float, updates: list[Update]
    ) -> None:
        request = share.request
        self.counts.output_tokens += len(tokens)
        self.counts.drafted += share.n_draft
        self.counts.accepted += len(tokens) - 1
        update = Update(request.id, request.choice, tokens)
        if request.first_token < 0:
            request.first_token = now
            update.times = request.times(now)
        if result.logprobs:
            update.logprobs = result.logprobs.get(index)
        if not request.cached_sent:
            request.cached_sent = True
            update.cached = request.cached
            update.prompt_logprobs = request.scores or None
        flag = result.flags[index]
        if request.constraint is not None:
            try:
                request.constraint.accept(tokens)
            except RidgelineError as error:
                updates.append(update)
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
        updates.append(update)


_order = attrgetter("order")
