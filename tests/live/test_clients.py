"""Clients that wrap OpenAI's API, as users write them, against the real model: litellm, LangChain and Pydantic AI."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from pydantic import BaseModel, Field

from .honest import WEATHER
from .served import MODEL, Served

pytestmark = pytest.mark.long

# Before litellm is imported: it would ask the network for prices of models.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

RAIN: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TEXTS = ["The keeper lit the lamp.", "It rained."]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    degrees: int = Field(ge=-50, le=60)


@pytest.fixture
def vectors(server: Served) -> list[list[float]]:
    """What the server says to a plain request."""
    answer = server.send("POST", "/v1/embeddings", {"input": TEXTS}).json
    return [item["embedding"] for item in answer["data"]]


def near(ours: Any, theirs: list[list[float]]) -> None:
    assert len(ours) == len(theirs)
    for vector, expected in zip(ours, theirs, strict=True):
        assert list(vector) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(server: Served, vectors: list[list[float]], provider: str) -> None:
    pytest.importorskip("litellm")
    import litellm

    asked: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": RAIN,
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = litellm.completion(**asked)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    called = litellm.completion(**{**asked, "max_tokens": 80}, tools=[WEATHER], tool_choice="required").choices[0]
    (call,) = called.message.tool_calls[:1]
    assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments)["city"], str)
    embedded = litellm.embedding(
        model=asked["model"], api_base=asked["api_base"], api_key="none", input=TEXTS, encoding_format="float"
    )
    near([item["embedding"] for item in embedded.data], vectors)
    assert embedded.usage.prompt_tokens > 0
    with pytest.raises(litellm.exceptions.BadRequestError, match="input"):
        litellm.embedding(model=asked["model"], api_base=asked["api_base"], api_key="none", input=[[1 << 20]])


def test_litellm_ranks(server: Served) -> None:
    pytest.importorskip("litellm")
    import litellm

    ranked = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        api_base=server.url,
        api_key="none",
        query=TEXTS[0],
        documents=TEXTS[::-1],
        top_n=1,
    )
    (best,) = ranked.results
    assert best["index"] == 1 and best["relevance_score"] == pytest.approx(1, abs=1e-4)


def test_langchain(server: Served, vectors: list[list[float]]) -> None:
    pytest.importorskip("langchain_openai")
    import langchain_openai

    place: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
    model = langchain_openai.ChatOpenAI(**place, temperature=0, max_tokens=24)
    answer = model.invoke("What is the weather in Paris?")
    assert answer.content and answer.usage_metadata["output_tokens"] == 24
    assert "".join(chunk.content for chunk in model.stream("What is the weather in Paris?")) == answer.content
    longer = langchain_openai.ChatOpenAI(**place, temperature=0, max_tokens=80)
    (call,) = longer.bind_tools([WEATHER], tool_choice="required").invoke("The weather in Paris?").tool_calls[:1]
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    structured = longer.with_structured_output(Weather, method="json_schema").invoke("The weather in Paris?")
    assert isinstance(structured, Weather)
    # Otherwise it splits texts by the tokenizer of OpenAI's models, which it fetches from the network.
    embeddings = langchain_openai.OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
    near(embeddings.embed_documents(TEXTS), vectors)
    near([embeddings.embed_query(TEXTS[0])], vectors[:1])


async def test_pydantic_ai(server: Served, vectors: list[list[float]]) -> None:
    pytest.importorskip("pydantic_ai")
    import pydantic_ai
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model, settings = OpenAIChatModel(MODEL, provider=provider), {"temperature": 0, "max_tokens": 24}
    agent = pydantic_ai.Agent(model, model_settings=settings)
    answer = await agent.run("Tell me a story about a lighthouse.")
    assert answer.output and answer.usage.output_tokens == 24
    async with agent.run_stream("Tell me a story about a lighthouse.") as stream:
        assert await stream.get_output() == answer.output
    typed = pydantic_ai.Agent(model, output_type=Weather, model_settings={"temperature": 0, "max_tokens": 80})
    called = await typed.run("What is the weather in Paris?")
    assert isinstance(called.output, Weather)
    calls = [part for message in called.all_messages() for part in message.parts if part.part_kind == "tool-call"]
    assert calls, "the output is the arguments of a tool call"
    embedding = OpenAIEmbeddingModel(MODEL, provider=provider)
    result = await pydantic_ai.Embedder(embedding).embed_documents(TEXTS)
    near(result.embeddings, vectors)
