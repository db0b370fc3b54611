"""The memory plan adds up, and leaves to the user what the user said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, DoesNotFit
from ridgeline.core.fit import Deployment
from ridgeline.core.fit import size as size_of
from ridgeline.core.resolve import resolve
from ridgeline.core.sizing import GIB, DrafterMemory, Memory, MemoryPlan, hardware_defaults
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope


def llama_8b() -> ModelSpec:
    layer = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
    return ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 131_072)


def gemma_like() -> ModelSpec:
    rope = Rope(10_000.0, 64)
    local, whole = LayerSpec(4, 1, 64, 512, rope, window=512), LayerSpec(4, 1, 64, 512, rope)
    return ModelSpec("Gemma3ForCausalLM", 4096, 256, (local,) * 5 + (whole,), 32_768, tied=True)


def size(
    spec: ModelSpec, engine: EngineConfig, memory: int, kind: str, drafters: DrafterMemory = DrafterMemory()
) -> MemoryPlan:
    return size_of(Deployment(spec, engine, Memory(kind, memory), drafters=drafters))


def check(plan: MemoryPlan) -> None:
    assert plan.total_bytes <= plan.usable_bytes
    assert plan.kv_bytes >= (plan.n_pages + 1) * plan.layout.page_bytes
    assert plan.sequences >= 1
    assert plan.max_request_tokens == plan.max_len


def test_h200_holds_a_whole_context() -> None:
    plan = size(llama_8b(), EngineConfig(), 141 * GIB, "cuda")
    check(plan)
    assert plan.weight_bytes == llama_8b().weight_bytes
    assert (plan.max_rows, plan.max_step_tokens, plan.page_tokens, plan.steps_in_flight) == (512, 8448, 64, 1)
    assert plan.kv_bytes > 100 * GIB
    assert set(plan.chosen) <= set(resolve({}).origins)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_rank_plans_for_its_own_heads(ranks: int) -> None:
    """A rank holds 1 / ranks of the layers' matrices and of the KV heads, and never less than one KV head."""
    spec = llama_8b()
    whole, rank_plan = (size(model, EngineConfig(), 141 * GIB, "cuda") for model in (spec, spec.on_rank(ranks)))
    check(rank_plan)
    assert rank_plan.layout.page_bytes * min(ranks, 8) == whole.layout.page_bytes
    linear = [sum(model.layer_linear_params(layer) for layer in model.layers) for model in (spec, spec.on_rank(8))]
    assert linear[1] * 8 == linear[0]
    assert rank_plan.n_pages > whole.n_pages * min(ranks, 8)


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 heads and a feed-forward width of 14336 cannot be split over 64 devices"):
        llama_8b().on_rank(64)
    odd = replace(llama_8b().layers[0], n_heads=24, n_kv_heads=6)
    with pytest.raises(
        ConfigError, match="6 heads or blocks cannot be split over 4 devices: use a divisor or a multiple of 6"
    ):
        odd.on_rank(4)


def test_cpu_takes_a_modest_share() -> None:
    plan = size(gemma_like(), EngineConfig(), 20 * GIB, "cpu")
    check(plan)
    assert plan.kv_bytes <= 5 * GIB and plan.graph_bytes == 0
    assert (plan.max_rows, plan.max_step_tokens, plan.page_tokens, plan.steps_in_flight) == (64, 512, 16, 0)
    need = (plan.layout.pages_for(plan.max_len, plan.max_step_tokens) + 1) * plan.max_rows
    assert plan.n_pages < need  # never more than all rows at full length could use


def test_user_values_win() -> None:
    engine = EngineConfig(
        max_num_seqs=7, max_num_batched_tokens=99, block_size=32, steps_in_flight=0, kv_cache_memory=20 * GIB
    )
    plan = size(llama_8b(), engine, 141 * GIB, "cuda")
    assert (plan.max_rows, plan.max_step_tokens, plan.page_tokens, plan.steps_in_flight) == (7, 99, 32, 0)
    assert plan.kv_bytes <= 20 * GIB < plan.kv_bytes + plan.layout.page_bytes


def test_what_others_hold_is_not_ours() -> None:
    alone = size(llama_8b(), EngineConfig(), 141 * GIB, "cuda")
    drafters = size(llama_8b(), EngineConfig(), 141 * GIB, "cuda", drafters=DrafterMemory(bytes=60 * GIB))
    assert drafters.total_bytes <= 81 * GIB < alone.total_bytes
    others = size_of(Deployment(llama_8b(), EngineConfig(), Memory("cuda", 141 * GIB, 60 * GIB)))
    assert others == drafters


def test_windowed_layers_cost_their_window() -> None:
    windowed = size(gemma_like(), EngineConfig(), 24 * GIB, "cuda")
    whole = replace(gemma_like(), layers=(gemma_like().layers[-1],) * 6)
    assert windowed.sequences > 3 * size(whole, EngineConfig(), 24 * GIB, "cuda").sequences


def test_the_mildest_change_comes_first() -> None:
    with pytest.raises(DoesNotFit, match=r"--gpu-memory-utilization 0\.9$"):
        size(llama_8b(), EngineConfig(gpu_memory_utilization=0.1), 141 * GIB, "cuda")
    with pytest.raises(DoesNotFit, match=r"with a context of \d+ of 131072 tokens\..* --max-model-len \d+$"):
        size(llama_8b(), EngineConfig(), 24 * GIB, "cuda")
    with pytest.raises(DoesNotFit, match="more than 1[0-9]"):
        size(llama_8b(), EngineConfig(), 8 * GIB, "cuda")


def test_a_cache_that_was_asked_for_is_named() -> None:
    with pytest.raises(
        DoesNotFit, match=r"^--kv-cache-memory is 10 bytes, but one sequence of 131072 tokens takes 17\d{9} bytes\."
    ):
        size(llama_8b(), EngineConfig(kv_cache_memory=10), 141 * GIB, "cuda")
    with pytest.raises(DoesNotFit, match=r"and 500\.00 GiB for --kv-cache-memory, but only .* GiB are missing"):
        size(llama_8b(), EngineConfig(kv_cache_memory=500 * GIB), 141 * GIB, "cuda")


def test_defaults_name_real_options() -> None:
    for kind in ("cpu", "cuda"):
        EngineConfig(**hardware_defaults(kind, 24 * GIB))  # type: ignore[arg-type]


def test_a_step_has_a_token_for_every_running_request() -> None:
    assert size(llama_8b(), EngineConfig(max_num_batched_tokens=8), 141 * GIB, "cuda").max_rows == 8
    with pytest.raises(ConfigError, match="raise --max-num-batched-tokens"):
        size(llama_8b(), EngineConfig(max_num_batched_tokens=8, max_num_seqs=9), 141 * GIB, "cuda")
