"""Limits that a caller declares for one request, in headers: `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms`.

They go before the server's own (`--slo`) where that request is judged: its verdict, its blame, goodput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ridgeline.core.errors import RequestError
from ridgeline.core.slo import NAMES, Slo

_PREFIX = "x-slo-"
HEADERS = {f"{_PREFIX}{name}-ms": name for name in NAMES}
"""Header -> limit."""


def read_declared(headers: Iterable[tuple[str, str]]) -> tuple[Slo, tuple[str, ...]]:
    """The limits of one request, and the names of x-slo- headers that nobody knows. Raises RequestError naming the header
    for one that is no positive number of milliseconds, or stands twice."""
    found: dict[str, float] = {}
    strange: list[str] = []
    for given, value in headers:
        name = given.lower()
        if not name.startswith(_PREFIX):
            continue
        if name not in HEADERS:
            strange.append(name)
        elif HEADERS[name] in found:
            raise RequestError(f"{name} is given twice: send it once.", param=name)
        else:
            found[HEADERS[name]] = _seconds(name, value)
    ttft_s, tpot_s, e2e_s = (found.get(name) for name in NAMES)
    return Slo(ttft_s, tpot_s, e2e_s), tuple(strange)


def _seconds(name: str, value: str) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise RequestError(
            f"{name} is {value[:40]!r}: expected a positive number of milliseconds, as in 200.", param=name
        )
    return milliseconds / 1e3
