"""Lottery tickets: iterative magnitude pruning with weight rewinding.

Each round trains the student, prunes the smallest weights and resets the others to their values at an early step.
Sources: Frankle and Carbin 2019, "The lottery ticket hypothesis"; Frankle et al. 2020, "Linear mode connectivity and the
lottery ticket hypothesis" (rewinding to an early step).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.prune import Pattern, smallest_mask
from ridgeline.compress.train import Trainer
from ridgeline.compress.tune import Masks, linears
from ridgeline.core.errors import ConfigError

Start = Callable[[Masks, Path], tuple[TrainableDecoder, Trainer]]
"""(masks, folder) -> a new student with these masks, and its trainer. Empty masks keep all weights.

The training resumes from the state in the folder if there is one."""
EARLY = "early.pt"
"""The state of the dense training at the rewind step."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A trained sparse student."""

    share: float
    """Share of the linears' weights that are zero."""
    masks: Masks
    """The weights that are not pruned."""
    student: TrainableDecoder


def surviving_masks(student: TrainableDecoder, share: float, masks: Masks) -> Masks:
    """Return masks that prune the smallest `share` of the weights of every linear, those pruned by `masks` first."""
    kept = {}
    for name, linear in linears(student).items():
        magnitude = linear.weight.detach().abs()
        if name in masks:
            magnitude = magnitude.masked_fill(~masks[name], -1.0)
        kept[name] = ~smallest_mask(magnitude, Pattern(share), by_row=False)
    return kept


def random_like(masks: Masks, seed: int) -> Masks:
    """Return masks with the same number of weights per linear at random positions."""
    generator = torch.Generator().manual_seed(seed)
    random_masks = {}
    for name, kept in masks.items():
        order = torch.randperm(kept.numel(), generator=generator).to(kept.device)
        random_masks[name] = kept.flatten()[order].view_as(kept)
    return random_masks


def find_tickets(start: Start, shares: Sequence[float], rewind: int, folder: Path) -> Iterator[Ticket]:
    """Yield the dense student, then one student for each of the rising `shares` of zeros.

    The masks of each student follow from the weights of the one before. rewind: the step to which weights and optimizer state are
    reset in every round. Its state is written to `folder`.
    """
    student, trainer = start({}, folder / "dense")
    trainer.run(until=rewind)
    if trainer.step != rewind:
        raise ConfigError(
            f"The training ended at step {trainer.step} and cannot rewind to step {rewind}: rewind to an earlier step."
        )
    shutil.copyfile(trainer.out / "state.pt", folder / EARLY)
    trainer.run()
    masks: Masks = {}
    yield Ticket(0.0, masks, student)
    for number, share in enumerate(shares):
        masks = surviving_masks(student, share, masks)
        student = train_rewound(start, masks, folder, f"round-{number + 1}")
        yield Ticket(share, masks, student)


def train_rewound(start: Start, masks: Masks, folder: Path, name: str) -> TrainableDecoder:
    """Train a student with `masks` in folder / name, from the early state that `find_tickets` wrote to `folder`."""
    (folder / name).mkdir()
    shutil.copyfile(folder / EARLY, folder / name / "state.pt")
    student, trainer = start(masks, folder / name)
    trainer.run()
    return student
