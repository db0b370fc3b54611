"""The engine says where its start-up went."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import DoesNotFit
from ridgeline.core.spec import KV_FORMATS
from ridgeline.engine import rank as module
from ridgeline.engine.assemble import assemble
from tests.models.families import save

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"


def test_stages_are_told_and_kept(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    reports: list[tuple[str, int, int]] = []
    config = EngineConfig(device="cpu", kv_cache_memory=1 << 24)
    engine = assemble(ModelConfig(str(tmp_path)), config, lambda *what: reports.append(what), imports_s=1.25)
    seconds = engine.setup.facts["startup_s"]
    assert list(seconds) == ["imports", "device", "config", "ceilings", "weights", "runner", "grammar"]
    assert seconds["imports"] == 1.25 and all(spent >= 0 for spent in seconds.values())
    assert {stage for stage, _, _ in reports} == {"weights"}
    assert reports[-1][1] == reports[-1][2]


def test_the_refusal_of_a_large_model_offers_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(str(MODELS / "qwen3-0.6b"), load_format="dummy", max_model_len=4096)
    monkeypatch.setattr(module, "host_memory", lambda: (2 << 30, 1_800_000_000))
    with pytest.raises(
        DoesNotFit, match=r"It fits with weights in int\d \(.* risk to quality\).* --quantization int\d"
    ):
        assemble(model, EngineConfig(device="cpu"), lambda *what: None)


def test_a_stage_takes_the_time_since_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves on by a second with every reading, and it is read at each report of progress and at each stage's end."""
    save("llama-gqa", tmp_path)
    reports: list[tuple[str, int, int]] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=partial(next, count(10.0))))
    config = EngineConfig(device="cpu", kv_cache_memory=1 << 24)
    seconds = assemble(ModelConfig(str(tmp_path)), config, lambda *what: reports.append(what)).setup.facts["startup_s"]
    assert len(reports) > 1
    assert seconds.pop("weights") == len(reports) + 1
    assert seconds == dict.fromkeys(("device", "config", "ceilings", "runner", "grammar"), 1.0)


def test_the_fingerprint_names_content_and_kv_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama-gqa", tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")

    def fingerprint(folder: str, block_size: int = 16, **model: object) -> str:
        config = EngineConfig(device="cpu", kv_cache_memory=1 << 24, block_size=block_size)
        chosen = ModelConfig(str(tmp_path / folder), **model)  # type: ignore[arg-type]
        return assemble(chosen, config, lambda *what: None).setup.fingerprint

    first = fingerprint("model")
    assert fingerprint("copy") == first
    assert fingerprint("copy", seed=5) == first, "a seed of requests is no part of the model"
    others = [
        fingerprint("model", block_size=32),
        fingerprint("model", dtype="bfloat16"),
        fingerprint("model", load_format="dummy"),
        fingerprint("model", load_format="dummy", seed=5),
    ]
    monkeypatch.setitem(KV_FORMATS, "float32", replace(KV_FORMATS["float32"], bits=16, dtype="float16"))
    others.append(fingerprint("model"))
    assert len({first, *others}) == 6
