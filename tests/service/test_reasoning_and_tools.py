"""Reasoning and tool calls of several model families, from the engine's tokens to the clients of three APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig, ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.text.prompts import ChatTemplates, Parsers
from tests.combinations import crossed

from .live import MODEL, Live, Reply, behaviour, live, says, tokenizer
from .real import real_server, write_checkpoint

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ tools }}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "wait"}},
]
ARGUMENTS = '{"city": "Rome"}'
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001 - DeepSeek's tokens have fullwidth bars
TWO = (("look", ARGUMENTS), ("wait", "{}"))
JSON_LIST = f'[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "wait", "arguments": {{}}}}]'
FAMILIES = {
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS]{JSON_LIST}", 2),
    "granite": ("<|tool_call|>", f"<|tool_call|>{JSON_LIST}", 2),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<｜tool▁calls▁begin｜>" + "".join(V31.format(*call) for call in TWO) + "<｜tool▁calls▁end｜>",  # noqa: RUF001
        2,
    ),
    "glm4": ("<|assistant|><|observation|>", f"look\n{ARGUMENTS}<|assistant|>wait\n{{}}", 2),
    "pythonic": ("[func_name1(a=1)]", "[look(city='Rome'), wait()]", 2),
    "cohere": (
        "<|START_ACTION|>",
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "look", "parameters": {ARGUMENTS}}}]<|END_ACTION|>',
        1,
    ),
    "gpt-oss": (
        "<|channel|>analysis functions.",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        1,
    ),
}


def calls_of(reply: Reply) -> list[tuple[str, str]]:
    """Calls of a streamed answer."""
    calls: dict[int, list[str]] = {}
    for event in reply.events:
        for choice in event["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(delta["index"], [delta["function"].get("name", ""), ""])
                call[1] += delta["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_calls_of_every_family(family: str) -> None:
    sign, output, count = FAMILIES[family]
    with live(behaviour(says(output)), chat_template=f"{{# {sign} #}}{PLAIN}") as server:
        choice = server.chat(max_tokens=400, tools=TOOLS).json["choices"][0]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            (name, json.loads(arguments)) for name, arguments in TWO[:count]
        ]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert choice["message"].get("reasoning_content") == ("hm" if family == "gpt-oss" else None)
        assert calls_of(server.chat(max_tokens=400, tools=TOOLS, stream=True)) == calls
        assert server.engine.submits[-1].sampling.grammar.kind == "lark"


@pytest.mark.parametrize(
    ("path", "stream"),
    crossed(
        ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
        (False, True),
        quick=lambda path, stream: path % 2 == stream,
    ),
)
def test_a_call_that_cannot_be_read_is_no_failure(path: str, stream: bool) -> None:
    """Brackets that are never closed, and more of them than a JSON parser reads."""
    deep = "[" * 1200
    function = {"name": "add", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    tools = {
        "/v1/messages": {"name": "add", "input_schema": {"type": "object"}},
        "/v1/responses": {"type": "function", **function},
    }
    body: dict[str, Any] = {"model": MODEL, "stream": stream, "tools": [tools.get(path, tool)]}
    hi = [{"role": "user", "content": "hi"}]
    body |= {"input": "hi"} if path == "/v1/responses" else {"messages": hi}
    body |= {"max_tokens": 1500} if path == "/v1/messages" else {}
    whole = "]" * len(deep) + "}}</tool_call>"
    for arguments in ('{"x": [1, {', '{"x": ' + deep, '{"x": ' + deep + whole):
        with live(behaviour(says('<tool_call>{"name": "add", "arguments": ' + arguments))) as server:
            answer = server.send("POST", path, body)
            assert answer.status == 200, answer.data[:300]
            assert b"add" in answer.data and b'"error":{' not in answer.data, arguments[:20]


def test_parsers_by_option() -> None:
    """The template shows neither format: the options name them."""
    plan = behaviour(says(f"a < b</think>[TOOL_CALLS]{JSON_LIST}"))
    options = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "mistral", "chat_template": PLAIN}
    with live(plan, **options) as server:
        message = server.chat(max_tokens=400, tools=TOOLS).json["choices"][0]["message"]
        assert message["reasoning_content"] == "a < b" and len(message["tool_calls"]) == 2
    with live(behaviour(says("<think>hm</think>Yes.")), reasoning_parser="none") as server:
        message = server.chat(max_tokens=400).json["choices"][0]["message"]
        assert message["content"] == "<think>hm</think>Yes." and "reasoning_content" not in message
    for parsers in (Parsers(reasoning="x"), Parsers(tool_calls="x")):
        with pytest.raises(ConfigError, match="parser is 'x': use one of auto, none, "):
            ChatTemplates(tokenizer(), {"default": PLAIN}, parsers=parsers)


HARMONY = (
    "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 4."
)


def test_channels_of_gpt_oss_in_three_apis() -> None:
    with live(behaviour(says(HARMONY)), chat_template=f"{{# <|channel|>analysis #}}{PLAIN}") as server:
        answer = server.chat(max_tokens=400).json
        assert answer["choices"][0]["message"]["reasoning_content"] == "Add."
        assert answer["choices"][0]["message"]["content"] == "I add.\nIt is 4."
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        deltas = [
            choice["delta"] for event in server.chat(max_tokens=400, stream=True).events for choice in event["choices"]
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Add."
        assert "".join(delta.get("content", "") for delta in deltas) == "I add.\nIt is 4."
        response = server.send("POST", "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 400}).json
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        body = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        message = server.send("POST", "/v1/messages", body).json
        assert [(block["type"], block.get("thinking")) for block in message["content"]] == [
            ("thinking", "Add."),
            ("text", None),
        ]  # fmt: skip


THINKS = PLAIN + "{# <think></think> #}"


@pytest.fixture(scope="module")
def thinker() -> Any:
    with live(behaviour(says("<think>hm</think>Yes.")), chat_template=THINKS) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"max_thinking_tokens": 7}, 7),
        ({"thinking_token_budget": 7, "max_thinking_tokens": 7}, 7),
        ({"reasoning_effort": "low"}, 2048),
        ({"reasoning_effort": "low", "max_thinking_tokens": 9}, 9),
        ({"reasoning_effort": "high"}, None),
        ({}, None),
    ],
)
def test_budgets_of_a_chat(thinker: Live, fields: dict[str, Any], budget: int | None) -> None:
    assert thinker.chat(max_tokens=90, **fields).status == 200
    grammar = thinker.engine.submits[-1].sampling.grammar
    assert (f"{{0,{budget}}}" in grammar.source) if budget else grammar is None


def test_budgets_of_other_apis_and_without_effect(thinker: Live) -> None:
    body = {"model": MODEL, "max_tokens": 90, "messages": [{"role": "user", "content": "hi"}]}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    assert thinker.send("POST", "/v1/messages", body).status == 200
    assert "{0,1024}" in thinker.engine.submits[-1].sampling.grammar.source
    body["thinking"] = {"type": "enabled", "budget_tokens": -1}
    assert "thinking.budget_tokens" in thinker.send("POST", "/v1/messages", body).json["error"]["message"]
    body = {"model": MODEL, "input": "hi", "reasoning": {"effort": "minimal"}}
    assert thinker.send("POST", "/v1/responses", body).status == 200
    assert "{0,512}" in thinker.engine.submits[-1].sampling.grammar.source
    differs = thinker.chat(max_thinking_tokens=1, thinking_token_budget=2)
    assert differs.status == 400 and differs.error["param"] == "max_thinking_tokens"
    with live(behaviour(says("Yes.")), chat_template=PLAIN) as server:
        answer = server.chat(max_thinking_tokens=1)
        assert answer.status == 200 and answer.headers["x-ridgeline-ignored-fields"] == "max_thinking_tokens"
        assert server.engine.submits[-1].sampling.grammar is None


@pytest.mark.long
@pytest.mark.parametrize("speculate", ["off", "reference"])
def test_the_engine_keeps_to_a_budget(tmp_path: Path, speculate: str) -> None:
    """A random model that reasons from the start: it stops after the budget, and its answer obeys the grammar.

    Drafts too: a budget is counted for their tokens, and taken back with them.
    """
    write_checkpoint(tmp_path)
    template = PLAIN + "{# </think> #}<think>\n"
    config = ServiceConfig(port=0, served_model_name=MODEL, drain_s=1.0, chat_template=template)
    asks: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 60, "temperature": 0}
    engine = EngineConfig(device="cpu", max_num_seqs=4, threads=1, speculate=speculate)
    with real_server(tmp_path, config, engine) as server:
        for budget in (0, 5, 40):
            answer = server.chat(**asks, max_thinking_tokens=budget).json
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert message["content"] in ("yes", "no")
            assert usage["completion_tokens_details"]["reasoning_tokens"] <= budget + 1  # the closing tag is one
        message = server.chat(**{**asks, "max_tokens": 20}).json["choices"][0]["message"]
        assert message["content"] in ("", "yes", "no") and message["reasoning_content"]
