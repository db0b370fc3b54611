"""Service level objectives: limits on a request's latency, and the verdict on one request or on a window of requests.

The server's goodput and the load generator use the same rules. A request is good when it has no error and misses no limit.
The share of good requests is taken over all offered requests.

A client's disconnect is not an error of the server. If the request had missed a limit before the disconnect, it is a miss, so
that clients who give up on a slow server count. Otherwise it is left out of the share, because its outcome is unknown. The
load generator is itself the client: it disconnects only at its own timeout, and counts that as an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.errors import ConfigError


class Latencies(NamedTuple):
    """Latencies of one request in seconds, in the order of their checks. None: the request never reached it."""

    ttft: float | None
    """Time to first token."""
    publish: float | None
    """Time to publish: until the first content that the user sees (docs/measures.md)."""
    tpot: float | None
    """Time per output token after the first."""
    e2e: float | None
    """End to end."""


NAMES = Latencies._fields
ATTAIN = "attain"

_ALIASES = {
    "e2el": "e2e",
    "time_to_first_token": "ttft",
    "time_to_publish": "publish",
    "time_to_first_output_token": "publish",
    "time_per_output_token": "tpot",
    "request_latency": "e2e",
}
_UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0, "us": 1e-6}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(ms|us|s|)")
_SIGN = re.compile(r"\s*(<=|>=|[=:<>])\s*")
_PART = re.compile(r"([^=:<>]*)(<=|>=|=|:|)(.*)")
_PERCENTILE = re.compile(r"p([0-9]+(?:\.[0-9]+)?)\((\w+)\)")
_SHARE = re.compile(r"([0-9]*\.?[0-9]+)(%|)")
_REMEDY = (
    "give ttft=200ms,publish=2s,tpot=100ms,e2e=5s (any of them; a number without unit is milliseconds), or for all requests "
    "of a window p95(ttft)<=200ms or attain>=0.95"
)


class Deadline(NamedTuple):
    """Limits that a scheduler keeps for a request, in seconds; infinite: there is none."""

    ttft_s: float = math.inf
    """Until the first token."""
    tpot_s: float = math.inf
    """Per token after it."""


NO_DEADLINE = Deadline()


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of all requests must take at most limit_s: p95(ttft)<=200ms has the share 0.95."""

    name: str
    share: float
    limit_s: float

    def __str__(self) -> str:
        return f"p{self.share * 100:.6g}({self.name})<={self.limit_s * 1e3:g}ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits in seconds that each good request meets; None: no limit.

    A name without a limit that has objectives uses the loosest of their limits. objectives: percentiles over a window. attain:
    required share of good requests among all offered ones.
    """

    ttft_s: float | None = None
    publish_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    objectives: tuple[Objective, ...] = ()
    attain: float | None = None

    def __bool__(self) -> bool:
        return self.of_windows or any(limit is not None for limit in self.limits().values())

    @staticmethod
    def parse(text: str) -> Slo:
        """Read `ttft=200ms,tpot=100ms,e2e=5s`, vLLM's `ttft:200 tpot:50 e2el:5000`, or objectives of a window as in
        `p95(ttft)<=500ms & p99(tpot)<=50ms & attain>=0.95`, separated by commas, spaces or &. Empty text means no limits.

        Raises ConfigError that names the field and the remedy.
        """
        limits: dict[str, float] = {}
        objectives: list[Objective] = []
        for part in re.split(r"[,&\s]+", _SIGN.sub(r"\1", text.strip())):
            if not part:
                continue
            name, sign, value = _PART.fullmatch(part).groups()  # type: ignore[union-attr]
            name = _ALIASES.get(name.lower(), name.lower())
            if percentile := _PERCENTILE.fullmatch(name):
                objective = _objective(part, sign, percentile, value)
                if (objective.name, objective.share) in [(known.name, known.share) for known in objectives]:
                    raise ConfigError(f"--slo gives {name} twice in {text!r}: keep one.", param="slo")
                objectives.append(objective)
                continue
            if name not in (*NAMES, ATTAIN) or sign not in (("=", ":", ">=") if name == ATTAIN else ("=", ":", "<=")):
                raise ConfigError(f"--slo {part!r} is not a known limit: {_REMEDY}.", param="slo")
            if name in limits:
                raise ConfigError(f"--slo gives {name} twice in {text!r}: keep one.", param="slo")
            limits[name] = _share(value) if name == ATTAIN else _seconds(name, value)
        attain = limits.pop(ATTAIN, None)
        return replace(Slo.of(limits), objectives=tuple(objectives), attain=attain)

    @staticmethod
    def of(limits: Mapping[str, float]) -> Slo:
        """Build from limits in seconds by name. A name that is missing has no limit."""
        return Slo(**{f"{name}_s": limit for name, limit in limits.items()})  # type: ignore[arg-type]

    @property
    def _declared(self) -> dict[str, float | None]:
        """Limits in seconds by name, in the order of their checks, without those of objectives."""
        return {name: getattr(self, f"{name}_s") for name in NAMES}

    @property
    def of_windows(self) -> bool:
        """Whether it has requirements on a window of requests: percentiles, or a share of good requests."""
        return bool(self.objectives) or self.attain is not None

    def limits(self) -> dict[str, float | None]:
        """Limits of a good request in seconds by name, in the order of their checks."""
        limits = self._declared
        for name, limit in limits.items():
            if limit is None:
                limits[name] = max(
                    (objective.limit_s for objective in self.objectives if objective.name == name), default=None
                )
        return limits

    @property
    def deadline(self) -> Deadline:
        """What a scheduler can keep of it."""
        limits = self.limits()
        return Deadline(*(math.inf if (limit := limits[name]) is None else limit for name in ("ttft", "tpot")))

    def under(self, request_slo: Slo) -> Slo:
        """These limits, replaced by those of `request_slo` where it has some: a request's own limits take precedence."""
        if request_slo == NO_SLO:
            return self
        limits = {f"{name}_s": limit for name, limit in request_slo.limits().items() if limit is not None}
        return replace(self, **limits)  # type: ignore[arg-type]

    def verdict(self, latencies: Latencies) -> str:
        """ "" if every limit is met, else the first missed one with both numbers, as in "ttft 312 ms > 200 ms".

        A time that is None was never reached and misses its limit. TPOT is the exception: an answer of one token has none.
        """
        for (name, limit), value in zip(self.limits().items(), latencies, strict=True):
            if limit is None or (value is None and name == "tpot"):
                continue
            if value is None or math.isnan(value):
                return f"{name} never reached (limit {_text(limit)})"
            if value > limit:
                return f"{name} {_text(value)} > {_text(limit)}"
        return ""

    def within(self, latencies: Latencies) -> tuple[bool, ...]:
        """For each objective, whether a request meets its limit. See `verdict` for times that are None."""
        verdicts = []
        for objective in self.objectives:
            value = getattr(latencies, objective.name)
            verdicts.append(objective.name == "tpot" if value is None else value <= objective.limit_s)
        return tuple(verdicts)

    def broken(self, shares: Sequence[float], attained: float) -> tuple[str, ...]:
        """The requirements that a window misses, with both numbers.

        shares: for each objective, the share of offered requests that meet its limit (failed requests do not). attained: share of
        good requests.
        """
        misses = [
            f"{objective}: a share of {share:.4g} of requests meets the limit; {objective.share:.6g} is required"
            for objective, share in zip(self.objectives, shares, strict=True)
            if share < objective.share
        ]
        if self.attain is not None and attained < self.attain:
            misses.append(f"attain>={self.attain:g}: a share of {attained:.4g} of requests is good")
        return tuple(misses)

    def __str__(self) -> str:
        """Text that `parse` reads back; empty without limits."""
        parts = [f"{name}={limit * 1e3:g}ms" for name, limit in self._declared.items() if limit is not None]
        parts += [str(objective) for objective in self.objectives]
        return ",".join([*parts, f"attain>={self.attain:g}"] if self.attain is not None else parts)


