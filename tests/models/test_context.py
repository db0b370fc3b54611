"""A decoder whose ranks hold parts of every page and divide the tokens of a step computes what it computes on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.mesh import Mesh
from ridgeline.planner.layout_times import context_bytes
from tests.lockstep import Lockstep, Rank
from tests.models.families import save
from tests.models.mesh_rank import CPU, DECODED, logits

WIDTH = 4
"""Bytes of float32."""


def load(folder: Path, mesh: Mesh) -> LoadedModel:
    return build(folder, model=ModelConfig(dtype="float32"), ops=REFERENCE, device=CPU, mesh=mesh)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "windows-shared", "mixtral", "gpt-oss"])
def test_two_ranks_are_one_device(family: str, tmp_path: Path) -> None:
    """And they send as many bytes as `ridgeline plan` counts."""
    save(family, tmp_path)
    model, group = load(tmp_path, Mesh()), Lockstep(2)

    def run(rank: Rank) -> torch.Tensor:
        return logits(load(tmp_path, Mesh(context=cast(Any, rank))))

    want, (first, second) = logits(model), group.run(run)
    torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-5 * max(1.0, float(want.abs().max())))
    assert torch.equal(first, second)
    sent = 0
    for layer in model.spec.layers:
        per_token = context_bytes(layer, WIDTH)
        # Steps of 18 tokens of two rows and of 33 tokens of one, tests.models.mesh_rank.logits. Its 40 slots are in three pages.
        sent += 10 * (per_token.inputs + per_token.results) + 18 * per_token.written + 24 * per_token.keys
        sent += DECODED * 2 * per_token.results
    assert group.sent == sent + (10 + 18) * model.spec.d_model * WIDTH
