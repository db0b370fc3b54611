"""Ollama's API, driven by its official client."""

from __future__ import annotations

import json

import ollama
import pytest

from .live import MODEL, Live, behaviour, counts, ids, live, tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


def client_of(server: Live) -> ollama.Client:
    return ollama.Client(f"http://127.0.0.1:{server.port}")


def test_chat(polite: Live):
    answer = client_of(polite).chat(MODEL, MESSAGES)
    assert (answer.message.content, answer.done, answer.done_reason) == ("Hello thé wörld", True, "stop")
    assert answer.eval_count == len(ids("Hello thé wörld")) + 1
    assert answer.prompt_eval_count == len(polite.engine.submits[-1].tokens)
    assert answer.total_duration >= answer.eval_duration >= 0


def test_a_stream_is_lines(polite: Live):
    parts = list(client_of(polite).chat(MODEL + ":latest", MESSAGES, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello thé wörld"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    raw = polite.send("POST", "/api/chat", {"model": MODEL, "messages": MESSAGES})
    assert raw.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["model"] for line in raw.data.splitlines()] == [MODEL] * len(raw.data.splitlines())


def test_generate_with_a_system_prompt_and_options(endless: Live):
    answer = client_of(endless).generate(MODEL, "hi", system="Be kind.", options={"num_predict": 4, "temperature": 0})
    assert (answer.response, answer.done_reason, answer.eval_count) == ("abca", "length", 4)
    prompt = tokenizer().decode(endless.engine.submits[-1].tokens, skip_special_tokens=False)
    assert prompt == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    stopped = client_of(endless).generate(MODEL, "hi", options={"stop": ["ca"]})
    assert (stopped.response, stopped.done_reason) == ("ab", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_tools(polite: Live, stream: bool):
    answer = client_of(polite).chat(MODEL, MESSAGES, tools=[TOOL], stream=stream)
    last = list(answer)[-1] if stream else answer
    (call,) = last.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", {"city": "Rome"})
    turn = [*MESSAGES, last.message, {"role": "tool", "tool_name": "look", "content": "sunny"}]
    client_of(polite).chat(MODEL, turn, tools=[TOOL])
    prompt = tokenizer().decode(polite.engine.submits[-1].tokens, skip_special_tokens=False)
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_formats_and_thoughts(polite: Live, thoughtful: Live):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert client_of(polite).chat(MODEL, MESSAGES, format=schema).message.content == '{"a": 1}'
    answer = client_of(thoughtful).chat(MODEL, MESSAGES, think=True)
    assert (answer.message.thinking, answer.message.content) == ("hm", "Yes.")


def test_models(polite: Live):
    client = client_of(polite)
    (model,) = client.list().models
    assert model.model == MODEL and client.ps().models[0].model == MODEL
    shown = client.show(MODEL)
    assert "tools" in shown.capabilities and "im_start" in shown.template
    with pytest.raises(ollama.ResponseError, match="does not exist") as raised:
        client.show("llama9")
    assert raised.value.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("chat", {"messages": MESSAGES, "options": {"temperature": 9}}, "options.temperature"),
        ("chat", {"messages": MESSAGES, "options": {"num_predict": "x"}}, "options.num_predict"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [*MESSAGES, {"role": "boss", "content": "x"}]}, "messages[1].role"),
        ("chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ("chat", {"messages": MESSAGES, "format": "xml"}, "format"),
        ("chat", {"messages": MESSAGES, "format": {"type": 7}}, "schema"),
        ("chat", {"messages": MESSAGES, "think": "huge"}, "think"),
        ("generate", {"prompt": "x", "raw": True}, "raw"),
        ("generate", {"prompt": "x" * 100_000}, "prompt"),
    ],
)
def test_errors_are_one_line_that_names_the_field(polite: Live, path, body, where):
    answer = polite.send("POST", f"/api/{path}", {"model": MODEL, **body})
    assert answer.status == 400 and where in answer.json["error"]


def test_what_has_no_effect_is_named(polite: Live):
    body = {"model": MODEL, "messages": MESSAGES, "keep_alive": "5m", "options": {"num_ctx": 4096}, "stream": False}
    answer = polite.send("POST", "/api/chat", body)
    assert answer.headers["x-ridgeline-ignored-fields"] == "options.num_ctx, keep_alive"


def test_a_failure_in_a_stream_is_its_last_line():
    with live(behaviour(counts, fail_after=3)) as server, pytest.raises(ollama.ResponseError):
        list(client_of(server).chat(MODEL, MESSAGES, stream=True))
