"""The small routes: health, version, models, metrics, tokenize, detokenize, the prefix cache.

A handler's docstring is the route's text in the API description.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

import ridgeline
from ridgeline.core.errors import ContextTooLong, NotFound, RequestError, Unavailable
from ridgeline.metrics import CONTENT_TYPE
from ridgeline.service.answer import write
from ridgeline.service.batches.engine_rows import ROWS
from ridgeline.service.choices import EVENT_STREAM
from ridgeline.service.errors import Starting, error_response
from ridgeline.service.fields import LONG, MAX_MESSAGES
from ridgeline.service.guard import FRONT, IGNORED, check_model, read_json
from ridgeline.service.prompt_log import LOOK_S, SILENCE_S
from ridgeline.service.readers import Boolean, Items, Reader, Record, Text, TokenIds
from ridgeline.service.sampling import encode_chat, tokenize
from ridgeline.service.state import Service
from ridgeline.text.chat import RenderOptions
from ridgeline.text.tools import read_tools

ROUTES = web.RouteTableDef()

_OBJECT = Record({}, open=True)
TOKENIZE: dict[str, Reader] = {
    "model": Text(512),
    "prompt": Text(LONG),
    "messages": Items(_OBJECT, MAX_MESSAGES, 1),
    "tools": Items(_OBJECT, MAX_MESSAGES),
    "add_special_tokens": Boolean(),
    "add_generation_prompt": Boolean(),
    "continue_final_message": Boolean(),
    "chat_template_kwargs": _OBJECT,
    "return_token_strs": Boolean(),
}
DETOKENIZE: dict[str, Reader] = {"model": Text(512), "tokens": TokenIds(LONG)}


def json_response(value: Any) -> web.Response:
    """A value as the JSON body of a 200; NaN becomes null."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@ROUTES.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 while the engine makes progress or is idle, otherwise 503 with the reason.

    batch_rows: choices of batch rows that it may run now. cache_tokens: those that its prefix cache holds.
    """
    front = request.app[FRONT]
    if front.trouble is not None:
        kind = Starting if front.starting else Unavailable
        return error_response(kind(f"Not healthy: {front.trouble}."))
    rows = request.app.get(ROWS)
    room = {} if rows is None else {"batch_rows": rows.look(), **_cache_tokens(front.client.facts)}
    return json_response({"status": "ok", "step": front.client.last_step, **room})


def _cache_tokens(facts: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that the prefix cache and the tiers below it hold; nothing while they are not known."""
    options, page = facts.get("options") or {}, int(facts.get("page_tokens", 0))
    if not options.get("enable_prefix_caching", True):
        return {"cache_tokens": 0}
    tokens = int(facts.get("blocks", 0)) // int(facts.get("kv_groups", 1)) * page
    tiers = options.get("kv_offload_gb") or 0.0, options.get("kv_disk_gb", 0.0) if options.get("kv_disk") else 0.0
    below = sum(tiers) * (1 << 30)
    per_token = int(facts.get("kv_bytes_per_token", 0))
    return {"cache_tokens": tokens + (int(below) // per_token if per_token else 0)} if tokens else {}


@ROUTES.get("/version")
async def version(request: web.Request) -> web.Response:
    """The server's version."""
    return json_response({"version": ridgeline.__version__})


@ROUTES.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """All metrics in the text format of Prometheus."""
    return web.Response(body=request.app[FRONT].render(), headers={"content-type": CONTENT_TYPE})


@ROUTES.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The models that this server serves, with their state."""
    return json_response({"object": "list", "data": request.app[FRONT].cards()})


@ROUTES.get("/v1/models/{name:.+}")
async def model(request: web.Request) -> web.Response:
    """The model by its name; 404 for another name."""
    return json_response(request.app[FRONT].card(request.match_info["name"]))


@ROUTES.post("/tokenize")
async def tokenize_text(request: web.Request) -> web.Response:
    """Token ids of `prompt`, in which special tokens are recognized, or of `messages`, as in a chat completion."""
    request.app[FRONT].check()
    body = await _body(request, TOKENIZE)
    check_model(request, body.get("model"))
    service = await request.app[FRONT].known(body.get("model"))
    service.card.check(body.get("model"))
    if ("prompt" in body) == ("messages" in body):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if "messages" in body:
        ids = await _tokenize_messages(request, service, body)
    elif text := body["prompt"]:
        ids = await tokenize(service, text, add_special_tokens=body.get("add_special_tokens", True))
    else:
        ids = []
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.limits.context, "tokens": ids}
    if body.get("return_token_strs"):
        answer["token_strs"] = [service.tokenizer.token_text(index) for index in ids]
    return json_response(answer)


async def _tokenize_messages(request: web.Request, service: Service, body: dict[str, Any]) -> list[int]:
    """The token ids of a chat completion's prompt. Refuses what a chat completion refuses."""
    messages = body["messages"]
    if tools := body.get("tools"):
        await asyncio.to_thread(read_tools, tools)
    encoder = service.templates.choose(tools=bool(tools))
    options = RenderOptions(
        body.get("add_generation_prompt", True),
        body.get("continue_final_message", False),
        body.get("chat_template_kwargs", {}),
    )
    special = body.get("add_special_tokens", False)
    prompt = await encode_chat(service, encoder, messages, tools=tools, options=options, add_special_tokens=special)
    ignored = await asyncio.to_thread(encoder.template.ignored, messages, options.variables)
    request[IGNORED] = (*request.get(IGNORED, ()), *ignored)
    return prompt.ids


@ROUTES.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    request.app[FRONT].check()
    body = await _body(request, DETOKENIZE)
    check_model(request, body.get("model"))
    service = await request.app[FRONT].known(body.get("model"))
    service.card.check(body.get("model"))
    if "tokens" not in body:
        raise RequestError(f"tokens is missing: send {DETOKENIZE['tokens'].expects}.", param="tokens")
    if len(body["tokens"]) > (limit := service.limits.context):  # decoding millions of ids would delay all streams
        raise ContextTooLong(f"tokens has {len(body['tokens'])} ids: send at most {limit} at once.", param="tokens")
    service.limits.check_ids(body["tokens"], "tokens")
    text = await asyncio.to_thread(service.tokenizer.decode, body["tokens"], skip_special_tokens=False)
    return json_response({"prompt": text})


@ROUTES.post("/reset_prefix_cache")
async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Remove all cached prefixes that no request uses, pinned ones included."""
    front = request.app[FRONT].of(request.query.get("model"))
    service = front.service()
    service.pin_book.reset()
    front.prompts.clear()
    return json_response(await service.client.control("reset_prefix_cache"))


@ROUTES.get("/admin/stats")
async def stats(request: web.Request) -> web.Response:
    """The engine's facts and numbers: free, used and total blocks, running and waiting requests."""
    return json_response(await request.app[FRONT].of(request.query.get("model")).service().client.control("stats"))


@ROUTES.get("/admin/prompts")
async def prompts(request: web.Request) -> web.StreamResponse:
    """For routers: the prompts that the engine was sent after the event `after`, as events with the hashes of their chunks."""
    front = request.app[FRONT]
    if ROWS not in request.app:
        raise NotFound("A server with several models tells no prompts: start one for each model.")
    response = web.StreamResponse(headers={"content-type": EVENT_STREAM, "cache-control": "no-cache"})
    await response.prepare(request)
    async with contextlib.aclosing(front.prompts.follow(request.query.get("after", ""), LOOK_S)) as batches:
        silent_since = time.monotonic()
        async for events in batches:
            if front.draining:
                break
            if events or time.monotonic() - silent_since > SILENCE_S:
                silent_since = time.monotonic()
                await write(request, response, b"".join(event.encode() for event in events) or b": \n\n")
    return response


async def _body(request: web.Request, known: dict[str, Reader]) -> dict[str, Any]:
    """The body's members, read by `known`, without nulls. Unknown members are named in a response header."""
    values, ignored = await read_json(request, partial(read_known, known))
    if ignored:
        request[IGNORED] = ignored
    return values


def read_known(known: dict[str, Reader], body: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The members of a body that `known` reads, without nulls, and the names of the others."""
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object: send an object.")
    values = {
        name: known[name].read(name, value) for name, value in body.items() if name in known and value is not None
    }
    return values, tuple(name for name in body if name not in known)
