from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from ridgeline.core.errors import BadGrammar, UnsupportedField
from ridgeline.core.sampling import Grammar, GrammarKind
from ridgeline.text import grammar as grammar_module
from ridgeline.text.control_tokens import hide_added_tokens
from ridgeline.text.grammar import MAX_SOURCE, GrammarCompiler
from ridgeline.text.tokenizer import Tokenizer
from tests.text.conftest import MARKUP, byte_level_backend, write_model
from tests.text.walk import allowed, outputs, walk

VOCAB = 641
END = 2

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["x", "é", None, 3]}, "minItems": 1, "maxItems": 3},
            "size": {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"const": {"k": [1]}}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    {
        "type": "array",
        "prefixItems": [{"type": "integer", "multipleOf": 5}, {"const": "z"}],
        "items": False,
        "minItems": 2,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "l": {"$ref": "#/$defs/tree"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
        "title": "Tree",
        "x-order": 1,
    },
    {"type": "string", "format": "date"},
    {"allOf": [{"type": "object", "properties": {"p": {"type": "integer"}}}, {"required": ["p"]}], "maxProperties": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {
        "type": "array",
        "prefixItems": [
            {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
            {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1},
            {"type": "number", "exclusiveMinimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        ],
        "items": False,
        "minItems": 3,
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, value: {"type": "boolean"}},
                "required": ["kind", value],
                "additionalProperties": False,
            }
            for kind, value in (("cat", "purrs"), ("dog", "barks"))
        ],
        "discriminator": {"propertyName": "kind"},
    },
]


def _tagged(tag: str, value: Any, required: tuple[str, ...], **members: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {tag: value, **members},
        "required": [*required],
        "additionalProperties": False,
    }


_BOOL, _INT = {"type": "boolean"}, {"type": "integer"}
_PAIR = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
UNIONS: list[dict[str, Any]] = [
    {  # pydantic: a tag with a default is not required; a list of unions that hold themselves
        "$defs": {
            "A": _tagged("kind", {"const": "a", "default": "a"}, ("x",), x=_BOOL),
            "B": _tagged("kind", {"enum": ["b", "c"], "default": "b"}, (), next={"$ref": "#/$defs/U"}),
            "U": {"oneOf": _PAIR, "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}}},
        },
        **_tagged("all", {"type": "array", "items": {"$ref": "#/$defs/U"}, "minItems": 1, "maxItems": 2}, ("all",)),
    },
    {  # no discriminator: one branch may go without the tag, since the other may not
        "$defs": {
            "A": _tagged("v", {"const": 1}, ("x", "v"), x=_INT),
            "B": _tagged("v", {"const": 2}, ("x",), x=_INT),
        },
        "oneOf": _PAIR,
    },
    {  # a union in a union, by tags of their own; the constant is behind a reference
        "$defs": {
            "K": {"const": "cat", "type": "string"},
            "A": _tagged("kind", {"$ref": "#/$defs/K"}, ("kind", "color"), color={"const": "black"}),
            "B": _tagged("kind", {"$ref": "#/$defs/K"}, ("kind",), color={"const": "white", "default": "white"}),
            "D": _tagged("kind", {"const": "dog"}, (), barks=_BOOL),
            "Cats": {"oneOf": _PAIR, "discriminator": {"propertyName": "color"}},
        },
        "oneOf": [{"$ref": "#/$defs/Cats"}, {"$ref": "#/$defs/D", "description": "barks"}],
        "discriminator": {"propertyName": "kind"},
    },
]
SCHEMAS += UNIONS


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level, vocab_size=VOCAB, end_ids=[END])


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_any_walk_satisfies_its_schema(
    schema: dict[str, Any], compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    compiler.compile(grammar)
    texts = outputs(lambda: compiler.compile(grammar).start(), byte_level, END)
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_a_union_by_its_tag_allows_every_branch(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    wanted = [
        (0, '{"all":[{"kind":"b","next":{"kind":"a","x":true}},{"kind":"c"}]}'),
        (1, '{"v":1,"x":5}'),
        (1, '{"x":5}'),
        (1, '{"v":2,"x":5}'),
        (2, '{"kind":"cat","color":"black"}'),
        (2, '{"kind":"cat","color":"white"}'),
        (2, '{"kind":"dog"}'),
    ]
    for index, text in wanted:
        jsonschema.validate(json.loads(text), UNIONS[index])
        state = compiler.compile(Grammar("json_schema", json.dumps(UNIONS[index]))).start()
        for token in byte_level.encode(text, add_special_tokens=False):
            assert token in allowed(state), text
            state.accept([token])
        assert END in allowed(state)


_A = _tagged("k", {"const": "a"}, ("k",))
_SAME = _tagged("k", {"enum": ["b", "a"]}, ("k",))
_ANY = {**_tagged("k", {"const": "b"}, ("k",)), "type": ["object", "null"]}
_FREE = _tagged("k", {"type": "string"}, ("k",))


@pytest.mark.parametrize("other", [_SAME, _ANY, _FREE, _tagged("k", {"const": "b"}, ()), True, {"$ref": "#/$defs/B"}])
def test_a_union_that_no_tag_tells_apart_is_refused(other: Any, compiler: GrammarCompiler) -> None:
    first = _A if other is not _ANY else {**_A, "type": ["object", "null"]}
    first = first if other == _SAME or other is _ANY else {**first, "required": []}
    schema: dict[str, Any] = {"$defs": {"A": first, "B": other}, "oneOf": _PAIR}
    with pytest.raises(BadGrammar, match="a required property with a const of its own|does not compile"):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_a_model_without_an_end_token_in_its_vocabulary_takes_no_grammar(byte_level: Tokenizer) -> None:
    grammar = Grammar("choice", '["a"]')
    GrammarCompiler(byte_level, vocab_size=VOCAB, end_ids=[END, VOCAB]).compile(grammar)
    with pytest.raises(UnsupportedField, match="needs an end token"):
        GrammarCompiler(byte_level, vocab_size=VOCAB, end_ids=[VOCAB]).compile(grammar)


def test_references_under_another_base_are_not_followed(compiler: GrammarCompiler) -> None:
    inner = {"$id": "http://example.org/i", "$defs": {"A": _A, "B": _A}, "oneOf": _PAIR}
    outer = {"$defs": {"A": _A, "B": _tagged("k", {"const": "b"}, ("k",))}, "properties": {"i": inner}}
    with pytest.raises(BadGrammar):
        compiler.compile(Grammar("json_schema", json.dumps(outer)))


def test_json_object(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    for text in outputs(lambda: compiler.compile(Grammar("json_object", "")).start(), byte_level, END):
        assert isinstance(json.loads(text), dict)


def test_sentencepiece_vocabulary(sentencepiece: Tokenizer) -> None:
    compiler = GrammarCompiler(sentencepiece, vocab_size=sentencepiece.vocab_size, end_ids=[END])
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[1]))
    for text in outputs(lambda: compiler.compile(grammar).start(), sentencepiece, END, count=10):
        jsonschema.validate(json.loads(text), SCHEMAS[1])


@pytest.mark.parametrize("pattern", ["[a-c]+x{2,3}", "a/b\n(é|日)?", r"[0-9]{2}-[^x]", "(yes|no)\\.", ""])
def test_regex(pattern: str, compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    for text in outputs(lambda: compiler.compile(Grammar("regex", pattern)).start(), byte_level, END, count=10):
        assert re.fullmatch(pattern, text)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choices=st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=4, unique=True))
def test_choice_allows_each_text_and_no_other(
    choices: list[str], compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    grammar = Grammar("choice", json.dumps(choices))
    assert set(outputs(lambda: compiler.compile(grammar).start(), byte_level, END, count=3)) <= set(choices)
    for text in choices:
        state = compiler.compile(grammar).start()
        for token in byte_level.encode(text, add_special_tokens=False):
            assert token in allowed(state)
            state.accept([token])
        assert END in allowed(state)


@pytest.mark.parametrize("text", ["<|im_end|>", "a</tool_call>b", "<tool_call>{}</tool_call>"])
def test_the_one_text_that_is_left_may_be_that_of_an_added_token(
    text: str, compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    """It is said in letters: added tokens are no text of a grammar."""
    added = byte_level.special_ids | byte_level.markup_ids
    for grammar in (Grammar("choice", json.dumps([text])), Grammar("json_schema", json.dumps({"const": text}))):
        state = compiler.compile(grammar).start()
        tokens = walk(state, byte_level, END, Random(0))
        assert tokens is not None and text in byte_level.decode(tokens, skip_special_tokens=False)
        assert not added & set(tokens)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_added_tokens_stay_what_they_are(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[END])
    token_ids = set(allowed(compiler.compile(Grammar("regex", r"(.|\n)*")).start()))
    assert not token_ids & (tokenizer.special_ids | tokenizer.markup_ids) - {END} and len(token_ids) > 256
    state = compiler.compile(Grammar("lark", "start: <[1]>")).start()
    assert allowed(state) == [1]
    state.accept([1])
    assert allowed(state) == [END]


def test_added_tokens_that_are_also_merged_of_letters(tmp_path: Path) -> None:
    """As a vocabulary of sentencepiece has them, whose merges were made of its pieces."""
    content = json.loads(byte_level_backend().to_str())
    model = content["model"]
    for pair in (("<", "b"), ("<b", ">")):
        model["vocab"]["".join(pair)] = len(model["vocab"]) + len(MARKUP)
        model["merges"].append([*pair])
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_tokens([AddedToken("<b>", special=False, normalized=False)])
    tokenizer = Tokenizer.load(write_model(tmp_path, backend, {}))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[END])
    tokens = walk(compiler.compile(Grammar("choice", '["<b>"]')).start(), tokenizer, END, Random(0))
    assert tokens is not None and tokenizer.decode(tokens, skip_special_tokens=False) == "<b>"


def test_a_vocabulary_of_pieces_with_scores_loses_the_names_too() -> None:
    tokens = [{"content": "<s>", "special": True}, {"content": "  ", "special": False}]
    model = {"unk_token": None, "vocab": [["<s>", 0.0], ["  ", -1.0], ["a", -2.0]]}
    hidden = hide_added_tokens({"model": model, "added_tokens": tokens})
    assert [token["content"] for token in hidden["added_tokens"]] == [name for name, _ in hidden["model"]["vocab"][:2]]
    assert hidden["added_tokens"][0]["content"] not in ("<s>", "a") and tokens[1]["content"] == "  "


def test_lark(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = Grammar("lark", 'start: "a" inner* "c"\ninner: "(" inner? ")"')
    texts = outputs(lambda: compiler.compile(grammar).start(), byte_level, END)
    assert len(set(texts)) > 3
    for text in texts:
        assert text[0] == "a" and text[-1] == "c" and text.count("(") == text.count(")")


def test_masks_are_words_of_the_whole_vocabulary(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    state = compiler.compile(Grammar("choice", '["fox"]')).start()
    assert len(state.mask()) == 4 * ((VOCAB + 31) // 32)
    texts = {byte_level.token_text(index) for index in allowed(state)}
    assert texts and all(text and "fox".startswith(text) for text in texts)


def test_the_end(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    state = compiler.compile(Grammar("regex", "ab?")).start()
    state.accept(byte_level.encode("a", add_special_tokens=False))
    assert not state.finished and END in allowed(state)
    state.accept([END])
    assert state.finished and allowed(state) == [END]

    state = compiler.compile(Grammar("regex", "a")).start()
    state.accept(byte_level.encode("a", add_special_tokens=False))
    assert state.finished and allowed(state) == [END]
    state.accept([END, 5])
    assert state.finished


def test_states_do_not_share(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = Grammar("regex", "ab")
    first, second = compiler.compile(grammar).start(), compiler.compile(grammar).start()
    first.accept(byte_level.encode("a", add_special_tokens=False))
    assert allowed(first) != allowed(second)


def test_a_forbidden_token_is_an_error(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    state = compiler.compile(Grammar("regex", "a")).start()
    with pytest.raises(BadGrammar, match="No token that the regex allows .* allowed_token_ids"):
        state.accept(byte_level.encode("z", add_special_tokens=False))


@pytest.mark.parametrize("grammar", [Grammar("json_object", ""), Grammar("json_schema", "{}")])
def test_white_space_is_a_space_or_an_indented_line(
    grammar: Grammar, compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    def taken(text: str) -> int:
        """Letters of a text that may be said."""
        state = compiler.compile(grammar).start()
        for place, letter in enumerate(text):
            (token,) = byte_level.encode(letter, add_special_tokens=False)
            if token not in allowed(state):
                return place
            state.accept([token])
        return len(text)

    value = {"a": [1, {"b": {}, "c": "d  e"}], "f": 2}
    for form in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"indent": 0}):
        written = json.dumps(value, **form)  # type: ignore[arg-type]
        assert taken(written) == len(written)
    for begun, blank in (('{"a"', " "), ('{"a":', " "), ("{", "\n"), ('{"a": 1', " ")):
        assert taken(begun + 2 * blank) == len(begun) + 1
    assert [taken("{" + blank) for blank in ("\t", "\r", "\n" + 80 * " ", "\n" + 80 * "\t")] == [1, 1, 66, 18]


DEEP = '{"items":' * 200 + "{}" + "}" * 200
HOSTILE: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "", "not valid JSON"),
    ("json_schema", "[" * 60_000, "not valid JSON|must be an object"),
    ("json_schema", "3", "must be an object"),
    ("json_schema", '{"properties": {"a": []}}', r"schema.properties.a must be an object"),
    ("json_schema", '{"type": "object", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"properties": {"a": {"not": {}}}}', r"schema\.properties\.a uses 'not'"),
    ("json_schema", '{"anyOf": [{"speling": 1}]}', r"anyOf\[0\] uses 'speling'"),
    ("json_schema", '{"type": "string", "nullable": true}', "null"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "type": "object"}', "x-guidance"),
    ("json_schema", '{"type": "robot"}', "robot"),
    ("json_schema", '{"type": "string", "format": "robot"}', "robot"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"type": "string", "pattern": "\\ud800"}', "not valid"),
    ("json_schema", '{"$ref": "#"}', "matches nothing"),
    ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
    ("json_schema", '{"$ref": "http://example.org/x"}', "example.org"),
    ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "matches nothing"),
    ("json_schema", '{"const": NaN}', "not valid"),
    ("json_schema", '{"enum": []}', "does not compile"),
    ("json_schema", "false", "object schema"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "exclude each other: write anyOf"),
    ("json_schema", '{"type": "array", "maxItems": 1e30}', "maxItems"),
    ("json_schema", '{"type": "integer", "minimum": 1e400}', "not valid"),
    ("json_schema", DEEP, "levels"),
    ("json_schema", '{"enum": [' + "[" * 500 + "]" * 500 + "]}", "not valid|does not compile"),
    ("json_schema", '{"anyOf": [' + ",".join(["{}"] * 5000) + "]}", "subschemas"),
    ("json_schema", '{"title": "' + "x" * MAX_SOURCE + '"}', "characters"),
    ("regex", "(", "unclosed"),
    ("regex", "(" * 20_000 + ")" * 20_000, "does not compile"),
    ("regex", "(?<!a)b", "look-around"),
    ("regex", r"(a)\1", "backreference"),
    ("regex", r"[^\s\S]", "matches nothing"),
    ("regex", "a\ud800", "surrogate"),
    ("choice", "[]", "at least one"),
    ("choice", '["a", ""]', "at least one"),
    ("choice", '["a", 3]', "at least one"),
    ("choice", '"a"', "at least one"),
    ("choice", "a", "not valid JSON"),
    ("choice", '["\\ud800"]', "surrogate"),
    ("lark", "", "does not compile"),
    ("lark", "no rules at all", "does not compile"),
    ("lark", "start: nothing", "nothing"),
    ("lark", "start: start", "matches nothing"),
    ("lark", "start: " + "(" * 10_000, "nested"),
    ("lark", "%llguidance", "%llguidance"),
    ("lark", '%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
    ("lark", "start: <|no_such_token|>", "no_such_token"),
    ("lark", 'start: %json {"robot', "json"),
    ("lark", "start: @elsewhere", "elsewhere"),
    ("lark", "\x00", "does not compile"),
]


@pytest.mark.parametrize(("kind", "source", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_are_refused_with_a_reason(
    kind: GrammarKind, source: str, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(BadGrammar) as caught:
        compiler.compile(Grammar(kind, source))
    assert re.search(reason, caught.value.message), caught.value.message
    assert len(caught.value.message) < 500


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["json_schema", "regex", "choice", "lark"]), source=st.text(max_size=80))
def test_no_text_breaks_the_check(kind: GrammarKind, source: str, compiler: GrammarCompiler) -> None:
    try:
        compiler.compile(Grammar(kind, source))
    except BadGrammar:
        return
    assert allowed(compiler.compile(Grammar(kind, source)).start())


LARK_LETTERS = st.text(st.sampled_from('start:|"ab/()[]{}*+?~&%\n ,.<>@-\\0123'), max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=LARK_LETTERS)
def test_no_lark_breaks_the_check(tail: str, compiler: GrammarCompiler) -> None:
    try:
        compiler.compile(Grammar("lark", "start: " + tail))
    except BadGrammar as error:
        assert error.message


def test_without_the_extra_structured_output_is_refused(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "llguidance", None)
    compiler = GrammarCompiler(byte_level, vocab_size=VOCAB, end_ids=[END])
    with pytest.raises(UnsupportedField, match=r"ridgeline\[structured\]"):
        compiler.compile(Grammar("json_object", ""))
