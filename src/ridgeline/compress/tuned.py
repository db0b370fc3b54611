"""Compression with training: apply a recipe, train the result by distillation from the original, and store it in the same layout.

Pruned weights stay zero, and rounded weights are rounded in the forward pass (compress.tune). Structured pruning gives a smaller
student; a student of any shape is given. The teacher is the original (compress.distill) or a server (compress.served_teacher).
Memory holds both models, the student with gradients and optimizer state in float32. An interrupted run resumes at the last
saved step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.job import Job, Progress, check_target, fingerprint
from ridgeline.compress.layerwise import CPU
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.served_teacher import ServedTeacher, ask
from ridgeline.compress.storage import Bitmask, Integers
from ridgeline.compress.student import student_checkpoint
from ridgeline.compress.train import Loss, Schedule, Source, TokenRows, Trainer, Training
from ridgeline.compress.tune import keep_on_grid, keep_zeros, save_trained, trainable_decoder
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.text.tokenizer import Tokenizer

STEPS, ROWS = 300, 16
INT8_RATE, GRID_RATE, FITTED_RATE, RATE = 1e-5, 3e-4, 1e-3, 3e-3
"""Default learning rates for weights in 8 bits, for other rounded weights, for heads pooled by components, and for pruned weights.

A start near the optimum needs small steps: large ones leave it."""
MAX_PASSES = 2
"""Maximum passes over the texts by default. With more passes a student overfits to few texts."""
SAVES = 20
"""Saved states per run."""
STATE = "tuning.json"
START, UNROUNDED, TRAINED = "start", "unrounded", "trained"
"""In the working folder: the model that training starts from, its weights before rounding, and the result."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Texts and hyperparameters of the training."""

    ids: torch.Tensor
    """Token ids of the texts, int64 [n]."""
    length: int
    """Tokens per row."""
    steps: int
    rows: int
    """Rows per batch."""
    rate: float
    """Learning rate of matrices (Muon). Embedding, head and vectors (AdamW) use half of it."""
    student: Path | None = None
    """Model folder, or file like config.json, of the recipe `distill`."""
    served: ServedTeacher | None = None
    """The teacher, if it is not the original in this process."""

    @property
    def tokens(self) -> int:
        """Training tokens, including repetitions."""
        return self.steps * self.rows * self.length

    @property
    def training(self) -> Training:
        """Hyperparameters of the training loop."""
        schedule = Schedule(self.steps, warmup=max(1, min(50, self.steps // 10)), decay_from=0.2)
        every = max(1, self.steps // SAVES)
        return Training(schedule, self.rate, self.rate / 2, matrix_decay=0.0, log_every=every, save_every=every)


def default_steps(ids: int, rows: int, length: int) -> int:
    """Return the default number of steps for texts of `ids` tokens."""
    return max(1, min(STEPS, MAX_PASSES * ids // (rows * length)))


def default_rate(recipe: Recipe) -> float:
    """Return the default learning rate of a recipe."""
    if not isinstance(recipe.storage, Integers):
        return FITTED_RATE if recipe.method == "gqa-pca" else RATE
    return INT8_RATE if recipe.bits == 8 else GRID_RATE


class TunedJob:
    """Like Job, with training. calibration: token ids of the calibration texts, for recipes that need them."""

    def __init__(
        self,
        source: Checkpoint,
        recipe: Recipe,
        calibration: Sequence[Sequence[int]],
        tuning: Tuning,
        out: Path,
        device: torch.device = CPU,
    ) -> None:
        self._source, self._recipe, self._tuning, self._out, self._device = source, recipe, tuning, out, device
        self._calibration, self._work = calibration, out.with_name(f".{out.name}.tuning")
        if recipe.method == "distill":
            check_target(out)
        else:
            Job(source, recipe, calibration, out, device)  # raises an error for invalid arguments
        if tuning.steps < 1 or tuning.rows < 1 or not tuning.rate > 0:
            raise ConfigError("--tune-steps and --tune-rows must be at least 1, --tune-rate above 0.", param="tune")
        if recipe.method == "distill" and tuning.student is None:
            raise ConfigError(
                "The recipe distill needs a student: give --student-config CONFIG.json or --student FOLDER.",
                param="student",
            )
        if len(tuning.ids) < tuning.length:
            raise ConfigError(
                f"The texts of --tune have {len(tuning.ids)} tokens, fewer than the {tuning.length} of a row: give more text, or "
                "lower --length.",
                param="tune",
            )
        self.loss = float("nan")
        """Loss of the last steps, KL from the original in nats per token."""

    def build(self, progress: Progress) -> Path:
        """Build the model in a temporary folder and return its path.

        Raises ConfigError or UnsupportedModel. The temporary folder is then deleted.
        """
        self._open()
        trained = self._work / TRAINED
        try:
            if not trained.exists():
                self._train(self._start(progress), trained, progress)
        except RidgelineError:
            shutil.rmtree(self._work)
            raise
        self.loss = json.loads((self._work / STATE).read_text(encoding="utf-8"))["loss"]
        return trained

    def publish(self) -> None:
        """Rename the finished folder to the target and delete the working folder."""
        (self._work / TRAINED).rename(self._out)
        shutil.rmtree(self._work)

    def _open(self) -> None:
        """Create the working folder, or keep that of an interrupted run with the same inputs."""
        identity = {
            "recipe": self._recipe.name,
            "source": fingerprint(self._source),
            "texts": hashlib.sha256(self._tuning.ids.numpy().tobytes()).hexdigest(),
            "tuning": [self._tuning.steps, self._tuning.rows, self._tuning.length, self._tuning.rate],
            "student": None if self._tuning.student is None else str(self._tuning.student.resolve()),
            "teacher": None
            if self._tuning.served is None
            else [self._tuning.served.endpoint.url, self._tuning.served.top],
        }
        state = self._work / STATE
        if state.is_file():
            saved = json.loads(state.read_text(encoding="utf-8"))
            if all(saved[name] == value for name, value in identity.items()):
                return
        if self._work.exists():
            shutil.rmtree(self._work)
        self._work.mkdir(parents=True)
        state.write_text(json.dumps(identity), encoding="utf-8")

    def _start(self, progress: Progress) -> Checkpoint:
        """Return the checkpoint that training starts from: the result of the recipe."""
        start = self._work / START
        if self._tuning.student is not None:
            return student_checkpoint(self._tuning.student, self._source, start)
        if not start.exists():
            unrounded = self._work / UNROUNDED if isinstance(self._recipe.storage, Integers) else None
            Job(self._source, self._recipe, self._calibration, start, self._device, unrounded).run(progress)
        return Checkpoint(start)

    def _train(self, start: Checkpoint, trained: Path, progress: Progress) -> None:
        tuning = self._tuning
        student = trainable_decoder(start, tuning.length).to(self._device)
        if isinstance(start.storage, Bitmask):
            keep_zeros(student)
        elif isinstance(start.storage, Integers):
            keep_on_grid(student, start, self._work / UNROUNDED)
        loss, rows = self._teacher(student) if tuning.served is None else self._served_teacher(student, progress)

        def batches(number: int) -> torch.Tensor:
            progress("training", number, tuning.steps)
            return rows(number)

        trainer = Trainer(student, loss, batches, tuning.training, self._work / "training")
        try:
            trainer.run()
        except FloatingPointError as error:
            raise ConfigError(
                f"The training does not converge ({error}): give a smaller --tune-rate.", param="tune_rate"
            ) from None
        progress("training", tuning.steps, tuning.steps)
        log_rows = map(json.loads, (trainer.out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        self._record([row["loss"] for row in log_rows if "loss" in row][-1])
        draft = trained.with_suffix(".draft")
        if draft.exists():
            shutil.rmtree(draft)
        save_trained(student, start, draft)
        draft.rename(trained)

    def _teacher(self, student: TrainableDecoder) -> tuple[Loss, Source]:
        """Return the loss and the batches of training on the original's distributions."""
        tuning = self._tuning
        teacher = trainable_decoder(self._source, tuning.length).to(self._device)
        if self._device.type == "cuda":
            teacher.cast_parameters(torch.bfloat16)
        return Distillation(student, teacher), TokenRows(tuning.ids.to(self._device), tuning.rows, tuning.length)

    def _served_teacher(self, student: TrainableDecoder, progress: Progress) -> tuple[Loss, Source]:
        """Return the loss and the batches of training on a server's answers. A batch has the numbers of its rows."""
        tuning = self._tuning
        assert tuning.served is not None
        available = len(tuning.ids) // tuning.length
        chosen = torch.randperm(available, generator=torch.Generator().manual_seed(0))[: tuning.steps * tuning.rows]
        rows = tuning.ids[: available * tuning.length].view(available, tuning.length)[chosen].tolist()
        lessons = ask(tuning.served, Tokenizer.load(self._source.folder), rows, self._work / "teacher", progress)
        if lessons.top_ids.numel() and (last := int(lessons.top_ids.max())) >= student.spec.vocab_size:
            raise ConfigError(
                f"The server reports the token {last}, but the student has {student.spec.vocab_size} tokens: give a MODEL and a "
                "student with the tokenizer of the served model.",
                param="teacher_url",
            )
        lessons = lessons.to(self._device)

        def batches(number: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(number)
            return torch.randint(len(rows), (tuning.rows,), generator=generator).to(self._device)

        return lambda numbers: lessons.loss(student, numbers), batches

    def _record(self, loss: float) -> None:
        """Write the loss into the state file."""
        state = self._work / STATE
        record = json.loads(state.read_text(encoding="utf-8")) | {"loss": loss}
        state.write_text(json.dumps(record), encoding="utf-8")
