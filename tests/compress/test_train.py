"""The training loop: the same twice, the same after a stop, and as scheduled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.compress.muon import orthogonalize
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.core.errors import ConfigError

TRAINING = Training(Schedule(20, warmup=2), 0.5, 0.05, matrix_decay=0.0, log_every=5, parts=2)
WANTED = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def student() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 6)


def batches(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def trainer(out: Path, training: Training = TRAINING) -> tuple[nn.Linear, Trainer]:
    model = student()
    return model, Trainer(model, lambda x: (model(x) - x @ WANTED.T - 1).square().mean(), batches, training, out)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_it_learns_and_says_so(tmp_path: Path) -> None:
    model, run = trainer(tmp_path, replace(TRAINING, schedule=Schedule(120)))
    last = run.run()
    assert last["done"] and last["step"] == 120
    assert (model.weight - WANTED).abs().max() < 0.2
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0] / 20


def test_twice_the_same(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / name) for name in "ab"]
    for _, run in runs:
        run.run()
    assert torch.equal(runs[0][0].weight, runs[1][0].weight)


def test_a_run_may_pause_at_a_step(tmp_path: Path) -> None:
    whole, run = trainer(tmp_path / "whole")
    run.run()
    cut, run = trainer(tmp_path / "cut")
    paused = run.run(until=7)
    assert paused["step"] == 7 and not paused["done"]
    assert run.run()["done"]
    assert torch.equal(whole.weight, cut.weight)


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    whole, run = trainer(tmp_path / "whole")
    run.run()
    training = replace(TRAINING, save_every=6)
    _, first = trainer(tmp_path / "cut", training)

    def stop() -> dict[str, float]:
        raise KeyboardInterrupt

    first.training = replace(training, check_every=8)
    with pytest.raises(KeyboardInterrupt):
        first.run(stop)
    model, second = trainer(tmp_path / "cut", training)
    assert second.step == 6
    second.run()
    torch.testing.assert_close(model.weight, whole.weight, rtol=0, atol=0)
    torch.testing.assert_close(model.bias, whole.bias, rtol=0, atol=0)


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    model, run = trainer(tmp_path)
    run.run()
    again, second = trainer(tmp_path)
    second.run()
    assert torch.equal(model.weight, again.weight)


def test_another_student_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path)[1].run()
    with pytest.raises(ConfigError, match="belongs to another model"):
        Trainer(nn.Linear(3, 3), lambda x: x.sum(), batches, TRAINING, tmp_path)


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    model = student()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    Trainer(model, lambda x: model(x).square().mean(), batches, TRAINING, tmp_path).run()
    assert torch.equal(model.bias, before) and not torch.equal(model.weight, student().weight)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train"):
        Trainer(model, lambda x: x.sum(), batches, TRAINING, tmp_path / "none")


def test_checks_are_logged(tmp_path: Path) -> None:
    seen: list[bool] = []
    model, run = trainer(tmp_path, replace(TRAINING, check_every=10))

    def check() -> dict[str, float]:
        seen.append(model.training or torch.is_grad_enabled())
        return {"held_out": 1.5}

    run.run(check)
    assert seen == [False] * 3 and model.training
    assert [row["check"] for row in rows(tmp_path) if "check" in row] == [{"held_out": 1.5}] * 3


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    model = student()
    run = Trainer(model, lambda x: model(x).mean() * float("nan"), batches, TRAINING, tmp_path)
    with pytest.raises(FloatingPointError, match="loss is nan at step 5"):
        run.run()
    assert not (tmp_path / "state.pt").exists()


def test_schedule() -> None:
    schedule = Schedule(100, warmup=10, decay_from=0.5, seconds=50.0)
    rates = [schedule.rate(step, schedule.progress(step, 0.0)) for step in (0, 4, 9, 50, 75, 99)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.02])
    assert schedule.progress(10, 45.0) == 0.9
    assert schedule.rate(10, 1.5) == 0.0


def test_rows_of_a_text() -> None:
    source = TokenRows(torch.arange(50, dtype=torch.int16), 6, 10)
    batch = source(3)
    assert batch.shape == (6, 10) and batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(10).expand(6, 10))
    assert torch.equal(batch, source(3)) and not torch.equal(batch, source(4))
    assert TokenRows(torch.arange(10), 2, 10)(0).tolist() == [list(range(10))] * 2
    with pytest.raises(ConfigError, match="The texts have 9 tokens, fewer than the 10 of a row"):
        TokenRows(torch.arange(9), 2, 10)(0)


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert values.min() > 0.6 and values.max() < 1.3
