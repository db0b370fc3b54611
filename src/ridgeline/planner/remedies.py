"""What each technique would gain on the recorded workload of a server.

Remedies are the changes that the registry of techniques proposes. The gain of each is predicted by a simulation of the workload
with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Risk
from ridgeline.planner.diagnose import Bottleneck
from ridgeline.planner.simulate import Figures, simulate
from ridgeline.planner.situation import Situation
from ridgeline.planner.techniques import TECHNIQUES, Change, Effort, Technique

OBJECTIVES: Mapping[str, tuple[str, Callable[[Figures], float]]] = {
    "e2e": ("mean time of a request", lambda figures: figures.e2e_s),
    "ttft": ("median time to first token", lambda figures: figures.ttft_s),
    "tpot": ("median time per output token", lambda figures: figures.tpot_s),
    "stall": ("longest wait between two tokens (p99)", lambda figures: figures.stall_s),
    "throughput": ("time per output token of all requests together", lambda figures: 1 / figures.tokens_s),
    "cost": ("device time per output token", lambda figures: figures.device_s),
}
"""What a remedy shall reduce: name -> (words, its value)."""
RISK_WORTH = {Risk.NONE: 1.0, Risk.MINIMAL: 1.02, Risk.SMALL: 1.1, Risk.MEDIUM: 1.5, Risk.LARGE: 3.0}
"""How many times better than a remedy without risk a remedy must be to rank equal. A preference, not a measurement."""
LEAST_GAIN = 0.02
"""Smallest predicted gain of a remedy."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with its prediction.

    gain: share of the objective that it removes; NaN: unknown. figures: predicted; None: unknown.
    """

    technique: Technique
    change: Change
    gain: float = math.nan
    figures: Figures | None = None

    @property
    def name(self) -> str:
        return f"{self.technique.name}: {self.change.detail}"

    @property
    def rank(self) -> tuple[Effort, float]:
        """Lower is better. What a restart does comes first."""
        return self.technique.effort, (1 - self.gain) * RISK_WORTH[self.change.risk]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What can be gained.

    objective: a key of OBJECTIVES. recorded, simulated: figures of the workload on the server as it is. remedies: by rank. unknown:
    remedies whose gain the record does not determine. useless: names of changes that gain less than LEAST_GAIN, or that the
    workload does not fit.
    """

    objective: str
    recorded: Figures
    simulated: Figures
    remedies: tuple[Remedy, ...]
    unknown: tuple[Remedy, ...]
    useless: tuple[str, ...]

    @property
    def offered(self) -> tuple[Remedy, ...]:
        """All remedies in the order of their numbers."""
        return (*self.remedies, *self.unknown)


def predict(situation: Situation, objective: str) -> Outlook:
    """Predict what each technique gains. objective: a key of OBJECTIVES. Raises ConfigError if the workload cannot be simulated."""
    now = simulate(situation.server, situation.workload, situation.concurrency)
    remedies = list(_remedies(situation, now, OBJECTIVES[objective][1]))
    useful = [remedy for remedy in remedies if remedy.gain >= LEAST_GAIN]
    return Outlook(
        objective=objective,
        recorded=situation.recorded,
        simulated=now,
        remedies=tuple(sorted(useful, key=lambda remedy: remedy.rank)),
        unknown=tuple(remedy for remedy in remedies if remedy.change.unknown),
        useless=tuple(
            remedy.name for remedy in remedies if not remedy.change.unknown and not remedy.gain >= LEAST_GAIN
        ),
    )


def objective_of(bottleneck: Bottleneck) -> str:
    """The objective that shows a bottleneck."""
    return "stall" if bottleneck == "prompts delay decoding" else "e2e"


def _remedies(situation: Situation, now: Figures, value: Callable[[Figures], float]) -> Iterator[Remedy]:
    """Every change that the techniques propose and that the server would start with, with its prediction."""
    for technique in TECHNIQUES:
        for change in filter(lambda change: change.after.starts(), technique.propose(situation)):
            figures = None if change.unknown else _predict(change.after)
            gain = math.nan if figures is None else 1 - value(figures) / value(now)
            yield Remedy(technique, change, gain, figures)


def _predict(situation: Situation) -> Figures | None:
    """Simulated figures; None if the workload does not fit."""
    try:
        return simulate(situation.server, situation.workload, situation.concurrency)
    except ConfigError:
        return None
