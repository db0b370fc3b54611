"""Grammars that make tool calls valid, and grammars that bound reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import WHITESPACE, lark_literal
from ridgeline.text.reasoning import Tags
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import HARMONY, ToolFormat
from ridgeline.text.tools import Tool, ToolChoice

_PLACES = re.compile(r"(\$name|\$arguments|\$id)")
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_PYTHON_TYPES = {"boolean": '("True" | "False")', "null": '"None"'}


def tool_grammar(
    form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, *, parallel: bool = True, text_tags: str = ""
) -> Grammar:
    """A grammar for outputs that call these tools with valid arguments; one call only unless `parallel`.

    If a call is not required, text is unconstrained until a call begins: at the first tag or, in a format without tags, at the
    first characters. Calls have the white space that models are trained on. Arguments have single spaces at most.
    text_tags: special tokens that text may contain.
    """
    if form is HARMONY:
        return _harmony(choice, tokenizer)
    first = tokenizer.token_id(form.first)
    lazy = form.first != "" and first not in tokenizer.markup_ids | tokenizer.special_ids and not choice.required
    rules = [f"call_{i}: {_body(form, tool, tokenizer)}" for i, tool in enumerate(choice.tools)]
    rules.append("body: " + " | ".join(f"call_{i}" for i in range(len(choice.tools))))
    if lazy:
        # A lazy lexeme ends at the first opening tag, so text cannot contain one.
        rules.append(rf"begin[lazy]: /(.|\n)*{re.escape(form.first)}/")
    first_tag = "begin" if lazy else markup(form.first, tokenizer)
    open_tag = markup(form.open, tokenizer) if form.begin else first_tag
    rules.append(f"call: {open_tag} body {markup(form.close, tokenizer)}")
    again = f"({markup(form.between, tokenizer)} call)*" if parallel else ""
    calls = f"call {again}"
    if form.marker:
        calls = f"{markup(form.marker, tokenizer)}? {calls}"
    if form.begin or form.is_list:
        ends = ("[", "]") if form.is_list else ("", "")
        opened = f"{first_tag} {lark_literal(ends[0])}" if form.begin else ""
        calls = f"{opened} call {again} {lark_literal(ends[1])} {markup(form.end, tokenizer)}"
        if not form.begin:
            calls = f"{markup(form.marker, tokenizer)}? {lark_literal('[')} {calls}"
    rules.append(f"calls: {calls}")
    if choice.required:
        return _lark("calls", rules)
    rules += _text_rules(form, choice, tokenizer, text_tags)
    if not form.first:
        return _lark("text | calls", rules)
    several = parallel and not form.begin
    if lazy:
        return _lark("call* text" if several else "calls | text", rules)
    return _lark("text (call text)*" if several else "text calls?", rules)


def bound_reasoning(grammar: Grammar | None, tags: Tags, tokenizer: Tokenizer, *, inside: bool, budget: int) -> Grammar:
    """A grammar for an output with at most `budget` tokens of reasoning (-1: any number), then what `grammar` allows.

    inside: the prompt has opened the reasoning; otherwise the output may do without it. `can_bound` must hold.
    """
    limit = "" if budget < 0 else f"[max_tokens={budget}]"
    close = markup(tags.close, tokenizer)
    thought = f"rl_think {close}" if inside else f"({markup(tags.open, tokenizer)} rl_think {close})?"
    rules = [rf"rl_think{limit}: /(.|\n)*/"]
    if grammar is None and tags.channels:
        rules.append(f"rl_answer: %lark {{\n{_harmony(ToolChoice((), False), tokenizer, thinks=False).source}\n}}")
    elif grammar is None:
        more = "".join(f" | {markup(tag, tokenizer)}" for tag in tags.answer or ())
        others = sorted(tokenizer.markup_ids - {tokenizer.token_id(tags.open), tokenizer.token_id(tags.close)})
        ids = f" | <[{','.join(map(str, others))}]>" if others else ""
        rules += [rf"rl_answer: (RL_TEXT{ids}{more})*", r"RL_TEXT: /(.|\n)+/"]
    else:
        rules.append(f"rl_answer: {_nested(grammar)}")
    return _lark(f"{thought} rl_answer", rules)


def can_bound(tags: Tags, tokenizer: Tokenizer) -> bool:
    """Whether reasoning in these tags can be bounded: the closing tag must begin with a token of its own."""
    return markup(tags.close, tokenizer).startswith("<[")


def markup(text: str, tokenizer: Tokenizer) -> str:
    """A text in a grammar: ids for the added tokens that it contains, literals for the rest."""
    ids = added_ids(text, tokenizer)
    if not ids:
        return lark_literal(text)
    longest_first = sorted(ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return " ".join(f"<[{ids[part]}]>" if part in ids else lark_literal(part) for part in parts if part)


def added_ids(text: str, tokenizer: Tokenizer) -> dict[str, int]:
    """The added tokens that a text contains, with their ids."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.content.strip() and token.content in text}


