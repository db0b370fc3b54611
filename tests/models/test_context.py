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


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "windows-shared", "mixtral"])
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
        inputs, results = context_bytes(layer, WIDTH)
        for share in (9, 17):  # of steps of 18 and 33 tokens, tests.models.mesh_rank.logits
            sent += share * (inputs + results)
        sent += DECODED * 2 * results
    assert group.sent == sent + (9 + 17) * model.spec.d_model * WIDTH
