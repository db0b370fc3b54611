"""Who knows the reference weights of a served model: a server elsewhere, or a second engine beside this one.

Both say what they think of given tokens. The second engine runs one request at a time in a process of low priority, and is
asked only while the first one has nothing to do.
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
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.launch import EngineProcess, launch
from ridgeline.wire.client import EngineClient
from ridgeline.wire.messages import Submit

TOP = 20
"""Alternatives per token that both sides are asked for."""
LAST = 1 << 20
"""Priority behind every request of a user."""
LONGEST = 4096
"""Tokens of prompt and answer that a second engine has room for; longer answers are not scored by it."""
NICE = 10
_TIMEOUT_S = 120.0

Told = Mapping[int, float]
"""Token -> log-probability, of one place: the alternatives that were told."""


class Reference(Protocol):
    """One who scores. Every method may raise EngineFailed, aiohttp.ClientError, TimeoutError or ValueError."""

    name: str

    async def open(self, facts: Mapping[str, Any]) -> int:
        """Get ready; the most tokens it scores at once. facts: of the engine that is compared with it."""
        ...

    async def score(self, ids: list[int]) -> list[Told]:
        """What it says of tokens 1.. of `ids`."""
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
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return int(facts["max_len"])

    async def score(self, ids: list[int]) -> list[Told]:
        assert self._session is not None
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP}
        if self._model:
            body["model"] = self._model
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{self._url} answers {answer.status}")
            told = (await answer.json())["choices"][0].get("prompt_logprobs") or []
        if len(told) != len(ids):
            raise ValueError(f"{self._url} does not honour prompt_logprobs")
        return [{int(token): float(one["logprob"]) for token, one in place.items()} for place in told[1:]]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class EngineReference:
    """A second engine on this machine, with room for one request. model, engine: as the first one's, the weights apart."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self.name = model.model or "the weights as they come"
        self._model, self._engine = model, engine
        self._process: EngineProcess | None = None

    async def open(self, facts: Mapping[str, Any]) -> int:
        most = min(LONGEST, int(facts["max_len"]))
        # Twice what the first engine's layers take: a pruned model has fewer heads than its original.
        room = 2 * (most + int(facts["page_tokens"])) * int(facts["kv_bytes_per_token"])
        engine = replace(
            self._engine,
            max_num_seqs=1,
            kv_cache_memory=room,
            speculate="",
            enable_prefix_caching=False,
            calibration="",
        )
        self._process = await launch(replace(self._model, max_model_len=most), engine)
        os.setpriority(os.PRIO_PROCESS, self._process.process.pid, NICE)
        found = await self._process.client.wait_ready()
        if found["vocab_size"] != facts["vocab_size"]:
            raise EngineFailed(f"{self.name} has {found['vocab_size']} tokens, the served model {facts['vocab_size']}.")
        return most

    async def score(self, ids: list[int]) -> list[Told]:
        assert self._process is not None
        return await scores(self._process.client, ids)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.stop()


def make_reference(config: ServiceConfig, model: ModelConfig, engine: EngineConfig) -> Reference | None:
    """Who scores a share of the answers; None if nobody is to. Raises ConfigError for a share that is none, or without a
    reference."""
    if not 0.0 <= config.shadow_rate <= 1.0:
        raise ConfigError(f"shadow_rate is {config.shadow_rate:g}: give a share from 0 to 1.", param="shadow_rate")
    if not config.shadow_rate:
        return None
    if config.shadow_url.startswith(("http://", "https://")):
        return ServerReference(config.shadow_url, config.shadow_model)
    if config.shadow_url:
        raise ConfigError(f"shadow_url is {config.shadow_url!r}: an address begins with http://.", param="shadow_url")
    if not config.shadow_model and not model.quantization:
        raise ConfigError(
            "shadow_rate needs the reference weights: name their folder as shadow_model, or give a server's address "
            "(http://...) as shadow_url.",
            param="shadow_model",
        )
    named = config.shadow_model or model.model
    revision = model.revision if named == model.model else None
    return EngineReference(replace(model, model=named, revision=revision, quantization=""), engine)


_numbers = itertools.count(1)


async def scores(client: EngineClient, ids: list[int]) -> list[Told]:
    """What an engine says of tokens 1.. of `ids`, asked behind everybody else. Raises EngineFailed."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
    request = Submit(f"shadow-{next(_numbers)}", ids, sampling, time.time(), LAST, cache=False)
    subscription, found = client.submit(request), None
    try:
        while not subscription.over:
            for delta in await subscription.take():
                if delta.finish not in ("", "stop", "length"):
                    raise EngineFailed(delta.error or delta.finish)
                found = found or delta.prompt_logprobs
    finally:
        subscription.close()
    if found is None or len(found) != len(ids) - 1:
        raise EngineFailed("the engine gave no scores.")
    return [_told(one) for one in found]


def _told(one: TokenLogprobs) -> Told:
    return {one.token: one.logprob, **dict(zip(one.top_ids, one.top_logprobs, strict=True))}
