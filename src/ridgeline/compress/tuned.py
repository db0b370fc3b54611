"""Compression with training: prune or round, train by distillation from the original, then pack.

Pruned weights stay zero, and rounded weights are rounded in the forward pass (compress.tune). Structured pruning gives a smaller
student. The original is the teacher (compress.distill). Memory holds both models, the student with gradients and optimizer
state in float32. An interrupted run resumes at the last saved step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.job import DONE, Job, Progress, copy_other_files, fingerprint
from ridgeline.compress.layerwise import CPU
from ridgeline.compress.recipes import Recipe, read_recipe
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import keep_on_grid, keep_zeros, release, trainable_decoder
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.models.stored import KEY

STEPS, ROWS = 300, 16
GRID_RATE, RATE = 3e-4, 3e-3
"""Default learning rates for rounded weights and for pruned ones.

Rounded weights start near the optimum, and large steps leave it."""
MAX_PASSES = 2
"""Maximum passes over the texts by default. With more passes a student overfits to few texts."""
SAVES = 20
"""Saved states per run."""
STATE = "tuning.json"
FLOATS = "floats"
SPARSE = ("magnitude", "wanda", "sparsegpt")
STRUCTURED = ("heads", "neurons", "layers")


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
    return GRID_RATE if recipe.method == "rtn" else RATE


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
        self._packing_recipe = _packing_recipe(recipe)
        Job(source, recipe, calibration, out, device)  # raises an error for invalid arguments
        if tuning.steps < 1 or tuning.rows < 1 or not tuning.rate > 0:
            raise ConfigError("--tune-steps and --tune-rows must be at least 1, --tune-rate above 0.", param="tune")
        if len(tuning.ids) < tuning.length:
            raise ConfigError(
                f"The texts of --tune have {len(tuning.ids)} tokens, fewer than the {tuning.length} of a row: give more text, or "
                "lower --length.",
                param="tune",
            )
        self._packing_job: Job | None = None
        self.loss = float("nan")
        """Loss of the last steps, KL from the original in nats per token."""

    def build(self, progress: Progress) -> Path:
        """Build the model in a temporary folder and return its path.

        Raises ConfigError or UnsupportedModel. The temporary folder is then deleted.
        """
        self._open()
        floats = self._work / FLOATS
        try:
            if not (floats / DONE).is_file():
                self._train(self._starting_checkpoint(progress), floats, progress)
            self.loss = json.loads((self._work / STATE).read_text(encoding="utf-8"))["loss"]
            if self._packing_recipe is None:
                return floats
            self._packing_job = Job(Checkpoint(floats), self._packing_recipe, [], self._out, self._device)
            return self._packing_job.build(progress)
        except RidgelineError:
            shutil.rmtree(self._work)
            raise

    def publish(self) -> None:
        """Rename the finished folder to the target and delete the working folder."""
        if self._packing_job is None:
            (self._work / FLOATS).rename(self._out)
        else:
            self._packing_job.publish()
        shutil.rmtree(self._work)

    def _open(self) -> None:
        """Create the working folder, or keep that of an interrupted run with the same inputs."""
        identity = {
            "recipe": self._recipe.name,
            "source": fingerprint(self._source),
            "texts": hashlib.sha256(self._tuning.ids.numpy().tobytes()).hexdigest(),
            "tuning": [self._tuning.steps, self._tuning.rows, self._tuning.length, self._tuning.rate],
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

    def _starting_checkpoint(self, progress: Progress) -> Checkpoint:
        """Return the checkpoint that training starts from: the original, or the model pruned by the recipe."""
        if self._recipe.method not in (*SPARSE, *STRUCTURED):
            return self._source
        cut = self._work / "cut"
        if not cut.exists():
            Job(self._source, self._recipe, self._calibration, cut, self._device).run(progress)
        return Checkpoint(cut)

    def _train(self, starting_checkpoint: Checkpoint, floats: Path, progress: Progress) -> None:
        tuning = self._tuning
        student = trainable_decoder(starting_checkpoint, tuning.length).to(self._device)
        if self._recipe.method in SPARSE:
            keep_zeros(student)
        elif self._recipe.method not in STRUCTURED:
            keep_on_grid(student, self._recipe.grid)
        teacher = trainable_decoder(self._source, tuning.length).to(self._device)
        if self._device.type == "cuda":
            teacher.cast_parameters(torch.bfloat16)
        rows = TokenRows(tuning.ids.to(self._device), tuning.rows, tuning.length)

        def batches(number: int) -> torch.Tensor:
            progress("training", number, tuning.steps)
            return rows(number)

        trainer = Trainer(student, Distillation(student, teacher), batches, tuning.training, self._work / "training")
        try:
            trainer.run()
        except FloatingPointError as error:
            raise ConfigError(
                f"The training does not converge ({error}): give a smaller --tune-rate.", param="tune_rate"
            ) from None
        progress("training", tuning.steps, tuning.steps)
        log_rows = map(json.loads, (trainer.out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        self._save_student(student, starting_checkpoint, floats, [row["loss"] for row in log_rows if "loss" in row][-1])

    def _save_student(
        self, student: TrainableDecoder, starting_checkpoint: Checkpoint, floats: Path, loss: float
    ) -> None:
        """Write the student as a model folder without constraints, and the loss into the state file."""
        release(student)
        temporary = floats.with_suffix(".draft")
        if temporary.exists():
            shutil.rmtree(temporary)
        config = {name: value for name, value in starting_checkpoint.config.items() if name != KEY}
        save_decoder(student, temporary, _with_bfloat16(config))
        copy_other_files(self._source.folder, temporary)
        state = self._work / STATE
        record = json.loads(state.read_text(encoding="utf-8")) | {"loss": loss}
        state.write_text(json.dumps(record), encoding="utf-8")
        temporary.rename(floats)


def _packing_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe that packs trained weights without changing them. None: they are stored in floats.

    Magnitude pruning selects the zeros, and rounding gives the grid of the training.
    Raises ConfigError for a recipe that does not support training.
    """
    if recipe.method in STRUCTURED:
        return None
    if recipe.method in SPARSE:
        return read_recipe(f"magnitude-{recipe.name.partition('-')[2]}")
    if recipe.method != "rtn" or recipe.name.endswith("w8a8"):
        raise ConfigError(
            f"The recipe {recipe.name} cannot be trained: leave --tune out, or use a recipe that rounds to nearest (such as "
            f"rtn-int3-g128), {', '.join(SPARSE)}, {', '.join(STRUCTURED)}.",
            param="recipe",
        )
    return recipe


def _with_bfloat16(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that declares bfloat16 weights."""
    converted: dict[str, Any] = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    text_config = converted.get("text_config")
    return (
        converted
        | {"torch_dtype": "bfloat16"}
        | ({"text_config": _with_bfloat16(text_config)} if isinstance(text_config, dict) else {})
    )
