"""Ollama's API, as far as its clients need it to talk to the served model: chat, generate, tags, show, ps and version.

The model runs already: `keep_alive` and `num_ctx` have no effect and are named in the header x-ridgeline-ignored-fields. Answers
are streamed as lines of JSON unless `stream` is false.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

import ridgeline
from ridgeline.core.errors import RidgelineError
from ridgeline.service.answer import Streaming
from ridgeline.service.apis.translate import Origin, Translated, read_members, read_translated, translated
from ridgeline.service.call import Call
from ridgeline.service.chat import ChatShape
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.errors import ollama_error
from ridgeline.service.fields import LONG, MAX_MESSAGES
from ridgeline.service.generate import generate
from ridgeline.service.guard import FRONT, read_json
from ridgeline.service.json_values import encode_arguments
from ridgeline.service.piece import CONTENT_FILTER, Piece
from ridgeline.service.readers import Boolean, Items, Reader, Record, Refused, Special, Text, wrong
from ridgeline.service.routes import json_response
from ridgeline.service.state import Service
from ridgeline.text.tools import MAX_TOOLS

ROUTES = web.RouteTableDef()

_OBJECT = Record({}, open=True)


def _think(name: str, value: Any) -> bool | str:
    if isinstance(value, bool) or value in ("low", "medium", "high"):
        return value  # type: ignore[no-any-return]
    raise wrong(name, value, 'true, false, "low", "medium" or "high"')


def _format(name: str, value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise wrong(name, value, '"json" or a JSON schema')


_COMMON: Mapping[str, Reader] = {
    "model": Text(512),
    "format": Special('"json" or a JSON schema', _format),
    "options": _OBJECT,
    "stream": Boolean(),
    "think": Special('true, false, "low", "medium" or "high"', _think),
    "keep_alive": Special("a duration", lambda name, value: value),
}
CHAT: Mapping[str, Reader] = {
    **_COMMON,
    "messages": Items(_OBJECT, MAX_MESSAGES, 1),
    "tools": Items(_OBJECT, MAX_TOOLS),
}
GENERATE: Mapping[str, Reader] = {
    **_COMMON,
    "prompt": Text(LONG),
    "system": Text(LONG),
    "suffix": Refused("the model does not fill gaps", ("",)),
    "images": Refused("this model reads text only", ([],)),
    "template": Refused("set the template with --chat-template at start", ("",)),
    "context": Refused("send the conversation to /api/chat"),
    "raw": Refused("send a prompt without a template to /v1/completions", (False,)),
}
SHOW: Mapping[str, Reader] = {"model": Text(512), "name": Text(512), "verbose": Boolean()}
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options, and the fields of a chat completion that they set. num_predict is read apart; others have no effect."""
_NAMES = {field: f"options.{option}" for option, field in _OPTIONS.items()} | {"max_tokens": "options.num_predict"}


@ROUTES.post("/api/chat")
async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation in the form of Ollama's API."""
    return await generate(request, Endpoint(_read_chat, partial(_call, _as_message)))


@ROUTES.post("/api/generate")
async def generate_text(request: web.Request) -> web.StreamResponse:
    """Answer a prompt in the form of Ollama's API."""
    return await generate(request, Endpoint(_read_generate, partial(_call, _as_response)))


@ROUTES.get("/api/tags")
async def tags(request: web.Request) -> web.Response:
    """The served model, in the form of Ollama's API."""
    return json_response({"models": [_entry(request.app[FRONT].service())]})


@ROUTES.get("/api/ps")
async def running(request: web.Request) -> web.Response:
    """The running model, in the form of Ollama's API."""
    service = request.app[FRONT].service()
    held = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": _entry(service)["size"]}
    return json_response({"models": [_entry(service) | held]})


@ROUTES.post("/api/show")
async def show(request: web.Request) -> web.Response:
    """Facts of the served model, in the form of Ollama's API."""
    service = request.app[FRONT].service()
    body, _ = await read_json(request, partial(read_members, known=SHOW))
    service.card.check(body.get("model", body.get("name")))
    facts = service.client.facts
    encoder = service.templates.choose(tools=False)
    capabilities = ["completion"]
    if service.templates.choose(tools=True).tool_format is not None:
        capabilities.append("tools")
    if encoder.tags is not None:
        capabilities.append("thinking")
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": encoder.template.source,
            "details": _entry(service)["details"],
            "model_info": {
                "general.architecture": facts.get("architecture", ""),
                "general.parameter_count": facts.get("params", 0),
                f"{facts.get('architecture', '')}.context_length": service.limits.context,
            },
            "capabilities": capabilities,
        }
    )


@ROUTES.get("/api/version")
async def version(request: web.Request) -> web.Response:
    """The server's version, in the form of Ollama's API."""
    return json_response({"version": ridgeline.__version__})


def _entry(service: Service) -> dict[str, Any]:
    card, facts = service.card, service.client.facts
    family, params = str(facts.get("architecture", "")), int(facts.get("params", 0))
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": _stamp(card.created),
        "size": int(facts.get("weight_bytes", 0)),
        "digest": str(facts.get("fingerprint", "")),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.1f}M",
            "quantization_level": str(facts.get("quantization") or facts.get("dtype", "")),
        },
    }


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _read_chat(body: Any) -> Translated:
    values, ignored = read_members(body, CHAT, ("messages",))
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(values["messages"])]
    return _translate(values, messages, [f"messages[{index}]" for index in range(len(messages))], ignored)


