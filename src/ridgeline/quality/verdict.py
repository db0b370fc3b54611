"""Whether a candidate is close enough: limits that the user sets, each held against what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import Drift, Estimate
from ridgeline.quality.tasks import Tally

LIMITS: Mapping[str, tuple[str, Literal["most", "least"]]] = {
    "max_kl": ("kl", "most"),
    "max_kl_p99": ("kl_p99", "most"),
    "min_top1": ("top1", "least"),
    "max_perplexity": ("perplexity", "most"),
    "max_perplexity_change": ("perplexity_change", "most"),
    "min_task_accuracy": ("task_accuracy", "least"),
    "max_task_drop": ("task_drop", "most"),
}
"""Name of a limit -> the figure it bounds, and from which side."""
_SHARES = {
    "min_top1": (0, 1),
    "min_task_accuracy": (0, 1),
    "max_task_drop": (-1, 1),
    "max_perplexity_change": (-1, float("inf")),
}
"""What a share, or a change of one, can be; all other figures are 0 or more."""


@dataclass(frozen=True, slots=True)
class Check:
    """One limit. passed: the measured value keeps it. certain: so does, or does not, the whole 95 % interval."""

    limit: str
    bound: float
    value: float
    passed: bool
    certain: bool


def check_limits(limits: Mapping[str, float], *, texts: bool, tasks: bool, drop: bool) -> None:
    """Raises ConfigError for a limit that nothing would be held against. texts: drift is measured; tasks: questions are
    asked; drop: of the reference too."""
    for name, bound in limits.items():
        figure, flag = LIMITS[name][0], f"--{name.replace('_', '-')}"
        low, high = _SHARES.get(name, (0, float("inf")))
        if not low <= bound <= high:
            allowed = f"of {low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
            unit = " (a share, not a percentage)" if name in _SHARES else ""
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
    """A check per limit, in the order of LIMITS. Raises ConfigError for a limit that does not exist."""
    unknown = sorted(set(limits) - set(LIMITS))
    if unknown:
        raise ConfigError(f"Unknown limit {unknown[0]!r}. Limits are {', '.join(LIMITS)}.")
    checks = []
    for name, (figure, side) in LIMITS.items():
        if name not in limits:
            continue
        bound, found = limits[name], figures[figure]

        def keeps(value: float, bound: float = bound, side: str = side) -> bool:
            return value <= bound if side == "most" else value >= bound

        passed = keeps(found.value)
        ends = [one for one in (found.low, found.high) if one is not None]
        checks.append(Check(name, bound, found.value, passed, bool(ends) and all(keeps(e) == passed for e in ends)))
    return checks


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured between two models. drift: None without texts; tasks: None without questions.

    top: alternatives per token that the divergence knows; 0: all of them.
    """

    reference: str
    candidate: str
    top: int
    drift: Drift | None
    tasks: Tally | None

    @property
    def figures(self) -> dict[str, Estimate]:
        """All of them, by name."""
        drift = self.drift.figures if self.drift is not None else {}
        return {**drift, **(self.tasks.figures if self.tasks is not None else {})}


def report(found: Found, checks: Sequence[Check]) -> dict[str, Any]:
    """A comparison as plain data for JSON."""
    drift, tasks = found.drift, found.tasks
    told: dict[str, Any] = {"reference": found.reference, "candidate": found.candidate}
    if drift is not None:
        told |= {"tokens": drift.tokens, "documents": drift.documents, "alternatives": found.top}
    if tasks is not None:
        told |= {"questions": tasks.asked, "tasks": told_tasks(tasks)}
    return told | {
        "figures": {name: _plain(one) for name, one in found.figures.items()},
        "checks": [_plain(one) for one in checks],
        "passed": all(one.passed for one in checks),
    }


def _plain(one: Estimate | Check) -> dict[str, Any]:
    """As JSON has it, which knows no NaN: what a broken model says is null."""
    values = asdict(one).items()
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}


def told_tasks(tasks: Tally) -> dict[str, Any]:
    """Right answers by task, as plain data."""
    return {
        name: {"asked": asked, "right_reference": before, "right": after}
        for name, (asked, before, after) in tasks.by_task.items()
    }
