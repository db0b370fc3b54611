from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from ridgeline.core.errors import BadGrammar, RequestError, RidgelineError, UnsupportedField
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.grammar import GrammarCompiler, GrammarState
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, detect_format
from ridgeline.text.tool_grammar import tool_grammar
from ridgeline.text.toolcalls import parse_tool_calls
from ridgeline.text.tools import ToolChoice, read_tool_choice, read_tools
from tests.text import templates
from tests.text.conftest import byte_level_backend, write_model
from tests.text.walk import allowed, outputs

END = 2
PLACE = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
ADD = {
    "type": "object",
    "$defs": {"place": {**PLACE, "additionalProperties": False}},
    "properties": {
        "at": {"$ref": "#/$defs/place", "description": "where"},
        "kind": {"enum": ["a", "b"]},
        "description": {"type": "string", "maxLength": 5},
    },
    "required": ["at", "description"],
    "additionalProperties": False,
}


def function(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **parameters, **more}}


TOOLS = read_tools([function("add", ADD), function("add_all"), function("now", {"properties": {}})])
SCHEMAS = {"add": ADD, "add_all": {"maxProperties": 0}, "now": {"type": "object"}}
ANY, MUST = ToolChoice(TOOLS, False), ToolChoice(TOOLS, True)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With tokens for every tag, and two for thoughts."""
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    backend.add_special_tokens([AddedToken("<|python_tag|>", special=True, normalized=False)])
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("tagged"), backend, {}))


def starter(form: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer, *, parallel: bool = True) -> Any:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[END])
    grammar = tool_grammar(form, choice, tokenizer, parallel=parallel)
    compiler.compile(grammar)
    return lambda: compiler.compile(grammar).start()


def follow(state: GrammarState, tokenizer: Tokenizer, text: str) -> str:
    """The part of `text` that the grammar lets pass, token by token."""
    passed: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state):
            break
        state.accept([token])
        passed.append(token)
    return tokenizer.decode(passed, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["tagged", "sentencepiece"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=pytest.mark.long)])
def test_required_calls_are_valid(kind: str, form: ToolFormat, parallel: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    seen = set()
    for output in outputs(starter(form, MUST, tokenizer, parallel=parallel), tokenizer, END):
        text, calls = parse_tool_calls(form, SCHEMAS, output)
        assert text == "" and calls, output
        assert parallel or len(calls) == 1
        seen |= {call.name for call in calls}
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert len(seen) > 1


def test_a_named_function_is_the_only_one(tagged: Tokenizer) -> None:
    choice = read_tool_choice({"type": "function", "function": {"name": "now"}}, TOOLS)
    for output in outputs(starter(HERMES, choice, tagged), tagged, END, count=10):
        assert {call.name for call in parse_tool_calls(HERMES, SCHEMAS, output)[1]} == {"now"}


@pytest.mark.parametrize("kind", ["tagged", "sentencepiece"])
def test_text_runs_free_until_a_call_begins(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    start = starter(HERMES, ANY, tokenizer)
    words = 'Let me {"see"} <tool>.\n'
    state = start()
    assert follow(state, tokenizer, words).strip() == words.strip() and END in allowed(state)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    whole = f"{words}{call}\n{call} and on"
    state = start()
    assert follow(state, tokenizer, whole).strip() == whole and END in allowed(state)
    wrong = f'{words}<tool_call>\n{{"name": "nobody'
    state = start()
    assert follow(state, tokenizer, wrong).strip() == f'{words}<tool_call>\n{{"name": "n' and END not in allowed(state)


@pytest.mark.parametrize("kind", ["tagged", "sentencepiece"])
def test_one_call_when_calls_may_not_be_parallel(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    state = starter(HERMES, ANY, tokenizer, parallel=False)()
    assert follow(state, tokenizer, f"Hm. {call}{call}").strip() == f"Hm. {call}" and END in allowed(state)
    state = starter(HERMES, ANY, tokenizer, parallel=False)()
    assert follow(state, tokenizer, "Hm.").strip() == "Hm." and END in allowed(state)


def test_thoughts_may_come_first(tagged: Tokenizer) -> None:
    text = "<think>\nhm\n</think>\n\nIt is 4."
    assert follow(starter(HERMES, ANY, tagged)(), tagged, text) == text
    assert follow(starter(LLAMA3, ANY, tagged)(), tagged, text) == text


def test_llama_text_begins_with_anything_but_a_brace(tagged: Tokenizer) -> None:
    start = starter(LLAMA3, ANY, tagged)
    assert END in allowed(start())
    for text in (
        "It is {4}.",
        '{"name": "now", "parameters": {}}',
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "add_all", "parameters": {}}',
    ):
        state = start()
        assert follow(state, tagged, text) == text and END in allowed(state)
    assert follow(start(), tagged, '{"answer": 42}') != '{"answer": 42}'
    assert follow(start(), tagged, ' {"answer": 42}') != ' {"answer": 42}'


def test_formats_come_from_the_template() -> None:
    def format_of(source: str) -> ToolFormat | None:
        return detect_format(ChatTemplate(source, {}))

    assert format_of(templates.QWEN) is HERMES and format_of(templates.LLAMA3) is LLAMA3
    assert format_of(templates.CHATML) is None and format_of(templates.MISTRAL) is None
    assert format_of("{{ tools }}[TOOL_CALLS]") is MISTRAL and format_of("{{ tools }}<tool_call><function=") is None
    assert format_of("no place for them <tool_call>") is None


def test_functions_without_parameters_take_none() -> None:
    assert TOOLS[1].schema["additionalProperties"] is False and TOOLS[2].schema["type"] == "object"


def test_unknown_keywords_matter_only_to_strict_functions() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "int99", "nullable": True}}, "if": {}}
    loose = read_tools([function("f", odd)])
    assert "if" not in loose[0].schema and "nullable" not in loose[0].schema["properties"]["a"]
    with pytest.raises(BadGrammar, match=r"'if'|nullable") as caught:
        read_tools([function("f", odd, strict=True)])
    assert caught.value.param == "tools[0].function.parameters"


def test_loose_functions_compile_whatever_they_ask(tagged: Tokenizer) -> None:
    odd = {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "format": "int99"}]}}, "not": {}}
    starter(HERMES, ToolChoice(read_tools([function("f", odd)]), True), tagged)


@pytest.mark.parametrize(
    ("tools", "kind", "param"),
    [
        ([], RequestError, "tools"),
        ({}, RequestError, "tools"),
        ([function("f")] * 2, RequestError, "tools"),
        ([function(f"f{i}") for i in range(200)], RequestError, "tools"),
        ([3], UnsupportedField, "tools[0]"),
        ([{"type": "web_search"}], UnsupportedField, "tools[0]"),
        ([{"type": "function"}], RequestError, "tools[0].function"),
        ([function('f"')], RequestError, "tools[0].function.name"),
        ([function("f", [])], RequestError, "tools[0].function.parameters"),
        ([function("f", {"type": "string"})], BadGrammar, "tools[0].function.parameters"),
        ([function("f", {"properties": {"a": 3}})], BadGrammar, "tools[0].function.parameters"),
    ],
)
def test_malformed_tools_name_the_field(tools: Any, kind: type[RidgelineError], param: str) -> None:
    with pytest.raises(kind) as caught:
        read_tools(tools)
    assert caught.value.param == param


def test_bounds_of_64_bits_compile(tagged: Tokenizer) -> None:
    number = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    tools = read_tools([function("f", {"type": "object", "properties": {"a": number}}, strict=True)])
    grammar = tool_grammar(HERMES, ToolChoice(tools, True), tagged)
    GrammarCompiler(tagged, vocab_size=tagged.vocab_size, end_ids=[END]).compile(grammar)


def test_very_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(BadGrammar, match="levels"):
        read_tools([function("f", schema)])


def test_choices() -> None:
    assert read_tool_choice(None, TOOLS) == read_tool_choice("auto", TOOLS) == ANY
    assert read_tool_choice("required", TOOLS) == MUST and read_tool_choice("none", TOOLS) == ToolChoice((), False)
    for choice in ("sometimes", {"type": "allowed_tools"}, 3):
        with pytest.raises(UnsupportedField):
            read_tool_choice(choice, TOOLS)
    for choice in ({"type": "function"}, {"type": "function", "function": {"name": "nobody"}}):
        with pytest.raises(RequestError, match="which tools does not contain"):
            read_tool_choice(choice, TOOLS)


def test_tokens_of_the_fixture(tagged: Tokenizer, tmp_path: Path) -> None:
    assert len(tagged.encode("<tool_call><think><|python_tag|>", add_special_tokens=False)) == 3