def _lark(start: str, rules: Sequence[str]) -> Grammar:
    return Grammar("lark", "\n".join([f"start: {start}", *rules]))


def _nested(grammar: Grammar) -> str:
    """A grammar as part of another one."""
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.source}\n}}"
    if grammar.kind == "choice":
        return "(" + " | ".join(map(lark_literal, json.loads(grammar.source))) + ")"
    if grammar.kind == "regex":
        return (
            "/"
            + _SLASH.sub(lambda match: match[0] if len(match[0]) > 1 else "\\/", grammar.source).replace("\n", "\\n")
            + "/"
        )
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema})


def _body(form: ToolFormat, tool: Tool, tokenizer: Tokenizer) -> str:
    """One call between the tags. The arguments are a separate schema, so that references in it stay valid."""
    places = {"$name": lark_literal(tool.name), "$id": "/[0-9]{1,3}/"}
    places["$arguments"] = _python(tool) if form.body == "python" else _json(tool, tool.schema)
    parts = _PLACES.split(form.template)
    return " ".join(places[part] if part in places else markup(part, tokenizer) for part in parts if part)


def _json(tool: Tool, schema: Any) -> str:
    options: dict[str, Any] = {"whitespace_pattern": " "}
    if not tool.strict:
        options["lenient"] = True
    return "%json " + json.dumps({"x-guidance": options, **schema})


def _python(tool: Tool) -> str:
    """Keyword arguments in the order of the schema; values are JSON, but for the words that Python writes differently."""
    schema = tool.schema
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required", ()))
    names = list(schema.get("properties", {}))
    pairs = [f"{lark_literal(name + '=')} {_python_value(tool, schema['properties'][name], shared)}" for name in names]
    # tails[i]: the pairs from i on, after another one. first: the pairs from i on, at the start.
    tail, first = "", '""'
    for name, pair in zip(reversed(names), reversed(pairs), strict=True):
        first = f"{pair} {tail}" if name in required else f"({pair} {tail} | {first})"
        tail = f'", " {pair} {tail}' if name in required else f'(", " {pair})? {tail}'
    return first


def _python_value(tool: Tool, schema: Any, shared: dict[str, Any]) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in _PYTHON_TYPES and not schema.keys() & {"enum", "const"}:
        return _PYTHON_TYPES[kind]
    return _json(tool, {**shared, **schema} if isinstance(schema, dict) else {})


def _text_rules(form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, text_tags: str) -> list[str]:
    """Rules for text: ordinary tokens and other markup (reasoning tags, for example), but nothing that begins a call."""
    tags = markup(form.tags, tokenizer)
    allowed = tokenizer.markup_ids | set(added_ids(text_tags, tokenizer).values())
    others = sorted(index for index in allowed if f"<[{index}]>" not in tags)
    markup_rule = f" | <[{','.join(map(str, others))}]>" if others else ""
    if form.first:
        return [r"TEXT: /(.|\n)+/", f"text: (TEXT{markup_rule})*"]
    if form.body == "named":
        names = "|".join(re.escape(tool.name) for tool in choice.tools)
        head = rf"HEAD: /(.|\n)+/ & ~/[ \t\r\n]*({names})\n(.|\n)*/"
    else:
        letter = r"\[" if form.is_list else "{"
        head = rf"HEAD: /[ \t\r\n]*[^{letter} \t\r\n](.|\n)*/"
    return [head, r"TEXT: /(.|\n)+/", f"text: ((HEAD{markup_rule}) (TEXT{markup_rule})*)?"]


def _harmony(choice: ToolChoice, tokenizer: Tokenizer, *, thinks: bool = True) -> Grammar:
    """Messages of gpt-oss: any number of notes, then the answer or a call. thinks: notes may be reasoning."""
    channel, message = markup("<|channel|>", tokenizer), markup("<|message|>", tokenizer)
    again = markup("<|end|><|start|>assistant", tokenizer)
    constraint = f'(" "? {markup("<|constrain|>", tokenizer)} "json" | " json")?'
    kinds = '("analysis" | "commentary")' if thinks else '"commentary"'
    rules = [f"note: {channel} {kinds} {message} TEXT? {again}", r"TEXT: /(.|\n)+/"]
    for i, tool in enumerate(choice.tools):
        to = lark_literal(f" to=functions.{tool.name}")
        head = f'({channel} "commentary" {to} | {to} {channel} "commentary")'
        rules.append(f"call_{i}: {head} {constraint} {message} {_json(tool, tool.schema)}")
    last = list(_last(choice, f'{channel} "final" {message} TEXT?'))
    return _lark(f"note* ({' | '.join(last)})", rules)


def _last(choice: ToolChoice, final: str) -> Iterator[str]:
    if not choice.required:
        yield final
    yield from (f"call_{i}" for i in range(len(choice.tools)))
