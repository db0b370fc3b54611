"""On a GPU: a sleeping engine gives its memory back and wakes with equal tokens from the same graphs, at both levels and in several
number formats; a weight update in place is that of a fresh engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.core.compatibility import REFUSALS
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.ops.blocks import kind_of
from ridgeline.wire.messages import Control, Submit

from .test_streamed_gpu import SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        ("sleep", "a GPU") in {refusal[:2] for refusal in REFUSALS}, reason="the table refuses sleep on a GPU"
    ),
]
KV_BYTES = 1 << 30


PUBLISHED: dict[str, dict[str, object]] = {
    "gguf": {"quant_method": "gguf", "format": "q4_k", "layers": [], "head": "q6_k"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""quantization_config of checkpoints in formats that are no options; the first as in the configuration of a GGUF file."""


def start(folder: Path, quantization: str = "", *, tied: bool = False, eager: bool = False) -> LocalEngine:
    """quantization: an option, or a name of PUBLISHED."""
    shape: dict[str, object] = {**SHAPE, "tie_word_embeddings": tied}
    if quantization in PUBLISHED:
        shape, quantization = {**shape, "quantization_config": PUBLISHED[quantization]}, ""
    (folder / "config.json").write_text(json.dumps(shape))
    model = ModelConfig(str(folder), load_format="dummy", dtype="bfloat16", quantization=quantization)
    config = EngineConfig(
        device="cuda", enable_sleep_mode=True, kv_cache_memory=KV_BYTES, max_num_seqs=8, enforce_eager=eager
    )
    return LocalEngine.start(model, config)


def tokens(engine: LocalEngine, name: str) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    return [token for delta in engine.run([Submit(name, list(range(5, 105)), sampling, 0.0)]) for token in delta.tokens]


def order(engine: LocalEngine, name: str, argument: str = "") -> dict[str, object]:
    while not engine.engine.idle:
        engine.engine.turn()
    (reply,) = engine.engine.handle(Control(name, name, argument))
    assert "error" not in reply.facts, reply.facts
    return reply.facts


def free() -> int:
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize(
    ("quantization", "tied", "eager"),
    [
        ("", False, False),
        ("", True, False),
        ("", False, True),
        ("fp8", False, False),
        ("fp8-weight", False, False),
        ("fp8-block", False, False),
        ("int8", False, False),
        ("int4", False, False),
        ("gguf", False, False),
        ("gguf", True, True),
    ],
)
def test_a_sleeping_engine_gives_memory_back_and_wakes_with_equal_tokens(
    tmp_path: Path, quantization: str, tied: bool, eager: bool
):
    engine = start(tmp_path, quantization, tied=tied, eager=eager)
    before = tokens(engine, "before")
    facts = engine.engine.setup.facts
    expanded, hopper = int(facts["expanded_bytes"]), kind_of(torch.device("cuda")) == "hopper"
    has_codes = quantization not in ("", "fp8-block")  # in its layers, or in the head that --quantization gives
    assert (expanded > 0) == (has_codes and hopper)
    weights = int(facts["weight_bytes"]) + expanded
    for level in ("1", "2", "1"):
        awake = free()
        order(engine, "sleep", level)
        assert free() - awake >= 0.95 * (weights + KV_BYTES)
        order(engine, "wake_up")
        assert tokens(engine, f"after {level}") == before
    assert engine.engine.loop.runner.late.take() == []
    engine.close()


def test_a_sleep_from_level_1_can_go_on_to_level_2(tmp_path: Path):
    engine = start(tmp_path)
    before = tokens(engine, "before")
    order(engine, "sleep", "1")
    assert order(engine, "sleep", "2")["level"] == 2
    order(engine, "wake_up")
    assert tokens(engine, "after") == before
    engine.close()
