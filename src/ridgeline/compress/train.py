"""The training loop: a student, a loss, a source of batches, a schedule. Distillation, fine-tuning after pruning and
quantization-aware training all run it.

Matrices are stepped by Muon, embeddings, heads and vectors by AdamW; parameters that need no gradient stay. A source is a
function of the step's number, so that a run that was stopped goes on with the batches it would have had.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compress.muon import Muon
from ridgeline.core.errors import ConfigError

Loss = Callable[[Tensor], Tensor]
"""A batch to its mean loss, a scalar that leads back to the student's parameters."""
Source = Callable[[int], Tensor]
"""Number of a batch, from 0, to the batch; always the same for the same number."""
Check = Callable[[], Mapping[str, float]]
"""Figures of the student on held-out data."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, constant steps, a linear decay to nothing.

    steps: how many. seconds: a run ends after so many even if steps are left, and its decay follows whichever comes first;
    such a run is not the same twice. decay_from: share of the run before the step size falls.
    """

    steps: int
    warmup: int = 50
    decay_from: float = 0.4
    seconds: float = float("inf")

    def progress(self, step: int, elapsed: float) -> float:
        return max(step / self.steps, elapsed / self.seconds)

    def rate(self, step: int, progress: float) -> float:
        """Share of the full step size at the step of this number, from 0."""
        falling = (1 - progress) / (1 - self.decay_from) if self.decay_from < 1 else 1.0
        return max(0.0, min(1.0, falling, (step + 1) / max(1, self.warmup)))


@dataclass(frozen=True, slots=True)
class Training:
    """How a student is trained. Step sizes: matrix_lr of Muon, vector_lr of AdamW. matrix_decay: weight decay of the matrices.

    parts: batches whose gradients make one step. clip: largest norm of the gradients together. log_every, check_every,
    save_every: in steps; 0: never (a finished run is always saved).
    """

    schedule: Schedule
    matrix_lr: float = 5e-3
    vector_lr: float = 2e-3
    matrix_decay: float = 0.1
    parts: int = 1
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    check_every: int = 0
    save_every: int = 0


