"""OpenAI-style chat messages as templates expect them: checked, copied, and in the one shape a template understands."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ridgeline.core.errors import RequestError, UnsupportedField, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_READ = frozenset({"role", "content", "tool_call_id"})
"""Members that have their effect, or are a label, in every template."""
MAX_ARGUMENTS = 1 << 20
"""Characters of the arguments of all tool calls of a conversation."""
_GONE = {"function_call": "send tool_calls instead", "audio": "this model reads text only, so leave it out"}
"""Members of OpenAI's messages that are refused, and why."""


def normalize(
    messages: Sequence[Mapping[str, Any]], *, parts: bool, text: bool, developer: bool
) -> list[dict[str, Any]]:
    """Fresh messages without null fields.

    parts, text: which content the template takes; a list of parts becomes its texts joined by newlines where it takes
    no lists, a text a list of one part where it takes nothing else. developer: it knows that role (else: system).
    Arguments of tool calls become objects, as templates write them out themselves. A refusal is what was said instead of content.
    Raises RequestError naming the field, UnsupportedField naming a part that is not text.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one message.", param="messages")
    _check_arguments(messages)
    return [_message(message, f"messages[{i}]", parts, text, developer) for i, message in enumerate(messages)]


def unread(messages: Sequence[Mapping[str, Any]], shown: Collection[str]) -> Iterator[str]:
    """Members of messages that `normalize` took and nothing reads, as `messages.name`; those that say nothing (empty ones) are
    left out. shown: the members that the template reads. Names come as often as they stand there."""
    for message in messages:
        content = message.get("content")
        for name, value in message.items():
            known = name in _READ or name in shown or (name in _REASONING_FIELDS and "reasoning_content" in shown)
            if value and not known and (name != "refusal" or content):
                yield f"messages.{name}"
        for part in content if isinstance(content, list) else ():
            yield from (
                f"messages.content.{name}" for name in part if name not in ("type", part["type"]) and part[name]
            )


def _message(message: Mapping[str, Any], where: str, parts: bool, text: bool, developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and content.", param=where)
    fresh = {key: value for key, value in message.items() if value is not None}
    for name in _GONE.keys() & fresh.keys():
        raise UnsupportedField(f"{where}.{name} is not supported: {_GONE[name]}.", param=f"{where}.{name}")
    role = fresh.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {shown(role)}: use one of {', '.join(ROLES)}.", param=f"{where}.role")
    if role == "developer" and not developer:
        fresh["role"] = "system"
    if fresh.get("refusal") and not fresh.get("content"):
        fresh["content"] = fresh.pop("refusal")
    if "content" in fresh:
        fresh["content"] = _content(fresh["content"], f"{where}.content", parts, text)
    elif role != "assistant":
        raise RequestError(f"{where}.content is missing: add the text of the message.", param=f"{where}.content")
    if "tool_calls" in fresh:
        fresh["tool_calls"] = _calls(fresh["tool_calls"], f"{where}.tool_calls")
    thought = next((fresh[name] for name in _REASONING_FIELDS if name in fresh), None)
    if thought is not None:
        fresh.setdefault("reasoning_content", thought)
    return fresh


def _content(content: Any, where: str, parts: bool, text: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content if text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    fresh = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(
                f'{where}[{i}] must be an object with a type: {{"type": "text", "text": ...}}.', param=f"{where}[{i}]"
            )
        if kind not in ("text", "refusal"):
            reason = f"{where}[{i}] is of type {shown(kind)}: this model reads text only. Send parts of type text."
            raise UnsupportedField(reason, param=f"{where}[{i}]")
        if not isinstance(part.get(kind), str):
            raise RequestError(f"{where}[{i}].{kind} must be a string.", param=f"{where}[{i}].{kind}")
        fresh.append({"type": "text", "text": part[kind]})
    return fresh if parts else "\n".join(part["text"] for part in fresh)


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError for more JSON in tool calls than is read in a moment: it may hold any number of values."""
    held = 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            held += len(arguments) if isinstance(arguments, str) else 0
        if held > MAX_ARGUMENTS:
            raise RequestError(
                f"The arguments of tool calls have more than {MAX_ARGUMENTS} characters: shorten them or leave out old calls.",
                param=f"messages[{i}].tool_calls",
            )


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of tool calls.", param=where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function must be an object with a name.", param=f"{where}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        field = f"{where}.function.arguments"
        raise RequestError(f"{field} must be a string that contains a JSON object.", param=field)
    return {**call, "function": {**function, "arguments": arguments}}
