"""The heart: plan -> launch -> commit -> reply, with up to `steps_in_flight` steps on the device while the host plans.

Nothing here knows a feature. Requests come in through `submit`, `cancel` and `end_choice`; news goes out as updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ridgeline.core.events import StepCounts, Update
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.engine.scheduler import Scheduler


class Runner(Protocol):
    """A device. It owns its memory and holds no policy."""

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step; never waits for the device."""

    def ready(self) -> bool:
        """The oldest launched step has finished."""

    def collect(self) -> StepResult:
        """The result of the oldest launched step; waits for it."""

    def close(self) -> None: ...


class Loop:
    """One scheduler and one runner. `clock` gives seconds; `steps_in_flight` 0 plans only after each commit."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        steps_in_flight: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.host_s = 0.0
        """Host time of the last turn: planning and committing."""
        self.device_s = 0.0
        self._depth = steps_in_flight
        self._clock = clock

    def turn(self) -> list[Update]:
        """One turn of the heart. Launches a step if one can be planned, commits the oldest when the device has enough."""
        scheduler = self.scheduler
        started = time.perf_counter()
        plan = scheduler.plan(self._clock())
        self.host_s = time.perf_counter() - started
        if plan is not None:
            self.runner.launch(plan)
        if scheduler.steps_in_flight > (self._depth if plan is not None else 0):
            result = self.runner.collect()
            started = time.perf_counter()
            updates = scheduler.commit(result, self._clock())
            self.host_s += time.perf_counter() - started
            self.device_s = result.device_s
            return updates
        return scheduler.take_updates()

    def take_counts(self) -> StepCounts:
        """Counts since the last call."""
        counts, self.scheduler.counts = self.scheduler.counts, StepCounts()
        return counts
