"""Checks OpenAI-style chat messages and copies them in the form that a template reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgeline.core.errors import RequestError, UnsupportedField, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEMPLATE_REASONING = frozenset(("reasoning_content", "thinking"))
"""Members in which templates read the reasoning of earlier turns: gpt-oss's `thinking`, others `reasoning_content`."""
_ALWAYS_READ = frozenset({"role", "content", "tool_call_id", "cache_control"})
"""Members that every template uses, labels, and the ends of cached prefixes, which no template reads."""
MAX_ARGUMENTS = 1 << 20
"""Maximum characters of the arguments of all tool calls of a conversation."""
_TEXTS = ("name", "refusal", "tool_call_id", *_REASONING_FIELDS)
"""Members of a message that are strings."""
_REFUSED = {"function_call": "send tool_calls instead", "audio": "this model reads text only, so leave it out"}
"""Members of OpenAI's messages that are refused, and the reason."""
_BREAKPOINT = "prompt_cache_breakpoint"


def normalize(
    messages: Sequence[Mapping[str, Any]], *, parts: bool, text: bool, developer: bool
) -> list[dict[str, Any]]:
    """Copies of the messages without null members.

    parts, text: kinds of content that the template takes. Without `parts`, a list of parts becomes its texts joined by newlines;
    without `text`, a text becomes a list of one part. developer: the template knows that role; otherwise it becomes system.
    Arguments of tool calls become objects, because templates serialize them. A refusal becomes the content where there is none.
    Raises RequestError naming the field, UnsupportedField naming a part that is not text.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one message.", param="messages")
    _check_arguments(messages)
    return [_message(message, f"messages[{i}]", parts, text, developer) for i, message in enumerate(messages)]


def unread_members(messages: Sequence[Mapping[str, Any]], readable: frozenset[str]) -> Iterator[str]:
    """Members of messages that `normalize` accepted and the template does not read, as `messages.name`, with repetitions.

    readable: the members that the template reads. Empty members are not reported.
    """
    for message in messages:
        content = message.get("content")
        for name, value in message.items():
            known = (
                name in _ALWAYS_READ
                or name in readable
                or (name in _REASONING_FIELDS and not readable.isdisjoint(_TEMPLATE_REASONING))
            )
            if value and not known and (name != "refusal" or content):
                yield f"messages.{name}"
        for part in content if isinstance(content, list) else ():
            yield from (
                f"messages.content.{name}"
                for name in part
                if name not in ("type", part["type"], "cache_control") and part[name]
            )


def _message(message: Mapping[str, Any], where: str, parts: bool, text: bool, developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and content.", param=where)
    members = {key: value for key, value in message.items() if value is not None and key != "cache_control"}
    for name in _REFUSED.keys() & members.keys():
        raise UnsupportedField(f"{where}.{name} is not supported: {_REFUSED[name]}.", param=f"{where}.{name}")
    role = members.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {shown(role)}: use one of {', '.join(ROLES)}.", param=f"{where}.role")
    for name in _TEXTS:
        if not isinstance(members.get(name, ""), str):
            raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    if role == "developer" and not developer:
        members["role"] = "system"
    if members.get("refusal") and not members.get("content"):
        members["content"] = members.pop("refusal")
    if "content" in members:
        members["content"] = _content(members["content"], f"{where}.content", parts, text)
    elif role != "assistant":
        raise RequestError(f"{where}.content is missing: add the text of the message.", param=f"{where}.content")
    if "tool_calls" in members:
        members["tool_calls"] = _calls(members["tool_calls"], f"{where}.tool_calls")
    reasoning = next((members[name] for name in _REASONING_FIELDS if name in members), None)
    if reasoning is not None:
        members.setdefault("reasoning_content", reasoning)
        # gpt-oss's template takes either reasoning or text before a call, and refuses both.
        if not (members.get("tool_calls") and members.get("content")):
            members.setdefault("thinking", reasoning)
    return members


def _content(content: Any, where: str, parts: bool, text: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content if text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(
                f'{where}[{i}] must be an object with a type: {{"type": "text", "text": ...}}.', param=f"{where}[{i}]"
            )
        if kind not in ("text", "refusal"):
            reason = f"{where}[{i}] is of type {shown(kind)}: this model reads text only. Send parts of type text."
            raise UnsupportedField(reason, param=f"{where}[{i}]")
        if part.get(_BREAKPOINT) is not None:
            reason = (
                f'{where}[{i}].{_BREAKPOINT} is not supported: send "cache_control": {{"type": "ephemeral"}} instead.'
            )
            raise UnsupportedField(reason, param=f"{where}[{i}].{_BREAKPOINT}")
        if not isinstance(part.get(kind), str):
            raise RequestError(f"{where}[{i}].{kind} must be a string.", param=f"{where}[{i}].{kind}")
        texts.append({"type": "text", "text": part[kind]})
    return texts if parts else "\n".join(part["text"] for part in texts)


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError if the arguments of tool calls are too long: parsing them takes time and memory."""
    characters = 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            characters += len(arguments) if isinstance(arguments, str) else 0
        if characters > MAX_ARGUMENTS:
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
    for name in ("id", "type"):
        if not isinstance(call.get(name), str | None):
            raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        field = f"{where}.function.arguments"
        raise RequestError(f"{field} must be a string that contains a JSON object.", param=field)
    return {**call, "function": {**function, "arguments": arguments}}
