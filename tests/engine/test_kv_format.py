"""The format of the cache is one value from the spec to the operations: what a format stores is the operations' own business.

The format of these tests stores each key and value divided by a power of two, which is its scale: nothing is lost, so tokens are
those of a cache without scales, wherever pages are copied and slots moved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, QUANTIZED_KV, KvFormat
from ridgeline.llm import LLM
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.decoder import Decoder
from ridgeline.models.hub import resolve_model
from ridgeline.models.layers import Build
from ridgeline.models.weights import load_checkpoint
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import AttentionOps, Heads, Ops, QkvShape
from ridgeline.parallel.mesh import ONE_DEVICE
from ridgeline.quant.unquantized import UnquantizedFormat
from tests.engine import runners
from tests.engine.runners import PROMPT, DeviceBench
from tests.models.families import save

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {"device": "cpu", "threads": 1}
NORMED = KvFormat("normed-test", "float32", 32, "float32")
FAMILY = "mistral-window"


def write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
    assert view.format == NORMED and view.scales is not None
    plain = replace(view, kv=torch.zeros_like(view.kv), scales=None)
    q, k, v = REFERENCE.attention.qkv_write(qkv, shape, plain, step)
    page, place = view.slots // view.page_tokens, view.slots % view.page_tokens
    for index, vectors in enumerate((k, v)):
        scales = torch.exp2(torch.frexp(vectors.abs().amax(-1, keepdim=True)).exponent.float())
        view.kv[page, index, :, place] = vectors / scales
        view.scales[page, index, :, place] = scales
    return q, k, v


def attend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert view.scales is not None
    return REFERENCE.attention.attend(q, k, v, replace(view, kv=view.kv * view.scales, scales=None), step, lse_needed)


OPS: Ops = replace(REFERENCE, name="normed", attention=AttentionOps(write, attend, frozenset({NORMED.name})))


def normed(folder: Path, ops: Ops) -> LoadedModel:
    """The model in `folder`, its cache in the format NORMED, which has to be in KV_FORMATS."""
    model = build(folder, model=ModelConfig(max_model_len=runners.MAX_LEN), ops=REFERENCE, device=CPU)
    spec = replace(model.spec, kv_format=NORMED.name)
    parts = Build(
        spec, ops, UnquantizedFormat(ops.matmul.unquantized, torch.float32, CPU), ONE_DEVICE, torch.float32, CPU
    )
    made = Decoder(parts, spec.max_len)
    load_checkpoint(made, folder)
    made.finish_loading()
    return replace(model, spec=spec, decoder=made, ops=ops)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(KV_FORMATS, NORMED.name, NORMED)
    save(FAMILY, tmp_path)
    return tmp_path


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_serves_what_its_operations_know(folder: Path, depth: int) -> None:
    """Choices that share a prompt and prefix hits copy pages with values and scales."""
    model = normed(folder, OPS)
    tokens = []
    for given in (model, None):
        bench = DeviceBench(FAMILY, depth=depth, step_tokens=24, model=given)
        bench.submit("greedy", PROMPT * 3, max_tokens=40)
        bench.submit("choices", PROMPT * 2, n=4, temperature=1.5, seed=2, max_tokens=40)
        bench.run()
        bench.submit("again", [*PROMPT * 3, 7, 8])
        bench.run()
        assert bench.scheduler.counts.prefix_hits
        tokens.append(bench.tokens)
    assert tokens[0] == tokens[1]
    per_token = model.spec.kv_bytes_per_token()
    head_dim = model.spec.layers[0].head_dim
    assert per_token * head_dim == runners.pair(FAMILY)[1].spec.kv_bytes_per_token() * (head_dim + 1)


def test_operations_refuse_a_format_that_they_do_not_know(folder: Path) -> None:
    """When the decoder is built, before weights are read; the message names what is known."""
    with pytest.raises(ConfigError, match="normed-test is not supported by the operations 'reference'.*: use float32"):
        normed(folder, REFERENCE)


def test_another_type_than_the_models_is_another_format(folder: Path) -> None:
    """Kernels read the cache in the model's dtype."""
    model = build(folder, model=ModelConfig(), ops=REFERENCE, device=CPU)
    spec = replace(model.spec, kv_format="bfloat16")
    parts = Build(
        spec,
        REFERENCE,
        UnquantizedFormat(REFERENCE.matmul.unquantized, torch.float32, CPU),
        ONE_DEVICE,
        torch.float32,
        CPU,
    )
    with pytest.raises(ConfigError, match="bfloat16"):
        Decoder(parts, spec.max_len)


@pytest.mark.parametrize("name", QUANTIZED_KV)
def test_a_quantized_cache_gives_the_same_tokens_whatever_the_steps_are(tmp_path: Path, name: str) -> None:
    """Each token reads what is stored, its own step's keys too: chunks, prefix hits, copies and preemption change nothing."""
    save("qwen3", tmp_path)
    model = build(
        tmp_path, model=ModelConfig(max_model_len=runners.MAX_LEN, kv_cache_dtype=name), ops=REFERENCE, device=CPU
    )
    assert model.spec.kv is KV_FORMATS[name]
    tokens = []
    for step_tokens, repeated in ((24, True), (64, False)):
        bench = DeviceBench("qwen3", step_tokens=step_tokens, model=model)
        bench.submit("greedy", PROMPT * 3, max_tokens=20)
        bench.submit("choices", PROMPT * 2, n=3, temperature=1.5, seed=2, max_tokens=20)
        bench.run()
        if repeated:
            bench.submit("again", [*PROMPT * 3], max_tokens=20)
            bench.run()
            assert bench.scheduler.counts.prefix_hits
            assert bench.tokens.pop(("again", 0)) == bench.tokens["greedy", 0]
        tokens.append(bench.tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", QUANTIZED_KV)
def test_drafts_and_other_operations_give_the_same_answers(name: str) -> None:
    """The shipped model in float32: without drafts, with drafters that read or write the cache, and batch-invariant."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    answers = []
    for options in (
        {},
        {"speculate": "auto"},
        {"speculate": "recycling"},
        {"speculate": f"recurrent:{resolve_model(ModelConfig()).parent / 'recurrent'}"},
        {"deterministic": True},
    ):
        llm = LLM(kv_cache_dtype=name, dtype="float32", max_model_len=256, kv_cache_memory=1 << 25, **COMMON, **options)
        answers.append([llm.generate(text, sampling)[0].text for text in ("Once upon a time", "def add(a, b):")])
        llm.close()
    assert all(other == answers[0] for other in answers)
