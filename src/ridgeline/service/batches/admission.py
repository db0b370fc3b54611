"""How many rows of batches may be in flight beside the online requests. No clock, no asyncio: every time is an argument.

The engine runs batch rows last: an online request preempts them when rows or blocks are short, and it enters the next step. What
remains is that each row makes steps longer. So the lane learns from the steps how long a step takes with n requests,
t(n) = a + b n, and lets in as many rows as keep t within the limit:

    with an SLO      the time per output token that the SLO allows, less a margin
    with an impact   the step time of the online requests alone, times 1 + impact

While no online request runs, nobody is slowed down, and all rows of the engine may be used.

The line cannot see everything (prompts of rows, a busy machine). So the lane also follows what it measures: it shrinks at once
while steps take longer than the SLO allows, and by half when online requests have missed the SLO, from which it recovers slowly.
Beside online requests it grows by a few rows at a time, so that their prompts do not fill a step.
A row with several choices counts as so many.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ridgeline.core.slo import Slo

DEFAULT_IMPACT = 0.10
"""Rise of step times that is allowed if neither --slo nor --batch-impact says more."""
MARGIN = 0.85
"""Share of a limit that predicted step times may reach, because steps vary."""
MISSES = 0.01
"""Share of online requests that may miss the SLO before the lane shrinks."""
IDLE_S = 2.0
"""Seconds without an online request after which the lane counts on none."""
_FORGET = 0.5 ** (1 / 400)
"""Weight of a step after another one, for the line: half after 400 steps."""
_FORGET_RECENT = 0.5 ** (1 / 16)
_JUDGED = 100
"""Online requests whose verdicts count."""
_JUDGED_S = 30.0
_SHRINK = 0.5
_LEAST = 1 / 16
_GROW_PER_S = 0.05
_GROW_ROWS = 2
"""Rows by which the lane grows at a time beside online requests, or a quarter of it if that is more."""
_GROW_S = 0.05
_SETTLE_STEPS = 16
"""Steps between two reductions because of slow steps."""
_SETTLE_S = 1.0
"""Seconds between two reductions: requests that end now began under the former limit."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load in choices. online: of online requests that have not ended. batch: of rows in flight. rows: those that the
    engine runs at once."""

    now: float
    online: int
    batch: int
    rows: int


class StepTimes:
    """Step seconds as a line over the number of running requests, from recent steps: least squares with exponential weights."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, running: float, seconds: float, steps: int = 1) -> None:
        """Add steps with their mean number of running requests and their mean time."""
        kept = _FORGET**steps
        self._weight = self._weight * kept + steps
        self._x = self._x * kept + steps * running
        self._y = self._y * kept + steps * seconds
        self._xx = self._xx * kept + steps * running * running
        self._xy = self._xy * kept + steps * running * seconds

    def line(self) -> tuple[float, float] | None:
        """Seconds of a step without requests and of each request in it; None before the first step.

        If all steps had about the same number of requests, their time is charged to the requests: the prediction for more of them
        is then too high rather than too low.
        """
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread < 0.05 * max(1.0, x):
            return 0.0, y / max(1.0, x)
        slope = max(0.0, (self._xy / self._weight - x * y) / spread)
        return (y - slope * x, slope) if slope * x < y else (0.0, y / x)


class LaneAdmission:
    """Decides how many rows may be in flight. impact: share by which step times may rise; None: only the SLO limits them."""

    def __init__(self, slo: Slo, impact: float | None = None) -> None:
        self._slo_step_s = slo.limits()["tpot"]
        self._judges = bool(slo)
        self._impact = DEFAULT_IMPACT if impact is None and not self._judges else impact
        self.steps = StepTimes()
        self._recent_s = 0.0
        """Mean time of the latest steps."""
        self._verdicts: deque[tuple[float, bool]] = deque(maxlen=_JUDGED)
        self._scale = 1.0
        self._shrunk_at = self._looked_at = -math.inf
        self._peak = 0.0
        """The most online choices of the last moments: it halves every second."""
        self._last_online = self._grown_at = -math.inf
        self._seen_at = 0.0
        self._most = 0
        self._pressed = 0.0
        """Rows that steps beyond the limit have left."""
        self._pressed_until = -math.inf
        """Time at which steps with so few rows have been measured."""

    def on_steps(self, running: float, seconds: float, steps: int = 1) -> None:
        """Steps of the engine: their mean number of running requests, online and batch together, and their mean time."""
        if running > 0 and seconds > 0:
            self.steps.observe(running, seconds, steps)
            kept = _FORGET_RECENT**steps if self._recent_s else 0.0
            self._recent_s = kept * self._recent_s + (1 - kept) * seconds

    def on_requests(self, now: float, good: int, missed: int) -> None:
        """Online requests have ended: how many met their SLO, and how many did not."""
        self._verdicts += [(now, True)] * good + [(now, False)] * missed

    def allowed(self, load: Load) -> int:
        """Rows that may be in flight now. More than that are to be withdrawn."""
        self._peak = max(load.online, self._peak * 0.5 ** max(0.0, load.now - self._seen_at))
        self._seen_at = load.now
        if load.online:
            self._last_online = load.now
        elif load.now - self._last_online > IDLE_S:
            self._peak = 0.0
        self._judge(load)
        if not self._peak:
            return load.rows
        if load.now - self._grown_at >= _GROW_S:
            self._grown_at = load.now
            self._most = load.batch + max(_GROW_ROWS, load.batch // 4)
        room = max(0, load.rows - load.online)
        fitting = min(self._fitting(self._peak, room), self._most)
        if load.now < self._pressed_until:
            fitting = min(fitting, self._pressed)
        elif self._slo_step_s is not None and self._recent_s > MARGIN * self._slo_step_s:
            self._pressed = load.batch * MARGIN * self._slo_step_s / self._recent_s
            self._pressed_until = load.now + max(_SETTLE_STEPS * self._recent_s, _GROW_S)
            fitting = min(fitting, self._pressed)
        return max(0, min(room, math.floor(self._scale * fitting)))

    def _fitting(self, online: float, room: int) -> float:
        """Rows that keep the predicted step within the limits, beside so many online requests."""
        line = self.steps.line()
        if line is None:
            return 1.0
        base, slope = line
        limits = []
        if self._slo_step_s is not None:
            limits.append(MARGIN * self._slo_step_s)
        if self._impact is not None:
            limits.append((base + slope * online) * (1 + self._impact))
        if not limits or slope <= 0:
            return room
        return (min(limits) - base) / slope - online

    def _judge(self, load: Load) -> None:
        """Shrink if online requests miss the SLO beside rows, grow slowly otherwise."""
        now = load.now
        if not load.batch or not self._judges:
            self._verdicts.clear()  # what they miss now is not the lane's fault
        while self._verdicts and now - self._verdicts[0][0] > _JUDGED_S:
            self._verdicts.popleft()
        misses = sum(not good for _, good in self._verdicts)
        if misses > MISSES * max(_JUDGED, len(self._verdicts)):
            if now - self._shrunk_at >= _SETTLE_S:
                self._scale = max(_LEAST, self._scale * _SHRINK)
                self._shrunk_at = now
                self._verdicts.clear()
        elif self._looked_at > -math.inf:
            self._scale = min(1.0, self._scale + _GROW_PER_S * max(0.0, now - self._looked_at))
        self._looked_at = now
