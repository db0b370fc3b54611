from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ridgeline.core.errors import RequestError, UnsupportedField
from ridgeline.text.chat import ChatTemplate, RenderOptions
from tests.text import templates

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'What the sky does <now> & "later" in São Paulo',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Genève"}}}

ASK: list[dict[str, Any]] = [{"role": "user", "content": "  Hi <b> & 你好 "}]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *ASK]
HELLO = {"role": "assistant", "content": "Hello! \n"}
LONG: list[dict[str, Any]] = [*SYSTEM, HELLO, {"role": "user", "content": "Bye"}]
CALLS: list[dict[str, Any]] = [
    *ASK,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
EVERY = {name: getattr(templates, name) for name in ("CHATML", "LLAMA3", "GEMMA", "MISTRAL", "QWEN")}


@pytest.fixture(scope="module")
def transformers_tokenizer(sentencepiece_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(sentencepiece_dir)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("messages", [ASK, SYSTEM, LONG], ids=["ask", "system", "long"])
@pytest.mark.parametrize("generate", [True, False])
def test_prompts_as_in_transformers(
    name: str, messages: list[dict[str, Any]], generate: bool, transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = EVERY[name]
    theirs = transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=generate
    )
    ours = ChatTemplate(source, SPECIALS).render(messages, options=RenderOptions(add_generation_prompt=generate))
    assert ours == theirs


@pytest.mark.parametrize("name", ["LLAMA3", "QWEN"])
@pytest.mark.parametrize("messages", [ASK, SYSTEM, CALLS], ids=["ask", "system", "calls"])
def test_tools_as_in_transformers(
    name: str, messages: list[dict[str, Any]], transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    theirs = transformers_tokenizer.apply_chat_template(
        messages, tools=[WEATHER], chat_template=EVERY[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(EVERY[name], SPECIALS).render(messages, tools=[WEATHER]) == theirs


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("last", ["Once upon", "Once upon \n", " x"])
def test_continued_messages_as_in_transformers(
    name: str, last: str, transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [*ASK, {"role": "assistant", "content": last}]
    theirs = transformers_tokenizer.apply_chat_template(
        messages, chat_template=EVERY[name], tokenize=False, continue_final_message=True
    )
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(EVERY[name], SPECIALS).render(messages, options=options) == theirs


def test_content_takes_the_shape_the_template_wants() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert "one\ntwo" in ChatTemplate(templates.CHATML, SPECIALS).render(parts)
    assert "onetwo" in ChatTemplate(templates.GEMMA, SPECIALS).render(parts)
    only = ChatTemplate(templates.PARTS_ONLY, SPECIALS)
    assert only.render(parts) == "[user]onetwo"
    assert only.render([{"role": "user", "content": "one"}]) == "[user]one"
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    assert only.render(parts, options=options) == "[user]onetwo"


def test_arguments_of_calls_may_be_text_or_object() -> None:
    template = ChatTemplate(templates.QWEN, SPECIALS)
    text = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Genève"}'}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [text]}]
    assert template.render(messages, tools=[WEATHER]) == template.render(
        [*ASK, {"role": "assistant", "tool_calls": [CALL]}], tools=[WEATHER]
    )
    assert isinstance(text["function"]["arguments"], str)


def test_developer_speaks_as_system_where_the_template_does_not_know_the_role() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *ASK]
    assert ChatTemplate(templates.CHATML, {}).render(messages) == ChatTemplate(templates.CHATML, {}).render(SYSTEM)


def test_variables_of_the_request_reach_the_template() -> None:
    template = ChatTemplate(templates.QWEN, SPECIALS)
    assert template.render(ASK).endswith("assistant\n")
    assert template.render(ASK, options=RenderOptions(variables={"enable_thinking": False})).endswith("</think>\n\n")
    with pytest.raises(RequestError) as caught:
        template.render(ASK, options=RenderOptions(variables={"messages": []}))
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*ASK, {"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[1].tool_calls[0].function"),
        (
            [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(templates.QWEN, SPECIALS).render(messages)
    assert caught.value.param == param


def test_parts_that_are_not_text_are_refused_by_name() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedField, match="image_url"):
        ChatTemplate(templates.GEMMA, SPECIALS).render([message])


def test_what_a_prompt_does_not_show_is_named() -> None:
    said = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    parts = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "lang": "en", "extra": None}]
    messages = [*ASK, said, {"role": "user", "content": parts, "name": "Ann", "tool_call_id": "c"}, *CALLS[1:]]
    messages.append({"role": "assistant", "content": "c", "reasoning": "hm", "parsed": {"a": 1}, "refusal": "no"})
    options = RenderOptions(variables={"enable_thinking": False, "enable_thinkin": True})

    def ignored(source: str) -> set[str]:
        template = ChatTemplate(source, SPECIALS)
        template.render([message for message in messages if "content" in message], options=options)
        return set(template.ignored(messages, options.variables))

    always = {
        "messages.content.lang",
        "messages.parsed",
        "messages.refusal",
        "chat_template_kwargs.enable_thinkin",
    }
    assert ignored(templates.QWEN) == {*always, "messages.name", "messages.reasoning"}  # functions have names there
    plain = {*always, "chat_template_kwargs.enable_thinking", "messages.tool_calls"}
    assert ignored(templates.CHATML) == {*plain, "messages.name", "messages.reasoning"}
    reads = "{% for m in messages %}{{ m.name }}: {{ m.content }}{{ m['reasoning_content'] }}{% endfor %}"
    assert ignored(reads) == plain
    assert ignored(reads.replace("reasoning_content", "thinking")) == plain


@pytest.mark.parametrize(("text", "expected"), [("", "I look."), ("Wait.", "")])
def test_reasoning_before_a_call_as_gpt_oss_reads_it(text: str, expected: str) -> None:
    """Its template refuses a call with text and reasoning, which an answer of the model may have."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    said = {"role": "assistant", "content": text, "reasoning_content": "I look.", "tool_calls": calls}
    assert ChatTemplate("{{ messages[-1].thinking }}", SPECIALS).render([*ASK, said]) == expected


def test_a_refusal_is_what_was_said() -> None:
    template = ChatTemplate(templates.QWEN, SPECIALS)
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    for said in (
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "refusal": "No.", "content": None},
        part,
    ):
        assert template.render([*ASK, said, *ASK]) == template.render(
            [*ASK, {"role": "assistant", "content": "No."}, *ASK]
        )


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_members_that_cannot_be_honoured_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        ChatTemplate(templates.QWEN, SPECIALS).render([*ASK, {"role": "assistant", "content": "a", name: {"id": "x"}}])
    assert caught.value.param == f"messages[1].{name}"


def test_the_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(RequestError, match="must alternate"):
        ChatTemplate(templates.GEMMA, SPECIALS).render([*ASK, *ASK])
    broken = ChatTemplate("{{ messages[0].nothing.more }}", {})
    with pytest.raises(RequestError, match="does not contain: .* no attribute 'nothing'"):
        broken.render(ASK)
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 // 0 }}", {}).render(ASK)


@pytest.mark.parametrize("attack", ["{{ messages.append(1) }}", "{% for i in range(1000000000) %}{% endfor %}"])
def test_the_sandbox_forbids(attack: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(attack, {}).render(ASK)


@pytest.mark.parametrize("attack", ["{{ messages.__class__ }}", "{{ raise_exception.__globals__ }}"])
def test_the_sandbox_hides(attack: str) -> None:
    assert ChatTemplate(attack, {}).render(ASK) == ""


def test_tools_without_a_place_in_the_template_are_refused() -> None:
    with pytest.raises(UnsupportedField) as caught:
        ChatTemplate(templates.CHATML, SPECIALS).render(ASK, tools=[WEATHER])
    assert caught.value.param == "tools"


def test_continuing_needs_a_text_and_no_new_turn() -> None:
    template = ChatTemplate(templates.QWEN, SPECIALS)
    with pytest.raises(RequestError, match="set add_generation_prompt to false"):
        template.render(ASK, options=RenderOptions(continue_final_message=True))
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="has no text: add content"):
        template.render([*ASK, {"role": "assistant", "tool_calls": [CALL]}], options=options)
