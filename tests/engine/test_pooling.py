"""Sums of hidden states: those of transformers, whatever else is in the step, in chunks, with the prefix cache and over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from ridgeline.core.sampling import Pooling, SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Delta, Submit
from tests.engine.helpers import Bench
from tests.engine.test_group import CONFIG, opened
from tests.models.families import save

KINDS: tuple[Pooling, ...] = get_args(Pooling)
SHARED = [5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6, 17, 18, 19, 20, 21, 22] * 3
PROMPTS = [[7], [7, 8], SHARED, [*SHARED, 30], [*SHARED, 31, 32], [*SHARED[:24]], [*SHARED[:25]]]


def submit(name: str, prompt: list[int], pooling: Pooling | None, **sampling: Any) -> Submit:
    return Submit(name, prompt, SamplingParams(pooling=pooling, **sampling), arrival=0.0)


def mixed() -> list[Submit]:
    """Every prompt with every pooling, twice, so that prefixes are cached, beside prompts that are generated from and scored."""
    pooled = [
        submit(f"{kind} {turn} {number}", prompt, kind)
        for turn in range(2)
        for number, prompt in enumerate(PROMPTS)
        for kind in KINDS
    ]
    others = [
        submit(f"other {number}", SHARED[number:], None, max_tokens=4, prompt_logprobs=1 if number % 2 else None)
        for number in range(4)
    ]
    for number, other in enumerate(others):
        pooled.insert(5 * number, other)
    return pooled


def ended(engine: LocalEngine, requests: list[Submit]) -> dict[str, Delta]:
    deltas = list(engine.run(requests))
    assert all(not delta.tokens for delta in deltas if delta.pooled)
    return {delta.id: delta for delta in deltas if delta.finish}


def check(theirs: Any, engine: LocalEngine) -> dict[str, int]:
    """Every pooled request has the vector that transformers has. Returns cached tokens."""
    requests = mixed()
    deltas = ended(engine, requests)
    assert deltas.keys() == {request.id for request in requests}
    with torch.inference_mode():
        hidden = [theirs.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy() for prompt in PROMPTS]
    for request in requests:
        kind = request.sampling.pooling
        if kind is None:
            continue
        delta, states = deltas[request.id], hidden[int(request.id.split()[-1])]
        expected = {"last": states[-1], "cls": states[0], "mean": states.sum(axis=0)}[kind]
        assert delta.finish == "length" and delta.pooled is not None
        ours = np.sum([np.frombuffer(part) for part in delta.pooled], axis=0)
        scale = len(request.tokens) if kind == "mean" else 1
        assert np.abs(ours - expected).max() <= 1e-4 * scale * np.abs(states).max(), request.id
    return {name: delta.cached for name, delta in deltas.items()}


@pytest.mark.parametrize("family", ["qwen3-window", pytest.param("llama-gqa", marks=pytest.mark.long)])
def test_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = save(family, tmp_path)
    with opened(tmp_path, CONFIG) as engine:
        cached = check(theirs, engine)
        stats = engine.engine.loop.scheduler.leases.pool
        assert stats.used == 0
    reads = {kind: sum(count for name, count in cached.items() if name.startswith(kind)) for kind in KINDS}
    assert reads["last"] > 0 and reads["mean"] == reads["cls"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"kv_cache_memory": 13 * 12_288},
        {"deterministic": True},
        {"steps_in_flight": 1},
        {"steps_in_flight": 1, "kv_cache_memory": 13 * 12_288},
        {"speculate": "reference+lookahead"},
        {"kv_retention": "heavy:keep=16,window=4", "block_size": 4},
    ],
    ids=lambda options: ", ".join(options),
)
def test_with_other_features(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = save("llama-gqa", tmp_path)
    with opened(tmp_path, replace(CONFIG, **options), max_model_len=128) as engine:
        check(theirs, engine)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu(eager: bool, tmp_path: Path) -> None:
    theirs = save("llama-gqa", tmp_path)
    with opened(tmp_path, replace(CONFIG, device="cuda", enforce_eager=eager), max_model_len=128) as engine:
        check(theirs, engine)


def test_a_cancelled_request_ends_without_a_vector() -> None:
    bench = Bench(step_tokens=4)
    bench.submit("a", SHARED[:40], pooling="mean")
    bench.turn()
    bench.scheduler.cancel("a")
    bench.run()
    assert bench.finish == {("a", 0): "cancelled"} and bench.leases.pool.used == 0
