"""The reference for scoring live answers: another server, or a second engine on this machine, with the reference weights.

Both return log-probabilities of given tokens. The second engine runs one request at a time in a process of low priority, and
gets requests only while the first engine is idle.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import aiohttp

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.launch import EngineProcess, launch
from ridgeline.wire.client import Client
from ridgeline.wire.messages import Submit

TOP = 20
"""Alternatives per token that both models are asked for."""
LOWEST_PRIORITY = 1 << 20
"""Priority below every request of a user."""
MAX_TOKENS = 4096
"""Maximum tokens of prompt and answer in a second engine. It does not score longer answers."""
NICENESS = 10
_TIMEOUT_S = 120.0

TopLogprobs = Mapping[int, float]
"""Token -> log-probability at one position, for the returned alternatives."""


class Reference(Protocol):
    """A model that scores tokens. Every method may raise EngineFailed, aiohttp.ClientError, TimeoutError or ValueError."""

    name: str

    async def open(self, facts: Mapping[str, Any]) -> int:
        """Get ready; returns the maximum tokens of a request. facts: of the engine that is compared with it."""
        ...

    async def score(self, ids: list[int]) -> list[TopLogprobs]:
        """Log-probabilities of tokens 1.. of `ids`."""
        ...

    async def close(self) -> None: ...


class ServerReference:
    """A server of the OpenAI API that honours `prompt_logprobs`."""

    def __init__(self, url: str, model: str) -> None:
        self.name = url
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def open(self, facts: Mapping[str, Any]) -> int:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return int(facts["max_len"])

    async def score(self, ids: list[int]) -> list[TopLogprobs]:
        assert self._session is not None
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP}
        if self._model:
            body["model"] = self._model
        async with LoopTimeout(_TIMEOUT_S), self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{self._url} answered {answer.status}")
            positions = (await answer.json())["choices"][0].get("prompt_logprobs") or []
        if len(positions) != len(ids):
            raise ValueError(f"{self._url} ignores prompt_logprobs: give a --shadow-url that supports it")
        return [
            {int(token): float(entry["logprob"]) for token, entry in position.items()} for position in positions[1:]
        ]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class EngineReference:
    """A second engine on this machine, for one request at a time. model, engine: options of the first engine, except for the
    weights.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self.name = model.model or "the unquantized model"
        self._model, self._engine = model, engine
        self._process: EngineProcess | None = None

    async def open(self, facts: Mapping[str, Any]) -> int:
        max_len = min(MAX_TOKENS, int(facts["max_len"]))
        # Twice the bytes of the first engine's layers, because a pruned model has fewer heads than its original.
        kv_bytes = 2 * (max_len + int(facts["page_tokens"])) * int(facts["kv_bytes_per_token"])
        engine = replace(
            self._engine,
            max_num_seqs=1,
            kv_cache_memory=kv_bytes,
            speculate="",
            enable_prefix_caching=False,
            calibration="",
        )
        self._process = await launch(replace(self._model, max_model_len=max_len), engine)
        os.setpriority(os.PRIO_PROCESS, self._process.process.pid, NICENESS)
        reference_facts = await self._process.client.wait_ready()
        if reference_facts["vocab_size"] != facts["vocab_size"]:
            raise EngineFailed(
                f"the vocabulary of {self.name} has {reference_facts['vocab_size']} tokens, that of the served model "
                f"{facts['vocab_size']}: give a --shadow-model with the same tokenizer."
            )
        return max_len

    async def score(self, ids: list[int]) -> list[TopLogprobs]:
        assert self._process is not None
        return await scores(self._process.client, ids)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.stop()


def make_reference(config: ServiceConfig, model: ModelConfig, engine: EngineConfig) -> Reference | None:
    """The configured reference; None without a share. Raises ConfigError for an invalid share, or if the reference is missing."""
    if not 0.0 <= config.shadow_rate <= 1.0:
        raise ConfigError(f"shadow_rate is {config.shadow_rate:g}: give a share from 0 to 1.", param="shadow_rate")
    if not config.shadow_rate:
        return None
    if config.shadow_url.startswith(("http://", "https://")):
        return ServerReference(config.shadow_url, config.shadow_model)
    if config.shadow_url:
        raise ConfigError(
            f"shadow_url is {config.shadow_url!r}: give an address that begins with http:// or https://.",
            param="shadow_url",
        )
    if not config.shadow_model and not model.quantization:
        raise ConfigError(
            "shadow_rate needs the reference weights: name their folder as shadow_model, or give a server's address "
            "(http://...) as shadow_url.",
            param="shadow_model",
        )
    name = config.shadow_model or model.model
    revision = model.revision if name == model.model else None
    return EngineReference(replace(model, model=name, revision=revision, quantization=""), engine)


_numbers = itertools.count(1)


async def scores(client: Client, ids: list[int]) -> list[TopLogprobs]:
    """An engine's log-probabilities of tokens 1.. of `ids`, at the lowest priority. Raises EngineFailed."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
    request = Submit(f"shadow-{next(_numbers)}", ids, sampling, time.monotonic(), LOWEST_PRIORITY, cache=False)
    subscription, prompt_logprobs = client.submit(request), None
    try:
        while not subscription.over:
            for delta in await subscription.take():
                if delta.finish not in ("", "stop", "length"):
                    raise EngineFailed(delta.error or delta.finish)
                prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
    finally:
        subscription.close()
    if prompt_logprobs is None or len(prompt_logprobs) != len(ids) - 1:
        raise EngineFailed("the engine returned no scores.")
    return [_top_logprobs(entry) for entry in prompt_logprobs]


def _top_logprobs(entry: TokenLogprobs) -> TopLogprobs:
    return {entry.token: entry.logprob, **dict(zip(entry.top_ids, entry.top_logprobs, strict=True))}
