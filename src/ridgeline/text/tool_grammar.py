"""Grammars that make tool calls valid, and grammars that bound reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import MAX_SOURCE, WHITESPACE, lark_literal
from ridgeline.text.reasoning import REASONING_FORMATS, Tags
from ridgeline.text.schema import clamp_bounds, read_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import HARMONY, ToolFormat
from ridgeline.text.tools import Tool, ToolChoice
from ridgeline.text.unions import rewrite_unions

_PLACES = re.compile(r"(\$name|\$arguments|\$id)")
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_PYTHON_TYPES = {"boolean": '("True" | "False")', "null": '"None"'}
_HARMONY_TAGS = REASONING_FORMATS["openai_gptoss"]


@dataclass(frozen=True, slots=True)
class TextTags:
    """Tags that text may contain though they are special tokens, and tags that it may not contain."""

    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(cls, tags: Tags | None, *, bounded: bool) -> TextTags:
        """bounded: `bound_reasoning` adds the reasoning, so that text has none."""
        if tags is None:
            return cls()
        around = (tags.open, tags.close)
        answer = tags.answer or ()
        return cls(answer, around) if bounded else cls((*answer, *around))


def tool_grammar(
    form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, *, parallel: bool = True, tags: TextTags = TextTags()
) -> Grammar:
    """A grammar for outputs that call these tools with valid arguments; one call only unless `parallel`.

    If a call is not required, text is unconstrained until a call begins: at the first tag or, in a format without tags, at the
    first characters. Calls have the white space that models are trained on. Arguments have single spaces at most.
    """
    if form is HARMONY:
        return harmony_grammar(choice, tokenizer)
    first = tokenizer.token_id(form.first)
    lazy = form.first != "" and first not in tokenizer.markup_ids | tokenizer.special_ids and not choice.required
    rules = [rule for i, tool in enumerate(choice.tools) for rule in _call(f"call_{i}", form, tool, tokenizer)]
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
    rules += _text_rules(form, choice, tokenizer, tags)
    if not form.first:
        return _lark("text | calls", rules)
    several = parallel and not form.begin
    if lazy:
        return _lark("call* text" if several else "calls | text", rules)
    return _lark("text (call text)*" if several else "text calls?", rules)


def bound_reasoning(
    grammar: Grammar | None, tags: Tags, tokenizer: Tokenizer, *, inside: bool, budget: int | None
) -> Grammar:
    """A grammar for an output with at most `budget` tokens of reasoning (None: any number), then what `grammar` allows.

    inside: the prompt has opened the reasoning; otherwise the output may do without it. `can_bound` must hold.
    """
    close = markup(tags.close, tokenizer)
    thought = f"{_thought(tags, tokenizer, budget)} {close}"
    if not inside:
        thought = f"({markup(tags.open, tokenizer)} {thought})?"
    if grammar is not None:
        return _lark(f"{thought} rl_answer", [f"rl_answer: {_nested(grammar)}"])
    text = TextTags(tags.answer or (), (tags.open, tags.close))
    return _lark(f"{thought} (RL_TEXT{_markup_rule(tokenizer, text)})*", [r"RL_TEXT: /(.|\n)+/"])


def harmony_grammar(
    choice: ToolChoice, tokenizer: Tokenizer, *, answer: Grammar | None = None, budget: int | None = None
) -> Grammar:
    """Messages of gpt-oss: reasoning of at most `budget` tokens, notes to the user, then the answer or a call.

    answer: constrains the text of the answer.
    """
    channel, message = markup("<|channel|>", tokenizer), markup("<|message|>", tokenizer)
    again = markup("<|end|><|start|>assistant", tokenizer)
    constraint = f'(" "? {markup("<|constrain|>", tokenizer)} "json" | " json")?'
    thought = _thought(_HARMONY_TAGS, tokenizer, budget)
    rules = [
        f'reasoning: {channel} "analysis" {message} {thought} {again}',
        f'note: {channel} "commentary" {message} TEXT? {again}',
        r"TEXT: /(.|\n)+/",
        f'final: {channel} "final" {constraint} {message} {"TEXT?" if answer is None else _nested(answer)}',
    ]
    for i, tool in enumerate(choice.tools):
        to = lark_literal(f" to=functions.{tool.name}")
        head = f'({channel} "commentary" {to} | {to} {channel} "commentary")'
        rules.append(f"call_{i}: {head} {constraint} {message} {_json(tool, tool.schema)}")
    last = [f"call_{i}" for i in range(len(choice.tools))] + ([] if choice.required else ["final"])
    notes = "reasoning? note*" if budget is not None else "(reasoning | note)*"
    return _lark(f"{notes} ({' | '.join(last)})", rules)


def _thought(tags: Tags, tokenizer: Tokenizer, budget: int | None) -> str:
    """Tokens of reasoning: all but special ones and the closing tag's first. Counted as tokens, not as a lexeme with max_tokens,
    which the library cannot take back after a draft.
    """
    if budget == 0:
        return ""
    closing = [tokenizer.token_id(tag) for tag in added_ids(tags.close, tokenizer)]
    others = ",".join(map(str, sorted(tokenizer.special_ids.union(index for index in closing if index is not None))))
    return f"<[^{others}]>*" if budget is None else f"<[^{others}]>{{0,{budget}}}"


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
    if grammar.kind == "json_object":
        schema: Any = {"type": "object"}
    else:
        schema = rewrite_unions(clamp_bounds(read_schema(grammar.source)))
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema})


def _call(rule: str, form: ToolFormat, tool: Tool, tokenizer: Tokenizer) -> list[str]:
    """One call between the tags, as the rule of this name. The arguments are a separate schema, so that references in it stay
    valid."""
    places, rules = {"$name": lark_literal(tool.name), "$id": "/[0-9]{1,3}/"}, []
    if form.body == "python":
        places["$arguments"], rules = f"{rule}_first_0", _python(rule, tool)
    else:
        places["$arguments"] = _json(tool, tool.schema)
    parts = _PLACES.split(form.template)
    body = " ".join(places[part] if part in places else markup(part, tokenizer) for part in parts if part)
    return [f"{rule}: {body}", *rules]


def _json(tool: Tool, schema: Any) -> str:
    options: dict[str, Any] = {"whitespace_pattern": " "}
    if not tool.strict:
        options["lenient"] = True
    return "%json " + json.dumps({"x-guidance": options, **schema})


def _python(rule: str, tool: Tool) -> list[str]:
    """Keyword arguments in the order of the schema; values are JSON, but for the words that Python writes differently.

    RULE_first_0 has all pairs, RULE_first_i those from i on, at the start, RULE_tail_i those from i on, after another one. Every
    pair repeats the definitions of the schema, so what is too long is refused here, before it is made.
    """
    schema = tool.schema
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, properties = set(schema.get("required", ())), schema.get("properties", {})
    rules, size = [f'{rule}_{part}_{len(properties)}: ""' for part in ("first", "tail")], 0
    for i, (name, value) in enumerate(properties.items()):
        pair, tail, needed = f"{rule}_pair_{i}", f"{rule}_tail_{i + 1}", name in required
        rules += [
            f"{pair}: {lark_literal(name + '=')} {_python_value(tool, value, shared)}",
            f"{rule}_first_{i}: {pair} {tail}" + ("" if needed else f" | {rule}_first_{i + 1}"),
            f'{rule}_tail_{i}: (", " {pair}){"" if needed else "?"} {tail}',
        ]
        size += sum(map(len, rules[-3:]))
        if size > MAX_SOURCE:
            reason = f"its arguments have more than {MAX_SOURCE} characters as a grammar, with $defs once for each"
            raise BadGrammar(f"tools: {tool.name!r} is too long ({reason}): shorten its schema.", param="tools")
    return rules


def _python_value(tool: Tool, schema: Any, shared: dict[str, Any]) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in _PYTHON_TYPES and not schema.keys() & {"enum", "const"}:
        return _PYTHON_TYPES[kind]
    return _json(tool, {**shared, **schema} if isinstance(schema, dict) else {})


def _markup_rule(tokenizer: Tokenizer, tags: TextTags, calls: str = "") -> str:
    """An alternative for the added tokens that text may contain. calls: tags of tool calls, which it may not."""
    ids = {index for tag in tags.allowed for index in added_ids(tag, tokenizer).values()} | tokenizer.markup_ids
    ids -= {index for tag in (calls, *tags.excluded) for index in added_ids(tag, tokenizer).values()}
    return f" | <[{','.join(map(str, sorted(ids)))}]>" if ids else ""


def _text_rules(form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, tags: TextTags) -> list[str]:
    """Rules for text: ordinary tokens and other markup (reasoning tags, for example), but nothing that begins a call."""
    markup_rule = _markup_rule(tokenizer, tags, form.tags)
    if form.first:
        return [r"TEXT: /(.|\n)+/", f"text: (TEXT{markup_rule})*"]
    if form.body == "named":
        names = "|".join(re.escape(tool.name) for tool in choice.tools)
        head = rf"HEAD: /(.|\n)+/ & ~/[ \t\r\n]*({names})\n(.|\n)*/"
    else:
        letter = r"\[" if form.is_list else "{"
        head = rf"HEAD: /[ \t\r\n]*[^{letter} \t\r\n](.|\n)*/"
    return [head, r"TEXT: /(.|\n)+/", f"text: ((HEAD{markup_rule}) (TEXT{markup_rule})*)?"]
