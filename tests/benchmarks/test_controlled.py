"""Engines of controlled acceptance draft, and what is kept is what was chosen."""

from __future__ import annotations

import json
from pathlib import Path

import controlled
import pytest
import torch
from controlled import NODES, PLACES, Script, dictated, start

from ridgeline.core.config import EngineConfig
from ridgeline.engine import assemble
from tests.benchmarks.test_ledger import LLAMA


def test_a_drafter_of_chosen_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wanted_by", "open_drafters"):
        monkeypatch.setattr(assemble, name, getattr(assemble, name))  # what `start` puts there goes with the test
    monkeypatch.setattr(controlled, "OUTPUT", 24)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": PLACES}))
    config = EngineConfig(device="cpu", max_num_seqs=2, enable_prefix_caching=False, kv_cache_memory=1 << 24)
    script = Script.write(3, PLACES + 64, LLAMA["vocab_size"], torch.device("cpu"))
    with dictated(script):
        engine = start(tmp_path, None, config, script)
        sizes = engine.local.engine.loop.runner._sizes
        assert sizes.drafts == (0, 1, 2, 3, NODES), "what start-up captures and rehearses"
        engine.use((0, NODES), fixed=True, share=1.0)
        assert engine.decode(2, 8, 1).gained > NODES
        engine.use((0, NODES), fixed=True, share=0.0)
        assert engine.decode(2, 8, 1).gained == 1.0
