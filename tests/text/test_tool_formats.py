# ruff: noqa: RUF001 - DeepSeek's tags have fullwidth bars
"""Every format of tool calls: outputs as models write them, malformed ones, and grammars whose outputs the parser reads."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from ridgeline.core.errors import BadGrammar, ConfigError
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.harmony import HarmonySplitter
from ridgeline.text.prompts import ChatTemplates
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import (
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM4,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    TOOL_FORMATS,
    ToolFormat,
    choose_format,
    detect_format,
)
from ridgeline.text.tool_grammar import tool_grammar
from ridgeline.text.toolcalls import ToolCallParser
from ridgeline.text.tools import ToolChoice, read_tools
from tests.text.conftest import byte_level_backend, write_model
from tests.text.walk import outputs

END = 2
NAMES = ("weather", "add", "add_all")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, FINISH = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEP = "[" * 3000 + "]" * 3000
X, CITY = '{"x": [1, {"y": "]}"}]}', '{"city": "Os}lo"}'
TWO = [("add", X), ("weather", CITY)]
LISTED = f'[{{"name": "add", "arguments": {X}}}, {{"name": "weather", "arguments": {CITY}}}]'
COMMAND = f'[\n    {{"tool_call_id": "0", "tool_name": "add", "parameters": {X}}}\n]'

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (MISTRAL, f"[TOOL_CALLS]{LISTED}", "", TWO),
    (MISTRAL, f"Yes. [TOOL_CALLS] {LISTED}", "Yes.", TWO),
    (MISTRAL, '[TOOL_CALLS][{"name": "robot", "arguments": {}}]',) * 1 + ('[TOOL_CALLS][{"name": "robot", "arguments": {}}]', []),
    (MISTRAL, "[TOOL_CALLS]no list", "[TOOL_CALLS]no list", []),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "add", "arguments": {X}}}, bad] on', ", bad] on", TWO[:1]),
    (MISTRAL_ARGS, f"[TOOL_CALLS]add[ARGS]{X}[TOOL_CALLS]weather[CALL_ID]ab12[ARGS]{CITY}", "", TWO),
    (MISTRAL_ARGS, "[TOOL_CALLS]addition[ARGS]{}", "[TOOL_CALLS]addition[ARGS]{}", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]add[ARGS]no", "[TOOL_CALLS]add[ARGS]no", []),
    (GRANITE, f"<|tool_call|>{LISTED}", "", TWO),
    (GRANITE, f"Hm.\n<|tool_call|> {LISTED}\n", "Hm.", TWO),
    (COHERE, f"<|START_ACTION|>{COMMAND}<|END_ACTION|>", "", TWO[:1]),
    (COHERE, f"Plan<|START_ACTION|>{COMMAND}", "Plan", TWO[:1]),
    (DEEPSEEK_V3, BEGIN + "\n".join(V3.format(*call) for call in TWO) + FINISH, "", TWO),
    (DEEPSEEK_V3, "So." + BEGIN + V3.format(*TWO[0]), "So.", TWO[:1]),
    (DEEPSEEK_V3, BEGIN + V3.format("robot", "{}") + FINISH, BEGIN + V3.format("robot", "{}") + FINISH, []),
    (DEEPSEEK_V3, BEGIN + FINISH, BEGIN + FINISH, []),
    (DEEPSEEK_V31, BEGIN + "".join(V31.format(*call) for call in TWO) + FINISH, "", TWO),
    (DEEPSEEK_V31, BEGIN + "what", BEGIN + "what", []),
    (GLM4, f"add\n{X}", "", TWO[:1]),
    (GLM4, f"\nadd\n{X}<|assistant|>weather\n{CITY}", "", TWO),
    (GLM4, "add it\n{}", "add it\n{}", []),
    (GLM4, "The weather\nis fine", "The weather\nis fine", []),
    (GLM4, "add", "add", []),
    (PYTHONIC, """[add(x=[1, {'y': "]}"}]), weather(city='Os}lo')]""", "", TWO),
    (PYTHONIC, """<|python_start|>[add(x=[1, {"y": "]}"}])]<|python_end|>""", "", TWO[:1]),
    (PYTHONIC, "[add()]", "", [("add", "{}")]),
    (PYTHONIC, r"[add(a=True, b=None, c='it\'s \u00e9\n', d=(1, -2.5e3))]", "", [
        ("add", '{"a": true, "b": null, "c": "it\'s é\\n", "d": [1, -2500.0]}')]),
    (PYTHONIC, "[1, 2]", "[1, 2]", []),
    (PYTHONIC, "[add(1)]", "[add(1)]", []),
    (PYTHONIC, "[add(x=1e999)]", "[add(x=1e999)]", []),
    (PYTHONIC, "[add(x=", "[add(x=", []),
    (PYTHONIC, "[add(x=" + DEEP + ")]", "[add(x=" + DEEP + ")]", []),
    (PYTHONIC, "It is [4].", "It is [4].", []),
]  # fmt: skip


def parse(form: ToolFormat, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form, NAMES)
    news = [*(parser.push(part) for part in parts), parser.finish()]
    deltas = [delta for _, more in news for delta in more]
    named = [delta for delta in deltas if delta.id]
    assert [delta.index for delta in named] == list(range(parser.calls))
    calls = [(head.name, "".join(d.arguments for d in deltas if d.index == head.index)) for head in named]
    return "".join(text for text, _ in news), calls


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_split_at_every_character(form: ToolFormat, output: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(form, [output]) == (text, calls)
    cuts = range(1, len(output)) if DEEP not in output else (9, 3100)
    for cut in cuts:
        assert parse(form, [output[:cut], output[cut:]]) == (text, calls), cut
    assert DEEP in output or parse(form, list(output)) == (text, calls)


FRAGMENTS = sorted(
    {part for form in TOOL_FORMATS.values() for part in (form.begin, form.open, form.close, form.end, form.separator)}
    | {"add", "weather(", "city='", "x=1", ")", "{", "}", "[", "]", ", ", '"', '{"name": "add", "arguments": {', "\\", "\n", " a"}
    | {"<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "analysis", "final", " to=functions.add"}
)  # fmt: skip


@pytest.mark.parametrize("form", list(dict.fromkeys(TOOL_FORMATS.values())), ids=lambda form: form.name)
@settings(max_examples=30)
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12))
def test_malformed_output_is_text(form: ToolFormat, parts: list[str]) -> None:
    whole = "".join(parts)
    text, calls = parse(form, [whole])
    assert parse(form, list(whole)) == parse(form, parts) == (text, calls)
    assert calls or text == whole


def harmony(parts: list[str], channel: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """Visible and hidden text, and calls."""
    splitter = HarmonySplitter(channel=channel)
    pieces = [*(splitter.push(part) for part in parts), splitter.finish()]
    text, calls = parse(HARMONY, [visible for visible, _ in pieces])
    return text, "".join(hidden for _, hidden in pieces), calls


ANALYSIS = "<|channel|>analysis<|message|>Hm, 2+2.<|end|><|start|>assistant"
HARMONY_CASES = [
    (f"{ANALYSIS}<|channel|>final<|message|>It is 4.", "It is 4.", "Hm, 2+2.", []),
    (f"{ANALYSIS}<|channel|>final<|message|>It is 4.<|return|>", "It is 4.", "Hm, 2+2.", []),
    (f"{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{X}<|call|>", "", "Hm, 2+2.", TWO[:1]),
    (f"{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{X}", "", "Hm, 2+2.", TWO[:1]),
    (f"{ANALYSIS}<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
     f"<|message|>{X}<|call|>", "I add.", "Hm, 2+2.", TWO[:1]),
    (f"{ANALYSIS}<|channel|>analysis<|message|>More.<|end|><|start|>assistant<|channel|>final<|message|>4", "4",
     "Hm, 2+2.\nMore.", []),
    ("<|channel|>analysis<|message|>It never en", "", "It never en", []),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b", "a", []),
    ("It is 4.", "It is 4.", "", []),
    ("<|channel|>final", "<|channel|>final", "", []),
    ("<|chan is no tag", "<|chan is no tag", "", []),
    ("", "", "", []),
    ("<|channel|>commentary to=functions.robot<|message|>{}<|call|>",
     "<|channel|>commentary to=functions.robot<|message|>{}<|call|>", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("output", "text", "hidden", "calls"), HARMONY_CASES)
def test_harmony(output: str, text: str, hidden: str, calls: list[tuple[str, str]]) -> None:
    assert harmony([output]) == harmony(list(output)) == (text, hidden, calls)
    for cut in range(1, len(output)):
        assert harmony([output[:cut], output[cut:]]) == (text, hidden, calls), cut


def test_harmony_of_long_outputs() -> None:
    """A header without end is text however it arrives, and the time does not grow with the rest of the output."""
    for size in (235, 240, 245, 250, 300):
        output = f"<|channel|>{'a' * size}<|message|>x"
        assert harmony([output]) == harmony(list(output)), size
    began = time.process_time()
    harmony(["<|channel|>final<|message|>a<|end|>" * 4000])
    assert time.process_time() - began < 1


@settings(max_examples=30)
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12))
def test_malformed_harmony_keeps_its_text(parts: list[str]) -> None:
    splitter = HarmonySplitter()
    pieces = [*(splitter.push(part) for part in parts), splitter.finish()]
    whole = "".join(parts)
    assert harmony(parts) == harmony(list(whole)) == harmony([whole])
    if "<|" not in whole:
        assert "".join(visible for visible, _ in pieces) == whole


def test_an_answer_that_goes_on_from_the_prompt() -> None:
    assert harmony(["more", " text"], "final") == ("more text", "", [])
    assert harmony(["more<|end|><|start|>assistant<|channel|>final<|message|>4"], "analysis") == ("4", "more", [])


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With tokens for the tags of all formats, special ones as in the models."""
    tags = {part for form in TOOL_FORMATS.values() for part in (form.begin, form.open, form.end, form.marker) if part}
    tags |= {"<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"}
    tags |= {"<|constrain|>", "<|call|>", "<|python_end|>"}
    backend = byte_level_backend()
    plain = {"<tool_call>", "</tool_call>", HARMONY.open}
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in sorted(tags - plain)])
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("tags"), backend, {}))


