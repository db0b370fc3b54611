"""Models whose layers share keys and values: a smaller cache, and the same tokens whatever the steps and operations are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.spec import QUANTIZED_KV, kv_layout
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose, choose_invariant
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops
from ridgeline.planner.kv import cache_of, savings
from tests.combinations import crossed
from tests.engine import runners
from tests.engine.runners import PAGE, PROMPT, DeviceBench
from tests.models.families import SHARING, save

CPU = torch.device("cpu")


def load(folder: Path, name: str, ops: Ops, kv_format: str = "auto") -> LoadedModel:
    save(name, folder)
    config = ModelConfig(max_model_len=runners.MAX_LEN, kv_cache_dtype=kv_format)
    return build(folder, model=config, ops=ops, device=CPU)


def answers(model: LoadedModel, step_tokens: int = 64, **facts: object) -> dict[tuple[str, int], list[int]]:
    """Tokens of greedy and sampled requests, the first of them twice: its prompt is found in the prefix cache."""
    bench = DeviceBench(step_tokens=step_tokens, model=model, **facts)
    bench.submit("greedy", PROMPT * 3, max_tokens=20)
    bench.submit("choices", PROMPT * 2, n=3, temperature=1.5, seed=2, max_tokens=20)
    bench.run()
    bench.submit("again", PROMPT * 3, max_tokens=20)
    bench.run()
    assert bench.scheduler.counts.prefix_hits and bench.tokens["again", 0] == bench.tokens["greedy", 0]
    return bench.tokens


@pytest.mark.parametrize("name", sorted(SHARING))
def test_tokens_do_not_depend_on_steps_and_operations(tmp_path: Path, name: str) -> None:
    """Chunks, prefix hits, copies and few blocks (preemption), by the reference and by the operations of this CPU."""
    model = load(tmp_path, name, REFERENCE)
    want = answers(model)
    groups = len(kv_layout(model.spec, PAGE).groups)
    assert answers(model, step_tokens=16, blocks=16 * groups) == want
    for ops in (choose(CPU, torch.float32), choose(CPU, torch.float32, eager=True)):
        assert answers(load(tmp_path, name, ops)) == want


@pytest.mark.parametrize("name", ["cla", "gemma3n-like"])
def test_deterministic_operations(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name, choose_invariant(CPU, torch.float32))
    assert answers(model) == answers(model, step_tokens=16)


@pytest.mark.parametrize("kv_format", crossed(list(QUANTIZED_KV), quick=lambda at: at == 1))
def test_formats_of_the_cache(tmp_path: Path, kv_format: str) -> None:
    """A shared cache is stored once, in any format."""
    model = load(tmp_path, "cla", REFERENCE, kv_format)
    assert answers(model) == answers(model, step_tokens=16)


def test_blocks_grow_as_caches_shrink(tmp_path: Path) -> None:
    """Capacity in tokens, with equal memory: five layers with two caches hold 5 / 2 of the tokens."""
    spec = load(tmp_path, "cla", REFERENCE).spec
    unshared = replace(spec, layers=tuple(replace(layer, share_from=None) for layer in spec.layers))
    memory = Memory("cpu", 1 << 33)
    config = EngineConfig(kv_cache_memory=1 << 24, block_size=16)
    tokens = [Planner(model, config, memory).plan()[0].n_pages * 16 for model in (spec, unshared)]
    assert tokens[0] == pytest.approx(2.5 * tokens[1], rel=0.01)
    _, changes = savings(cache_of(spec), 1000)
    assert {change.name: change.factor for change in changes}["sharing"] == 2.5
