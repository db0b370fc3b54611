"""The scheduler owns requests. `plan` gives each the query tokens it lacks, `commit` learns what became of them.

One rule, no phases: a request has tokens it knows and tokens it has computed, and a step gives it query tokens until
they meet. Prompts, chunks of prompts, decoding, prefix hits and drafts are this one rule. Requests run in the order of
(priority, arrival); when blocks run out, the last in that order gives way and comes back later.

Every end of a request goes through `finish`; its row and blocks return when no step in flight holds them.

Most rows of most steps only go on decoding. Planning such a row adds one to three numbers, committing it appends a token;
whatever needs more (a block to lease, a limit, a first token, a flag) takes the slower way, `_give` and `_commit_share`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import RidgelineError
from ridgeline.core.events import News, StepCounts, Update
from ridgeline.core.plan import Flag, Join, Logits, StepPlan, StepResult
from ridgeline.core.spec import KvLayout
from ridgeline.engine.in_flight import Share, StepInFlight
from ridgeline.engine.leases import Leases
from ridgeline.engine.policy import Admission, Limits
from ridgeline.engine.request import Constraint, Lease, Request, State
from ridgeline.speculation.guest import NO_SPECULATION, Speculation

_LOOK_S = 0.0005
"""Seconds between two looks where all that run wait: for their masks, or for their blocks to be filled."""


class Scheduler:
    """Plans steps within `limits`, leasing blocks from `leases`, admitting by `admission`. Knows no device and no clock:
    `now` comes as an argument (seconds), so that it runs on a virtual clock as well."""

    def __init__(
        self,
        layout: KvLayout,
        leases: Leases,
        limits: Limits,
        admission: Admission,
        speculation: Speculation = NO_SPECULATION,
    ) -> None:
        self.layout = layout
        self.leases = leases
        self.limits = limits
        self.counts = StepCounts()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._admission = admission
        self._speculation = speculation
        self._by_id: dict[str, dict[int, Request]] = {}
        self._free_rows = list(range(limits.rows, 0, -1))
        self._generation = 0
        self._next = StepInFlight(StepPlan(1))
        self.last_step = 0
        """Number of the last step committed."""
        self.committed: tuple[Sequence[int], Sequence[int], int] = (), (), 0
        """Of the last step committed: tokens that its rows hold, how many of them are new, how many had a draw behind them."""
        self._price = 0.0
        """Device seconds that one query token in every step so far would have cost."""
        self._flight: deque[StepInFlight] = deque()
        self._forms: deque[StepInFlight] = deque(maxlen=8)
        """Of each form of late the last step, since somebody entered or left."""
        self._updates: list[Update] = []
        self._leaving = 0
        self._open = 0
        self._look_at = -math.inf
        """When a step without rows may ask for transfers again."""

    # --- requests come and go ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self._by_id or self._flight or self._updates or self.leases.filling)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flight)

    @property
    def queued(self) -> int:
        """Choices that have not ended and do not run, those among them that wait for their leader's prompt."""
        return self._open - len(self.running)

    def wait_seconds(self, now: float) -> float:
        """Seconds in which there is nothing to do unless something arrives. To be asked after a turn that did nothing."""
        if self._flight or self._updates:
            return 0.0
        if self.running or self.leases.filling:
            return _LOOK_S
        return self._admission.opens_in(self.waiting, now) if self.waiting else math.inf

    def fits(self, request: Request) -> bool:
        """Whether the request could run if it were alone."""
        most = request.limit + self._speculation.max_nodes + self._speculation.slots_ahead
        return self.layout.pages_for(most, self.limits.step_tokens) <= self.leases.total

    def add(self, request: Request) -> None:
        """Take over a request. Choices after the first wait for the first one's prompt and share its blocks."""
        choices = self._by_id.setdefault(request.id, {})
        choices[request.choice] = request
        self._open += 1
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

    def end_choice(self, request_id: str, choice: int, reason: str, kept: int) -> None:
        """The service ended this choice itself (a stop string): of its output, `kept` tokens count."""
        request = self._by_id.get(request_id, {}).get(choice)
        if request is not None:
            self.counts.dropped += max(0, len(request.tokens) - request.prompt_len - kept)
            self.finish(request, reason)

    def finish(self, request: Request, reason: str, error: str = "") -> None:
        """The one end of every request, whatever the reason. Idempotent."""
        if request.finish:
            return
        request.finish = reason
        request.error = error
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
        """Out of the running set; row and blocks return now, or when the last step or transfer that holds them has ended."""
        self.running.remove(request)
        self._forms.clear()
        request.state = State.LEAVING
        request.settle(self._price)
        request.writable = request.watch = 0
        self._leaving += 1
        self.leases.stop(request, self._next.plan)
        if request.in_flight == 0 and request.lease is not Lease.FILLING:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """No step holds it any more: give back what it held; a preempted request waits again."""
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
        request.computed = request.planned = 0
        request.expected = len(request.tokens)
        if request.needs_scores:
            request.scores = []
        insort(self.waiting, request, key=_order)

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run (nothing to do, or all wait for steps in flight). A step without rows
        starts, ends and asks for transfers while nobody can be planned.

        A plan that gave nobody a query token yet is kept: it may hold joins and pages already.
        """
        step = self._next
        budget = self._continue_running(step, self.limits.step_tokens)
        if self.waiting:
            self._admit(step, budget, now)
        if step.requests:
            step.state_rows(self._forms)
            step.drafts = self._speculation.begin_step(step.plan, step.requests)
        elif not (step.plan.transfers or step.plan.cancels or self._asks(now)):
            return None
        self.leases.start(step.plan)
        self._next = StepInFlight(StepPlan(step.plan.step + 1))
        self._flight.append(step)
        return step.plan

    def _asks(self, now: float) -> bool:
        """Whether a step is needed only to learn which transfers have ended."""
        asks = bool(self.leases.filling) and not self._flight and now >= self._look_at
        if asks:
            self._look_at = now + _LOOK_S
        return asks

    def _continue_running(self, step: StepInFlight, budget: int) -> int:
        """Every running request gets what it needs; one token is kept back for each request behind it."""
        idle, last = self._speculation.idle, len(self.running) - 1
        for place, request in enumerate(tuple(self.running)):
            planned, expected = request.planned, request.expected
            if planned >= expected or budget <= 0:
                continue
            fast = planned + 1 == expected < request.limit and planned < request.writable
            if fast and request.constraint is None and (idle or self._speculation.skips(request)):
                request.planned = expected
                request.expected = expected + 1
                request.in_flight += 1
                step.requests.append(request)
                budget -= 1
            elif request.state is State.RUNNING:
                most = max(1, budget - last + place)
                budget -= self._give(step, request, min(expected - planned, most), most)
        return budget

    def _give(self, step: StepInFlight, request: Request, n_query: int, most: int) -> int:
        """Plan `n_query` tokens of a running request, with its draft at most `most`; returns how many it got (0: not ready, or
        no blocks)."""
        plan, speculation = step.plan, self._speculation
        samples = request.planned + n_query == request.expected
        draft = EMPTY_DRAFT
        if (samples and request.limit <= request.expected) or not request.ready(samples, speculation.waits):
            return 0
        if samples:
            if n_query == 1:
                draft = speculation.propose(request, most - 1)
            if request.constraint is not None:
                allowed_draft = self._masked(plan, request, request.constraint, draft)
                if allowed_draft is None:
                    return 0
                draft = allowed_draft
        after = request.planned + n_query + speculation.slots_ahead
        while not self.leases.extend(request, after + len(draft.tokens), plan):
            if draft.tokens:
                draft = EMPTY_DRAFT
                plan.masks.pop(request.row, None)
                if request.constraint is not None:
                    self._masked(plan, request, request.constraint, draft)
            elif not self._make_room(request):
                plan.masks.pop(request.row, None)
                return 0
        total = n_query + len(draft.tokens)
        wanted = Logits.LAST if n_query == 1 and samples else self._wanted(plan, request, total, samples)
        if not (total == 1 and samples and wanted is Logits.LAST):
            step.shares[len(step.requests)] = Share(total, draft, samples, wanted)
        step.requests.append(request)
        request.in_flight += 1
        request.planned += total
        if samples:
            request.expected += 1 + len(draft.tokens)
        return total

    def _wanted(self, plan: StepPlan, request: Request, total: int, samples: bool) -> Logits:
        """Which logits its next `total` tokens need, of a prompt at least; states the tokens to score."""
        if request.planned < request.prompt_len - 1 and request.needs_scores:
            after = request.tokens[request.planned + 1 : min(request.planned + total + 1, request.prompt_len)].tolist()
            plan.score_ids[request.row] = after + [-1] * (total - len(after))
            return Logits.ALL
        return Logits.LAST if samples else Logits.NONE

    def _masked(self, plan: StepPlan, request: Request, constraint: Constraint, draft: Draft) -> Draft | None:
        """State the tokens a grammar allows next and behind each node; returns what it allows of the draft. A grammar that
        cannot go on ends its own request: None."""
        try:
            draft, plan.masks[request.row] = constraint.masks(draft) if draft.tokens else (draft, constraint.mask())
        except RidgelineError as error:
            self.finish(request, "refused", error.message)
            return None
        return draft

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

    def _admit(self, step: StepInFlight, budget: int, now: float) -> None:
        allowed = self._admission.allowed(len(self.running), self.waiting, now)
        incomplete = (
            [candidate for candidate in self.running if candidate.planned < len(candidate.tokens) - 1]
            if allowed and budget > 0
            else []
        )
        chunk = self.limits.step_tokens
        while allowed > 0 and budget > 0 and self.waiting:
            request = self.waiting[0]
            if not self._free_rows or not self.leases.admits(request, len(self.running), incomplete, chunk):
                if self._gives_way(request):
                    continue
                return
            self.waiting.pop(0)
            self._enter(step.plan, request, now)
            allowed -= 1
            budget -= self._give(step, request, min(request.expected - request.planned, budget), budget)
            incomplete.append(request)

    def _gives_way(self, request: Request) -> bool:
        """Preempt a running request of a less urgent priority for one that waits."""
        last = self.running[-1] if self.running else None
        if last is None or self._leaving or last.order[0] <= request.order[0]:
            return False
        return self._preempt(last)

    def _enter(self, plan: StepPlan, request: Request, now: float) -> None:
        """Give a waiting request its row and whatever is computed already: a leader's blocks, a prefix hit, or what a source has,
        for which it waits without holding up those behind it."""
        self._generation += 1
        self._forms.clear()
        request.row = self._free_rows.pop()
        request.generation = self._generation
        request.state = State.RUNNING
        request.speculation.reset_device()
        insort(self.running, request, key=_order)
        request.computed = request.planned = self.leases.open(request, plan)
        if request.lease is Lease.READY:
            self._join(plan, request, now)

    def _join(self, plan: StepPlan, request: Request, now: float) -> None:
        """Tell the device of a request that has its row and is ready."""
        self.leases.state(request, plan)
        hit = request.computed
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
                request.tokens[:],
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

    def commit(self, result: StepResult, now: float) -> News:
        """Learn what the oldest step in flight did; returns the news for the service."""
        step = self._flight.popleft()
        self.last_step = result.step
        self.counts.failed += result.error is not None
        for request, arrived in self.leases.ended(step.plan, result) if self.leases.filling else ():
            self._end_transfer(request, arrived, now)
        gained: list[Request] = []
        tokens, offset = result.tokens, 0
        news = News()
        before, self._price = self._price, self._price + result.device_s / max(1, step.plan.n_tokens)
        rows = zip(step.requests, step.plan.n_query, result.counts, result.flags, strict=True)
        for place, (request, n_query, count, flag) in enumerate(rows):
            request.in_flight -= 1
            computed = request.computed + 1
            if n_query == count == 1 and computed < request.watch and not flag:
                request.computed = computed
                request.tokens.append(tokens[offset])
                news.tokens.append(tokens[offset])
                gained.append(request)
            elif request.state is State.LEAVING:
                self.counts.dropped += count
                if request.in_flight == 0:
                    self._settle(request)
            elif result.error is not None:
                self.finish(request, "error", f"The step failed: {result.error}")
            elif place in result.lost:
                self.finish(request, "error", "The device lost an upload of the request: send it again.")
            else:
                request.pay(before, self._price, n_query)
                self._commit_share(step, place, tokens[offset : offset + count], result, now, news)
            offset += count
        if step.requests:
            self.counts.saved_s += self._speculation.end_step(step.drafts, step.plan, step.requests, result)
        draws = sum(step.plan.samples) + len(step.plan.drafts)
        self.committed = [holder.computed for holder in step.requests], step.plan.n_query, draws
        self.counts.output_tokens += len(gained)
        if gained:
            news.ids, news.choices = [holder.id for holder in gained], [holder.choice for holder in gained]
        news.updates += self.take_updates()
        return news

    def _end_transfer(self, request: Request, arrived: bool, now: float) -> None:
        """Nothing writes to the request's blocks any more. It computes what did not arrive."""
        if request.state is State.LEAVING:
            self._settle(request)
            return
        if not arrived:
            request.computed = request.planned = self.leases.reopen(request)
        self._join(self._next.plan, request, now)

    def _commit_share(
        self, step: StepInFlight, place: int, tokens: list[int], result: StepResult, now: float, news: News
    ) -> None:
        """Commit one row, whatever it got and whatever came of it."""
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
        request.tokens.extend(tokens)
        watch = request.watch if request.computed < request.watch else self.leases.committed(request)
        if request.followers and request.computed >= request.prompt_len:
            self._release_followers(request)
        if tokens:
            if n_draft:
                self.counts.verified(n_draft, len(tokens) - 1)
                request.speculation.count(n_draft, len(tokens) - 1)
                self._speculation.observe(request, step.shares[place].draft, tokens, result, place)
            self._take_tokens(request, place, tokens, result, now, news)
        plain = request.constraint is None and request.sampling.logprobs is None
        if request.cached_sent and plain:
            request.watch = watch if request.state is State.RUNNING else 0

    def _take_tokens(
        self, request: Request, place: int, tokens: list[int], result: StepResult, now: float, news: News
    ) -> None:
        self.counts.output_tokens += len(tokens)
        update = Update(request.id, request.choice, tokens)
        news.updates.append(update)
        if request.first_token < 0:
            request.first_token = now
            update.times = request.times(now)
        if result.logprobs:
            update.logprobs = result.logprobs.get(place)
        if not request.cached_sent:
            request.cached_sent = True
            update.cached = request.cached
            update.prompt_logprobs = request.scores or None
        flag = result.flags[place]
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


_order = attrgetter("order")
