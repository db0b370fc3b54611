"""The route that records a profile of the engine. Only a key of operators may use it, on a server that has one."""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from ridgeline.core.errors import RequestError, RidgelineError, Unavailable
from ridgeline.service.batches.objects import Conflict
from ridgeline.service.guard import FRONT, HOLDER, IGNORED, read_json
from ridgeline.service.keys.errors import AdminOnly
from ridgeline.service.keys.keyring import ANYONE
from ridgeline.service.readers import Boolean, Integer, Number, Reader, Text
from ridgeline.service.routes import read_known
from ridgeline.wire.client import Client

ROUTES = web.RouteTableDef()
LONGEST_S = 60.0
PROFILE: dict[str, Reader] = {
    "model": Text(512),
    "seconds": Number(0.0, LONGEST_S, above=True),
    "steps": Integer(1, 10_000),
    "with_stack": Boolean(),
}
_DEFAULT_S = 2.0
_COMPRESSION = 4
"""Level of gzip."""
_LOOK_S = 0.005
"""Seconds between two looks at the number of the last step."""
_ORDER_S = 300.0
"""Seconds in which the engine must have started or written a profile."""


@ROUTES.post("/debug/profile")
async def profile(request: web.Request) -> web.Response:
    """Record what the engine does, and return it as a Chrome trace (gzip), which ui.perfetto.dev shows.

    For `seconds` (2), or for `steps` steps and at most 60 seconds. The engine is slower meanwhile, and it stands still while the
    trace is written. Needs the key of operators; a server without keys refuses it.
    """
    if request[HOLDER] is ANYONE:
        raise AdminOnly(
            "Profiles need a key of operators, which this server does not have: start it with --admin-api-key."
        )
    values, ignored = await read_json(request, partial(read_known, PROFILE))
    if ignored:
        request[IGNORED] = ignored
    if "seconds" in values and "steps" in values:
        raise RequestError("Send either seconds or steps.", param="steps")
    front = request.app[FRONT].of(values.get("model"))
    if front.config.prefill_engines:
        raise RequestError("Several engines cannot be profiled together so far: leave --prefill-engines out.")
    trace = await record(front.service().client, values)
    headers = {"content-disposition": "attachment; filename=ridgeline-trace.json.gz"}
    return web.Response(body=trace, content_type="application/gzip", headers=headers)


async def record(client: Client, values: dict[str, Any]) -> bytes:
    """The trace of an engine. values: as the body has them. Raises Conflict, if another one is being recorded, and Unavailable."""
    order = _order(client, "profile_start", "stacks" if values.get("with_stack") else "")
    starting = asyncio.get_running_loop().create_task(order)
    with tempfile.TemporaryDirectory(prefix="ridgeline-profile-") as folder:
        path = Path(folder) / "trace.json"
        try:
            await asyncio.shield(starting)
            await _wait(client, values)
        except Conflict:
            raise
        except BaseException:
            await asyncio.shield(_drop(client, starting))
            raise
        await _order(client, "profile_stop", str(path))
        return await asyncio.to_thread(lambda: gzip.compress(path.read_bytes(), _COMPRESSION))


async def _drop(client: Client, starting: asyncio.Task[None]) -> None:
    """End a profile whose start was ordered, also one that the engine has yet to start."""
    with suppress(RidgelineError):
        await starting
    conflicts = isinstance(starting.exception(), Conflict)  # the profile of another client
    with suppress(RidgelineError):  # the engine drops it by itself, or has ended
        if not conflicts:
            await _order(client, "profile_stop")


async def _wait(client: Client, values: dict[str, Any]) -> None:
    """Until the given time or number of steps is over."""
    if (steps := values.get("steps")) is None:
        await asyncio.sleep(values.get("seconds", _DEFAULT_S))
        return
    last = client.last_step + steps
    try:
        async with asyncio.timeout(LONGEST_S):
            while client.last_step < last:
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return


async def _order(client: Client, order: str, argument: str = "") -> None:
    reply = await client.control(order, _ORDER_S, argument)
    if (problem := reply.get("error")) is not None:
        raise Conflict(str(problem)) if reply.get("status") == 409 else Unavailable(str(problem))
