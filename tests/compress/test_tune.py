"""Training in compressed form: zeros stay, grids are kept, and the answers come nearer to the teacher's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.grid import Codes, Grid
from ridgeline.compress.job import Job
from ridgeline.compress.layerwise import LayerwiseRunner, batches
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import OnGrid, keep_on_grid, keep_zeros, save_trained, trainable_decoder
from ridgeline.core.errors import ConfigError

from .test_compress import model, quiet, texts

__all__ = ["model"]


def trained(student: TrainableDecoder, teacher: TrainableDecoder, out: Path, rate: float = 2e-3) -> tuple[float, float]:
    """The loss before and after twenty steps."""
    rows = TokenRows(torch.tensor(texts(20)).flatten(), rows=8, tokens=32)
    loss, held = Distillation(student, teacher), torch.tensor(texts(4))

    def now() -> float:
        with torch.no_grad():
            return float(loss(held))

    before = now()
    Trainer(student, loss, rows, Training(Schedule(20, warmup=3), matrix_lr=rate, vector_lr=rate / 2), out).run()
    return before, now()


def weights(decoder: TrainableDecoder) -> list[torch.Tensor]:
    return [layer.get_submodule(name).weight.detach().clone() for layer in decoder.layers for name in LINEAR_NAMES]


def check_saved(student: TrainableDecoder, start: Checkpoint, folder: Path) -> None:
    """What is stored are the trained weights: linears exactly, the others rounded to the types of the start."""
    before = weights(student)
    save_trained(student, start, folder)
    saved = Checkpoint(folder)
    assert saved.storage == start.storage and saved.config == start.config and saved.bytes == start.bytes
    for index in range(len(student.layers)):
        stored, like = saved.stored_layer(index), start.stored_layer(index)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in like.items()
        }
    again = trainable_decoder(saved, 64)
    assert all(torch.equal(a, b) for a, b in zip(weights(again), before, strict=True))


@pytest.mark.parametrize("recipe", ["sparsegpt-2:4", pytest.param("magnitude-50", marks=pytest.mark.long)])
def test_what_was_pruned_stays_pruned_and_is_packed_as_it_is(model: Path, recipe: str, tmp_path: Path) -> None:
    Job(Checkpoint(model), read_recipe(recipe), texts(), tmp_path / "pruned").run(quiet)
    student = trainable_decoder(Checkpoint(tmp_path / "pruned"), 64)
    zeros = [weight == 0 for weight in weights(student)]
    keep_zeros(student)
    before, after = trained(student, trainable_decoder(Checkpoint(model), 64), tmp_path / "run")
    assert after < 0.9 * before
    assert all(torch.equal(weight == 0, zero) for weight, zero in zip(weights(student), zeros, strict=True))
    check_saved(student, Checkpoint(tmp_path / "pruned"), tmp_path / "saved")


@pytest.mark.parametrize(
    "recipe",
    [
        *("gptq-int4-g32-zp", "gptq-int4-g32-actorder"),
        *(
            pytest.param(recipe, marks=pytest.mark.long)
            for recipe in (
                *("gptq-int3-g32", "gptq-int4-g32-ordered", "awq-int4-g32", "smoothquant-w8a8"),
                *("rtn-int3-g32", "awq-int3-g32", "rtn-w8a8"),
            )
        ),
    ],
)
def test_training_on_a_grid_starts_and_ends_on_it(model: Path, recipe: str, tmp_path: Path) -> None:
    start, rate = tmp_path / "start", 1e-4 if "w8a8" in recipe else 2e-3 if "int3" in recipe else 4e-4
    Job(Checkpoint(model), read_recipe(recipe), texts(), start, unrounded=tmp_path / "unrounded").run(quiet)
    student = trainable_decoder(Checkpoint(start), 64)
    rounded = weights(student)
    keep_on_grid(student, Checkpoint(start), tmp_path / "unrounded")
    assert all(torch.equal(a, b) for a, b in zip(weights(student), rounded, strict=True))
    before, after = trained(student, trainable_decoder(Checkpoint(model), 64), tmp_path / "run", rate)
    assert after < 0.97 * before, (before, after)
    scales = [codes.scales for codes in Checkpoint(start).codes(0).values()]
    check_saved(student, Checkpoint(start), tmp_path / "saved")
    learned = [codes.scales for codes in Checkpoint(tmp_path / "saved").codes(0).values()]
    assert any(not torch.equal(a, b) for a, b in zip(scales, learned, strict=True))


def test_a_saved_student_computes_what_it_computed_in_training(model: Path, tmp_path: Path) -> None:
    """The model is stored in float32, so norms and embedding are exact too. The inputs of W8A8 are rounded on both sides."""
    start = tmp_path / "start"
    Job(Checkpoint(model), read_recipe("smoothquant-w8a8"), texts(), start, unrounded=tmp_path / "unrounded").run(quiet)
    student = trainable_decoder(Checkpoint(start), 64)
    keep_on_grid(student, Checkpoint(start), tmp_path / "unrounded")
    trained(student, trainable_decoder(Checkpoint(model), 64), tmp_path / "run", 2e-4)
    save_trained(student, Checkpoint(start), tmp_path / "saved")
    runner = LayerwiseRunner(student.spec, 64)
    saved = Checkpoint(tmp_path / "saved")
    states = runner.states(saved, batches(texts(4)), lambda _: None)
    with torch.no_grad():
        ours = student.hidden(torch.tensor(texts(4)))
    torch.testing.assert_close(torch.cat(states), ours, rtol=1e-4, atol=1e-4)


def test_gradients_pass_the_rounding_and_reach_the_scales() -> None:
    """Inside the grid the gradient of a weight is that of its rounded value; beyond its ends only the scale learns."""
    grid = OnGrid(Codes(Grid(3, 0), torch.tensor([[4, 7]], dtype=torch.uint8), torch.tensor([[0.5]])))
    weight = torch.tensor([[0.3, 9.0]], requires_grad=True)
    rounded = grid(weight)
    assert rounded.tolist() == [[0.5, 1.5]]
    rounded.sum().backward()
    assert weight.grad is not None and grid.stretch.grad is not None
    assert weight.grad.tolist() == [[1.0, 0.0]]
    # d/ds = (code - zero) - weight / s inside and code - zero beyond, times s for the logarithm.
    assert float(grid.stretch.grad) == pytest.approx(0.5 * ((1 - 0.6) + 3))


def test_nothing_to_keep_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="no zero weights"):
        keep_zeros(trainable_decoder(Checkpoint(model), 64))
