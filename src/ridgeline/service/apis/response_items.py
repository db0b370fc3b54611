"""Requests of OpenAI's Responses API: items become messages of a chat completion.

Built-in tools, prompts of the platform, conversations and background runs are refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ridgeline.service.answer import Streaming
from ridgeline.service.apis.response_events import ResponseShape
from ridgeline.service.apis.response_store import ResponseStore, Stored
from ridgeline.service.apis.translate import Origin, read_members, read_translated, texts, translated
from ridgeline.service.call import Call
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.fields import EFFORTS, LONG, MAX_MESSAGES, TIERS, VERBOSITIES, Fields
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
    wrong,
)
from ridgeline.service.state import Service
from ridgeline.text.tools import MAX_TOOLS

PREVIOUS = "previous_items"
"""Member of a body with the items of the responses before, from a caller that stores them itself, as a router does."""
_OBJECT = Record({}, open=True)
_ITEMS = Items(_OBJECT, MAX_MESSAGES, 1)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_STRINGS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Members of items that are strings."""


def _read_input(name: str, value: Any) -> Any:
    return value if isinstance(value, str) else _ITEMS.read(name, value)


def _read_choice(name: str, value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "function": {"name": value["name"]}}
    return OneOf(("none", "auto", "required")).read(name, value)


BODY: Mapping[str, Reader] = {
    "model": Text(512),
    "input": Special("a text or a list of items", _read_input),
    "instructions": Text(LONG),
    "previous_response_id": Text(256),
    PREVIOUS: Items(_OBJECT, MAX_MESSAGES),
    "store": Boolean(),
    "stream": Boolean(),
    "max_output_tokens": Integer(1, LONG),
    "temperature": Number(0, 2),
    "top_p": Number(0, 1),
    "tools": Items(_OBJECT, MAX_TOOLS),
    "tool_choice": Special('"none", "auto", "required" or a function', _read_choice),
    "parallel_tool_calls": Boolean(),
    "text": Record({"format": _OBJECT, "verbosity": OneOf(VERBOSITIES)}),
    "reasoning": Record({"effort": OneOf(EFFORTS), "summary": Text(64), "generate_summary": Text(64)}),
    "metadata": _OBJECT,
    "user": Text(1024),
    "safety_identifier": Text(1024),
    "prompt_cache_key": Text(1024),
    "service_tier": OneOf(tuple(TIERS)),
    "include": Items(Text(256), 64),
    "truncation": Refused("prompts are never truncated", ("disabled",)),
    "background": Refused("keep the connection, or use /v1/batches", (False,)),
    "conversation": Refused("use previous_response_id"),
    "prompt": Refused("prompts of the platform are not known here"),
    "max_tool_calls": Refused("the server runs no tools"),
    "top_logprobs": Refused("use /v1/chat/completions", (0,)),
}
_SAME = ("model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "service_tier", "user")
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


def endpoint(store: ResponseStore, owner: str) -> Endpoint:
    """How a request is read. store, owner: whose responses it can go on from, and where its own is kept."""
    return Endpoint(_read, partial(_call, store, owner))


def _read(body: Any) -> Fields:
    values, ignored = read_members(body, BODY, ("input",))
    without_effect = [
        f"reasoning.{name}" for name in ("summary", "generate_summary") if values.get("reasoning", {}).get(name)
    ]
    return Fields(values, (*ignored, *without_effect))


async def _call(
    store: ResponseStore, owner: str, service: Service, fields: Fields, arrival: float
) -> tuple[Call, ResponseShape, Streaming | None]:
    values = fields.values
    previous = values.get("previous_response_id")
    given = values.get(PREVIOUS)
    known = store.conversation(owner, previous) if given is None else given
    items = as_items(values["input"])
    made = _messages([*known, *items], len(known))
    if values.get("instructions"):
        made.insert(0, ({"role": "system", "content": values["instructions"]}, "instructions"))
    messages, origins = [message for message, _ in made], [where for _, where in made]
    body = {name: values[name] for name in _SAME if name in values} | {"messages": messages} | _controls(values)
    asked = translated(body, Origin(origins, _NAMES))
    call, chat, streaming = await read_translated(service, asked, "resp", arrival)
    shape = ResponseShape(call, chat, service.card.name, values, int(arrival))
    if values.get("store", True) and given is None:
        shape.on_end = lambda response: store.put(owner, Stored(response, items, previous))
    return call, shape, streaming


def as_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as items with ids."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    stamp = time.time_ns()
    return [{"id": f"item_{stamp:x}_{index}", **item} for index, item in enumerate(given)]


def _messages(items: Sequence[Mapping[str, Any]], known: int) -> list[tuple[dict[str, Any], str]]:
    """Messages of items, and where each comes from. known: items of earlier responses. Calls and thoughts that follow one another
    are one message of the assistant, with the text after them."""
    made: list[tuple[dict[str, Any], str]] = []
    for index, item in enumerate(items):
        where = f"input[{index - known}]" if index >= known else "previous_response_id"
        message = _message(item, where)
        last = made[-1][0] if made else {}
        if message["role"] == last.get("role") == "assistant" and _joins(last, message):
            last["tool_calls"] = [*last.get("tool_calls", ()), *message.pop("tool_calls", ())]
            last |= {name: value for name, value in message.items() if value}
            if not last["tool_calls"]:
                del last["tool_calls"]
        else:
            made.append((message, where))
    return made


def _joins(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a part of the assistant's turn belongs to the message before it: one of them has no text."""
    return not (last.get("content") and message.get("content"))


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    for name in _STRINGS.get(kind, ()) if isinstance(kind, str) else ():
        if not isinstance(item.get(name), str | None):
            raise wrong(f"{where}.{name}", item[name], "a string")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        parts = texts(item.get("output"), f"{where}.output", _TEXTS)
        output = "\n".join(part["text"] for part in parts)
        return {"role": "tool", "tool_call_id": item.get("call_id", ""), "content": output}
    if kind == "reasoning":
        given = item.get("content")
        thoughts = texts([] if given is None else given, f"{where}.content", ("reasoning_text", *_TEXTS))
        return {"role": "assistant", "content": "", "reasoning_content": "\n".join(part["text"] for part in thoughts)}
    if kind != "message":
        raise wrong(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, " or ".join(_ROLES))
    content: Any = item.get("content")
    if isinstance(content, list):  # a refusal has its text under its own name
        content = [
            {"type": "text", "text": part["refusal"]} if isinstance(part, Mapping) and "refusal" in part else part
            for part in content
        ]
    return {"role": role, "content": texts(content, f"{where}.content", _TEXTS)}


def _controls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the chat completion that have another form."""
    body: dict[str, Any] = {}
    if "max_output_tokens" in values:
        body["max_tokens"] = values["max_output_tokens"]
    if "tools" in values:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(values["tools"])]
    if (effort := values.get("reasoning", {}).get("effort")) is not None:
        body["reasoning_effort"] = effort
    text = values.get("text", {})
    if text.get("verbosity") is not None:
        body["verbosity"] = text["verbosity"]
    form = text.get("format") or {}
    if form.get("type") == "json_schema":
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form:
        body["response_format"] = form
    return body


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise wrong(f"{where}.type", tool.get("type"), "function: the server runs no tools of its own")
    members = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": members}
