"""Anthropic's Messages API, driven by its official client, and by hand where the client would not send it."""

from __future__ import annotations

import anthropic
import pytest

from .live import MODEL, Live, behaviour, counts, ids, live, tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def client(polite: Live):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{polite.port}", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(server: Live) -> str:
    return tokenizer().decode(server.engine.submits[-1].tokens, skip_special_tokens=False)


def test_a_message(client: anthropic.Anthropic, polite: Live):
    message = client.messages.create(model=MODEL, max_tokens=64, system="Be kind.", messages=MESSAGES)
    assert [block.text for block in message.content] == ["Hello thé wörld"]
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    assert message.id.startswith("msg_")
    usage = message.usage
    prompt = len(polite.engine.submits[-1].tokens)
    assert usage.cache_read_input_tokens == 16 and usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.output_tokens == len(ids("Hello thé wörld")) + 1
    assert client.messages.count_tokens(model=MODEL, system="Be kind.", messages=MESSAGES).input_tokens == prompt


def test_a_stream(client: anthropic.Anthropic):
    with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "Hello thé wörld"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == len(ids("Hello thé wörld")) + 1
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools(client: anthropic.Anthropic, polite: Live):
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES, tools=[TOOL])
    (block,) = answer.content
    assert (answer.stop_reason, block.type, block.name, block.input) == (
        "tool_use",
        "tool_use",
        "look",
        {"city": "Rome"},
    )
    with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES, tools=[TOOL]) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    turn = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    client.messages.create(model=MODEL, max_tokens=64, messages=turn, tools=[TOOL])
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nSo?" in prompt_of(polite)


def test_thoughts_are_blocks_of_their_own(thoughtful: Live):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{thoughtful.port}", api_key="x", max_retries=0) as client:
        ask = {"model": MODEL, "max_tokens": 2000, "messages": MESSAGES}
        hidden = client.messages.create(**ask)
        assert [block.type for block in hidden.content] == ["text"]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        shown = client.messages.create(**ask, thinking=thinking)
        assert [(block.type, getattr(block, block.type)) for block in shown.content] == [
            ("thinking", "hm"),
            ("text", "Yes."),
        ]
        with client.messages.stream(**ask, thinking=thinking) as stream:
            final = stream.get_final_message()
        assert [getattr(block, block.type) for block in final.content] == ["hm", "Yes."]


def test_an_answer_continues_the_last_message_and_stops(endless: Live):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{endless.port}", api_key="x", max_retries=0) as client:
        start = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
        message = client.messages.create(model=MODEL, max_tokens=5, messages=start)
        assert message.stop_reason == "max_tokens" and prompt_of(endless).endswith("assistant\nThe answer is")
        stopped = client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, stop_sequences=["ca"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "ca", "ab")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": MESSAGES}, "max_tokens"),
        ({"max_tokens": 5, "messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 5, "messages": [*MESSAGES, {"role": "user", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
        ({"max_tokens": 5, "messages": MESSAGES, "system": 7}, "system"),
        ({"max_tokens": 5, "messages": MESSAGES, "tools": [{"type": "web_search_20250305"}]}, "tools[0].type"),
        ({"max_tokens": 5, "messages": MESSAGES, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"max_tokens": 5, "messages": MESSAGES, "stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 5, "messages": MESSAGES, "thinking": {"type": "huge"}}, "thinking.type"),
        ({"max_tokens": 5, "messages": MESSAGES, "output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"max_tokens": 1 << 20, "messages": MESSAGES}, "max_tokens"),
    ],
)  # fmt: skip
def test_errors_have_their_form_and_name_the_field(polite: Live, body, where):
    answer = polite.send("POST", "/v1/messages", {"model": MODEL, **body})
    assert answer.status == 400
    error = answer.json
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert where in error["error"]["message"]


def test_errors_of_the_conversation_name_the_original_message(polite: Live):
    turn = [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "x", "input": {}}]}]
    late = [
        *MESSAGES,
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]},
    ]
    answer = polite.send(
        "POST", "/v1/messages", {"model": MODEL, "max_tokens": 5, "system": "s", "messages": [*turn, *late]}
    )
    assert answer.status == 400 and "messages[2].content[0].cache_control" in answer.json["error"]["message"]


def test_unknown_models_and_routes(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=MESSAGES)


def test_a_failure_in_a_stream_is_an_event():
    with (
        live(behaviour(counts, fail_after=3)) as server,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError) as raised,
        client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream,
    ):
        stream.get_final_message()
    assert raised.value.body["error"]["type"] == "api_error"
