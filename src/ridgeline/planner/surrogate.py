"""A replica for simulations of large fleets, which passes over steps in which nothing begins and nothing ends.

The scheduler's rules as far as they decide times: requests are admitted in order of arrival while rows and cache suffice, each
running answer gets a token in every step, the rest of a step goes to prompts in order, and a step in flight is planned while the
one before it runs. Steps with prompts are simulated one by one; steps that only decode are counted in one jump, with the time of
the middle one. `surrogate_error` in benchmarks/thousand.py compares it with the real scheduler.

Not simulated: preemption (a request is admitted when the cache holds its prompt and its answer), batching policies, retention and
tiers below the cache.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ridgeline.core.cost import WorkMeter
from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec
from ridgeline.kv.retention import KEEP_ALL
from ridgeline.planner.simulate import Event, Outcome, Server

_ROUNDED = 64
"""Contexts in the times of decode steps are rounded to so many tokens, so that most times are known already."""


class _Answer:
    """A request that was admitted. left: prompt tokens to compute. base: tokens that it holds, less the steps counted when it began
    to decode."""

    __slots__ = ("base", "due", "first", "left", "number", "spec")

    def __init__(self, number: int, spec: RequestSpec, due: float, left: int) -> None:
        self.number, self.spec, self.due, self.left = number, spec, due, left
        self.first = 0.0
        self.base = 0


class _Step(NamedTuple):
    """A planned step: prompt tokens of each request that it computes; empty: it only decodes."""

    parts: tuple[tuple[_Answer, int], ...]


class Prefixes:
    """The blocks of prompts that a replica has computed, the least recently used ones forgotten. tokens: of the cache."""

    def __init__(self, tokens: int) -> None:
        self._room, self._held = tokens, 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def cached(self, spec: RequestSpec) -> int:
        """Tokens of a prompt that are there. The last token is always computed."""
        return min(self.depth(spec.blocks) * spec.block, spec.input - 1)

    def depth(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        return next((depth for depth, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def store(self, spec: RequestSpec) -> None:
        for block in reversed(spec.blocks):
            self._held += spec.block if block not in self._blocks else 0
            self._blocks[block] = spec.block
            self._blocks.move_to_end(block)
        while self._held > self._room:
            self._held -= self._blocks.popitem(last=False)[1]


class StepTimes:
    """Seconds of steps of a server. Replicas of a fleet share it."""

    def __init__(self, server: Server) -> None:
        self._cost, self._meter = server.cost, WorkMeter(server.cost.spec)
        self.decode = lru_cache(1 << 16)(self._decode)

    def _decode(self, rows: int, context: int) -> float:
        """A step that gives each of `rows` answers a token. context: mean tokens that they hold, in units of _ROUNDED."""
        tokens = max(1, context * _ROUNDED)
        return self._cost.step_s(self._meter.work([tokens] * rows, [1] * rows, rows))

    def mixed(self, parts: Sequence[tuple[_Answer, int]], rows: int, context: int) -> float:
        """A step that also computes parts of prompts."""
        ends = [context] * rows + [answer.spec.input - answer.left + count for answer, count in parts]
        counts = [1] * rows + [count for _, count in parts]
        drawn = rows + sum(answer.left == count for answer, count in parts)
        return self._cost.step_s(self._meter.work(ends, counts, drawn))


class Surrogate:
    """One replica. `next_s` is the time at which it must be turned; `add` may bring that forward."""

    def __init__(self, server: Server, times: StepTimes, now: float) -> None:
        self._server, self._times = server, times
        self.now = now
        self.busy_s = 0.0
        self.prefix_tokens = 0, 0
        self._tokens = server.pages * server.layout.page_tokens
        self.prefixes = Prefixes(self._tokens if server.prefix_cache else 0)
        self._waiting: deque[tuple[int, RequestSpec, float]] = deque()
        self._prompts: deque[_Answer] = deque()
        self._decoding: list[tuple[int, int, _Answer]] = []  # by the step count at which they end
        self._held = self._base = self._steps = 0
        self._step: _Step | None = None
        self._next: _Step | None = None
        self._jump = 0  # steps of the current jump
        self._step_s = 0.0
        self._planned_s = math.inf  # when the step after a jump is planned
        self.next_s = math.inf

    @staticmethod
    def stands_for(server: Server) -> bool:
        """Whether a surrogate has all options of the server."""
        return server.batching == "continuous" and server.retention == KEEP_ALL and not server.tier_pages

    def add(self, number: int, spec: RequestSpec, due: float, now: float) -> None:
        """A request that was sent at `due` arrives. Raises ConfigError if it can never run."""
        if spec.input + spec.output > min(self._tokens, self._server.limits.max_len):
            raise ConfigError(
                f"A request of {spec.input} prompt and {spec.output} output tokens does not fit a replica."
            )
        if self._next is None and now > self._planned_s:  # the step after this jump was planned before
            self._next = self._plan()
        self._waiting.append((number, spec, due))
        if self._step is None:
            self.now = now + self._server.host_s
            self._begin(self._plan())
        elif not self._step.parts and self._jump > 1:
            # A jump is cut: the step that runs ends, and so does the one that is planned already, if one is in flight.
            passed = math.ceil((now - self.now) / self._step_s)
            self._jump_over(max(1, min(self._jump, passed + self._server.steps_in_flight)))

    def _jump_over(self, steps: int) -> None:
        """Set how many steps of decoding come before something else. With a step in flight what follows is planned one step
        earlier."""
        self._jump, self.next_s = steps, self.now + steps * self._step_s
        if self._server.steps_in_flight:
            self._planned_s = self.now + (steps - 1) * self._step_s

    def turn(self) -> list[Event]:
        """End the step, or the jump, that ends at `next_s`, and begin the next one."""
        step, self.now = self._step, self.next_s
        assert step is not None
        self.busy_s += self._jump * self._step_s
        self._steps += self._jump
        events = self._ended()
        for answer, count in step.parts:
            answer.left -= count
            if not answer.left:
                self._prompts.remove(answer)
                events += self._drawn(answer)
        planned = self._next
        if planned is None:
            self._begin(self._plan())
        elif planned.parts or self._decoding:
            self._begin(planned)
            if not planned.parts and (
                self._waiting or self._prompts
            ):  # what has arrived is in the step after the planned one
                self._jump_over(1)
        else:
            self._begin(self._plan())
        return events

    # --- steps ------------------------------------------------------------------------------------------------------

    def _begin(self, step: _Step | None) -> None:
        """Run a step. With a step in flight the one after it is planned now, without what arrives meanwhile."""
        self._step, self._next, self.next_s, self._planned_s = step, None, math.inf, math.inf
        if step is None:
            return
        rows = len(self._decoding)
        context = (self._base + rows * self._steps) // rows if rows else 0
        if step.parts:
            self._jump, self._step_s = 1, self._times.mixed(step.parts, rows, context)
            self.next_s = self.now + self._step_s
            if self._server.steps_in_flight:
                self._next = self._plan(dict(step.parts))
        else:
            steps = self._decoding[0][0] - self._steps
            self._step_s = self._times.decode(rows, (context + steps // 2) // _ROUNDED)
            self._jump_over(steps)

    def _plan(self, running: dict[_Answer, int] | None = None) -> _Step | None:
        """The next step: parts of prompts in order. running: what the step before it computes. None: nothing to do."""
        self._admit()
        computed = running or {}
        room = self._server.limits.step_tokens - len(self._decoding)
        parts = list[tuple[_Answer, int]]()
        for answer in self._prompts:
            left = answer.left - computed.get(answer, 0)
            if room <= 0:
                break
            if left > 0:
                parts.append((answer, min(left, room)))
                room -= min(left, room)
        return _Step(tuple(parts)) if parts or self._decoding else None

    def _admit(self) -> None:
        rows = self._server.limits.rows
        while self._waiting and len(self._prompts) + len(self._decoding) < rows:
            number, spec, due = self._waiting[0]
            if self._held and self._held + spec.input + spec.output > self._tokens:
                return
            self._waiting.popleft()
            self._held += spec.input + spec.output
            cached = self.prefixes.cached(spec)
            hits, asked = self.prefix_tokens
            self.prefix_tokens = hits + cached, asked + spec.input
            self._prompts.append(_Answer(number, spec, due, spec.input - cached))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _drawn(self, answer: _Answer) -> list[Event]:
        """A prompt is computed, and its first token drawn."""
        answer.first = self.now
        self.prefixes.store(answer.spec)
        if answer.spec.output == 1:
            return [self._end(answer, True)]
        answer.base = answer.spec.input - self._steps
        self._base += answer.base
        heapq.heappush(self._decoding, (self._steps + answer.spec.output - 1, answer.number, answer))
        return [Event(answer.number, True, None)]

    def _ended(self) -> list[Event]:
        events = list[Event]()
        while self._decoding and self._decoding[0][0] <= self._steps:
            answer = heapq.heappop(self._decoding)[2]
            self._base -= answer.base
            events.append(self._end(answer, False))
        return events

    def _end(self, answer: _Answer, first: bool) -> Event:
        spec, outside = answer.spec, self._server.outside_s
        self._held -= spec.input + spec.output
        later = spec.output - 1
        tpot = (self.now - answer.first) / later if later else math.nan
        times = answer.first - answer.due + outside, tpot, self.now - answer.due + outside
        return Event(answer.number, first, Outcome(*times, math.nan, spec.output))
