"""Linears in both forms, in an engine: bytes as planned, and expanded anew after a sleep and after an update of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.gpu_blocks import expanded_bytes
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.sizing import Memory, Planner
from ridgeline.engine import rank, sleep
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.weight_memory import WeightMemory
from ridgeline.models.build import build
from ridgeline.models.decoder import Decoder
from ridgeline.models.hub import resolve_model
from ridgeline.ops import native_cpu
from ridgeline.ops.reference import REFERENCE
from ridgeline.wire.messages import Control, Submit
from tests.models.gguf_files import Options, write

CPU = torch.device("cpu")


def folder(path: Path, spread: float = 0.02, **options: Any) -> Path:
    """spread: of the weights."""
    chosen = Options(kind=Kind.Q4_1, config={"num_hidden_layers": 2, "initializer_range": spread}, **options)
    return resolve_model(ModelConfig(model=str(write(path, chosen).path)), cache=path / "cache")


@pytest.mark.parametrize(
    "options", [{"head": Kind.Q6_K}, {"head": None}, {"head": Kind.F16}, {"kinds": {"v_proj": Kind.Q6_K}}]
)
def test_bytes_are_those_of_the_plan(tmp_path: Path, options: dict[str, Any]):
    model = build(folder(tmp_path, **options), model=ModelConfig(dtype="bfloat16"), ops=REFERENCE, device=CPU)
    memory, planned = WeightMemory(model.decoder, expands=True), expanded_bytes(model.spec)
    assert sum(tensor.nbytes for tensor in memory.expanded) == planned > 0
    assert sum(tensor.nbytes for tensor in model.decoder.tensors()) == model.spec.weight_bytes
    plan, _ = Planner(model.spec, EngineConfig(), Memory("cuda", 141 << 30)).plan()
    assert plan.weight_bytes == model.spec.weight_bytes + planned
    assert not WeightMemory(model.decoder).expanded and not memory.ranges


@pytest.fixture
def both_forms(monkeypatch: pytest.MonkeyPatch) -> list[WeightMemory]:
    """Engines on a CPU with the operations that have both forms. Returns the memories of their weights."""
    made = list[WeightMemory]()

    def expanding(decoder: Any, expands: bool, releasable: bool) -> WeightMemory:
        assert not expands  # a CPU's plan has one form
        made.append(WeightMemory(decoder, True, releasable))
        return made[-1]

    monkeypatch.setattr(rank, "WeightMemory", expanding)
    for module in (rank, sleep):
        monkeypatch.setattr(module, "operations", lambda *arguments: REFERENCE)
    return made


def test_expanded_linears_follow_the_stored_ones(tmp_path: Path, both_forms: list[WeightMemory]):
    first, second = folder(tmp_path / "first"), folder(tmp_path / "second", 0.3)
    config = EngineConfig(device="cpu", max_num_seqs=2, kv_cache_memory=8 << 20, enable_sleep_mode=True, threads=1)
    engine, other = (LocalEngine.start(ModelConfig(str(place)), config) for place in (first, second))
    memory, fresh = both_forms
    addresses, before = [tensor.data_ptr() for tensor in memory.expanded], tokens(engine, "before")
    assert before != tokens(other, "other")
    for level in ("1", "2"):
        order(engine, "sleep", level)
        for tensor in memory.expanded:
            tensor.zero_()
        order(engine, "wake_up")
        assert tokens(engine, f"after {level}") == before
    order(engine, "update_weights", str(second))
    assert tokens(engine, "updated") == tokens(other, "again")
    assert all(ours.equal(theirs) for ours, theirs in zip(memory.expanded, fresh.expanded, strict=True))
    assert [tensor.data_ptr() for tensor in memory.expanded] == addresses
    engine.close()
    other.close()


@pytest.mark.parametrize("head", [Kind.F32, Kind.Q8_0, None])
def test_the_last_logits_are_those_of_the_weights_that_were_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: Kind | None
):
    if native_cpu.load()[0] is None:
        pytest.skip("needs the native operations")
    made = list[Decoder]()
    monkeypatch.setattr(
        rank, "WeightMemory", lambda decoder, *rest: made.append(decoder) or WeightMemory(decoder, *rest)
    )
    first, second = folder(tmp_path / "first", head=head), folder(tmp_path / "second", 0.3, head=head)
    config = EngineConfig(device="cpu", max_num_seqs=2, kv_cache_memory=8 << 20, enable_sleep_mode=True, threads=1)
    engine, other = (LocalEngine.start(ModelConfig(str(place), dtype="bfloat16"), config) for place in (first, second))
    served, expected = made
    hidden = torch.randn(3, served.spec.d_model, dtype=torch.bfloat16)
    before = served.logits(hidden).clone()
    assert before.shape[1] % 16  # the last block of a packed head is padded
    for level in ("1", "2"):
        order(engine, "sleep", level)
        order(engine, "wake_up")
        assert served.logits(hidden).equal(before)
    order(engine, "update_weights", str(second))
    assert served.logits(hidden).equal(expected.logits(hidden)) and not before.equal(expected.logits(hidden))
    engine.close()
    other.close()


def tokens(engine: LocalEngine, name: str) -> list[int]:
    """Of a prompt that is long enough for the expanded form."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [token for delta in engine.run([Submit(name, list(range(5, 105)), sampling, 0.0)]) for token in delta.tokens]


def order(engine: LocalEngine, name: str, argument: str = "") -> None:
    while not engine.engine.idle:
        engine.engine.turn()
    (reply,) = engine.engine.handle(Control(name, name, argument))
    assert "error" not in reply.facts, reply.facts
