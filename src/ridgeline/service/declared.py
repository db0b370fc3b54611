"""What a request declares in headers: latency limits, and the agent run that it belongs to.

`x-slo-ttft-ms`, `x-slo-publish-ms`, `x-slo-tpot-ms` and `x-slo-e2e-ms` take precedence over the server's limits (`--slo`) in that
request's verdict, its blame and goodput. Requests with the same `x-run-id` are calls of one run (`metrics.agent_runs`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from ridgeline.core.errors import RequestError
from ridgeline.core.slo import NAMES, Slo

_PREFIX = "x-slo-"
HEADERS = {f"{_PREFIX}{name}-ms": name for name in NAMES}
"""Header -> name of the limit."""
RUN_ID = "x-run-id"
RUN_ID_LENGTH = 128
_RUN_ID = re.compile(rf"[\x21-\x7e]{{1,{RUN_ID_LENGTH}}}")


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
    return Slo.of(limits), tuple(unknown)


def read_run_id(values: Sequence[str]) -> str:
    """The agent run of one request, "" without one. values: those of the header x-run-id.

    Raises RequestError for more than one value, and for one that is not RUN_ID_LENGTH printable ASCII characters or fewer.
    """
    if len(values) > 1:
        raise RequestError(f"{RUN_ID} is given twice: send it once.", param=RUN_ID)
    if values and not _RUN_ID.fullmatch(values[0]):
        raise RequestError(
            f"{RUN_ID} is {values[0][:40]!r}: send 1 to {RUN_ID_LENGTH} printable ASCII characters without spaces.",
            param=RUN_ID,
        )
    return values[0] if values else ""


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
