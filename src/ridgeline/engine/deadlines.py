"""Limits on latency decide the order of prompts and the size of steps.

With --keep-slo a request brings its limits: seconds until the first token, and seconds per token after it. Without limits
every step may be as large as the device allows, and nothing here runs.

*Size.* A step that computes prompts lasts at most as long as the answers beside it can wait. An answer can wait for the seconds
that it has saved by tokens that came faster than its limit, and for those that its next tokens will save at the pace of recent
steps. Sizes are whole tiles of matrix products, which are also the sizes of graphs: a part of a tile takes as long as a whole one.

*Order.* A prompt is late if it cannot meet its limit, or if others could not because of it. Moore's algorithm finds the fewest
(Management Science 15(1), 1968): go through the prompts in order, add up their predicted seconds, and where one would not be in
time, give up the longest so far. A late prompt runs after the others of its priority, with a small part of a step, so that a prompt
that arrives does not wait for a large step. Each step chooses anew. After PATIENCE times its limit a prompt runs in its old order.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Sequence

from ridgeline.core.cost import CostModel, WorkMeter, step_work
from ridgeline.engine.in_flight import StepInFlight
from ridgeline.engine.request import Request, by_order

PATIENCE = 20
"""Limits after which a late prompt runs in its old order."""
MARGIN = 1 / 8
"""Share of the limit for what is not predicted: requests that arrive, and the way outside the engine."""
LATE_SHARE = 1 / 20
"""Share of its limit that a step may take for a late prompt."""
LEAST_TOKENS = 256
"""Prompt tokens that a step may have in any case."""
TILE = 128
"""Query tokens of a tile."""
AHEAD = 64
"""Later tokens of an answer that may make up for a large step now."""
LOST = 8
"""Tokens after which a slow answer counts as lost: it no longer makes steps smaller."""
LEARNED = 1 / 16
"""Weight of a measured step in the ratio of measured to predicted seconds."""
PACE = 1 / 64
"""Weight of a measured step in the pace of steps."""
CHUNK, SLOTS = 2_048, 4_096
"""Tokens and slots of the steps from whose predictions seconds of one token and one slot are taken."""


class NoDeadlines:
    """For schedulers without a cost model: limits are ignored."""

    def step_tokens(
        self, most: int, running: list[Request], waiting: list[Request], flight: Sequence[StepInFlight], now: float
    ) -> int:
        """Query tokens of the next step, at most `most`. Prompts that are late, or no longer, change their places in `running` and
        `waiting`. flight: the steps that have not been committed.
        """
        return most

    def observe(self, step: StepInFlight, seconds: float) -> None:
        """A step took `seconds` of the device."""


NO_DEADLINES = NoDeadlines()


class Deadlines(NoDeadlines):
    """cost: predicts steps."""

    def __init__(self, cost: CostModel) -> None:
        self._cost, self._meter = cost, WorkMeter(cost.spec)
        self._step_s = cost.decode_s([1])
        self._slot_s = (cost.decode_s([SLOTS]) - self._step_s) / SLOTS
        # Above 0: where copies of weights take the step, tokens seem to cost nothing.
        self._token_s = max(1e-9, (cost.step_s(step_work(cost.spec, [(0, CHUNK)], 1)) - self._step_s) / CHUNK)
        self._empty_ratio = self._token_ratio = 1.0
        """Measured over predicted seconds of steps without and with prompts."""
        self._pace_s = 0.0
        """Seconds of recent steps."""
        self._limited = False
        self._late: dict[Request, tuple[float, int]] = {}
        """Late prompts with their old order."""
        self._met = -math.inf
        """When a prompt was not late last."""

    def step_tokens(
        self, most: int, running: list[Request], waiting: list[Request], flight: Sequence[StepInFlight], now: float
    ) -> int:
        if not self._limited:
            self._limited = any(min(request.deadline) < math.inf for request in waiting)
            if not self._limited:
                return most
        for request, order in self._late.items():
            request.leaves = 0
            _move(request, order, running, waiting)
        self._late.clear()
        prompts = [request for request in (*running, *waiting) if request.planned < request.prompt_len]
        if not prompts:
            return most
        empty_s, token_s = self._empty_s(running), self._token_s * self._token_ratio
        begin_s = sum(empty_s + token_s * (step.plan.n_tokens - len(step.requests)) for step in flight)
        slacks = (_slack(request, now, empty_s, self._pace_s) - begin_s - empty_s for request in running)
        tokens = int(min(most, max(LEAST_TOKENS, min(slacks, default=math.inf) / token_s)))
        for request in self._chosen(prompts, now, now + begin_s, token_s):
            self._late[request] = request.order
            # Behind the others of its priority: priorities are integers.
            _move(request, (request.order[0] + 0.5, request.order[1]), running, waiting)
            part = LEAST_TOKENS + int(LATE_SHARE * request.deadline.ttft_s / token_s)
            request.leaves = max(0, tokens - part) if now - self._met < PATIENCE * request.deadline.ttft_s else 0
        return min(most, (len(running) + tokens) // TILE * TILE)

    def observe(self, step: StepInFlight, seconds: float) -> None:
        if not self._limited or not seconds:
            return
        counts = step.plan.n_query
        self._pace_s += PACE * (seconds - self._pace_s)
        if step.plan.n_tokens == len(counts):
            self._empty_ratio *= 1 + LEARNED * (seconds / self._empty_s(step.requests) - 1)
        elif step.plan.n_tokens >= len(counts) + LEAST_TOKENS:
            ends = [request.computed + count for request, count in zip(step.requests, counts, strict=True)]
            predicted_s = self._cost.step_s(self._meter.work(ends, counts, len(counts)))
            self._token_ratio += LEARNED * (seconds / predicted_s - self._token_ratio)

    def _empty_s(self, requests: Sequence[Request]) -> float:
        """Seconds of a step that gives each request a token."""
        return self._empty_ratio * (self._step_s + self._slot_s * sum(request.computed for request in requests))

    def _chosen(self, prompts: list[Request], now: float, begin: float, token_s: float) -> set[Request]:
        """Prompts that have become late, if the others begin at `begin` and take `token_s` for each token."""
        chosen, longest = set[Request](), list[tuple[float, float, int, Request]]()
        for request in sorted(prompts, key=by_order):
            due, seconds = _due(request, now), token_s * (len(request.tokens) - request.planned)
            begin += seconds
            if due == math.inf:
                continue
            heapq.heappush(longest, (-request.order[0], -seconds, request.order[1], request))
            while begin > due and request not in chosen:
                _, less, _, given_up = heapq.heappop(longest)
                chosen.add(given_up)
                begin += less
        if longest:
            self._met = now
        return chosen


def _due(request: Request, now: float) -> float:
    """When the first token must be drawn. Infinite if nothing depends on it any more, or the request has been patient."""
    limit_s = request.deadline.ttft_s
    waits = request.first_token < 0 and not request.finish and now - request.arrival < PATIENCE * limit_s
    return request.arrival + (1 - MARGIN) * limit_s if waits else math.inf


def _slack(request: Request, now: float, empty_s: float, pace_s: float) -> float:
    """Seconds that the next token of an answer can take. Infinite without a limit that a step of `empty_s` meets, before the first
    token, and for a lost answer."""
    limit_s = request.deadline.tpot_s
    if request.first_token < 0 or not empty_s < limit_s < math.inf:
        return math.inf
    slack = (len(request.tokens) - request.prompt_len + request.in_flight) * limit_s - (now - request.first_token)
    later = min(AHEAD, (request.limit - len(request.tokens)) // 4) * max(0.0, limit_s - max(empty_s, pace_s))
    return slack + later if slack > -LOST * limit_s else math.inf


def _move(request: Request, order: tuple[float, int], *lists: list[Request]) -> None:
    """Give a request another place in the list that has it."""
    request.order = order
    for requests in lists:
        if request in requests:
            requests.remove(request)
            insort(requests, request, key=by_order)
