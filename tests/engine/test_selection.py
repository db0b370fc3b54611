"""Selection end to end: an ample budget changes no token, a small one is near full attention, and bounds follow their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.llm import LLM
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from tests.engine.runners import MAX_LEN, PAGE, DeviceBench
from tests.models.families import save

CPU = torch.device("cpu")
LONG = [3 + 7 * at % 250 for at in range(90)]


def model_of(folder: Path, family: str = "qwen3", device: torch.device = CPU, **options: Any) -> LoadedModel:
    save(family, folder)
    ops = REFERENCE if device == CPU else choose(device, torch.float32)
    return build(folder, model=ModelConfig(max_model_len=MAX_LEN, **options), ops=ops, device=device)


def deep(folder: Path, **options: Any) -> LoadedModel:
    """A model with layers that select."""
    model = model_of(folder, **options)
    assert [layer.budget for layer in model.spec.layers[:2]] == [None, None]
    assert {layer.budget for layer in model.spec.layers[2:]} == {options["kv_selection"]}
    return model


def answers(model: LoadedModel, step_tokens: int = 64, **how: Any) -> dict[tuple[str, int], list[int]]:
    bench = DeviceBench("qwen3", step_tokens=step_tokens, model=model, **how)
    bench.submit("long", LONG, max_tokens=60)
    bench.run()
    return bench.tokens


@pytest.mark.parametrize("name", ["auto", "int8", "fp8"])
def test_an_ample_budget_gives_the_tokens_of_full_attention(tmp_path: Path, name: str) -> None:
    """Every row is within the budget, in each KV format."""
    full = model_of(tmp_path, kv_cache_dtype=name)
    wide = deep(tmp_path, kv_cache_dtype=name, kv_selection=MAX_LEN)
    assert answers(wide) == answers(full)


@pytest.mark.parametrize("name", [pytest.param("auto", marks=pytest.mark.long), "int8"])
def test_chunks_hits_and_forks_change_no_token_of_a_small_budget(tmp_path: Path, name: str) -> None:
    """Bounds are written by whatever step fills a page, and copies and prefix hits carry them. A row that runs alone selects in
    each of its steps."""
    model = deep(tmp_path, kv_cache_dtype=name, kv_selection=4 * PAGE)
    first = answers(model)
    assert answers(model, step_tokens=24) == first
    bench = DeviceBench("qwen3", model=model)
    for _ in range(2):
        bench.submit("long", LONG, max_tokens=60)
        bench.run()
        assert bench.tokens["long", 0] == first["long", 0]
        bench.tokens.clear()
    assert bench.scheduler.counts.prefix_hits
    bench.submit("choices", LONG, n=2, temperature=0.0, max_tokens=60)
    bench.run()
    assert bench.tokens["choices", 0] == bench.tokens["choices", 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_selects_what_a_cpu_selects(tmp_path: Path, graphs: bool) -> None:
    """Steps in flight, chunks and prefix hits too."""
    expected = answers(deep(tmp_path, kv_selection=4 * PAGE))
    model = deep(tmp_path, device=torch.device("cuda"), kv_selection=4 * PAGE)
    for step_tokens in (64, 24):
        assert answers(model, step_tokens, device="cuda", graphs=graphs, depth=1) == expected


def test_a_small_budget_reads_less(tmp_path: Path) -> None:
    """The tokens differ from those of full attention, and the formulas of bytes know why."""
    full = model_of(tmp_path)
    small = deep(tmp_path, kv_selection=4 * PAGE)
    assert answers(small) != answers(full), "nothing that matters was left out"
    assert small.spec.kv_read_bytes(159, 1) < full.spec.kv_read_bytes(159, 1)
    assert small.spec.kv_read_bytes(20, 1) == full.spec.kv_read_bytes(20, 1)
    assert small.spec.kv_read_bytes(100, 60) == full.spec.kv_read_bytes(100, 60)
    layouts = [kv_layout(model.spec, PAGE) for model in (full, small)]
    bounds = sum(4 * layer.n_kv_heads * layer.head_dim for layer in small.spec.layers[2:])
    assert layouts[1].page_bytes - layouts[0].page_bytes == bounds


def test_the_shipped_model_answers_with_the_option() -> None:
    """Compiled operations where the machine has them; within the budget the answer is that of full attention."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    texts = []
    for budget in (0, 64, 256):
        llm = LLM(kv_selection=budget, max_model_len=256, kv_cache_memory=1 << 25, device="cpu", threads=1)
        texts.append(llm.generate("Once upon a time, " * 20, sampling)[0].text)
    assert texts[2] == texts[0]
    assert texts[1]


def test_a_budget_that_chooses_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 64, 4 blocks of 16"):
        LLM(kv_selection=63, block_size=16, max_model_len=256, device="cpu")
    with pytest.raises(ConfigError, match="number of tokens"):
        model_of(tmp_path, kv_selection=-1)
    with pytest.raises(ConfigError, match="no layer without a window after its first 2"):
        model_of(tmp_path, "mistral-window", kv_selection=64)
