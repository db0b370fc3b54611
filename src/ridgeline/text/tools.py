"""The functions that a request offers, and which of them an output may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import BadGrammar, RequestError, UnsupportedField, shown
from ridgeline.text.schema import check_schema, clamp_bounds, prune_schema
from ridgeline.text.unions import rewrite_unions

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. schema: of its arguments. strict: refuse keywords that cannot be enforced, instead of dropping them."""

    name: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """tools: functions that the output may call, empty for text only. required: it must call one of them."""

    tools: tuple[Tool, ...]
    required: bool


def read_tools(tools: Any) -> tuple[Tool, ...]:
    """Check the `tools` field. Raises RequestError naming the entry, BadGrammar for a schema that cannot be enforced."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools must be a list of 1 to {MAX_TOOLS} functions.", param="tools")
    functions = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(tools))
    names = [tool.name for tool in functions]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise RequestError(f"tools has two functions named {duplicate!r}: rename one.", param="tools")
    return functions


def read_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Check the `tool_choice` field (None: "auto") for these tools. Raises RequestError or UnsupportedField."""
    if choice == "none":
        return ToolChoice((), False)
    if choice is None or choice == "auto":
        return ToolChoice(tuple(tools), False)
    if choice == "required":
        return ToolChoice(tuple(tools), True)
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind != "function":
        raise UnsupportedField(
            f'tool_choice is {shown(kind)}: use "none", "auto", "required" or an object that names a function.',
            param="tool_choice",
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        raise RequestError(
            f"tool_choice names the function {shown(name)}, which tools does not contain: add it to tools, or name another.",
            param="tool_choice",
        )
    return ToolChoice(chosen, True)


def _tool(entry: Any, where: str) -> Tool:
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind != "function":
        raise UnsupportedField(f'{where}.type is {shown(kind)}: use "function", the only supported type.', param=where)
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object with a name.", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must have 1 to 64 letters, digits, _ or -.", param=f"{where}.function.name"
        )
    for member, kind, expects in (("description", str, "a string"), ("strict", bool, "true or false")):
        if not isinstance(function.get(member), kind | None):
            raise RequestError(f"{where}.function.{member} must be {expects}.", param=f"{where}.function.{member}")
    strict = function.get("strict") is True
    return Tool(name, _arguments(function.get("parameters"), strict, f"{where}.function.parameters"), strict)


def _arguments(schema: Any, strict: bool, where: str) -> Mapping[str, Any]:
    if schema is None:
        return _NO_ARGUMENTS
    if not isinstance(schema, dict):
        raise RequestError(f"{where} must be a JSON schema (an object).", param=where)
    check_schema(schema, strict=strict, param=where)
    pruned: dict[str, Any] = prune_schema(rewrite_unions(clamp_bounds(schema)))
    if pruned.setdefault("type", "object") != "object":
        raise BadGrammar(f'{where}.type must be "object".', param=where)
    return pruned
