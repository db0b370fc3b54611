"""The functions that a request offers, the format of the model's calls, and the grammar that makes calls valid."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import BadGrammar, RequestError, UnsupportedField, shown
from ridgeline.core.sampling import Grammar
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.grammar import lark_literal
from ridgeline.text.schema import check_schema, clamp_bounds, prune_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.unions import rewrite_unions

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: `open`, a JSON object with "name" and `arguments`, `close`.

    lead, tail: white space between the tags and the object. between: separator of two calls. marker: a token without meaning that
    may stand before the first call.
    """

    name: str
    open: str
    close: str
    arguments: str
    lead: str = ""
    tail: str = ""
    between: str = ""
    marker: str = ""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", lead="\n", tail="\n", between="\n")
LLAMA3 = ToolFormat("llama3", "", "", "parameters", between="; ", marker="<|python_tag|>")


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


def detect_format(template: ChatTemplate) -> ToolFormat | None:
    """The call format in a chat template; None if the template takes no tools or uses an unknown format."""
    source = template.source
    if "tools" not in template.names or "<function=" in source:
        return None
    if HERMES.open in source:
        return HERMES
    if LLAMA3.marker in source or ("ipython" in source and f'"{LLAMA3.arguments}"' in source):
        return LLAMA3
    return None


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


def tool_grammar(form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, *, parallel: bool = True) -> Grammar:
    """A grammar for outputs that call these tools with valid arguments; one call only unless `parallel`.

    If a call is not required, text is unconstrained until a call begins: at the opening tag or, in a format without tags, at a "{"
    as the first character. Calls have the white space that models are trained on. Arguments have single spaces at most.
    """
    added = tokenizer.markup_ids | tokenizer.special_ids
    lazy = form.open != "" and tokenizer.token_id(form.open) not in added and not choice.required
    rules = [f"call_{i}: {_call(form, tool)}" for i, tool in enumerate(choice.tools)]
    rules.append("body: " + " | ".join(f"call_{i}" for i in range(len(choice.tools))))
    rules.append(f"call: {'begin' if lazy else _tag(form.open, tokenizer)} body {_tag(form.close, tokenizer)}")
    if lazy:
        # A lazy lexeme ends at the first opening tag, so text cannot contain one.
        rules.append(rf"begin[lazy]: /(.|\n)*{re.escape(form.open)}/")
    again = f"({lark_literal(form.between)} call)*" if parallel else ""
    first = f"{_tag(form.marker, tokenizer)}? call" if form.marker else "call"
    if choice.required:
        return _lark(f"{first} {again}", rules)
    rules += _text_rules(form, tokenizer)
    if not form.open:
        return _lark(f"text | {first} {again}", rules)
    if lazy:
        return _lark("call* text" if parallel else "call | text", rules)
    return _lark("text (call text)*" if parallel else "text call?", rules)


def _lark(start: str, rules: Sequence[str]) -> Grammar:
    return Grammar("lark", "\n".join([f"start: {start}", *rules]))


def _call(form: ToolFormat, tool: Tool) -> str:
    """One call between the tags. The arguments are a separate schema, so that references in it stay valid."""
    head = f'{form.lead}{{"name": "{tool.name}", "{form.arguments}": '
    options: dict[str, Any] = {"whitespace_pattern": " "}
    if not tool.strict:
        options["lenient"] = True
    schema = json.dumps({"x-guidance": options, **tool.schema})
    return f"{lark_literal(head)} %json {schema} {lark_literal('}' + form.tail)}"


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    """A tag in a grammar: its id if it is one added token, otherwise its text."""
    index = tokenizer.token_id(tag)
    return f"<[{index}]>" if index in tokenizer.markup_ids | tokenizer.special_ids else lark_literal(tag)


def _text_rules(form: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    """Rules for text: ordinary tokens and other markup (reasoning tags, for example), but no opening tag."""
    markup = sorted(tokenizer.markup_ids - {tokenizer.token_id(form.open)})
    markup_rule = f" | <[{','.join(map(str, markup))}]>" if markup else ""
    if form.open:
        return [r"TEXT: /(.|\n)+/", f"text: (TEXT{markup_rule})*"]
    head = r"HEAD: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/"
    return [head, r"TEXT: /(.|\n)+/", f"text: ((HEAD{markup_rule}) (TEXT{markup_rule})*)?"]


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
    strict = bool(function.get("strict"))
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
