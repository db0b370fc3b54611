"""Training of one drafter for a model folder: Medusa heads, a recurrent draft or a draft model, from texts to a folder.

The steps are those of compress.drafters: the model writes text, the drafter trains on it, and held-out texts measure the
accuracies that determine the drafter's tree. An interrupted run resumes at the last saved step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ridgeline.compress.acceptance import Text, texts
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.drafters import (
    OUTPUTS,
    WRITTEN,
    MixedRows,
    Stream,
    Students,
    draft_rates,
    frequent,
    save_calibrated_heads,
    save_calibrated_recurrent,
    teacher_writes,
)
from ridgeline.compress.job import Progress, check_target, fingerprint
from ridgeline.compress.layerwise import CPU
from ridgeline.compress.student import student_checkpoint
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import save_trained, trainable_decoder
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.spec import ModelSpec

Kind = Literal["medusa", "recurrent", "draft"]
KINDS: tuple[Kind, ...] = ("medusa", "recurrent", "draft")
RATE = 5e-3
"""Default learning rate of matrices. Vectors and embeddings use a fifth of it."""
PIECES_AT_ONCE = 64
"""Pieces that the model writes in one batch."""
PASSES = 2
"""How often the training reads each written piece, on average."""
HELD_OUT_ROWS = 48
"""Rows of held-out text that measure accuracies."""
SAVES = 20
"""Saved states per run."""
RESULT = "result"


@dataclass(frozen=True, slots=True)
class DrafterTraining:
    """What is trained, on which texts and how long."""

    kind: Kind
    documents: Sequence[Sequence[int]]
    """Token ids of the training texts."""
    held_out: Tensor
    """int64 [rows, tokens], texts that measure accuracies. The first fifth of a row is a prompt."""
    length: int
    """Tokens per row."""
    steps: int
    rows: int
    """Rows per batch, a multiple of 1 + WRITTEN."""
    rate: float = RATE
    student: Path | None = None
    """Start of a draft model: a model folder, or a file like config.json."""

    @property
    def tokens(self) -> int:
        """Training tokens, including repetitions."""
        return self.steps * self.rows * self.length

    @property
    def training(self) -> Training:
        """Hyperparameters of the training loop."""
        schedule = Schedule(self.steps, warmup=max(1, min(50, self.steps // 10)), decay_from=0.15)
        every = max(1, self.steps // SAVES)
        return Training(schedule, self.rate, self.rate / 5, log_every=every, save_every=every)


class DrafterJob:
    """The training of one drafter for the model `source` into the folder `out`."""

    def __init__(self, source: Checkpoint, job: DrafterTraining, out: Path, device: torch.device = CPU) -> None:
        check_target(out)
        if job.steps < 1 or job.rows < 1 or job.rows % (1 + WRITTEN) or not job.rate > 0:
            raise ConfigError(
                f"--tune-steps must be at least 1, --tune-rows a multiple of {1 + WRITTEN}, and --tune-rate above 0.",
                param="tune",
            )
        if job.kind == "draft" and job.student is None:
            raise ConfigError(
                "The recipe draft needs a student: give --student-config CONFIG.json or --student FOLDER.",
                param="student",
            )
        self._source, self._job, self._out, self._device = source, job, out, device
        self._attended = attended_layer(source.spec) if job.kind == "recurrent" else 0
        self._work = out.with_name(f".{out.name}.training")
        self.loss = float("nan")
        """Loss of the last steps."""
        self.accuracies: list[list[float]] = []
        """[place][rank], how often the candidate of this rank is the target's token, on held-out texts."""

    def run(self, progress: Progress) -> None:
        """Train and publish the drafter. Raises ConfigError or UnsupportedModel; the working folder is then deleted."""
        self._open()
        try:
            self._train(progress)
        except RidgelineError:
            shutil.rmtree(self._work)
            raise
        except FloatingPointError as error:
            shutil.rmtree(self._work)
            raise ConfigError(
                f"The training does not converge ({error}): give a smaller --tune-rate.", param="tune_rate"
            ) from None
        (self._work / RESULT).rename(self._out)
        shutil.rmtree(self._work)

    def _open(self) -> None:
        """Create the working folder, or keep that of an interrupted run with the same inputs."""
        job, state = self._job, self._work / "job.json"
        digest = hashlib.sha256(json.dumps([list(ids) for ids in job.documents]).encode()).hexdigest()
        student = None if job.student is None else str(job.student.resolve())
        identity = [job.kind, fingerprint(self._source), digest, job.length, job.steps, job.rows, job.rate, student]
        if state.is_file() and json.loads(state.read_text(encoding="utf-8")) == identity:
            return
        if self._work.exists():
            shutil.rmtree(self._work)
        self._work.mkdir(parents=True)
        state.write_text(json.dumps(identity), encoding="utf-8")

    def _train(self, progress: Progress) -> None:
        job = self._job
        teacher = trainable_decoder(self._source, max(job.length, job.held_out.shape[1])).to(self._device)
        teacher.requires_grad_(False).eval()
        if self._device.type == "cuda":
            teacher.cast_parameters(torch.bfloat16)
        stream = self._stream()
        written = self._written(teacher, stream, progress)
        rows = MixedRows(TokenRows(stream.ids, job.rows // (1 + WRITTEN), job.length), written)
        start = None if job.student is None else student_checkpoint(job.student, self._source, self._work / "start")
        torch.manual_seed(0)
        ids = frequent(torch.cat((stream.ids, written.flatten())), OUTPUTS, teacher.spec.vocab_size)
        draft = None if start is None else trainable_decoder(start, job.length)
        students = Students(teacher, [job.kind], ids, self._attended, draft).to(self._device)
        if students.recurrent is not None:
            with torch.no_grad():
                students.recurrent.init_from_teacher(teacher, teacher.hidden(rows(0)[:2]))

        def batches(number: int) -> Tensor:
            progress("training", number, job.steps)
            return rows(number)

        trainer = Trainer(students, students.loss(teacher), batches, job.training, self._work / "training")
        trainer.run()
        progress("training", job.steps, job.steps)
        log_rows = map(json.loads, (trainer.out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        self.loss = [row["loss"] for row in log_rows if "loss" in row][-1]
        self._save(students, teacher, start)

    def _stream(self) -> Stream:
        lengths = torch.tensor([0, *(len(ids) for ids in self._job.documents[:-1])])
        ids = torch.tensor([token for document in self._job.documents for token in document], dtype=torch.int32)
        return Stream(ids.to(self._device), lengths.cumsum(0).to(self._device))

    def _written(self, teacher: TrainableDecoder, stream: Stream, progress: Progress) -> Tensor:
        """Return the pieces that the teacher writes, int32 [pieces, length]. Each batch is kept in the working folder."""
        job = self._job
        pieces = max(1, round(job.tokens * WRITTEN / (1 + WRITTEN) / PASSES / job.length))
        batches = []
        for batch, start in enumerate(range(0, pieces, PIECES_AT_ONCE)):
            progress("writing text", batch, -(-pieces // PIECES_AT_ONCE))
            path = self._work / f"written-{batch:05d}.pt"
            if not path.is_file():
                rows = min(PIECES_AT_ONCE, pieces - start)
                torch.save(teacher_writes(teacher, stream, batch, rows, job.length), path.with_suffix(".part"))
                path.with_suffix(".part").replace(path)
            batches.append(torch.load(path, map_location=self._device, weights_only=True))
        return torch.cat(batches)

    def _save(self, students: Students, teacher: TrainableDecoder, start: Checkpoint | None) -> None:
        """Write the trained drafter into RESULT with its accuracies."""
        result, rows = self._work / RESULT, self._job.held_out.to(self._device)
        if result.exists():
            shutil.rmtree(result)
        held_out: list[Text] = list(texts(teacher, {"": rows}, max(1, rows.shape[1] // 5)))
        if students.heads is not None:
            self.accuracies = save_calibrated_heads(students.heads, teacher, result, held_out)
        elif students.recurrent is not None:
            self.accuracies = save_calibrated_recurrent(students.recurrent, teacher, result, held_out)
        elif students.draft is not None and start is not None:
            self.accuracies = draft_rates(students.draft, held_out)
            save_trained(students.draft, start, result)


def attended_layer(spec: ModelSpec) -> int:
    """Return the last layer that a recurrent draft can attend to: without a window and a softcap. Raises ConfigError."""
    able = [
        index
        for index, layer in enumerate(spec.layers)
        if layer.window is None and layer.softcap is None and layer.share_from is None
    ]
    if not able:
        raise ConfigError(
            f"A recurrent draft cannot attend to {spec.architecture}, whose layers all have a window or a softcap: use the recipe "
            "medusa or draft.",
            param="recipe",
        )
    return able[-1]
