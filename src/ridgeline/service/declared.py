"""Latency limits of one request, in headers: `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms`.

They take precedence over the server's limits (`--slo`) in that request's verdict, its blame and goodput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ridgeline.core.errors import RequestError
from ridgeline.core.slo import NAMES, Slo

_PREFIX = "x-slo-"
HEADERS = {f"{_PREFIX}{name}-ms": name for name in NAMES}
"""Header -> name of the limit."""


def read_declared(headers: Iterable[tuple[str, str]]) -> tuple[Slo, tuple[str, ...]]:
    """The limits of one request, and the names of unknown x-slo- headers.

    Raises RequestError naming a header that is not a positive number of milliseconds, or is sent twice.
    """
    limits: dict[str, float] = {}
    unknown: list[str] = []
    for header, value in headers:
        name = header.lower()
        if not name.startswith(_PREFIX):
            continue
        if name not in HEADERS:
            unknown.append(name)
        elif HEADERS[name] in limits:
            raise RequestError(f"{name} is given twice: send it once.", param=name)
        else:
            limits[HEADERS[name]] = _seconds(name, value)
    ttft_s, tpot_s, e2e_s = (limits.get(name) for name in NAMES)
    return Slo(ttft_s, tpot_s, e2e_s), tuple(unknown)


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
