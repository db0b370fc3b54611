"""Engines of controlled acceptance draft, and what is kept is what was chosen."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from controlled import NODES, PLACES, Script, dictated, start

from ridgeline.core.config import EngineConfig
from ridgeline.engine import assemble, rank
from ridgeline.ops.rows import Int, RowState
from ridgeline.speculation import build
from tests.benchmarks.test_ledger import LLAMA


@pytest.mark.parametrize("paid", ["free", "head"])
def test_a_drafter_of_chosen_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paid: str) -> None:
    for room, name in ((build, "wanted_by"), (rank, "open_drafters"), (assemble, "head_hash")):
        monkeypatch.setattr(room, name, getattr(room, name))  # what `start` puts there goes with the test
    runners = Mock(side_effect=rank.build_runner)
    monkeypatch.setattr(rank, "build_runner", runners)
    sizes_of_head = {"num_hidden_layers": 1, "draft_vocab_size": 40}
    for name, more in (("target", {}), ("head", sizes_of_head)):
        (tmp_path / name).mkdir()
        config = LLAMA | {"max_position_embeddings": PLACES} | more
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    options = EngineConfig(device="cpu", max_num_seqs=2, enable_prefix_caching=False, kv_cache_memory=1 << 24)
    script = Script.write(3, PLACES + 64, LLAMA["vocab_size"], torch.device("cpu"))
    with dictated(script):
        engine = start(tmp_path / "target", paid, tmp_path / "head", options, script)
        _, _, sizes, *_ = runners.call_args.args
        assert sizes.drafts == (0, 1, 2, 3, NODES), "what start-up captures and warms up"
        engine.use((0, NODES), fixed=True, share=1.0)
        assert engine.decode(2, 8, 1, output=24).gained > NODES
        engine.use((0, NODES), fixed=True, share=0.0)
        assert engine.decode(2, 8, 1, output=24).gained == 1.0


def test_the_kernels_dictate_the_same() -> None:
    """What is said behind rows and their drafts, and drafts that are right and wrong."""
    scripted = pytest.importorskip("scripted")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    script = Script.write(4, 64, 1000, device)
    ints = torch.zeros(4, Int.STOP + 2, dtype=torch.int32, device=device)
    ints[:, Int.KNOWN] = torch.tensor([1, 9, 30, 5])
    state = RowState(ints.new_zeros(4, 64), ints, ints.new_zeros(1, 4, 4), 16)
    rows, share = ints.new_tensor([3, 1, 2]), ints.new_tensor(500)
    said, luck = script.said.view(4, 64), script.luck.view(4, 64)
    for each in ([1, 1, 1], [1, 5, 20, 2]):
        of = ints.new_tensor([3, 1, 2, 1][: len(each)]).repeat_interleave(ints.new_tensor(each))
        depth = torch.cat([torch.arange(count) for count in each]).int().to(device)
        got = scripted.said(state, of, depth, torch.zeros_like(of), script)
        assert torch.equal(got, said[of, ints[of, Int.KNOWN] + depth])
    scripted.draft(state, rows, 3, script, share)
    right = 0
    for row in rows.tolist():
        known = int(ints[row, Int.KNOWN])
        accepted = state.tokens[row, known : known + 3] == said[row, known : known + 3]
        assert torch.equal(accepted, luck[row, known : known + 3] < 500)
        assert int(state.tokens[row].count_nonzero()) <= 3
        right += int(accepted.sum())
    assert 0 < right < 9
