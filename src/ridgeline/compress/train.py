"""The training loop for distillation, fine-tuning after pruning and quantization-aware training.

Muon updates matrices. AdamW updates embeddings, heads and vectors. Parameters without gradient are constant. A batch is a
function of its number, so a resumed run gets the same batches as an uninterrupted one.
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
"""batch -> mean loss, a scalar that is differentiable in the student's parameters."""
Source = Callable[[int], Tensor]
"""number of a batch, from 0 -> batch. The same number always gives the same batch."""
Check = Callable[[], Mapping[str, float]]
"""() -> figures of the student on held-out data."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate schedule: linear warm-up, constant, linear decay to 0."""

    steps: int
    warmup: int = 50
    decay_from: float = 0.4
    """Share of the run before the decay."""
    seconds: float = float("inf")
    """Time limit. The decay follows the limit that is closer, steps or seconds. A run with a time limit is not reproducible."""

    def progress(self, step: int, elapsed: float) -> float:
        """Return the finished share of the run."""
        return max(step / self.steps, elapsed / self.seconds)

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate factor of a step, counted from 0."""
        decay = (1 - progress) / (1 - self.decay_from) if self.decay_from < 1 else 1.0
        return max(0.0, min(1.0, decay, (step + 1) / max(1, self.warmup)))


@dataclass(frozen=True, slots=True)
class Training:
    """Hyperparameters of a training run. The intervals are in steps; 0 means never. A finished run is always saved."""

    schedule: Schedule
    matrix_lr: float = 5e-3
    """Learning rate of Muon."""
    vector_lr: float = 2e-3
    """Learning rate of AdamW."""
    matrix_decay: float = 0.1
    """Weight decay of the matrices."""
    parts: int = 1
    """Batches per step (gradient accumulation)."""
    clip: float = 1.0
    """Maximum norm of all gradients."""
    seed: int = 0
    log_every: int = 50
    check_every: int = 0
    save_every: int = 0


class Trainer:
    """A training run with a folder: log.jsonl has a row per `log_every` steps, and an interrupted run resumes from state.pt."""

    def __init__(self, student: nn.Module, loss: Loss, batches: Source, training: Training, out: Path) -> None:
        self.student, self.loss, self.batches, self.training, self.out = student, loss, batches, training, out
        trainable = [(name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad]
        if not trainable:
            raise ConfigError("The student has no parameter to train: set requires_grad on some.")
        self.device = trainable[0][1].device
        matrices = [parameter for name, parameter in trainable if is_matrix(name, parameter)]
        others = [parameter for name, parameter in trainable if not is_matrix(name, parameter)]
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
        """Accumulate the gradients of one step. Returns the mean loss of its batches."""
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
        """Update the parameters with the learning rates multiplied by `rate`, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self.training.clip)
        self.muon.lr = self.training.matrix_lr * rate
        self.muon.step()
        if self.adam is not None:
            self.adam.param_groups[0]["lr"] = self.training.vector_lr * rate
            self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None

    def run(self, check: Check | None = None, until: int | None = None) -> dict[str, Any]:
        """Train to the end of the schedule or to step `until`, from which another call continues.

        Returns the last row of the log. Raises FloatingPointError if the loss is not finite.
        """
        training, schedule = self.training, self.training.schedule
        self.student.train()
        self.log(
            {"training": asdict(training), "step": self.step, "parameters": sum(p.numel() for p in self.parameters)}
        )
        start, last_report, loss_sum = time.monotonic() - self.elapsed, self.step, torch.zeros((), device=self.device)
        while (progress := schedule.progress(self.step, self.elapsed)) < 1 and self.step != until:
            loss_sum += self.gradients()
            self.update(schedule.rate(self.step, progress))
            self.step += 1
            self.elapsed = time.monotonic() - start
            if due(training.log_every, self.step):
                self.report(loss_sum, self.step - last_report)
                last_report = self.step
            if check is not None and due(training.check_every, self.step):
                self.log({"step": self.step, "check": self.run_check(check)})
            if due(training.save_every, self.step):
                self.save()
        row = self.report(loss_sum, self.step - last_report) | {"done": progress >= 1}
        if check is not None:
            row["check"] = self.run_check(check)
        self.log(row)
        self.save()
        return row

    def run_check(self, check: Check) -> dict[str, float]:
        """Run `check` in evaluation mode."""
        self.student.eval()
        with torch.no_grad():
            figures = dict(check())
        self.student.train()
        return figures

    def report(self, loss_sum: Tensor, steps: int) -> dict[str, Any]:
        """Log the mean loss of the last `steps` steps and reset the sum."""
        row: dict[str, Any] = {"step": self.step, "seconds": round(self.elapsed, 2)}
        if steps:
            row["loss"] = loss_sum.item() / steps
            loss_sum.zero_()
            self.log(row)
            if not -float("inf") < row["loss"] < float("inf"):
                raise FloatingPointError(f"the loss is {row['loss']} at step {self.step}: lower the learning rate.")
        return row

    def log(self, row: Mapping[str, Any]) -> None:
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save(self) -> None:
        """Write state.pt. An existing file is replaced only after the new one is complete."""
        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "velocity": self.muon.velocity,
            "adam": self.adam.state_dict() if self.adam is not None else None,
        }
        torch.save(state, self.out / "part.pt")
        (self.out / "part.pt").replace(self.out / "state.pt")

    def resume(self) -> None:
        state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
        shapes = [parameter.shape for parameter in self.parameters]
        if [parameter.shape for parameter in state["parameters"]] != shapes:
            raise ConfigError(
                f"The saved training {self.out / 'state.pt'} belongs to another model: give another folder, or delete the file."
            )
        with torch.no_grad():
            for parameter, stored in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(stored)
        self.muon.velocity = state["velocity"]
        if self.adam is not None:
            self.adam.load_state_dict(state["adam"])
        self.step, self.elapsed = state["step"], state["elapsed"]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates the parameter: a matrix between hidden states. The rows of embeddings and heads are tokens."""
    return parameter.dim() == 2 and "embed" not in name and "lm_head" not in name


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Batches int64 [rows, tokens] that start at random positions of a token stream, drawn from (seed, number of the batch)."""

    stream: Tensor
    """Token ids [n] of any integer type."""
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
        # Non-blocking, so that the device runs a step while the host launches the next.
        starts = torch.randint(last + 1, (self.rows, 1), generator=generator).to(self.stream.device, non_blocking=True)
        return self.stream[starts + torch.arange(self.tokens, device=self.stream.device)].long()
