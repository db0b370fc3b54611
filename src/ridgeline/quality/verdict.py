"""The verdict on a candidate: the user's limits, checked against the measured figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import Drift, Estimate
from ridgeline.quality.tasks import Tally

LIMITS: Mapping[str, tuple[str, Literal["max", "min"]]] = {
    "max_kl": ("kl", "max"),
    "max_kl_p99": ("kl_p99", "max"),
    "min_top1": ("top1", "min"),
    "max_perplexity": ("perplexity", "max"),
    "max_perplexity_change": ("perplexity_change", "max"),
    "min_task_accuracy": ("task_accuracy", "min"),
    "max_task_drop": ("task_drop", "max"),
}
"""Name of a limit -> the figure it bounds, and whether the bound is a maximum or a minimum."""
UNITS: Mapping[str, str] = {
    "kl": "mean KL divergence in nats per token",
    "kl_p99": "99th percentile of the KL divergence in nats",
    "top1": "share of tokens with the same most probable token, 0 to 1",
    "perplexity": "of the candidate",
    "perplexity_change": "relative change of the perplexity, 0.01 is one percent",
    "task_accuracy": "share of questions answered correctly, 0 to 1",
    "task_drop": "lost share of questions answered correctly, 0 to 1",
}
"""Figure -> its meaning and unit, for the command line."""
_RANGES = {
    "min_top1": (0, 1),
    "min_task_accuracy": (0, 1),
    "max_task_drop": (-1, 1),
    "max_perplexity_change": (-1, float("inf")),
}
"""Possible range of a limit. All other limits are 0 or more."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one limit."""

    limit: str
    bound: float
    value: float
    passed: bool
    """Whether the value is within the bound."""
    certain: bool
    """Whether both ends of the 95 % interval give the same result as the value."""


def check_limits(limits: Mapping[str, float], *, texts: bool, tasks: bool, drop: bool) -> None:
    """Raise ConfigError for a limit out of range or without a measurement.

    Args:
        texts: drift is measured.
        tasks: the candidate answers questions.
        drop: the reference answers the questions too.
    """
    for name, bound in limits.items():
        figure, flag = LIMITS[name][0], f"--{name.replace('_', '-')}"
        low, high = _RANGES.get(name, (0, float("inf")))
        if not low <= bound <= high:
            allowed = f"of {low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
            unit = " (a share, not a percentage)" if name in _RANGES else ""
            raise ConfigError(f"{flag} is {bound:g}: give a value {allowed}{unit}.", param=name)
        if not figure.startswith("task") and not texts:
            raise ConfigError(f"{flag} needs texts: give --text FILE.", param=name)
        if figure.startswith("task") and not tasks:
            raise ConfigError(f"{flag} needs questions: give --tasks FILE.", param=name)
        if figure == "task_drop" and not drop:
            raise ConfigError(
                f"{flag} needs a reference that answers questions: give a model or a server, not a file.", param=name
            )


def judge(figures: Mapping[str, Estimate], limits: Mapping[str, float]) -> list[Check]:
    """Check each limit, in the order of LIMITS. Raises ConfigError for an unknown limit."""
    unknown = sorted(set(limits) - set(LIMITS))
    if unknown:
        raise ConfigError(f"Unknown limit {unknown[0]!r}. Limits are {', '.join(LIMITS)}.")
    checks = []
    for name, (figure, side) in LIMITS.items():
        if name not in limits:
            continue
        bound, estimate = limits[name], figures[figure]

        def holds(value: float, bound: float = bound, side: str = side) -> bool:
            return value <= bound if side == "max" else value >= bound

        passed = holds(estimate.value)
        interval = [end for end in (estimate.low, estimate.high) if end is not None]
        checks.append(
            Check(name, bound, estimate.value, passed, bool(interval) and all(holds(end) == passed for end in interval))
        )
    return checks


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measurements of a candidate against a reference."""

    reference: str
    candidate: str
    top: int
    """Alternatives per token that the divergence uses. 0: the whole vocabulary."""
    drift: Drift | None
    """None without texts."""
    tasks: Tally | None
    """None without questions."""

    @property
    def figures(self) -> dict[str, Estimate]:
        """All figures by name."""
        drift = self.drift.figures if self.drift is not None else {}
        return {**drift, **(self.tasks.figures if self.tasks is not None else {})}


def report(comparison: Comparison, checks: Sequence[Check]) -> dict[str, Any]:
    """Convert a comparison to JSON data."""
    drift, tasks = comparison.drift, comparison.tasks
    data: dict[str, Any] = {"reference": comparison.reference, "candidate": comparison.candidate}
    if drift is not None:
        data |= {"tokens": drift.tokens, "documents": drift.documents, "alternatives": comparison.top}
    if tasks is not None:
        data |= {"questions": tasks.questions, "tasks": task_counts(tasks)}
    return data | {
        "figures": {name: _json_values(estimate) for name, estimate in comparison.figures.items()},
        "checks": [_json_values(check) for check in checks],
        "passed": all(check.passed for check in checks),
    }


def _json_values(record: Estimate | Check) -> dict[str, Any]:
    """Convert a record to JSON data. NaN and infinity become null, because JSON cannot represent them."""
    values = asdict(record).items()
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}


def task_counts(tasks: Tally) -> dict[str, Any]:
    """Return the counts by task as JSON data."""
    return {
        name: {"asked": questions, "right_reference": reference_correct, "right": correct}
        for name, (questions, reference_correct, correct) in tasks.by_task.items()
    }
