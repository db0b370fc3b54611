"""Service level objectives: limits on a request's latency, the verdict on one request, and that on a window of them.

The server's live goodput and the load generator judge by this one value. A request is good when it has no error and
misses no limit; the share of good ones is taken over all that were offered.

A client's disconnect is no error of the server. Such a request is judged by what happened until then: it is a miss when a
limit had already been missed (so that clients who give up on a slow server count), and otherwise it is left out of the
share, since nobody knows how it would have ended. The load generator is the client itself: it never leaves but at its
own timeout, and counts that as an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.core.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")
"""Limits in the order of being judged: time to first token, time per output token after it, end to end."""
ATTAIN = "attain"

_ALIASES = {
    "e2el": "e2e",
    "time_to_first_token": "ttft",
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
    "give ttft=200ms,tpot=100ms,e2e=5s (any of the three; a number without unit is milliseconds), or for all requests of a "
    "window p95(ttft)<=200ms or attain>=0.95"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """Of all requests a share must take at most limit_s: p95(ttft)<=200ms has the share 0.95."""

    name: str
    share: float
    limit_s: float

    def __str__(self) -> str:
        return f"p{self.share * 100:.6g}({self.name})<={self.limit_s * 1e3:g}ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that each good request meets; None where there is no limit. A name that has objectives and no limit
    of its own has the loosest of theirs.

    objectives: what percentiles over a window must be. attain: share of all offered requests that must be good.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    objectives: tuple[Objective, ...] = ()
    attain: float | None = None

    def __bool__(self) -> bool:
        return self.of_windows or any(limit is not None for limit in self.limits().values())

    @staticmethod
    def parse(text: str) -> Slo:
        """Read `ttft=200ms,tpot=100ms,e2e=5s`, vLLM's `ttft:200 tpot:50 e2el:5000`, or objectives of a window as in
        `p95(ttft)<=500ms & p99(tpot)<=50ms & attain>=0.95`, joined by commas, spaces or &. Empty text has no limit.

        Raises ConfigError that names the field and the remedy.
        """
        found: dict[str, float] = {}
        objectives: list[Objective] = []
        for part in re.split(r"[,&\s]+", _SIGN.sub(r"\1", text.strip())):
            if not part:
                continue
            name, sign, value = _PART.fullmatch(part).groups()  # type: ignore[union-attr]
            name = _ALIASES.get(name.lower(), name.lower())
            if percentile := _PERCENTILE.fullmatch(name):
                objective = _objective(part, sign, percentile, value)
                if (objective.name, objective.share) in [(one.name, one.share) for one in objectives]:
                    raise ConfigError(f"--slo gives {name} twice in {text!r}: keep one.", param="slo")
                objectives.append(objective)
                continue
            if name not in (*NAMES, ATTAIN) or sign not in (("=", ":", ">=") if name == ATTAIN else ("=", ":", "<=")):
                raise ConfigError(f"--slo {part!r} is not a known limit: {_REMEDY}.", param="slo")
            if name in found:
                raise ConfigError(f"--slo gives {name} twice in {text!r}: keep one.", param="slo")
            found[name] = _share(value) if name == ATTAIN else _seconds(name, value)
        ttft_s, tpot_s, e2e_s = (found.get(name) for name in NAMES)
        return Slo(ttft_s, tpot_s, e2e_s, tuple(objectives), found.get(ATTAIN))

    @property
    def of_windows(self) -> bool:
        """Whether it says what must hold over many requests: percentiles, or a share."""
        return bool(self.objectives) or self.attain is not None

    def limits(self) -> dict[str, float | None]:
        """Limit of a good request in seconds by name, in the order of being judged."""
        found = dict(zip(NAMES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True))
        for name, limit in found.items():
            if limit is None:
                found[name] = max((one.limit_s for one in self.objectives if one.name == name), default=None)
        return found

    def under(self, own: Slo) -> Slo:
        """These limits, but those of `own` where it has some: what one request declares goes before what all must meet."""
        if own == NO_SLO:
            return self
        ttft_s, tpot_s, e2e_s = own.limits().values()
        return replace(self, ttft_s=ttft_s or self.ttft_s, tpot_s=tpot_s or self.tpot_s, e2e_s=e2e_s or self.e2e_s)

    def verdict(self, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> str:
        """ "" if every limit is met, else the first missed one with both numbers, as in "ttft 312 ms > 200 ms".

        A time that is None was never reached and misses its limit; only TPOT may be None without harm, because an
        answer of one token has none.
        """
        measured = (ttft_s, tpot_s, e2e_s)
        for (name, limit), value in zip(self.limits().items(), measured, strict=True):
            if limit is None or (value is None and name == "tpot"):
                continue
            if value is None or math.isnan(value):
                return f"{name} never reached (limit {_words(limit)})"
            if value > limit:
                return f"{name} {_words(value)} > {_words(limit)}"
        return ""

    def within(self, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> tuple[bool, ...]:
        """For each objective whether a request stays within its limit; see `verdict` for a time that is None."""
        measured = dict(zip(NAMES, (ttft_s, tpot_s, e2e_s), strict=True))
        found = []
        for one in self.objectives:
            value = measured[one.name]
            found.append(one.name == "tpot" if value is None else value <= one.limit_s)
        return tuple(found)

    def broken(self, shares: Sequence[float], attained: float) -> tuple[str, ...]:
        """What a window misses, with both numbers. shares: of all offered requests those `within` each objective (failed
        ones are not). attained: share of good ones."""
        found = [
            f"{one}: a share of {share:.4g} of requests meets the limit; {one.share:.6g} is required"
            for one, share in zip(self.objectives, shares, strict=True)
            if share < one.share
        ]
        if self.attain is not None and attained < self.attain:
            found.append(f"attain>={self.attain:g}: a share of {attained:.4g} of requests is good")
        return tuple(found)

    def __str__(self) -> str:
        """The text that `parse` reads back; empty without a limit."""
        own = zip(NAMES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True)
        parts = [f"{name}={limit * 1e3:g}ms" for name, limit in own if limit is not None]
        parts += [str(one) for one in self.objectives]
        return ",".join([*parts, f"attain>={self.attain:g}"] if self.attain is not None else parts)


NO_SLO = Slo()


def _objective(part: str, sign: str, percentile: re.Match[str], value: str) -> Objective:
    name, share = _ALIASES.get(percentile[2], percentile[2]), round(float(percentile[1]) / 100, 9)
    if name not in NAMES or not 0 < share < 1 or sign not in ("=", ":", "<="):
        raise ConfigError(f"--slo {part!r} is not a percentile of ttft, tpot or e2e: {_REMEDY}.", param="slo")
    return Objective(name, share, _seconds(name, value))


def _seconds(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not (0 < seconds < math.inf):
        raise ConfigError(f"--slo {name} is {text!r}, not a positive duration: {_REMEDY}.", param="slo")
    return seconds


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--slo attain is {text!r}, not a share above 0 and at most 1: {_REMEDY}.", param="slo")
    return share


def _words(seconds: float) -> str:
    """Six digits, so that a value just above its limit does not read as equal to it."""
    return f"{seconds * 1e3:.6g} ms" if seconds < 10 else f"{seconds:.6g} s"
