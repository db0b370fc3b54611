"""The official client, sync and async, as users write it."""

from __future__ import annotations

from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from .live import MODEL, Live, behaviour, counts, live

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


class Answer(BaseModel):
    a: int


class Count(BaseModel):
    kind: Literal["count"] = "count"
    a: int = 0


class Word(BaseModel):
    kind: Literal["word"] = "word"
    text: str = ""


class Union(BaseModel):
    said: Annotated[Count | Word, Field(discriminator="kind")]


@pytest.fixture
def client(polite: Live):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{polite.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, extra_body={"top_k": 5})
    assert [choice.message.content for choice in answer.choices] == ["Hello thé wörld"] * 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer._request_id


def test_stream(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello thé wörld"
    assert chunks[-1].usage.completion_tokens == 16


def test_logprobs(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "Hello thé wörld"
    assert len(content[0].top_logprobs) == 3


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello thé wörld", "bHello thé wörld"]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert set(texts.values()) == {"Hello thé wörld"}


def test_tools(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("look", '{"city": "Rome"}')
    history = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert final.choices[0].finish_reason == "tool_calls"


def test_structured_output(client):
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(a=1)


@pytest.mark.parametrize("strict", [True, False])
def test_a_union_with_a_discriminator(client, strict):
    schema = Union.model_json_schema()
    assert "oneOf" in schema["properties"]["said"] and "required" not in schema["$defs"]["Count"]
    as_sent = {"type": "json_schema", "json_schema": {"name": "said", "schema": schema}}
    form = openai.lib._parsing.type_to_response_format_param(Union) if strict else as_sent
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    assert answer.choices[0].finish_reason == "stop"


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_have_their_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"


def test_a_failure_in_the_middle_is_an_exception():
    with live(behaviour(counts, fail_after=3)) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.APIError, match="step failed"):
            list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


async def test_async(polite: Live):
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{polite.port}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello thé wörld"
        text = ""
        async for chunk in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == "Hello thé wörld"
