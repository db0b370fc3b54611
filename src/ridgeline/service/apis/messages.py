"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

Messages become those of a chat completion. What has no effect here (`metadata`) is named in the header
x-ridgeline-ignored-fields; images and documents, server tools and containers are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from ridgeline.core.errors import RidgelineError
from ridgeline.service.answer import Streaming
from ridgeline.service.apis.translate import (
    Origin,
    Translated,
    read_members,
    read_translated,
    text_part,
    texts,
    translated,
)
from ridgeline.service.call import Call, Usage
from ridgeline.service.chat import ChatShape, Part
from ridgeline.service.choices import EVENT_STREAM
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.errors import anthropic_error
from ridgeline.service.fields import LONG, MAX_MESSAGES, MAX_STOPS, TTLS
from ridgeline.service.generate import generate
from ridgeline.service.guard import FRONT, check_model, read_json
from ridgeline.service.json_values import encode_arguments
from ridgeline.service.piece import CONTENT_FILTER, Piece
from ridgeline.service.readers import (
    Boolean,
    Integer,
    Items,
    Number,
    OneOf,
    Reader,
    Record,
    Refused,
    Special,
    Text,
    Texts,
    wrong,
)
from ridgeline.service.routes import json_response
from ridgeline.service.sampling import encode_chat
from ridgeline.service.state import Service
from ridgeline.text.chat import RenderOptions
from ridgeline.text.tools import MAX_TOOLS

ROUTES = web.RouteTableDef()

_OBJECT = Record({}, open=True)


def _as_it_is(name: str, value: Any) -> Any:
    return value


MESSAGES: Mapping[str, Reader] = {
    "model": Text(512),
    "messages": Items(_OBJECT, MAX_MESSAGES, 1),
    "max_tokens": Integer(1, LONG),
    "system": Special("a text or a list of text blocks", _as_it_is),
    "stop_sequences": Texts(MAX_STOPS),
    "stream": Boolean(),
    "temperature": Number(0, 1),
    "top_p": Number(0, 1),
    "top_k": Integer(-1, 1 << 20),
    "tools": Items(_OBJECT, MAX_TOOLS),
    "tool_choice": Record({"disable_parallel_tool_use": Boolean()}, open=True),
    "thinking": _OBJECT,
    "metadata": _OBJECT,
    "service_tier": OneOf(("auto", "standard_only")),
    "output_config": _OBJECT,
    "cache_control": _OBJECT,
    "container": Refused("the server runs no tools"),
    "mcp_servers": Refused("clients call tools", ([],)),
}
COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
"""Fields of /v1/messages/count_tokens."""
_NAMES = {
    "stop": "stop_sequences",
    "chat_template_kwargs": "thinking",
    "max_thinking_tokens": "thinking.budget_tokens",
    "response_format": "output_config",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", CONTENT_FILTER: "refusal"}
_encode = msgspec.json.Encoder().encode


@ROUTES.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation in the form of Anthropic's Messages API."""
    return await generate(request, ENDPOINT)


@ROUTES.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """The number of prompt tokens of a conversation."""
    request.app[FRONT].check()
    fields = await read_json(request, _read_counted)
    check_model(request, fields.get("model"))
    service = await request.app[FRONT].known(fields.get("model"))
    with fields.origin.errors():
        service.card.check(fields.get("model"))
        tools = fields.get("tools") or None
        encoder = service.templates.choose(tools=tools is not None)
        options = RenderOptions(
            add_generation_prompt=fields.get("add_generation_prompt", True),
            continue_final_message=fields.get("continue_final_message", False),
        )
        prompt = await encode_chat(
            service, encoder, fields.get("messages"), tools=tools, options=options, add_special_tokens=False
        )
    return json_response({"input_tokens": len(prompt.ids)})


def _read_counted(body: Any) -> Translated:
    known = {name: MESSAGES[name] for name in COUNTED}
    values, ignored = read_members(body, known, ("messages",))
    return _translate(values, ignored)


def _read(body: Any) -> Translated:
    values, ignored = read_members(body, MESSAGES, ("max_tokens", "messages"))
    return _translate(values, ignored)


def _translate(values: Mapping[str, Any], ignored: Sequence[str]) -> Translated:
    """The chat completion of a body. Raises RequestError."""
    conversation: list[dict[str, Any]] = []
    origins: list[str] = []
    if "system" in values:
        conversation.append({"role": "system", "content": texts(values["system"], "system", ("text",))})
        origins.append("system")
    for index, message in enumerate(values["messages"]):
        made = _message(message, f"messages[{index}]")
        conversation += made
        origins += [f"messages[{index}]"] * len(made)
    same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "cache_control")
    body: dict[str, Any] = {name: values[name] for name in same if name in values} | {"messages": conversation}
    if "stop_sequences" in values:
        body["stop"] = list(values["stop_sequences"])
    if conversation[-1]["role"] == "assistant":  # the answer goes on from its beginning
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    thinks, budget = _thinking(values.get("thinking", {}))
    body |= {"include_reasoning": thinks}
    if "thinking" in values:
        body["chat_template_kwargs"] = {"enable_thinking": thinks}
    if budget is not None:
        body["max_thinking_tokens"] = budget
    body |= _tools(values.get("tools", []), values.get("tool_choice"))
    body |= _output(values.get("output_config", {}))
    without_effect = [name for name in ("metadata",) if name in values]
    return translated(body, Origin(origins, _NAMES), (*ignored, *without_effect))