NO_SLO = Slo()


def _objective(part: str, sign: str, percentile: re.Match[str], value: str) -> Objective:
    name, share = _ALIASES.get(percentile[2], percentile[2]), round(float(percentile[1]) / 100, 9)
    if name not in NAMES or not 0 < share < 1 or sign not in ("=", ":", "<="):
        raise ConfigError(f"--slo {part!r} is not a percentile of ttft, publish, tpot or e2e: {_REMEDY}.", param="slo")
    return Objective(name, share, _seconds(name, value))


def reader_pace(text: str) -> float:
    """Seconds per token of the option `reader_pace`. 0: it is off. Raises ConfigError."""
    seconds = _duration(text)
    if text and not seconds:
        raise ConfigError(
            f"--reader-pace is {text!r}, not a positive duration: give the time in which a person reads a token, as in 120ms, or "
            "leave the option out.",
            param="reader_pace",
        )
    return seconds


def _seconds(name: str, text: str) -> float:
    seconds = _duration(text)
    if not seconds:
        raise ConfigError(f"--slo {name} is {text!r}, not a positive duration: {_REMEDY}.", param="slo")
    return seconds


def _duration(text: str) -> float:
    """Seconds of a positive duration (200ms, 2s; without unit: milliseconds). 0 for any other text."""
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    return seconds if seconds < math.inf else 0.0


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--slo attain is {text!r}, not a share above 0 and at most 1: {_REMEDY}.", param="slo")
    return share


def _text(seconds: float) -> str:
    """Six digits, so that a value just above its limit does not print as equal to it."""
    return f"{seconds * 1e3:.6g} ms" if seconds < 10 else f"{seconds:.6g} s"
