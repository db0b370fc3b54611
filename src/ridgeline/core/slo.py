"""Service level objectives: limits on a request's latency, and the verdict on one request.

The server's live goodput and the load generator judge by this one value. A request is good when it has no error and
misses no limit; the share of good ones is taken over all that were offered.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")
"""Limits in the order of being judged: time to first token, time per output token after it, end to end."""

_ALIASES = {
    "e2el": "e2e",
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "request_latency": "e2e",
}
_UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0, "us": 1e-6}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(ms|us|s|)")
_REMEDY = "write ttft=200ms,tpot=100ms,e2e=5s (any of the three; a bare number is milliseconds)"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None where there is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.limits().values())

    @staticmethod
    def parse(text: str) -> Slo:
        """Read `ttft=200ms,tpot=100ms,e2e=5s`, or vLLM's `ttft:200 tpot:50 e2el:5000`. Empty text has no limit.

        Raises ConfigError that names the field and the remedy.
        """
        found: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, sign, value = re.match(r"([^=:<]*)(=|:|<=|)(.*)", part).groups()  # type: ignore[union-attr]
            name = _ALIASES.get(name.lower(), name.lower())
            if not sign or name not in NAMES:
                raise ConfigError(f"slo {part!r} names no limit we know: {_REMEDY}.", param="slo")
            if name in found:
                raise ConfigError(f"slo gives {name} twice in {text!r}: keep one.", param="slo")
            found[name] = _seconds(name, value)
        return Slo(found.get("ttft"), found.get("tpot"), found.get("e2e"))

    def limits(self) -> dict[str, float | None]:
        """Limit in seconds by name, in the order of being judged."""
        return dict(zip(NAMES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True))

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

    def __str__(self) -> str:
        """The text that `parse` reads back; empty without a limit."""
        return ",".join(f"{name}={limit * 1e3:g}ms" for name, limit in self.limits().items() if limit is not None)


def _seconds(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not (0 < seconds < math.inf):
        raise ConfigError(f"slo {name} is {text!r}, which is no positive duration: {_REMEDY}.", param="slo")
    return seconds


def _words(seconds: float) -> str:
    """Six digits, so that a value just above its limit does not read as equal to it."""
    return f"{seconds * 1e3:.6g} ms" if seconds < 10 else f"{seconds:.6g} s"
