"""Routes of operators that load and unload LoRA adapters. The names of routes and fields are those of vLLM."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from ridgeline.core.errors import RequestError
from ridgeline.service.guard import FRONT, IGNORED, read_json
from ridgeline.service.readers import Reader, Text
from ridgeline.service.routes import json_response, read_known

ROUTES = web.RouteTableDef()
LOAD: dict[str, Reader] = {"lora_name": Text(256), "lora_path": Text(4096)}
UNLOAD: dict[str, Reader] = {"lora_name": Text(256)}


@ROUTES.post("/v1/load_lora_adapter")
async def load(request: web.Request) -> web.Response:
    """Load a LoRA adapter from a folder of the server. Requests then name it as their model. Needs --enable-lora."""
    values = await _body(request, LOAD)
    front = request.app[FRONT].of(None)
    name, folder = values["lora_name"], values["lora_path"]
    if name in (front.service().card.name, front.service().card.root):
        raise RequestError(f"lora_name is {name!r}, the name of the model: give another one.", param="lora_name")
    await front.adapters.load(name, folder)
    return json_response({"success": True, "message": f"The adapter {name!r} is loaded."})


@ROUTES.post("/v1/unload_lora_adapter")
async def unload(request: web.Request) -> web.Response:
    """Unload a LoRA adapter. Its running requests go on."""
    values = await _body(request, UNLOAD)
    front = request.app[FRONT].of(None)
    await front.adapters.unload(values["lora_name"])
    return json_response({"success": True, "message": f"The adapter {values['lora_name']!r} is unloaded."})


async def _body(request: web.Request, known: dict[str, Reader]) -> dict[str, Any]:
    values, ignored = await read_json(request, partial(read_known, known))
    if ignored:
        request[IGNORED] = ignored
    for name in known:
        if not values.get(name):
            raise RequestError(f"{name} is missing: send {' and '.join(known)}.", param=name)
    return values