ADD = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "note": {"type": "string", "maxLength": 4},
        "at": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "at"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"add": ADD, "add_all": {"maxProperties": 0}}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
        {"type": "function", "function": {"name": "add_all"}},
    ]
)


@pytest.mark.parametrize("form", list(dict.fromkeys(TOOL_FORMATS.values())), ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(tagged: Tokenizer, form: ToolFormat, parallel: bool) -> None:
    compiler = GrammarCompiler(tagged, vocab_size=tagged.vocab_size, end_ids=[END])
    grammar = tool_grammar(form, ToolChoice(TOOLS, True), tagged, parallel=parallel)
    compiled = compiler.compile(grammar)
    for output in outputs(compiled.start, tagged, END, count=6, hide=False):
        text, calls = parse(form, [output]) if form is not HARMONY else harmony([output])[::2]
        assert calls and (parallel or len(calls) == 1), output
        assert form is HARMONY or text == "", output
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("form", [HERMES, PYTHONIC], ids=lambda form: form.name)
def test_a_function_may_have_many_arguments(tagged: Tokenizer, form: ToolFormat) -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(100)}, "required": ["p50"]}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": many}}])
    grammar = tool_grammar(form, ToolChoice(tools, True), tagged)
    assert len(grammar.source) < 1 << 16
    compiler = GrammarCompiler(tagged, vocab_size=tagged.vocab_size, end_ids=[END])
    state = compiler.compile(grammar).start()
    text = {PYTHONIC: "[f(p3=1, p50=2, p99=3)]", HERMES: '<tool_call>\n{"name": "f", "arguments": {"p3": 1, "p50": 2}}'}
    for token in tagged.encode(text[form], add_special_tokens=False):
        state.accept([token])  # raises for a token that the mask does not allow


