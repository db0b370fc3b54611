"""A draft model's chain in one call drafts what the same operations draft token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops import native_cpu
from ridgeline.ops.native_chain import NativeChain
from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.step import KvView
from ridgeline.ops.table import Ops, Programs
from ridgeline.speculation.device import DraftRows
from ridgeline.speculation.draft_model import DraftModel
from tests.models.families import save

PAGE, PAGES, WIDTH, LIMIT = 4, 12, 48, 40
COUNT = 6


@pytest.fixture(scope="module")
def native(folder: Path) -> Ops:
    result, what = native_cpu.load(folder)
    assert result is not None, what
    return result


def load(family: str, folder: Path, dtype: str, ops: Ops) -> LoadedModel:
    config = ModelConfig(dtype=dtype, max_model_len=WIDTH)
    return build(folder, model=config, ops=ops, device=torch.device("cpu"))


class Bench:
    """Three rows of different lengths in any order, the scratch row behind them, and the cache of one draft model."""

    def __init__(self, model: LoadedModel) -> None:
        spec, chance = model.spec, torch.Generator().manual_seed(1)
        self.layers = spec.layers
        shape = (1 + 4 * PAGES, 2, spec.layers[0].n_kv_heads, PAGE, spec.layers[0].head_dim)
        dtype = model.decoder.embedding.dtype
        self.kv = [torch.randn(shape, generator=chance).to(dtype) for _ in spec.layers]
        ints = torch.zeros(4, Int.STOP + 2, dtype=torch.int32)
        ints[:, Int.KNOWN] = torch.tensor([1, 9, 17, 12])
        ints[:, Int.POSITION] = ints[:, Int.LENGTH] = ints[:, Int.KNOWN] - 1
        ints[:, Int.LIMIT] = LIMIT
        ints[:, Int.KEY : Int.KEY + 2] = torch.randint(-1000, 1000, (4, 2), generator=chance)
        ints[:, Int.STOP :] = -1
        ints[0, Int.DONE] = 1
        ints[3, Int.LIMIT] = 14
        tables = (torch.arange(4 * PAGES, dtype=torch.int32) + 1).view(1, 4, PAGES)
        words = torch.randint(0, spec.vocab_size, (4, WIDTH), generator=chance, dtype=torch.int32)
        self.state = RowState(words, ints, tables, PAGE)
        self.scales = [spec.scale_of(layer) for layer in spec.layers]

    def views(self, slots: torch.Tensor) -> list[KvView]:
        table = self.state.tables[0]
        return [
            KvView(kv, table, slots[0], layer.window, layer.softcap, scale)
            for kv, layer, scale in zip(self.kv, self.layers, self.scales, strict=True)
        ]

    def draft(self, drafter: DraftModel, temperature: float) -> torch.Tensor:
        """What stands in the rows afterwards."""
        rows = torch.tensor([3, 1, 2, 0], dtype=torch.int32)
        hidden = torch.zeros(4, 1)
        before = self.state.ints.clone()
        behind = DraftRows(
            self.state, rows, torch.tensor([0.0, temperature, 0.0, temperature]), hidden, WIDTH, temperature == 0
        )
        drafter.draft(behind, COUNT, self.views)
        assert torch.equal(self.state.ints, before), "the rows themselves stay where they are"
        return self.state.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "few"),
    [
        ("llama-gqa", False),
        ("mistral-window", False),
        ("qwen3", False),
        ("smollm", False),
        ("smollm", True),
        ("qwen2", True),
    ],
)
def test_a_chain_is_what_single_steps_draft(
    native: Ops, tmp_path: Path, dtype: str, family: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, rows that reach their limit on the way."""
    save(family, tmp_path)
    chain = Mock(side_effect=NativeChain.__call__)
    monkeypatch.setattr(NativeChain, "__call__", lambda *given: chain(*given))
    for temperature in (0.0, 0.9):
        results = []
        for ops in (native, replace(native, programs=Programs())):
            model = load(family, tmp_path, dtype, ops)
            vocabulary = range(1, model.spec.vocab_size, 3) if few else ()
            model.decoder.scale = 3.1 if family == "qwen2" else 1.0  # as Gemma has one
            bench = Bench(model)
            drafter = DraftModel(model, vocabulary)
            before = bench.state.tokens.clone()
            chain.reset_mock()
            results.append(bench.draft(drafter, temperature)[1:])
            assert chain.called == (ops is native)
            drafted = results[-1][1][17 : 17 + COUNT]
            assert not torch.equal(drafted, before[2, 17 : 17 + COUNT])
            assert not few or all(int(item) % 3 == 1 for item in drafted)
        assert torch.equal(*results)
