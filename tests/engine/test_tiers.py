"""Options of the tiers below the KV cache: with the shipped model, and what is refused before weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.tiers import check_tiers
from ridgeline.kv.offload import CopyCost
from ridgeline.llm import LLM
from ridgeline.wire.messages import Control, Reply, StepStats, Submit
from tests.engine.runners import layout_of, pair

SAMPLING = SamplingParams(max_tokens=16, temperature=0.0)
PROMPTS = [f"{word} upon a time there was a story about {word}. " * 8 for word in ("Once", "Twice", "Never", "Always")]


def _answers(**options: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of prompts asked twice, in a cache that holds fewer than all of them."""
    facts: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2 << 20} | options
    llm = LLM(device="cpu", threads=1, **facts)
    answers = [llm.generate(prompt, SAMPLING)[0] for prompt in PROMPTS * 2]
    llm.close()
    return [answer.choices[0].token_ids for answer in answers], [answer.cached_tokens for answer in answers]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        *(
            pytest.param(option, marks=pytest.mark.long)
            for option in ({}, {"speculate": "auto"}, {"deterministic": True}, {"kv_retention": "window:keep=64"})
        ),
    ],
    ids=str,
)
def test_the_shipped_model_answers_the_same_and_a_restart_finds_its_blocks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    memory = {"kv_cache_memory": 700_000} if "kv_cache_dtype" in options else {}
    tiers = {"kv_offload_gb": 0.05, "kv_disk": str(tmp_path), "kv_disk_gb": 0.5}
    computed, cached = _answers(**options, **memory)
    assert not any(cached), "each prompt evicts the one before"
    copied, cached = _answers(**options, **memory, **tiers)
    assert copied == computed and not any(cached[:4]) and all(cached[4:])
    restarted, cached = _answers(**options, **memory, **tiers)
    assert restarted == computed and all(cached)


def test_what_tiers_hold_and_did_is_reported(tmp_path: Path) -> None:
    records: list[StepStats] = []
    config = EngineConfig(
        device="cpu", threads=1, kv_cache_memory=2 << 20, kv_offload_gb=0.05, kv_disk=str(tmp_path), kv_disk_gb=0.5
    )
    engine = LocalEngine.start(ModelConfig(dtype="float32", max_model_len=256), config, on_step=records.append)
    for number in range(8):
        tokens = [100 * (number % 4) + 7 + token for token in range(80)]
        list(engine.run([Submit(str(number), tokens, SamplingParams(max_tokens=4), arrival=0.0)]))
    (reply,) = engine.engine.handle(Control("stats", "stats"))
    engine.close()
    assert isinstance(reply, Reply)
    host, disk = reply.facts["tiers"]
    assert (host["name"], disk["name"]) == ("host", "disk")
    assert host["stored"] >= host["loaded"] > 0 and host["blocks"] > 0 and host["page_bytes"] == disk["page_bytes"] > 0
    last = next(record.tiers for record in reversed(records) if record.tiers)
    assert {name: loaded for name, _, loaded, _ in last} == {"host": host["loaded"], "disk": disk["loaded"]}


@pytest.mark.long
def test_an_engine_that_ends_writes_what_its_cache_holds(tmp_path: Path) -> None:
    """Nothing was evicted. Files of other operations are not served: with --deterministic no token depends on a batch."""
    options: dict[str, Any] = {"kv_offload_gb": 0.05, "kv_disk": str(tmp_path), "kv_cache_memory": 32 << 20}
    tokens, _ = _answers(**options)
    _, cached = _answers(deterministic=True, **options)
    assert not any(cached[:4]) and all(cached[4:])
    again, cached = _answers(**options)
    assert again == tokens and all(cached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_ttl": 60.0}, "add --kv-offload-gb"),
        ({"kv_offload_gb": 1e-9}, "give more"),
        ({"kv_offload_gb": 1e9}, "are free: give less"),
        ({"kv_disk": "blocks"}, "add --kv-offload-gb"),
        ({"kv_offload_gb": 1.0, "kv_disk": "blocks", "kv_disk_gb": 0.0}, "give more"),
    ],
)
def test_what_does_not_hold_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_tiers(EngineConfig(**options), layout_of(pair("llama-gqa")[1]))
    assert caught.value.param in options


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_tiers(EngineConfig(kv_offload_gb=0.01, kv_disk=str(tmp_path / "file")), layout_of(pair("llama-gqa")[1]))


def test_a_copy_pays_where_it_is_faster() -> None:
    cost = CostModel(pair("llama-gqa")[1].spec, flops_per_s=1e9, bytes_per_s=1e9, overhead_s=0.0)
    page = 1 << 16
    step_s = cost.step_s(step_work(cost.spec, [(0, 512)], 0))
    rate = 64 * page / step_s  # of a copy that takes as long as the step
    assert CopyCost(cost, page, rate * 1.01).pays(0, 512, 64, 0)
    assert not CopyCost(cost, page, rate * 0.99).pays(0, 512, 64, 0)
    assert CopyCost(cost, page, 3 * rate, rate).pays(0, 512, 64, 42)
    assert not CopyCost(cost, page, 3 * rate, rate).pays(0, 512, 64, 44)
