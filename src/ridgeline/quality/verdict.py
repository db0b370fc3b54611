"""Whether a candidate is close enough: limits that the user sets, each held against what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import Drift

LIMITS: Mapping[str, tuple[str, Literal["most", "least"]]] = {
    "max_kl": ("kl", "most"),
    "max_kl_p99": ("kl_p99", "most"),
    "min_top1": ("top1", "least"),
    "max_perplexity": ("perplexity", "most"),
    "max_perplexity_change": ("perplexity_change", "most"),
}
"""Name of a limit -> the figure it bounds, and from which side."""


@dataclass(frozen=True, slots=True)
class Check:
    """One limit. passed: the measured value keeps it. certain: so does, or does not, the whole 95 % interval."""

    limit: str
    bound: float
    value: float
    passed: bool
    certain: bool


def judge(drift: Drift, limits: Mapping[str, float]) -> list[Check]:
    """A check per limit, in the order of LIMITS. Raises ConfigError for a limit that does not exist."""
    unknown = sorted(set(limits) - set(LIMITS))
    if unknown:
        raise ConfigError(f"there is no limit {unknown[0]!r}: {', '.join(LIMITS)}.")
    checks = []
    for name, (figure, side) in LIMITS.items():
        if name not in limits:
            continue
        bound, found = limits[name], drift.figures[figure]

        def keeps(value: float, bound: float = bound, side: str = side) -> bool:
            return value <= bound if side == "most" else value >= bound

        passed = keeps(found.value)
        ends = [one for one in (found.low, found.high) if one is not None]
        checks.append(Check(name, bound, found.value, passed, bool(ends) and all(keeps(e) == passed for e in ends)))
    return checks


def report(reference: str, candidate: str, top: int, drift: Drift, checks: Sequence[Check]) -> dict[str, Any]:
    """A comparison as plain data for JSON. top: alternatives per token that the divergence knows; 0: all of them."""
    return {
        "reference": reference,
        "candidate": candidate,
        "tokens": drift.tokens,
        "documents": drift.documents,
        "alternatives": top,
        "figures": {name: asdict(one) for name, one in drift.figures.items()},
        "checks": [asdict(one) for one in checks],
        "passed": all(one.passed for one in checks),
    }
