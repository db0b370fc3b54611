"""Batching policies: which waiting requests may be admitted, and when. After admission all policies are alike.

continuous   every request that fits is admitted at every step (Orca, Yu et al. 2022, section 3.1).
static:N     N requests are admitted together, and no other until all of them have ended.
dynamic:N,W  as static, but a batch also starts when its oldest request has waited W milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

from ridgeline.core.errors import ConfigError
from ridgeline.engine.request import Request

OUTPUT_WEIGHT = 2
"""Service of a token of an answer, in tokens of a prompt: w_q / w_p in the source of Fairness."""
STATIC_PATIENCE_S = 10.0
"""A static batch starts after this time even if it is not full, so that no request waits forever."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the scheduler. rows: device rows, without the scratch row 0. pace_s: seconds in which a person reads a token; a
    streamed request that is ahead of its reader leaves its part of a step to prompts. 0: no request does. stages: of a pipeline."""

    rows: int
    step_tokens: int
    max_len: int
    pace_s: float = 0.0
    stages: int = 1

    def held(self, running: Sequence[Request], in_flight: int) -> set[Request]:
        """The running requests that a step of a pipeline leaves out: those whose last token is being drawn, and those beyond the
        share of one stage. So each stage has a step of its own. With `in_flight` steps, one for each stage, fewer than half a
        share wait for others: a step of one row reads as many weights as a step of many."""
        if self.stages == 1:
            return set()
        ready = [request for request in running if request.expected == len(request.tokens)]
        share = -(-len(running) // self.stages)
        return set(running).difference(ready[: share if in_flight < self.stages or 2 * len(ready) >= share else 0])


class Fairness:
    """Which request is admitted next when several clients wait: the virtual token counter (Sheng et al. 2024, arXiv:2401.00588,
    algorithm 2).

    Each client has a counter of the service it got. Of the requests with the most urgent priority, the first one of the client with
    the lowest counter is next. A client that begins to wait gets at least the lowest counter of those that wait already, so that it
    cannot save service up.
    """

    def __init__(self) -> None:
        self._clients: set[str] = set()
        self._service: dict[str, int] = {}
        self._waiting: set[str] = set()
        """Clients that waited at the last choice."""
        self._last = ""
        """The client that was chosen last."""

    def add(self, request: Request) -> None:
        """A request arrives."""
        self._clients.add(request.client)

    def charge(self, request: Request) -> None:
        """Count what a request got since the last call: its prompt once, and each token of its answer."""
        if len(self._clients) > 1:
            service = request.prompt_len + OUTPUT_WEIGHT * (len(request.tokens) - request.prompt_len)
            self._service[request.client] = self._service.get(request.client, 0) + service - request.charged
            request.charged = service

    def first(self, waiting: Sequence[Request], allowed: int, running: Sequence[Request]) -> int:
        """Place of the next request, among the first `allowed` of `waiting`, which is in order of (priority, arrival)."""
        if len(self._clients) < 2:
            return 0
        for request in running:
            self.charge(request)
        heads: dict[str, int] = {}
        for place, request in enumerate(islice(waiting, allowed)):
            if request.order[0] != waiting[0].order[0]:
                break
            heads.setdefault(request.client, place)
        service = self._service
        floor = min(
            (service.get(client, 0) for client in self._waiting & heads.keys()), default=service.get(self._last, 0)
        )
        for client in heads.keys() - self._waiting:
            service[client] = max(service.get(client, 0), floor)
        self._waiting = set(heads)
        self._last = min(heads, key=lambda client: (service.get(client, 0), client == self._last))
        return heads[self._last]


class Waiting(Protocol):
    """A waiting request as a policy sees it."""

    id: str
    arrival: float

    @property
    def followers(self) -> Sequence[object]:
        """Choices of the same prompt that are admitted after it."""


class Admission(Protocol):
    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        """How many requests at the head of `waiting` may be admitted now. `waiting` is in order of admission."""

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        """Seconds until a request may be admitted, if none runs and none arrives."""


class Continuous:
    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        return len(waiting)

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        return 0.0


class Batched:
    """Static and dynamic batches. The members of a batch are fixed when it starts: a later request never replaces a cancelled one,
    and a preempted request returns to its own batch. All choices of a request belong to one batch."""

    def __init__(self, size: int, window_s: float) -> None:
        self.size = size
        self.window_s = window_s
        self._members: set[str] = set()

    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        if running == 0 and waiting and waiting[0].id not in self._members:
            self._members = self._open(waiting, now)
        outsider = (place for place, request in enumerate(waiting) if request.id not in self._members)
        return next(outsider, len(waiting))

    def _open(self, waiting: Sequence[Waiting], now: float) -> set[str]:
        """Ids of the next batch's members; empty while the batch is neither full nor overdue."""
        choices = sum(1 + len(request.followers) for request in waiting)
        if choices < self.size and (not waiting or self.opens_in(waiting, now) > 0):
            return set()
        before = accumulate((1 + len(request.followers) for request in waiting), initial=0)
        return {request.id for request, earlier in zip(waiting, before, strict=False) if earlier < self.size}

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        return max(0.0, min(request.arrival for request in waiting) + self.window_s - now)


def admission(batching: str) -> Admission:
    """Read `continuous`, `static:N` or `dynamic:N,WINDOW_MS`. Raises ConfigError."""
    kind, _, arguments = batching.partition(":")
    numbers = arguments.split(",") if arguments else []
    try:
        if kind == "continuous" and not numbers:
            return Continuous()
        if kind == "static" and len(numbers) == 1 and int(numbers[0]) > 0:
            return Batched(int(numbers[0]), STATIC_PATIENCE_S)
        if kind == "dynamic" and len(numbers) == 2 and int(numbers[0]) > 0 and float(numbers[1]) >= 0:
            return Batched(int(numbers[0]), float(numbers[1]) / 1000)
    except ValueError:
        pass
    raise ConfigError(
        f"--batching is {batching!r}: give continuous, static:N or dynamic:N,WINDOW_MS, as in dynamic:4,100.",
        param="batching",
    )
