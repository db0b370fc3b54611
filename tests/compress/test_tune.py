"""Training in compressed form: zeros stay, grids are kept, and the answers come nearer to the teacher's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.grid import Grid, round_to_nearest
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import keep_on_grid, keep_zeros, release, trainable_decoder
from ridgeline.core.errors import ConfigError

from .test_compress import SMALL, model, quiet, texts

__all__ = ["model"]


def trained(student: TrainableDecoder, teacher: TrainableDecoder, out: Path) -> tuple[float, float]:
    """The loss before and after twenty steps."""
    rows = TokenRows(torch.tensor(texts(20)).flatten(), rows=8, tokens=32)
    loss, held = Distillation(student, teacher), torch.tensor(texts(4))

    def now() -> float:
        with torch.no_grad():
            return float(loss(held))

    before = now()
    Trainer(student, loss, rows, Training(Schedule(20, warmup=3), matrix_lr=2e-3, vector_lr=1e-3), out).run()
    return before, now()


def packed(student: TrainableDecoder, recipe: str, folder: Path) -> Checkpoint:
    """What `compress` makes of a trained student."""
    release(student)
    save_decoder(student, folder / "floats", {**SMALL, "torch_dtype": "bfloat16"})
    Job(Checkpoint(folder / "floats"), read_recipe(recipe), [], folder / "packed").run(quiet)
    return Checkpoint(folder / "packed")


def weights(decoder: TrainableDecoder) -> list[torch.Tensor]:
    return [layer.get_submodule(name).weight.detach().clone() for layer in decoder.layers for name in LINEAR_NAMES]


def check_packed(
    student: TrainableDecoder, checkpoint: Checkpoint, near: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    for index, layer in enumerate(student.layers):
        dense = checkpoint.layer(index)
        for name in LINEAR_NAMES:
            near(dense[f"{name}.weight"], layer.get_submodule(name).weight.detach())


@pytest.mark.parametrize("recipe", ["sparsegpt-2:4", "magnitude-50"])
def test_what_was_pruned_stays_pruned_and_is_packed_as_it_is(model: Path, recipe: str, tmp_path: Path) -> None:
    Job(Checkpoint(model), read_recipe(recipe), texts(), tmp_path / "pruned").run(quiet)
    student = trainable_decoder(Checkpoint(tmp_path / "pruned"), 64)
    zeros = [weight == 0 for weight in weights(student)]
    keep_zeros(student)
    before, after = trained(student, trainable_decoder(Checkpoint(model), 64), tmp_path / "run")
    assert after < 0.9 * before
    pattern = recipe.partition("-")[2]
    checkpoint = packed(student, f"magnitude-{pattern}", tmp_path)
    assert all(torch.equal(weight == 0, zero) for weight, zero in zip(weights(student), zeros, strict=True))

    def same(stored: torch.Tensor, trained_to: torch.Tensor) -> None:
        assert torch.equal(stored, trained_to.bfloat16().float())

    check_packed(student, checkpoint, same)


def test_training_on_a_grid_ends_on_it(model: Path, tmp_path: Path) -> None:
    grid = Grid(3, 32)
    student = trainable_decoder(Checkpoint(model), 64)
    plain = [round_to_nearest(weight, grid).dequantize() for weight in weights(student)]
    keep_on_grid(student, grid)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(student), plain, strict=True))
    before, after = trained(student, trainable_decoder(Checkpoint(model), 64), tmp_path / "run")
    assert after < 0.9 * before
    checkpoint = packed(student, "rtn-int3-g32", tmp_path)

    def near(stored: torch.Tensor, trained_to: torch.Tensor) -> None:
        # Floats in 16 bits lie between: a weight at the edge of two steps may fall on the other side.
        steps = (stored - trained_to).abs() / trained_to.abs().amax()
        assert float((steps > 0.02).float().mean()) < 0.01

    check_packed(student, checkpoint, near)


def test_nothing_to_keep_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="no zero weights"):
        keep_zeros(trainable_decoder(Checkpoint(model), 64))
