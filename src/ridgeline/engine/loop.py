"""The main loop of the engine: plan -> launch -> commit -> reply. While the host plans, up to `steps_in_flight` steps are on the
device.

The loop is independent of features: they belong to the scheduler and the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ridgeline.core.events import StepCounts, StepUpdates
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.engine.scheduler import Scheduler


class Runner(Protocol):
    """A device. It owns its memory and holds no policy."""

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step; never waits for the device."""

    def collect(self) -> StepResult:
        """The result of the oldest launched step; waits for it."""

    def close(self) -> None:
        """Wait for the device and drop the steps in flight."""


class Loop:
    """Drives one scheduler and one runner. clock: seconds; it must not jump, as a wall clock does when it is set. steps_in_flight:
    0 plans a step only after the commit of the last one."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        steps_in_flight: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.plan_s = self.commit_s = 0.0
        """Host seconds of plan and commit in the last turn."""
        self.turns = 0
        """Turns that made progress, or had a reason to wait. /health reads it."""
        self.device_s = self.idle_s = 0.0
        """Of the last committed step: seconds on the device, and seconds that the device idled before it although there was
        work."""
        self._fresh = 0
        """Number of the first step after a time without work."""
        self._drained = True
        self._depth = steps_in_flight
        self._clock = clock

    def turn(self) -> StepUpdates:
        """Launch a step if one can be planned. Commit the oldest step if more than steps_in_flight are launched or none was
        planned."""
        scheduler = self.scheduler
        started = time.perf_counter()
        plan = scheduler.plan(self._clock())
        self.plan_s, self.commit_s = time.perf_counter() - started, 0.0
        if plan is not None or scheduler.steps_in_flight or self.wait_seconds() > 0:
            self.turns += 1
        if plan is not None:
            if self._drained:
                self._fresh, self._drained = plan.step, False
            self.runner.launch(plan)
        if scheduler.steps_in_flight > (self._depth if plan is not None else 0):
            result = self.runner.collect()
            started = time.perf_counter()
            updates = scheduler.commit(result, self._clock())
            self.commit_s = time.perf_counter() - started
            self.device_s = result.device_s
            self.idle_s = 0.0 if result.step == self._fresh else result.gap_s
            self._drained = not (scheduler.running or scheduler.waiting or scheduler.steps_in_flight)
            return updates
        return StepUpdates(scheduler.take_updates())

    def wait_seconds(self) -> float:
        """Seconds until the next turn can make progress, unless a request arrives; 0 while there is work, infinite when idle."""
        return self.scheduler.wait_seconds(self._clock())

    def take_counts(self) -> StepCounts:
        """Counts since the last call."""
        counts, self.scheduler.counts = self.scheduler.counts, StepCounts()
        return counts
