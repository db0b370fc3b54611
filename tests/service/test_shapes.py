"""Shapes of answers: single bodies, streams, usage, log-probabilities, stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from ridgeline.service import answer
from ridgeline.service.call import Usage
from ridgeline.service.choices import ChoicesShape
from ridgeline.service.piece import Piece

from .conftest import THINKING
from .fake_engine import score
from .live import EOS, MODEL, Live, behaviour, counts, eos_id, ids, live, says

TEXT = "Hello thé wörld"


def joined(events: list, index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def test_chat_body(polite: Live):
    answer = polite.chat()
    body = answer.json
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == MODEL
    assert body["system_fingerprint"]
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    produced = len(ids(TEXT)) + 1
    prompt = len(polite.engine.submits[-1].tokens)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": produced,
        "total_tokens": prompt + produced,
        "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_chat_stream(polite: Live):
    answer = polite.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert {(event["id"], event["created"], event["object"], event["model"]) for event in events} == {
        (events[0]["id"], events[0]["created"], "chat.completion.chunk", MODEL)
    }
    first, last = events[0]["choices"][0], events[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert joined(events) == TEXT
    assert not any("usage" in event for event in events)


def test_include_usage(polite: Live):
    events = polite.chat(stream=True, stream_options={"include_usage": True}).events
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == polite.chat().json["usage"]


def test_continuous_usage(polite: Live):
    events = polite.complete(stream=True, stream_options={"continuous_usage_stats": True}).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == len(ids(TEXT)) + 1
    assert events[0]["usage"]["prompt_tokens"] == 2


class Letters(ChoicesShape):
    """A shape that shows what it is given."""

    usage = Usage()
    head = b'{"id":"x"'

    def choices(self, piece: Piece) -> list[bytes]:
        self.usage.completion += piece.count
        return [b'{"text":"%b"}' % piece.text.encode()] if piece.text or piece.finish else []

    def empty(self, index: int) -> bytes:
        return b'{"text":"","index":%d}' % index


def events_of(batches: list[list[Piece]], keep_alive_s: float = 60.0, **streaming: bool) -> list[str]:
    """What is sent of pieces that come one batch at a time, without the line ends."""

    async def pieces() -> AsyncGenerator[list[Piece], None]:
        for batch in batches:
            yield batch

    async def sent() -> list[str]:
        shape = Letters()
        shape.usage = Usage()
        events = answer.event_data(pieces(), shape.events(answer.Streaming(**streaming)), keep_alive_s)
        return [data.decode().strip() async for data in events]

    return asyncio.run(sent())


HELD = [[Piece(0, "", 1)], [Piece(0, "ab", 1)], [Piece(0, "", 0)], [Piece(0, "", 1, "stop")]]


def test_tokens_without_text_are_counted_when_they_come():
    *sent, end = events_of(HELD, continuous_usage=True)
    assert end == "data: [DONE]" and len(sent) == 3
    events = [json.loads(data.removeprefix("data: ")) for data in sent]
    assert [event["choices"][0]["text"] for event in events] == ["", "ab", ""]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]


def test_tokens_without_text_have_no_event_where_nobody_counts():
    assert len(events_of(HELD)) == len(HELD) - 2 + 1
    assert events_of([[], *HELD], keep_alive_s=0).count(": keep-alive") == 3


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a\U0001f600b", {}),
        ("abcabc", {"stop": "cabz"}),
        ("<think>hidden</think>Yes.", {"include_reasoning": False}),
    ],
)
def test_counts_and_text_of_what_is_held_back(text, fields):
    with live(behaviour(says(text)), chat_template=THINKING) as server:
        events = server.chat(stream=True, stream_options={"continuous_usage_stats": True}, **fields).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert joined(events) == text.split(">")[-1] and counts == sorted(counts) and counts[-1] == len(ids(text)) + 1
    assert not any("reasoning_content" in choice["delta"] for event in events for choice in event["choices"])


def test_completion_body_and_stream(polite: Live):
    body = polite.complete().json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == TEXT
    events = polite.complete(stream=True).events
    assert joined(events) == TEXT
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert {event["object"] for event in events} == {"text_completion"}


def test_default_length_of_a_completion_is_16(endless: Live):
    body = endless.complete().json
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (16, "length")
    assert body["choices"][0]["text"] == "abcabcabcabcabca"


def test_choices(endless: Live):
    body = endless.chat(n=3, max_tokens=4).json
    assert [choice["message"]["content"] for choice in body["choices"]] == ["abca", "bcab", "cabc"]
    assert body["usage"]["completion_tokens"] == 12
    events = endless.chat(n=3, max_tokens=4, stream=True).events
    assert [joined(events, index) for index in range(3)] == ["abca", "bcab", "cabc"]


def test_several_prompts(endless: Live):
    answer = endless.complete(prompt=["x", "yy", "zzz"], n=2, max_tokens=2, echo=True)
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == ["xab", "xbc", "yyab", "yybc", "zzzab", "zzzbc"]
    assert answer.json["usage"]["prompt_tokens"] == 6
    events = endless.complete(prompt=[[120], [121, 121]], n=1, max_tokens=2, echo=True, stream=True).events
    assert [joined(events, index) for index in range(2)] == ["xab", "yyab"]


def test_token_id_prompts_are_taken_as_they_are(endless: Live):
    assert endless.complete(prompt=[1, 2, 3], max_tokens=1).status == 200
    assert endless.engine.submits[-1].tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("stop", "include", "text", "kept"),
    [
        ("cab", False, "ab", 5),
        ("cab", True, "abcab", 5),
        (["zz", "bc"], False, "a", 3),
        ("abcabcz", False, "abcabcabca", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(endless: Live, stop, include, text, kept, stream):
    answer = endless.complete(max_tokens=10, stop=stop, include_stop_str_in_output=include, stream=stream)
    if stream:
        assert joined(answer.events) == text
        finish = answer.events[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json["choices"][0]
        finish = choice["finish_reason"]
        assert choice["text"] == text
        assert answer.json["usage"]["completion_tokens"] == (kept or 10)
        assert choice["stop_reason"] == (None if kept is None else stop if isinstance(stop, str) else "bc")
    assert finish == ("length" if kept is None else "stop")
    if kept is not None:
        submit = endless.engine.submits[-1]
        endless.until(lambda: endless.engine.finishes)
        finish = endless.engine.finishes[-1]
        assert (finish.id, finish.reason, finish.kept) == (submit.id, "stop", kept)
    assert not [cancel for cancel in endless.engine.cancels if cancel.id == endless.engine.submits[-1].id]


def test_stop_string_inside_a_step_of_many_tokens():
    with live(behaviour(counts, per_step=8)) as server:
        body = server.chat(max_tokens=64, stop="ca", logprobs=True).json
        assert body["choices"][0]["message"]["content"] == "ab"
        assert body["usage"]["completion_tokens"] == 4
        assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == ["a", "b"]


def test_characters_are_never_cut(polite: Live):
    for event in polite.chat(stream=True).events:
        assert "\ufffd" not in event["choices"][0]["delta"].get("content", "")


def test_an_answer_that_ends_inside_a_character():
    with live(behaviour(says("hé", end=False))) as server:
        assert server.complete(max_tokens=2).json["choices"][0]["text"] == "h\ufffd"


def test_special_tokens_are_hidden_or_shown():
    def script(submit, choice):
        return [*ids("a"), *ids("<|im_start|>"), *ids("b"), eos_id()]

    with live(behaviour(script)) as server:
        assert server.complete().json["choices"][0]["text"] == "ab"
        assert server.complete(skip_special_tokens=False).json["choices"][0]["text"] == "a<|im_start|>b"
        shown = server.complete(skip_special_tokens=False, include_stop_str_in_output=True)
        assert shown.json["choices"][0]["text"] == f"a<|im_start|>b{EOS}"


def test_stop_reason_is_told_for_the_requests_own_stop_token():
    with live(behaviour(counts)) as server:
        choice = server.complete(stop_token_ids=ids("c")).json["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ids("c")[0])


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(polite: Live, stream):
    answer = polite.chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        held = [event["choices"][0]["logprobs"] for event in answer.events]
        entries = [entry for logprobs in held if logprobs for entry in logprobs["content"]]
    else:
        entries = answer.json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    wanted = score(ids("H")[0], 2)
    assert entries[0]["token"] == "H" and entries[0]["logprob"] == pytest.approx(wanted.logprob)
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["H", "I"]
    assert all(set(top) == {"token", "logprob", "bytes"} for entry in entries for top in entry["top_logprobs"])


def test_completion_logprobs(polite: Live):
    logprobs = polite.complete(logprobs=1).json["choices"][0]["logprobs"]
    tokens = [
        "H",
        "e",
        "ll",
        "o",
        " ",
        "th",
        "bytes:\\xc3",
        "bytes:\\xa9",
        " ",
        "w",
        "bytes:\\xc3",
        "bytes:\\xb6",
        "r",
        "l",
        "d",
    ]
    assert logprobs["tokens"] == [*tokens, EOS]
    assert logprobs["text_offset"] == [0, 1, 2, 4, 5, 6, 8, 8, 9, 10, 11, 11, 12, 13, 14, 15]
    assert logprobs["top_logprobs"][0] == {"H": logprobs["token_logprobs"][0]}
    assert polite.complete(logprobs=0).json["choices"][0]["logprobs"]["top_logprobs"][1] == {
        "e": pytest.approx(score(101, 0).logprob)
    }


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_as_an_evaluation_harness_asks(endless: Live, max_tokens):
    """lm-evaluation-harness: token ids, echo, logprobs 1, and of the lists it reads [context length : -1] or all."""
    prompts = [ids("the cat"), ids("a dog!")]
    answer = endless.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234)
    assert answer.json["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, text, choice in zip(prompts, ("the cat", "a dog!"), answer.json["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == text + "a" * max_tokens
        assert choice["finish_reason"] == "length"
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(
            [score(i, 1).logprob for i in [*prompt, 97][1 : len(prompt) + max_tokens]]
        )
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
            assert max(top, key=top.get) == token
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"]) and logprobs["text_offset"][0] == 0
    sampling = endless.engine.submits[-1].sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 1, 1)


def test_echo_without_logprobs_and_without_output(endless: Live):
    body = endless.complete(prompt="the", echo=True, max_tokens=0).json
    assert body["choices"][0]["text"] == "the" and body["usage"]["completion_tokens"] == 0
    assert body["choices"][0]["logprobs"] is None


def test_echo_completes_a_character_of_the_prompt():
    tail = ids("é")
    with live(behaviour(lambda submit, choice: [tail[1], eos_id()])) as server:
        body = server.complete(prompt=[*ids("a"), tail[0]], echo=True).json
        assert body["choices"][0]["text"] == "aé"


def test_prompt_logprobs(endless: Live):
    body = endless.chat(prompt_logprobs=1, max_tokens=1).json
    prompt = endless.engine.submits[-1].tokens
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][1][str(prompt[1])]["rank"] == 1
    choice = endless.complete(prompt_logprobs=0, max_tokens=1).json["choices"][0]
    assert choice["prompt_logprobs"][1][str(ids("i")[0])]["decoded_token"] == "i"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_told_apart(thoughtful: Live, stream):
    answer = thoughtful.chat(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    if stream:
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert joined(answer.events) == "Yes."
        usage = answer.events[-1]["usage"]
    else:
        message = answer.json["choices"][0]["message"]
        thought, usage = message["reasoning_content"], answer.json["usage"]
        assert message["content"] == "Yes."
    assert thought == "hm"
    assert 2 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 4
    hidden = thoughtful.chat(include_reasoning=False).json["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_of_a_completion_are_counted_and_stay_in_its_text(thoughtful: Live, stream):
    asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = thoughtful.complete(max_tokens=64, **asked)
    if stream:
        text = "".join(choice["text"] for event in answer.events for choice in event["choices"])
        usage = answer.events[-1]["usage"]
    else:
        text, usage = answer.json["choices"][0]["text"], answer.json["usage"]
    assert text == "<think>hm</think>Yes."
    assert 2 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 4 < usage["completion_tokens"]


def test_a_prompt_may_open_the_thought_of_a_completion(polite: Live, thoughtful: Live):
    inside = thoughtful.complete(prompt="Why? <think>\n", max_tokens=2).json["usage"]
    assert inside["completion_tokens_details"]["reasoning_tokens"] == 2
    assert polite.complete(max_tokens=64).json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_effort_reaches_the_template(thoughtful: Live):
    assert thoughtful.chat(reasoning_effort="high").status == 200
    assert thoughtful.engine.submits[-1].tokens[-2:] != ids("<think></think>")
    assert thoughtful.chat(reasoning_effort="none").status == 200
    assert thoughtful.engine.submits[-1].tokens[-2:] == ids("<think></think>")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "look"}}])
def test_tool_call(polite: Live, choice):
    body = polite.chat(tools=TOOLS, tool_choice=choice).json["choices"][0]
    assert body["finish_reason"] == "tool_calls" and body["message"]["content"] is None
    (call,) = body["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "look", "arguments": '{"city": "Rome"}'}
    assert polite.engine.submits[-1].sampling.grammar.kind == "lark"


def test_tool_call_streamed(polite: Live):
    events = polite.chat(tools=TOOLS, stream=True).events
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["index"] == 0 and deltas[0]["function"]["name"] == "look" and deltas[0]["id"]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Rome"}'
    assert all("id" not in delta for delta in deltas[1:])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_choice_none_is_plain_text(polite: Live):
    message = polite.chat(tools=TOOLS, tool_choice="none").json["choices"][0]["message"]
    assert message["content"] == TEXT and "tool_calls" not in message
    assert polite.engine.submits[-1].sampling.grammar is None


def test_a_schema_that_does_not_compile_names_its_function(polite: Live):
    bad = {"type": "function", "function": {"name": "go", "parameters": {"properties": {"a": {"type": "strng"}}}}}
    error = polite.chat(tools=[*TOOLS, bad]).error
    assert (error["code"], error["param"]) == ("invalid_grammar", "tools")
    assert (
        error["message"].startswith("tools: the parameters of 'go' cannot be enforced. ")
        and error["message"].count("the type 'strng' is unknown") == 1
    )
    assert "call_" not in error["message"]


def test_tools_need_a_template_that_knows_them(thoughtful: Live):
    answer = thoughtful.chat(tools=TOOLS)
    assert answer.status == 400 and answer.error["param"] == "tools"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema",
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
    ],
)
def test_structured_output_reaches_the_engine(polite: Live, fields, kind):
    assert polite.chat(**fields).json["choices"][0]["message"]["content"] == '{"a": 1}'
    assert polite.engine.submits[-1].sampling.grammar.kind == kind
    assert polite.complete(**fields).status == 200


def test_continue_final_message(endless: Live):
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Well, "}]
    answer = endless.chat(messages=messages, add_generation_prompt=False, continue_final_message=True, max_tokens=2)
    assert answer.status == 200
    assert endless.engine.submits[-1].tokens[-5:] == ids("Well, ")


def test_defaults_of_the_model_are_used_where_a_request_is_silent():
    with live(behaviour(counts, defaults={"temperature": 0.6, "top_k": 20})) as server:
        assert server.chat(max_tokens=1, top_k=3).status == 200
        sampling = server.engine.submits[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 3, 1.0)