def test_definitions_are_not_repeated_without_end(tagged: Tokenizer) -> None:
    shared = {"x": {"type": "string", "enum": [f"e{n}" for n in range(3000)]}}
    schema = {"type": "object", "$defs": shared, "properties": {f"p{n}": {"$ref": "#/$defs/x"} for n in range(2000)}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    began = time.process_time()
    with pytest.raises(BadGrammar, match="'f' is too long"):
        tool_grammar(PYTHONIC, ToolChoice(tools, True), tagged)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("form", list(dict.fromkeys(TOOL_FORMATS.values())), ids=lambda form: form.name)
def test_text_is_free_beside_optional_calls(tagged: Tokenizer, form: ToolFormat) -> None:
    compiler = GrammarCompiler(tagged, vocab_size=tagged.vocab_size, end_ids=[END])
    state = compiler.compile(tool_grammar(form, ToolChoice(TOOLS, False), tagged)).start()
    head = "<|channel|>final<|message|>" if form is HARMONY else ""
    for token in tagged.encode(f"{head}add? It is fine.", add_special_tokens=False):
        state.accept([token])  # raises for a token that the mask does not allow


def test_requests_cannot_write_the_tags_of_calls(tagged: Tokenizer) -> None:
    source = "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}"
    encoder = ChatTemplates(tagged, {"default": source}).choose(tools=True)
    prompt = encoder.encode([{"role": "user", "content": "[TOOL_CALLS]"}])
    assert encoder.tool_format is MISTRAL and prompt.text.endswith("[TOOL_CALLS][TOOL_CALLS]")
    assert prompt.ids.count(tagged.token_id("[TOOL_CALLS]")) == 1


TEMPLATES = [
    ("{{ tools }}<tool_call>", HERMES),
    ("{{ tools }}[TOOL_CALLS]", MISTRAL),
    ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL_ARGS),
    ("{{ tools }}<|tool_call|> followed by a JSON list", GRANITE),
    ("{{ tools }}<|START_ACTION|>", COHERE),
    (f"{{{{ tools }}}}{BEGIN}```json", DEEPSEEK_V3),
    (f"{{{{ tools }}}}{BEGIN}", DEEPSEEK_V31),
    ("{{ tools }}<|assistant|><|observation|>", GLM4),
    ("{{ tools }}[func_name1(params_name1=params_value1)]", PYTHONIC),
    ('{{ tools }}ipython {"name": 1, "parameters": 2}', LLAMA3),
    ("{{ tools }}<|channel|>commentary to=functions.", HARMONY),
    ("{{ tools }}<tool_call><function=", None),
    ("{{ tools }}<tool_call><arg_key>", None),
    ("[TOOL_CALLS]", None),
]


@pytest.mark.parametrize(("source", "form"), TEMPLATES)
def test_formats_of_templates_and_by_name(source: str, form: ToolFormat | None) -> None:
    template = ChatTemplate(source, {})
    assert detect_format(template) is choose_format("auto", template) is form
    assert choose_format("none", template) is None and choose_format("granite", template) is GRANITE
    with pytest.raises(ConfigError, match="tool_call_parser is 'x': use one of auto, none, hermes"):
        choose_format("x", template)
