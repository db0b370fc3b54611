"""The official client, sync and async, as users write it, against the real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from .honest import PERSON, WEATHER
from .served import MODEL, TIMEOUT_S, Served

STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
RAIN: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TIME = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Person(BaseModel):
    """Bounded, so that a small model comes to an end of it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


@pytest.fixture
async def later(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "ridgeline")
    assert client.models.retrieve(MODEL) == model
    assert model.to_dict()["max_model_len"] == 512


def test_a_stream_says_what_the_body_says(client: openai.OpenAI):
    body = client.chat.completions.create(**GREEDY, messages=STORY, max_tokens=30)
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(
        **GREEDY, messages=STORY, max_tokens=30, stream=True, stream_options=usage))  # fmt: skip
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == body.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["length"]
    assert last.choices == [] and last.usage is not None and body.usage is not None
    assert last.usage.completion_tokens == body.usage.completion_tokens == 30
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_logprobs(client: openai.OpenAI):
    choice = client.chat.completions.create(
        **GREEDY, messages=STORY, max_tokens=12, logprobs=True, top_logprobs=4).choices[0]  # fmt: skip
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs) <= 0
    streamed = client.chat.completions.create(
        **GREEDY, messages=STORY, max_tokens=12, logprobs=True, top_logprobs=4, stream=True)  # fmt: skip
    entries = [entry for chunk in streamed if (scores := chunk.choices[0].logprobs) for entry in scores.content or ()]
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


def test_structured_output(client: openai.OpenAI):
    parsed = client.chat.completions.parse(
        **GREEDY, messages=[{"role": "user", "content": "Who are you?"}], response_format=Person, max_tokens=100)  # fmt: skip
    assert isinstance(parsed.choices[0].message.parsed, Person)
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, temperature=1, seed=seed, messages=STORY, response_format=form, max_tokens=100)  # fmt: skip
        assert Person.model_validate_json(answer.choices[0].message.content or "")
    loose = client.chat.completions.create(
        **GREEDY, messages=STORY, max_tokens=200, response_format={"type": "json_object"})  # fmt: skip
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content or ""), dict)
    with client.chat.completions.stream(**GREEDY, messages=STORY, response_format=Person, max_tokens=100) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_tools(client: openai.OpenAI, choice: Any, names: set[str]):
    asked: dict[str, Any] = {**GREEDY, "messages": RAIN, "tools": [WEATHER, TIME], "max_tokens": 80}
    answer = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    call: Any = answer.message.tool_calls[0]
    assert call.function.name in names and call.id and call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_time" or isinstance(arguments["city"], str)
    with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
        final: Any = stream.get_final_completion().choices[0].message.tool_calls
    said: Any = answer.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in final] == [
        (call.function.name, call.function.arguments) for call in said
    ]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    history = [*RAIN, answer.message, result]
    completion = client.chat.completions.create(
        **GREEDY, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=20
    )
    assert completion.choices[0].message.content and not completion.choices[0].message.tool_calls


def test_tools_that_may_be_called(client: openai.OpenAI):
    """With "auto" it is the model's to decide; what it says is a valid call or plain text."""
    for text in ("What is the weather in Paris?", "Tell me a story.", "Hello!"):
        choice = client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": text}], tools=[WEATHER], max_tokens=80).choices[0]  # fmt: skip
        for call in choice.message.tool_calls or ():
            function: Any = call.function  # type: ignore[union-attr]
            assert function.name == "get_weather" and isinstance(json.loads(function.arguments)["city"], str)
        assert choice.message.content or choice.message.tool_calls
        assert "<tool_call>" not in (choice.message.content or "")


