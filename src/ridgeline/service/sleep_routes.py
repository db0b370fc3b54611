"""Routes of operators that release the memory of a model and replace its weights. Their names are those of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from ridgeline.core.errors import RequestError
from ridgeline.service.guard import FRONT, IGNORED, read_json
from ridgeline.service.readers import Boolean, Number, Reader, Text
from ridgeline.service.routes import json_response, read_known
from ridgeline.service.sleep import WAIT_S

ROUTES = web.RouteTableDef()
LEVELS, MODES = ("1", "2"), ("wait", "abort")
LONGEST_S = 3600.0
UPDATE: dict[str, Reader] = {
    "model_path": Text(4096),
    "model": Text(512),
    "abort_all_requests": Boolean(),
    "timeout_s": Number(0.0, LONGEST_S),
}


@ROUTES.post("/sleep")
async def sleep(request: web.Request) -> web.Response:
    """Release the memory of a model's weights and KV cache, once its requests have ended.

    Needs --enable-sleep-mode. Level 1 keeps the weights in host memory, level 2 reads them from the model folder again.
    """
    query = request.query
    level, mode = _choice(query, "level", LEVELS), _choice(query, "mode", MODES)
    front = request.app[FRONT].of(query.get("model"))
    reply = await front.sleep.sleep(int(level), abort=mode == "abort", wait_s=_seconds(query))
    return json_response({"is_sleeping": True, **reply})


@ROUTES.post("/wake_up")
async def wake_up(request: web.Request) -> web.Response:
    """Give a model its memory back. It answers when the model is ready."""
    reply = await request.app[FRONT].wake(request.query.get("model"))
    return json_response({"is_sleeping": False, **reply})


@ROUTES.get("/is_sleeping")
async def is_sleeping(request: web.Request) -> web.Response:
    """Whether a model sleeps."""
    level = request.app[FRONT].of(request.query.get("model")).sleep.level
    return json_response({"is_sleeping": level > 0, "level": level})


@ROUTES.post("/update_weights_from_disk")
async def update_weights(request: web.Request) -> web.Response:
    """Replace the weights of a model by those of a folder of the same architecture, between two steps.

    Needs --enable-sleep-mode. Cached prefixes are dropped.
    """
    values, ignored = await read_json(request, partial(read_known, UPDATE))
    if ignored:
        request[IGNORED] = ignored
    if not values.get("model_path"):
        raise RequestError("model_path is missing: send the folder of the new weights.", param="model_path")
    reply = await request.app[FRONT].update(
        values.get("model"),
        values["model_path"],
        abort=values.get("abort_all_requests", False),
        wait_s=float(values.get("timeout_s", WAIT_S)),
    )
    return json_response({"success": True, "message": f"The weights are those of {values['model_path']}.", **reply})


def _choice(query: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """A member of the query; the first of `known` if it is not given."""
    if (value := query.get(name, known[0])) not in known:
        raise RequestError(f"{name} is {value[:40]!r}: give {' or '.join(known)}.", param=name)
    return value


def _seconds(query: Mapping[str, Any]) -> float:
    text = query.get("timeout_s", str(WAIT_S))
    try:
        if 0.0 <= (seconds := float(text)) <= LONGEST_S:
            return seconds
    except ValueError:
        pass
    raise RequestError(f"timeout_s is {text[:40]!r}: give 0 to {LONGEST_S:g} seconds.", param="timeout_s")
