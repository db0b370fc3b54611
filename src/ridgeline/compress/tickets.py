"""Lottery tickets: train, prune the smallest weights, put the others back to where they were early on, train again, and so on
(Frankle and Carbin 2019, "The lottery ticket hypothesis"; back to an early step instead of the first: Frankle et al. 2020,
"Linear mode connectivity and the lottery ticket hypothesis").
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.prune import Pattern, lowest
from ridgeline.compress.train import Trainer
from ridgeline.compress.tune import Masks, linears
from ridgeline.core.errors import ConfigError

Start = Callable[[Masks, Path], tuple[TrainableDecoder, Trainer]]
"""A new student under masks (none: all weights stay) and its training in a folder, from which that goes on if it holds a state."""
EARLY = "early.pt"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A student that was trained to the end with a share of its linears' weights zero. masks: those that are not."""

    share: float
    masks: Masks
    student: TrainableDecoder


def survivors(student: TrainableDecoder, share: float, masks: Masks) -> Masks:
    """Masks that leave zero the smallest `share` of the weights of every linear. What `masks` took already goes first."""
    kept = {}
    for name, linear in linears(student).items():
        size = linear.weight.detach().abs()
        if name in masks:
            size = size.masked_fill(~masks[name], -1.0)
        kept[name] = ~lowest(size, Pattern(share), by_row=False)
    return kept


def random_like(masks: Masks, seed: int) -> Masks:
    """As many weights of every linear, drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, kept in masks.items():
        order = torch.randperm(kept.numel(), generator=generator).to(kept.device)
        drawn[name] = kept.flatten()[order].view_as(kept)
    return drawn


def find_tickets(start: Start, shares: Sequence[float], rewind: int, folder: Path) -> Iterator[Ticket]:
    """The dense student, then one for each of the rising `shares` of zeros, its masks drawn from the student before.

    rewind: the step to which weights and the optimizer's state go back in every round; it is left in `folder`.
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
        masks = survivors(student, share, masks)
        student = rewound(start, masks, folder, f"round-{number + 1}")
        yield Ticket(share, masks, student)


def rewound(start: Start, masks: Masks, folder: Path, name: str) -> TrainableDecoder:
    """A student under `masks`, trained in folder / name from the early state that `find_tickets` left in `folder`."""
    (folder / name).mkdir()
    shutil.copyfile(folder / EARLY, folder / name / "state.pt")
    student, trainer = start(masks, folder / name)
    trainer.run()
    return student
