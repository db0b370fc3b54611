"""OpenAI's Responses API, driven by the official client."""

from __future__ import annotations

import json

import openai
import pytest

from .live import MODEL, Live, behaviour, counts, ids, live, tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "look", "parameters": PARAMETERS}


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def prompt_of(server: Live) -> str:
    return tokenizer().decode(server.engine.submits[-1].tokens, skip_special_tokens=False)


def test_a_response(polite: Live):
    response = client_of(polite).responses.create(model=MODEL, input="hi", instructions="Be kind.")
    assert (response.output_text, response.status, response.model) == ("Hello thé wörld", "completed", MODEL)
    assert response.id.startswith("resp_") and response.output[0].role == "assistant"
    usage = response.usage
    assert (
        usage.input_tokens == len(polite.engine.submits[-1].tokens) and usage.input_tokens_details.cached_tokens == 16
    )
    assert usage.output_tokens == len(ids("Hello thé wörld")) + 1
    assert prompt_of(polite).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


def test_a_stream(polite: Live):
    events = list(client_of(polite).responses.create(model=MODEL, input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello thé wörld"
    with client_of(polite).responses.stream(model=MODEL, input="hi") as stream:
        assert stream.get_final_response().output_text == "Hello thé wörld"


def test_a_response_goes_on_from_another(polite: Live):
    client = client_of(polite)
    first = client.responses.create(model=MODEL, input="one", instructions="Not carried over.")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    third = client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    said = ("assistant", "Hello thé wörld")
    turns = [("user", "one"), said, ("user", "two"), said, ("user", "three")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt_of(polite) == expected + "<|im_start|>assistant\n"
    assert client.responses.retrieve(third.id).previous_response_id == second.id
    items = client.responses.input_items.list(third.id).data
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="four", previous_response_id=third.id)
    kept = client.responses.create(model=MODEL, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_tools(polite: Live):
    client = client_of(polite)
    response = client.responses.create(model=MODEL, input="hi", tools=[TOOL])
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"city": "Rome"})
    events = list(client.responses.create(model=MODEL, input="hi", tools=[TOOL], stream=True))
    assert json.loads("".join(event.delta for event in events if event.type.endswith("arguments.delta"))) == {
        "city": "Rome"
    }
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model=MODEL, input=[result], previous_response_id=response.id, tools=[TOOL])
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt_of(polite)
    assert polite.engine.submits[-1].sampling.grammar is not None


def test_structured_output_and_reasoning(polite: Live, thoughtful: Live):
    form = {
        "type": "json_schema",
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    assert client_of(polite).responses.create(model=MODEL, input="hi", text={"format": form}).output_text == '{"a": 1}'
    response = client_of(thoughtful).responses.create(model=MODEL, input="hi", reasoning={"effort": "low"})
    thought, message = response.output
    assert (thought.content[0].text, message.content[0].text) == ("hm", "Yes.")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    events = list(
        client_of(thoughtful).responses.create(model=MODEL, input="hi", reasoning={"effort": "low"}, stream=True)
    )
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"


def test_a_short_answer_is_incomplete(endless: Live):
    response = client_of(endless).responses.create(model=MODEL, input="hi", max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "abca" and response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "must"}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": 7}}}, "text.format"),
        ({"input": "x", "reasoning": {"effort": "vast"}}, "reasoning.effort"),
    ],
)
def test_errors_name_the_field(polite: Live, body, where):
    answer = polite.send("POST", "/v1/responses", {"model": MODEL, **body})
    assert answer.status == 400 and where in answer.error["message"]


def test_a_failure_in_a_stream_is_an_event():
    with live(behaviour(counts, fail_after=3)) as server:
        events = list(client_of(server).responses.create(model=MODEL, input="hi", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message


def test_the_oldest_response_goes_first():
    with live(behaviour(counts), response_store_mb=0.002) as server:
        client = client_of(server)
        kept = [client.responses.create(model=MODEL, input="hi", max_output_tokens=100).id for _ in range(3)]
        assert client.responses.retrieve(kept[-1]).id == kept[-1]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept[0])


def test_keys_do_not_see_the_responses_of_others(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('a.key = "aaaaaaaaaaaaaaaa"\nb.key = "bbbbbbbbbbbbbbbb"\n')
    with live(behaviour(counts), api_keys=str(keys)) as server:
        a, b = (client_of(server).with_options(api_key=letter * 16) for letter in "ab")
        response = a.responses.create(model=MODEL, input="hi", max_output_tokens=4)
        assert a.responses.retrieve(response.id).id == response.id
        with pytest.raises(openai.NotFoundError):
            b.responses.retrieve(response.id)
