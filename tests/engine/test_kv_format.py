"""A cache in any format changes no token with the steps that compute it, and what no operation serves is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, QUANTIZED_KV
from ridgeline.llm import LLM
from ridgeline.models.build import build
from ridgeline.models.building import Build
from ridgeline.models.decoder import Decoder
from ridgeline.models.hub import resolve_model
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops
from ridgeline.parallel.mesh import ONE_DEVICE
from ridgeline.quant.unquantized import UnquantizedFormat
from tests.engine import runners
from tests.engine.runners import PROMPT, DeviceBench
from tests.models.families import save

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {"device": "cpu", "threads": 1}
UNQUANTIZED: Ops = replace(REFERENCE, attention=replace(REFERENCE.attention, kv_formats=frozenset()))


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_operations_refuse_a_format_that_they_do_not_know(tmp_path: Path, name: str) -> None:
    """When the decoder is built, before weights are read; the message names what is known. Another dtype is another format."""
    save("mistral-window", tmp_path)
    model = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=CPU)
    spec = replace(model.spec, kv_format=name)
    weights = UnquantizedFormat(REFERENCE.matmul.unquantized, torch.float32, CPU)
    with pytest.raises(ConfigError, match=f"{name} is not supported by the operations 'reference'.*: use float32"):
        Decoder(Build(spec, UNQUANTIZED, weights, ONE_DEVICE, torch.float32, CPU), spec.max_len, weights)


@pytest.mark.parametrize(
    ("name", "message"), [("int5", "use one of auto, int8, fp8, int4"), ("int4", "heads of 16: use int8")]
)
def test_an_option_that_no_cache_has_is_refused(tmp_path: Path, name: str, message: str) -> None:
    save("smollm", tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, model=ModelConfig(kv_cache_dtype=name), ops=REFERENCE, device=CPU)


@pytest.mark.parametrize(
    ("family", "name"), [*(("qwen3", name) for name in QUANTIZED_KV), ("mistral-window", "int8"), ("gpt-oss", "int8")]
)
def test_a_quantized_cache_gives_the_same_tokens_whatever_the_steps_are(tmp_path: Path, family: str, name: str) -> None:
    """Each token reads what is stored, its own step's keys too: chunks, prefix hits, copies and preemption change nothing."""
    save(family, tmp_path)
    model = build(
        tmp_path, model=ModelConfig(max_model_len=runners.MAX_LEN, kv_cache_dtype=name), ops=REFERENCE, device=CPU
    )
    assert model.spec.kv is KV_FORMATS[name]
    tokens = []
    for step_tokens, repeated in ((24, True), (64, False)):
        bench = DeviceBench(family, step_tokens=step_tokens, model=model)
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


@pytest.mark.long
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