def _message(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A message's chat messages: results of tools come apart."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise wrong(f"{where}.role", role, "user or assistant; instructions go into the field system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise wrong(f"{where}.content", content, "a text or a list of blocks")
    if role == "assistant":
        return [_assistant(content, f"{where}.content")]
    results, parts = [], []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            results.append(_result(block, place))
        else:
            parts.append(text_part(block, place, ("text",)))
    return results + ([{"role": "user", "content": parts}] if parts else [])


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise wrong(f"{where}.tool_use_id", block.get("tool_use_id"), "the id of a tool_use block")
    given = block.get("content")
    parts = texts("" if given is None else given, f"{where}.content", ("text",))
    message = {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": "\n".join(part["text"] for part in parts),
    }
    return message | _control(block)


def _assistant(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    control: dict[str, Any] = {}
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(_tool_use(block, place))
            control = control | _control(block)
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise wrong(f"{place}.thinking", block.get("thinking"), "a text")
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            parts.append(text_part(block, place, ("text",)))
    message: dict[str, Any] = {"role": "assistant", "content": parts or "", **control}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), Mapping):
        raise wrong(where, block, "a tool_use block with id, name and input, which is an object")
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _control(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") is not None else {}


def _thinking(thinking: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether the client wants to see thoughts; and the maximum of their tokens."""
    kind = thinking.get("type", "disabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise wrong("thinking.type", kind, "enabled, adaptive or disabled")
    return kind != "disabled", thinking.get("budget_tokens") if kind == "enabled" else None


def _tools(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None) -> dict[str, Any]:
    functions = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise wrong(f"tools[{index}].type", tool["type"], "custom: the server runs no tools of its own")
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise wrong(f"tools[{index}].input_schema", schema, "a JSON schema")
        function = {"name": tool.get("name"), "parameters": schema}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function} | _control(tool))
    body: dict[str, Any] = {"tools": functions} if functions else {}
    if choice is None:
        return body
    kind = choice.get("type")
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        body["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    if choice.get("disable_parallel_tool_use"):
        body["parallel_tool_calls"] = False
    return body


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar of the answer."""
    form = config.get("format")
    if form is None:
        return {}
    if (
        not isinstance(form, Mapping)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), Mapping)
    ):
        raise wrong("output_config.format", form, "an object with type json_schema and schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}}


async def _call(service: Service, fields: Translated, arrival: float) -> tuple[Call, MessagesShape, Streaming | None]:
    call, chat, streaming = await read_translated(service, fields, "msg", arrival)
    return call, MessagesShape(call, chat, service.card.name), streaming


ENDPOINT = Endpoint(_read, _call)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage object: input_tokens are those that were neither cached nor written to the cache."""
    written = sum(usage.written.values())
    return {
        "input_tokens": usage.prompt - usage.cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": usage.written.get(ttl, 0) for ttl in TTLS},
        "output_tokens": usage.completion,
    }


class MessagesShape:
    """A message. See answer.Shape."""

    def __init__(self, call: Call, chat: ChatShape, model: str) -> None:
        self._chat = chat
        self.usage = chat.usage
        self.id, self.model = call.id, model
        self.grow, self.add = chat.grow, chat.add

    def events(self, streaming: Streaming) -> MessageEvents:
        return MessageEvents(self)

    def whole(self) -> dict[str, Any]:
        (choice,) = self._chat.body()
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": encode_arguments(function["arguments"]),
                }
            )
        ending = end_of(choice["finish_reason"], choice["stop_reason"])
        return self.head() | {"content": content, **ending, "usage": usage_of(self.usage)}

    def head(self) -> dict[str, Any]:
        """The message before its content."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self.usage),
        }


def end_of(finish: str, stopped_by: str | int | None) -> dict[str, Any]:
    """stop_reason and stop_sequence."""
    if finish == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOPS[finish], "stop_sequence": None}


class MessageEvents:
    """A message as named events: its blocks one after the other. See answer.Events."""

    content_type = EVENT_STREAM
    silence = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, shape: MessagesShape) -> None:
        self._shape = shape
        self._begun = False
        self._block = -1
        self._kind = ""
        """Type of the open block, "" for none."""

    def take(self, piece: Piece) -> bytes:
        if piece.withdrawal is not None:
            part = Part("" if self._begun else piece.withdrawal.replacement, "", [], CONTENT_FILTER)
        else:
            part = self._shape.grow(piece)
        events: list[bytes] = []
        if part.reasoning:
            events += self._open("thinking", {"thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.content:
            events += self._open("text", {"text": ""})
            events.append(self._delta({"type": "text_delta", "text": part.content}))
        for call in part.calls:
            if call.id:
                events += self._close() + self._open("tool_use", {"id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        if part.finish:
            events += self._close()
            ending = end_of(part.finish, piece.stopped_by)
            usage = {"output_tokens": self._shape.usage.completion}
            events.append(event("message_delta", {"delta": ending, "usage": usage}))
        if events and not self._begun:
            self._begun = True
            events.insert(0, event("message_start", {"message": self._shape.head()}))
        return b"".join(events)

    def end(self) -> bytes:
        return event("message_stop", {})

    def error(self, error: RidgelineError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def _open(self, kind: str, members: Mapping[str, Any]) -> list[bytes]:
        """Begin a block, unless one of this kind is open."""
        if kind == self._kind:
            return []
        closed = self._close()
        self._kind, self._block = kind, self._block + 1
        block = {"type": kind, **members}
        return [*closed, event("content_block_start", {"index": self._block, "content_block": block})]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [event("content_block_stop", {"index": self._block})]

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._block, "delta": delta})


def event(kind: str, members: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **members}))