class Trainer:
    """One run, in a folder: log.jsonl (a row per `log_every` steps) and state.pt, from which a stopped run goes on."""

    def __init__(self, student: nn.Module, loss: Loss, batches: Source, training: Training, out: Path) -> None:
        self.student, self.loss, self.batches, self.training, self.out = student, loss, batches, training, out
        named = [(name, one) for name, one in student.named_parameters() if one.requires_grad]
        if not named:
            raise ConfigError("The student has no parameter to train: set requires_grad on some.")
        self.device = named[0][1].device
        matrices = [one for name, one in named if is_matrix(name, one)]
        others = [one for name, one in named if not is_matrix(name, one)]
        self.parameters = matrices + others
        self.muon = Muon(matrices, training.matrix_lr, training.matrix_decay)
        fused = self.device.type == "cuda"
        self.adam = (
            torch.optim.AdamW(others, training.vector_lr, (0.9, 0.95), weight_decay=0.0, fused=fused)
            if others
            else None
        )
        self.step, self.elapsed = 0, 0.0
        torch.manual_seed(training.seed)
        out.mkdir(parents=True, exist_ok=True)
        if (out / "state.pt").is_file():
            self.resume()

    def gradients(self) -> Tensor:
        """Add up the gradients of one step; the mean loss of its parts."""
        total = torch.zeros((), device=self.device)
        parts = self.training.parts
        for part in range(parts):
            batch = self.batches(self.step * parts + part)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.loss(batch)
            (loss / parts).backward()
            total += loss.detach() / parts
        return total

    def update(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.training.clip)
        self.muon.lr = self.training.matrix_lr * rate
        self.muon.step()
        if self.adam is not None:
            self.adam.param_groups[0]["lr"] = self.training.vector_lr * rate
            self.adam.step()
        for one in self.parameters:
            one.grad = None

    def run(self, check: Check | None = None, until: int | None = None) -> dict[str, Any]:
        """Train to the end of the schedule, or to step `until` of it, where another call goes on; the last row of the log.

        Raises FloatingPointError if the loss is not finite.
        """
        training, schedule = self.training, self.training.schedule
        self.student.train()
        self.log(
            {"training": asdict(training), "step": self.step, "parameters": sum(p.numel() for p in self.parameters)}
        )
        before, since, running = time.monotonic() - self.elapsed, self.step, torch.zeros((), device=self.device)
        while (progress := schedule.progress(self.step, self.elapsed)) < 1 and self.step != until:
            running += self.gradients()
            self.update(schedule.rate(self.step, progress))
            self.step += 1
            self.elapsed = time.monotonic() - before
            if due(training.log_every, self.step):
                self.report(running, self.step - since)
                since = self.step
            if check is not None and due(training.check_every, self.step):
                self.log({"step": self.step, "check": self.checked(check)})
            if due(training.save_every, self.step):
                self.save()
        row = self.report(running, self.step - since) | {"done": progress >= 1}
        if check is not None:
            row["check"] = self.checked(check)
        self.log(row)
        self.save()
        return row

    def checked(self, check: Check) -> dict[str, float]:
        self.student.eval()
        with torch.no_grad():
            found = dict(check())
        self.student.train()
        return found

    def report(self, running: Tensor, steps: int) -> dict[str, Any]:
        """Log the mean loss of the last `steps` steps and start a new sum."""
        row: dict[str, Any] = {"step": self.step, "seconds": round(self.elapsed, 2)}
        if steps:
            row["loss"] = running.item() / steps
            running.zero_()
            self.log(row)
            if not -float("inf") < row["loss"] < float("inf"):
                raise FloatingPointError(f"the loss is {row['loss']} at step {self.step}: lower the learning rate.")
        return row

    def log(self, row: Mapping[str, Any]) -> None:
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save(self) -> None:
        """Write state.pt; one that is there already stays whole until the new one is."""
        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "parameters": [one.detach() for one in self.parameters],
            "velocity": self.muon.velocity,
            "adam": self.adam.state_dict() if self.adam is not None else None,
        }
        torch.save(state, self.out / "part.pt")
        (self.out / "part.pt").replace(self.out / "state.pt")

    def resume(self) -> None:
        state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
        shapes = [one.shape for one in self.parameters]
        if [one.shape for one in state["parameters"]] != shapes:
            raise ConfigError(
                f"The saved training {self.out / 'state.pt'} belongs to another model: give another folder, or delete the file."
            )
        with torch.no_grad():
            for one, stored in zip(self.parameters, state["parameters"], strict=True):
                one.copy_(stored)
        self.muon.velocity = state["velocity"]
        if self.adam is not None:
            self.adam.load_state_dict(state["adam"])
        self.step, self.elapsed = state["step"], state["elapsed"]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it: a weight between hidden states. Embeddings and heads have rows that mean tokens."""
    return parameter.dim() == 2 and "embed" not in name and "lm_head" not in name


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A source of batches [rows, tokens] int64 from a stream of token ids [n] of any integer type: rows that begin at random
    places, drawn from (seed, number of the batch)."""

    stream: Tensor
    rows: int
    tokens: int
    seed: int = 0

    def __call__(self, number: int) -> Tensor:
        last = len(self.stream) - self.tokens
        if last < 0:
            raise ConfigError(
                f"The texts have {len(self.stream)} tokens, fewer than the {self.tokens} of a row: give more text."
            )
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        # Without waiting: a device then works on one step while the next is being launched.
        starts = torch.randint(last + 1, (self.rows, 1), generator=generator).to(self.stream.device, non_blocking=True)
        return self.stream[starts + torch.arange(self.tokens, device=self.stream.device)].long()