def test_choices_stops_and_seeds(client: openai.OpenAI):
    drawn: dict[str, Any] = {"model": MODEL, "messages": STORY, "n": 3, "seed": 5, "temperature": 1, "max_tokens": 25}
    first, again = (client.chat.completions.create(**drawn) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3 and first.usage is not None and first.usage.completion_tokens <= 75
    other = client.chat.completions.create(**{**drawn, "seed": 6})
    assert texts != [choice.message.content for choice in other.choices]
    stopped = client.chat.completions.create(**GREEDY, messages=STORY, stop=[".", "!"], max_tokens=60).choices[0]
    whole = client.chat.completions.create(**GREEDY, messages=STORY, max_tokens=60).choices[0].message.content or ""
    assert stopped.finish_reason == "stop" and stopped.message.content == whole[: whole.index(".")]


def test_a_prompt_said_again_comes_from_the_cache(client: openai.OpenAI):
    words = "The keeper of the lighthouse counted the ships that passed in the night, and wrote them down. " * 10
    counts = []
    for _ in range(2):
        usage = client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": words}], max_tokens=2).usage  # fmt: skip
        assert usage is not None and usage.prompt_tokens_details is not None
        counts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    (length, before), (_, after) = counts
    assert before == 0 and after is not None and length - 32 <= after < length


def test_completions_score_what_they_are_given(client: openai.OpenAI):
    prompts = ["def add(a, b):\n    return a + b\n", "Once upon a time"]
    on = {"min_tokens": 5}
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=5, echo=True, logprobs=2, extra_body=on)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        scores = choice.logprobs
        assert scores is not None and scores.tokens and scores.token_logprobs and scores.text_offset
        assert choice.text.startswith(prompt) and "".join(scores.tokens) == choice.text
        assert scores.token_logprobs[0] is None and all(score <= 0 for score in scores.token_logprobs[1:])
        assert scores.text_offset == [len("".join(scores.tokens[:index])) for index in range(len(scores.tokens))]
    ids = client.completions.create(**GREEDY, prompt=[[300, 301], [302]], max_tokens=0, echo=True, logprobs=0)
    assert [len(choice.logprobs.tokens) for choice in ids.choices if choice.logprobs and choice.logprobs.tokens] == [
        2,
        1,
    ]
    parts = client.completions.create(**GREEDY, prompt=prompts[1], max_tokens=20, stream=True)
    whole = client.completions.create(**GREEDY, prompt=prompts[1], max_tokens=20).choices[0].text
    assert "".join(part.choices[0].text for part in parts) == whole


def test_errors_have_their_classes(client: openai.OpenAI, server: Served):
    cases: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None, str | None]] = [
        (openai.NotFoundError, {"model": "gpt-4"}, "model", "model_not_found"),
        (openai.BadRequestError, {"temperature": 9}, "temperature", None),
        (openai.BadRequestError, {"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        (openai.BadRequestError, {"messages": []}, "messages", None),
        (openai.BadRequestError, {"extra_body": {"guided_regex": "("}}, "guided_regex", "invalid_grammar"),
        (openai.BadRequestError, {"modalities": ["audio"]}, "modalities", "unsupported_value"),
    ]
    for kind, change, param, code in cases:
        with pytest.raises(kind) as raised:
            client.chat.completions.create(**{**GREEDY, "messages": STORY, **change})
        assert (raised.value.param, raised.value.code) == (param, code)
        assert raised.value.type == "invalid_request_error" and raised.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-4", input="x")


async def test_async(later: openai.AsyncOpenAI, client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY, messages=STORY, max_tokens=24).choices[0].message.content
    text = ""
    async for chunk in await later.chat.completions.create(**GREEDY, messages=STORY, max_tokens=24, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole
    parsed = await later.chat.completions.parse(**GREEDY, messages=STORY, response_format=Person, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with pytest.raises(openai.BadRequestError):
        await later.completions.create(model=MODEL, prompt=[])


async def test_leaving_an_async_stream_cancels(later: openai.AsyncOpenAI, server: Served):
    before = server.metric("aborted_requests_total")
    stream = await later.completions.create(
        **GREEDY, prompt="Once upon a time", max_tokens=450, stream=True, extra_body={"ignore_eos": True})  # fmt: skip
    async for _ in stream:
        break
    await stream.close()
    assert server.rest()["used"] == 0
    assert server.metric("aborted_requests_total") == before + 1