def _read_generate(body: Any) -> Translated:
    values, ignored = read_members(body, GENERATE, ("prompt",))
    messages, origins = [{"role": "user", "content": values["prompt"]}], ["prompt"]
    if values.get("system"):
        messages, origins = [{"role": "system", "content": values["system"]}, *messages], ["system", *origins]
    return _translate(values, messages, origins, ignored)


def _translate(
    values: Mapping[str, Any], messages: list[dict[str, Any]], origins: Sequence[str], ignored: Sequence[str]
) -> Translated:
    options = {name: value for name, value in values.get("options", {}).items() if value is not None}
    body: dict[str, Any] = {"messages": messages, "stream": values.get("stream", True), "model": values.get("model")}
    body |= {field: options[option] for option, field in _OPTIONS.items() if option in options}
    if options.get("num_predict", -1) != -1:
        body["max_tokens"] = options["num_predict"]
    if "think" in values:
        think = values["think"]
        body |= {"reasoning_effort": think if isinstance(think, str) else "medium" if think else "none"}
    if values.get("tools"):
        body["tools"] = values["tools"]
    form = values.get("format")
    if form == "json":
        body["response_format"] = {"type": "json_object"}
    elif form:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    without_effect = [f"options.{name}" for name in options if name not in _OPTIONS and name != "num_predict"]
    if "keep_alive" in values:
        without_effect.append("keep_alive")
    names = _NAMES | {
        "response_format.json_schema.schema": "format",
        "response_format": "format",
        "reasoning_effort": "think",
    }
    return translated(body, Origin(origins, names), (*ignored, *without_effect))


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with calls as OpenAI has them: Ollama's have no ids, and arguments are objects."""
    if message.get("images"):
        raise wrong(f"{where}.images", message["images"], "no images, because this model reads text only")
    kept = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        kept["reasoning_content"] = message["thinking"]
    if message.get("role") == "tool":
        kept.setdefault("tool_call_id", str(message.get("tool_name", "")))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for index, call in enumerate(calls):
            if not isinstance(call, Mapping):
                raise wrong(f"{where}.tool_calls[{index}]", call, "an object with function")
        kept["tool_calls"] = [{"id": f"call_{index}", "type": "function", **call} for index, call in enumerate(calls)]
    return kept


async def _call(form: Any, service: Service, fields: Translated, arrival: float) -> tuple[Call, OllamaShape, Any]:
    call, shape, streaming = await read_translated(service, fields, "ollama", arrival)
    return call, OllamaShape(shape, service.card.name, call.arrival, form), streaming


def _as_message(content: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {
                "function": {
                    "name": call["function"]["name"],
                    "arguments": encode_arguments(call["function"]["arguments"]),
                }
            }
            for call in calls
        ]
    return {"message": message}


def _as_response(content: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class OllamaShape:
    """An answer of Ollama's API. See answer.Shape. form: makes the members of a text, a thought and calls."""

    def __init__(self, chat: ChatShape, model: str, arrival: float, form: Any) -> None:
        self._chat, self._model, self._arrival, self._form = chat, model, arrival, form
        self._first = 0.0
        self.usage = chat.usage

    def events(self, streaming: Streaming) -> OllamaLines:
        return OllamaLines(self)

    def add(self, piece: Piece) -> None:
        self._first = self._first or time.time()
        self._chat.add(piece)

    def whole(self) -> dict[str, Any]:
        (choice,) = self._chat.body()
        message = choice["message"]
        made = message["content"] or "", message.get("reasoning_content", ""), message.get("tool_calls", ())
        return self.line(self._form(*made)) | self.ending(choice["finish_reason"])

    def line(self, members: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": _stamp(time.time()), **members, "done": False}

    def part(self, piece: Piece) -> dict[str, Any] | None:
        """The line of what a piece adds; None if nothing can be shown. Calls come when they are complete, with the end."""
        begun, self._first = self._first > 0, self._first or time.time()
        if piece.withdrawal is not None:
            self._chat.add(piece)
            content = "" if begun else piece.withdrawal.replacement
            return self.line(self._form(content, "", ())) | self.ending(CONTENT_FILTER)
        part = self._chat.grow(piece)
        (choice,) = self._chat.body()
        calls = choice["message"].get("tool_calls", ()) if part.finish else ()
        if not (part.content or part.reasoning or part.finish):
            return None
        line = self.line(self._form(part.content, part.reasoning, calls))
        return line | self.ending(part.finish) if part.finish else line

    def ending(self, finish: str) -> dict[str, Any]:
        """The last members: why it ended, tokens, and nanoseconds."""
        now = time.time()
        first = self._first or now
        return {
            "done": True,
            "done_reason": "stop" if finish == "tool_calls" else finish,
            "total_duration": int((now - self._arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt,
            "prompt_eval_duration": int((first - self._arrival) * 1e9),
            "eval_count": self.usage.completion,
            "eval_duration": int((now - first) * 1e9),
        }


class OllamaLines:
    """Lines of JSON. See answer.Events."""

    content_type = "application/x-ndjson"
    silence = b""

    def __init__(self, shape: OllamaShape) -> None:
        self._shape = shape

    def take(self, piece: Piece) -> bytes:
        line = self._shape.part(piece)
        return b"" if line is None else msgspec.json.encode(line) + b"\n"

    def end(self) -> bytes:
        return b""

    def error(self, error: RidgelineError) -> bytes:
        return ollama_error(error) + b"\n"
