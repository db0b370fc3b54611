"""Budgets of reasoning: grammars that close it after a number of tokens, and let the request's own grammar follow."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from ridgeline.core.draft import Draft
from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import GrammarCompiler, GrammarState
from ridgeline.text.reasoning import REASONING_FORMATS, Tags, detect_tags
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import HERMES
from ridgeline.text.tool_grammar import TextTags, bound_reasoning, can_bound, harmony_grammar, tool_grammar
from ridgeline.text.tools import ToolChoice, read_tools
from tests.text.conftest import byte_level_backend, write_model
from tests.text.walk import allowed

END = 2
THINK, COHERE, HARMONY = (REASONING_FORMATS[name] for name in ("qwen3", "cohere2", "openai_gptoss"))
HARMONY_TAGS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
TOOLS = read_tools([{"type": "function", "function": {"name": "now"}}])
SCHEMA = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    special = (COHERE.open, COHERE.close, *(COHERE.answer or ()), *HARMONY_TAGS)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("marked"), backend, {}))


def start(
    tokenizer: Tokenizer,
    budget: int | None,
    grammar: Grammar | None = None,
    tags: Tags = THINK,
    *,
    inside: bool = False,
) -> GrammarState:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[END])
    if tags is HARMONY:
        bounded = harmony_grammar(ToolChoice((), False), tokenizer, answer=grammar, budget=budget)
    else:
        bounded = bound_reasoning(grammar, tags, tokenizer, inside=inside, budget=budget)
    compiled = compiler.compile(bounded)
    compiled.slow_mask_s = 60.0  # no draft is cut for the time that its masks take
    return compiled.start()


def accepts(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar allows this output, to its end."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state):
            return False
        state.accept([token])
    return END in allowed(state)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("inside", [False, True])
def test_the_closing_tag_is_forced_after_the_budget(marked: Tokenizer, budget: int, inside: bool) -> None:
    state = start(marked, budget, inside=inside)
    state.accept([] if inside else [marked.token_id("<think>")])
    word = marked.encode("a", add_special_tokens=False)
    for _ in range(budget):
        assert word[0] in allowed(state) and marked.token_id("</think>") in allowed(state)
        state.accept(word)
    assert allowed(state) == [marked.token_id("</think>")]
    state.accept([marked.token_id("</think>")])
    assert accepts(state, marked, "It is 4.")


def test_reasoning_may_end_early_or_not_begin(marked: Tokenizer) -> None:
    assert accepts(start(marked, 3), marked, "<think>a</think>b") and accepts(start(marked, 3), marked, "It is 4.")
    assert not accepts(start(marked, 3), marked, "It <think>is</think> 4.")  # reasoning outside of the budget
    assert accepts(start(marked, 3, inside=True), marked, "a</think>b")


def test_drafts_count_towards_the_budget_and_are_taken_back(marked: Tokenizer) -> None:
    state = start(marked, 3, inside=True)
    word = marked.encode("a", add_special_tokens=False)[0]
    state.masks(Draft.of([word] * 5, ()))  # leaves nothing behind
    draft, _masks = state.masks(Draft.of([word] * 5, ()))
    assert tuple(draft.tokens) == (word,) * 3
    state.accept([word] * 3)
    assert allowed(state) == [marked.token_id("</think>")]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (SCHEMA, '{"a": 1}', '{"a": 2}'),
        (Grammar("json_object", ""), '{"b": [1]}', "[1]"),
        (Grammar("regex", r"a/\/b+"), "a//bb", "a/bb"),
        (Grammar("choice", '["yes", "no"]'), "no", "noo"),
        (Grammar("lark", 'start: "x" start | "y"'), "xxy", "xx"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
@pytest.mark.parametrize("budget", [4, None])
def test_what_follows_obeys_the_grammar_of_the_request(
    marked: Tokenizer, grammar: Grammar, good: str, bad: str, budget: int | None
) -> None:
    head = "<think>hm</think>" if budget else "<think>" + "hm, " * 20 + "</think>"
    assert accepts(start(marked, budget, grammar), marked, head + good)
    assert accepts(start(marked, budget, grammar), marked, good)
    assert not accepts(start(marked, budget, grammar), marked, head + bad)
    assert accepts(start(marked, budget, grammar, inside=True), marked, "hm</think>" + good)
    assert not accepts(start(marked, budget, grammar, inside=True), marked, good)


@pytest.mark.parametrize("required", [True, False])
def test_tools_follow(marked: Tokenizer, required: bool) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tags = TextTags.of(THINK, bounded=True)
    grammar = tool_grammar(HERMES, ToolChoice(TOOLS, required), marked, tags=tags)
    assert accepts(start(marked, 9, grammar, inside=True), marked, f"hm</think>{call}")
    assert accepts(start(marked, 9, grammar, inside=True), marked, "hm</think>No.") is not required
    assert accepts(start(marked, 9, grammar), marked, f"<think>hm</think>{call}")
    assert not accepts(start(marked, 1, grammar), marked, f"<think>hmhmhm</think>{call}")


def test_tags_of_cohere_and_channels_of_gpt_oss(marked: Tokenizer) -> None:
    answer = "<|START_RESPONSE|>b<|END_RESPONSE|>"
    assert accepts(start(marked, 2, tags=COHERE), marked, f"<|START_THINKING|>a<|END_THINKING|>{answer}")
    assert not accepts(start(marked, 2, tags=COHERE), marked, f"<|START_THINKING|>abcdefghij<|END_THINKING|>{answer}")
    head, answer = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>b"
    assert accepts(start(marked, 2, tags=HARMONY), marked, f"{head}a<|end|><|start|>assistant{answer}")
    assert accepts(start(marked, 2, tags=HARMONY), marked, answer)
    text = f"{head}a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
    assert accepts(start(marked, 2, SCHEMA, HARMONY), marked, text + '{"a": 1}')
    assert not accepts(start(marked, None, SCHEMA, HARMONY), marked, text + '{"a": 2}')
    assert not accepts(start(marked, 2, tags=HARMONY), marked, f"{head}abcdefghij<|end|><|start|>assistant{answer}")


def test_tags_that_are_no_tokens_cannot_be_bounded(marked: Tokenizer) -> None:
    assert can_bound(THINK, marked) and can_bound(HARMONY, marked)
    assert not can_bound(REASONING_FORMATS["granite"], marked)


def test_a_grammar_that_does_not_compile_is_refused(marked: Tokenizer) -> None:
    with pytest.raises(BadGrammar):
        start(marked, 3, Grammar("regex", "("))


def test_formats_of_templates() -> None:
    names = {
        "<think></think>": "qwen3",
        "<think></think><response></response>": "granite_response",
        "Here is my thought process: Here is my response:": "granite",
        "[THINK][/THINK]": "mistral",
        "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>": "cohere2",
        "<|channel|>analysis": "openai_gptoss",
    }
    for template, name in names.items():
        assert detect_tags(template) is REASONING_FORMATS[name]
