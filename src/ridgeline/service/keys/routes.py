"""The route /v1/usage."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from ridgeline.core.errors import NotFound
from ridgeline.service.guard import FRONT, HOLDER
from ridgeline.service.keys.limits import period_start
from ridgeline.service.keys.usage import UsageLedger, Used
from ridgeline.service.readers import wrong
from ridgeline.service.routes import json_response

ROUTES = web.RouteTableDef()
STEPS = ("hour", "day", "month", "total")
"""Values of `by`."""
DAYS = 30
"""Days of an answer without `since`."""
MAX_ROWS = 50_000


@ROUTES.get("/v1/usage")
async def usage(request: web.Request) -> web.Response:
    """What API keys have used: a key sees its own use, and the key of operators that of all.

    Each row has the sums of the requests that ended in one hour, day or month (UTC), or of all of them.
    """
    front, holder = request.app[FRONT], request[HOLDER]
    if front.keys.usage is None:
        raise NotFound("This server does not count the use of API keys: start it with --api-keys FILE.")
    query, now = request.query, time.time()
    by = query.get("by", "day")
    if by not in STEPS:
        raise wrong("by", by, ", ".join(STEPS))
    since, until = _seconds(query, "since", now - DAYS * 86_400), _seconds(query, "until", now + 1)
    key = query.get("key") if holder.admin else holder.name
    if query.get("key", key) != key:
        raise NotFound(
            f"There is no use of the key {query['key'][:80]!r} that this key may see: leave key out.", param="key"
        )
    rows = await asyncio.to_thread(_rows, front.keys.usage, key, (since, until), by)
    return json_response({"object": "list", "data": rows})


def _seconds(query: Mapping[str, str], name: str, default: float) -> float:
    """Unix seconds of a number or a time in ISO 8601 (UTC if it names no zone)."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise wrong(name, text, "unix seconds, or a time as in 2027-01-31T12:00:00Z") from None
        value = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= value < 1 << 35 or math.isnan(value):
        raise wrong(name, text, "unix seconds, or a time as in 2027-01-31T12:00:00Z")
    return value


def _rows(ledger: UsageLedger, key: str | None, span: tuple[float, float], by: str) -> list[dict[str, Any]]:
    """The sums by step and key, the earliest first. Waits for the disk."""
    sums: dict[tuple[int, str], Used] = {}
    for hour, name, used in ledger.hours(key, *span):
        start = hour if by == "hour" else int(period_start(by, hour))
        sums.setdefault((start, name), Used()).add(used)
    if len(sums) > MAX_ROWS:
        raise wrong("since", f"{len(sums)} rows ago", f"a time with at most {MAX_ROWS} rows, or a longer step as by")
    return [
        {"object": "usage", "start": start, "key": name, **msgspec.to_builtins(used)}
        for (start, name), used in sums.items()
    ]
