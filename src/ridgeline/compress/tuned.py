"""Compression with training behind it: pruned, cut or rounded, then trained on the original's distributions, then packed.

What was pruned stays zero, what will be rounded is rounded in the forward pass (compress.tune), what was cut is a smaller
student; the original is the teacher of all (compress.distill). Unlike compression alone this holds two whole models in memory, one
of them with gradients and an optimizer's state in float32. An interrupted run goes on at the last saved step.
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
from ridgeline.compress.job import DONE, Job, Progress, copy_rest, fingerprint
from ridgeline.compress.recipes import Recipe, read_recipe
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import keep_on_grid, keep_zeros, release, trainable
from ridgeline.compress.walk import CPU
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.models.stored import KEY

STEPS, ROWS = 300, 16
GRID_RATE, RATE = 3e-4, 3e-3
"""Step sizes: weights on a grid lie where they should already, and large steps lose that; what was pruned or cut has far to go."""
PASSES = 2
"""How often texts are read where nobody says how many steps: a student learns few texts by heart and becomes worse."""
SAVES = 20
"""How often a run writes down where it is."""
STATE = "tuning.json"
FLOATS = "floats"
SPARSE = ("magnitude", "wanda", "sparsegpt")
SMALLER = ("heads", "neurons", "layers")


@dataclass(frozen=True, slots=True)
class Tuning:
    """ids: token ids [n] of the texts, int64. rows, length: of a batch, `length` tokens each. rate: step size of matrices (Muon);
    embedding, head and vectors (AdamW) take half of it."""

    ids: torch.Tensor
    length: int
    steps: int
    rows: int
    rate: float

    @property
    def tokens(self) -> int:
        """That are trained on, repetitions included."""
        return self.steps * self.rows * self.length

    @property
    def training(self) -> Training:
        schedule = Schedule(self.steps, warmup=max(1, min(50, self.steps // 10)), decay_from=0.2)
        every = max(1, self.steps // SAVES)
        return Training(schedule, self.rate, self.rate / 2, matrix_decay=0.0, log_every=every, save_every=every)


def usual_steps(ids: int, rows: int, length: int) -> int:
    """For texts of so many tokens."""
    return max(1, min(STEPS, PASSES * ids // (rows * length)))


def usual_rate(recipe: Recipe) -> float:
    """Where nobody says how large steps are."""
    return GRID_RATE if recipe.method == "rtn" else RATE


class TunedJob:
    """As Job, with training. calibration: rows of token ids for recipes that prune or cut by them."""

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
        self._packs = _packing(recipe)
        Job(source, recipe, calibration, out, device)  # refuses what cannot begin
        if tuning.steps < 1 or tuning.rows < 1 or not tuning.rate > 0:
            raise ConfigError("--tune-steps and --tune-rows must be at least 1, --tune-rate above 0.", param="tune")
        if len(tuning.ids) < tuning.length:
            raise ConfigError(
                f"The texts of --tune have {len(tuning.ids)} tokens, fewer than the {tuning.length} of a row: give more text, or "
                "lower --length.",
                param="tune",
            )
        self._last: Job | None = None
        self.loss = float("nan")
        """Of the last steps, nats per token from the original."""

    def build(self, progress: Progress) -> Path:
        """The finished model in a folder of its own, beside the target. Raises ConfigError or UnsupportedModel; then nothing is
        left."""
        self._open()
        floats = self._work / FLOATS
        try:
            if not (floats / DONE).is_file():
                self._train(self._begun(progress), floats, progress)
            self.loss = json.loads((self._work / STATE).read_text(encoding="utf-8"))["loss"]
            if self._packs is None:
                return floats
            self._last = Job(Checkpoint(floats), self._packs, [], self._out, self._device)
            return self._last.build(progress)
        except RidgelineError:
            shutil.rmtree(self._work)
            raise

    def publish(self) -> None:
        """Let the target appear."""
        if self._last is None:
            (self._work / FLOATS).rename(self._out)
        else:
            self._last.publish()
        shutil.rmtree(self._work)

    def _open(self) -> None:
        """Make the folder of what is half done, or keep that of an equal run that was interrupted."""
        said = {
            "recipe": self._recipe.name,
            "source": fingerprint(self._source),
            "texts": hashlib.sha256(self._tuning.ids.numpy().tobytes()).hexdigest(),
            "tuning": [self._tuning.steps, self._tuning.rows, self._tuning.length, self._tuning.rate],
        }
        state = self._work / STATE
        if state.is_file():
            kept = json.loads(state.read_text(encoding="utf-8"))
            if all(kept[name] == one for name, one in said.items()):
                return
        if self._work.exists():
            shutil.rmtree(self._work)
        self._work.mkdir(parents=True)
        state.write_text(json.dumps(said), encoding="utf-8")

    def _begun(self, progress: Progress) -> Checkpoint:
        """What training begins with: the original, pruned or cut by the recipe where it does that."""
        if self._recipe.method not in (*SPARSE, *SMALLER):
            return self._source
        cut = self._work / "cut"
        if not cut.exists():
            Job(self._source, self._recipe, self._calibration, cut, self._device).run(progress)
        return Checkpoint(cut)

    def _train(self, begun: Checkpoint, floats: Path, progress: Progress) -> None:
        tuning = self._tuning
        student = trainable(begun, tuning.length).to(self._device)
        if self._recipe.method in SPARSE:
            keep_zeros(student)
        elif self._recipe.method not in SMALLER:
            keep_on_grid(student, self._recipe.grid)
        teacher = trainable(self._source, tuning.length).to(self._device)
        if self._device.type == "cuda":
            teacher.rounded(torch.bfloat16)
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
        rows_of_log = map(json.loads, (trainer.out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        self._keep(student, begun, floats, [row["loss"] for row in rows_of_log if "loss" in row][-1])

    def _keep(self, student: TrainableDecoder, begun: Checkpoint, floats: Path, loss: float) -> None:
        """The student as a model folder, its weights plain; the loss beside it."""
        release(student)
        draft = floats.with_suffix(".draft")
        if draft.exists():
            shutil.rmtree(draft)
        config = {name: one for name, one in begun.config.items() if name != KEY}
        save_decoder(student, draft, _in_bfloat16(config))
        copy_rest(self._source.folder, draft)
        state = self._work / STATE
        said = json.loads(state.read_text(encoding="utf-8")) | {"loss": loss}
        state.write_text(json.dumps(said), encoding="utf-8")
        draft.rename(floats)


def _packing(recipe: Recipe) -> Recipe | None:
    """The recipe that stores trained weights without changing them: the smallest ones are the zeros, the grid is that they were
    trained on. None: they are stored as they are. Raises ConfigError for what cannot be trained."""
    if recipe.method in SMALLER:
        return None
    if recipe.method in SPARSE:
        return read_recipe(f"magnitude-{recipe.name.partition('-')[2]}")
    if recipe.method != "rtn" or recipe.name.endswith("w8a8"):
        raise ConfigError(
            f"The recipe {recipe.name} cannot be trained: leave --tune out, or use a recipe that rounds to nearest (such as "
            f"rtn-int3-g128), {', '.join(SPARSE)}, {', '.join(SMALLER)}.",
            param="recipe",
        )
    return recipe


def _in_bfloat16(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json whose weights are stored in bfloat16, whatever they were."""
    said: dict[str, Any] = {name: one for name, one in config.items() if name not in ("dtype", "torch_dtype")}
    inner = said.get("text_config")
    return (
        said | {"torch_dtype": "bfloat16"} | ({"text_config": _in_bfloat16(inner)} if isinstance(inner, dict) else {})
    )
