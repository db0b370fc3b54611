"""Lottery tickets: what is drawn, and that every round begins where the dense training was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.tickets import EARLY, find_tickets, random_like, surviving_masks, train_rewound
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import Masks, keep_masks, linears
from ridgeline.core.errors import ConfigError

from .test_compress import model, texts

__all__ = ["model"]
STEPS, REWIND = 12, 4


@pytest.fixture
def source(model: Path) -> Checkpoint:
    return Checkpoint(model)


class Starter:
    """Students of one shape and seed; remembers at which step each began and with which weights."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.begun: list[tuple[int, dict[str, torch.Tensor]]] = []

    def __call__(self, masks: Masks, out: Path) -> tuple[TrainableDecoder, Trainer]:
        torch.manual_seed(3)
        student = TrainableDecoder(self.source.spec, 64)
        if masks:
            keep_masks(student, masks)
        rows = TokenRows(torch.tensor(texts(20)).flatten(), rows=4, tokens=32)

        def loss(ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(student(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        trainer = Trainer(student, loss, rows, Training(Schedule(STEPS, warmup=2), log_every=0), out)
        self.begun.append((trainer.step, weights(student)))
        return student, trainer


def weights(student: TrainableDecoder) -> dict[str, torch.Tensor]:
    return {name: linear.weight.detach().clone() for name, linear in linears(student).items()}


def shuffle(student: TrainableDecoder) -> None:
    for linear in linears(student).values():
        torch.nn.init.normal_(linear.weight)


def zeros(student: TrainableDecoder) -> dict[str, float]:
    return {name: float((weight == 0).float().mean()) for name, weight in weights(student).items()}


def test_the_smallest_go_and_stay_gone(source: Checkpoint) -> None:
    student = TrainableDecoder(source.spec, 64)
    shuffle(student)
    half = surviving_masks(student, 0.5, {})
    for name, weight in weights(student).items():
        assert weight.abs()[half[name]].min() >= weight.abs()[~half[name]].max()
    shuffle(student)
    fewer = surviving_masks(student, 0.75, half)
    for name, kept in fewer.items():
        assert float(kept.float().mean()) == pytest.approx(0.25, abs=0.01)
        assert not bool((kept & ~half[name]).any())


def test_a_random_ticket_is_as_sparse_and_another(source: Checkpoint) -> None:
    student = TrainableDecoder(source.spec, 64)
    shuffle(student)
    masks = surviving_masks(student, 0.75, {})
    drawn = random_like(masks, seed=1)
    assert drawn.keys() == masks.keys()
    for name, kept in masks.items():
        assert int(drawn[name].sum()) == int(kept.sum())
        assert not torch.equal(drawn[name], kept)


def test_rounds_go_back_to_the_early_step(source: Checkpoint, tmp_path: Path) -> None:
    start = Starter(source)
    dense, half, most = list(find_tickets(start, [0.5, 0.75], REWIND, tmp_path))
    assert all(share == 0 for share in zeros(dense.student).values())
    for ticket in (half, most):
        assert all(share == pytest.approx(ticket.share, abs=0.01) for share in zeros(ticket.student).values())
    early = [tensor.detach() for tensor in torch.load(tmp_path / EARLY, weights_only=True)["parameters"]]
    assert [step for step, _ in start.begun] == [0, REWIND, REWIND]
    for (_, begun), masks in zip(start.begun[1:], (half.masks, most.masks), strict=True):
        for name, weight in begun.items():
            assert any(torch.equal(item * masks[name], weight) for item in early if item.shape == weight.shape)


def test_a_ticket_of_all_weights_is_the_dense_run_again(source: Checkpoint, tmp_path: Path) -> None:
    start = Starter(source)
    dense = next(find_tickets(start, [], REWIND, tmp_path)).student
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights(dense).items()}
    again = weights(train_rewound(start, whole, tmp_path, "again"))
    assert all(torch.equal(weight, again[name]) for name, weight in weights(dense).items())


def test_a_step_that_never_comes_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"ended at step {STEPS} and cannot rewind to step {STEPS + 1}"):
        list(find_tickets(Starter(source), [0.5], STEPS + 1, tmp_path))
