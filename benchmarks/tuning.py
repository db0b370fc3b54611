"""What training gives back after compression, and what compressed shapes gain over training from scratch:

    python benchmarks/tuning.py --ids IDS.npy [...] [--device cuda] [--out benchmarks/results/compression.json]

Pruned models and models with pooled key/value heads are trained as they are made, zeros kept ("+tuned"), weights trained on their
grid (QAT, "+tuned"), smaller dense shapes trained from the pruned teacher ("+tuned", "+distilled") and from scratch for the same
tokens ("+scratch"); lottery tickets ("ticket-80") stand against random masks as sparse. All but scratch and tickets learn from the
original's distributions. The rows stand beside those of benchmarks/compression.py, judged on the same texts. The token ids are
training/data.py's.

The clock sets how many steps a training has: a share of --seconds, by the pace of its first batches. Rows say the tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import cpu_name, provenance, write_rows
from compression import TEXTS, Run, row
from torch import Tensor, nn
from torch.func import functional_call

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import Layer, TrainableDecoder, save_decoder
from ridgeline.compress.distill import kl
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.inputs import int8_inputs
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.storage import Bitmask
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows
from ridgeline.compress.tickets import find_tickets, random_like, train_rewound
from ridgeline.compress.train import Loss, Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import (
    Masks,
    keep_masks,
    keep_on_grid,
    keep_zeros,
    linears,
    release,
    save_trained,
    trainable_decoder,
)
from ridgeline.compress.tuned import default_rate
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.models.hub import resolve_model
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

Experiment = Callable[["Bench", float], None]
"""Runs its trainings, the first of them for about so many seconds, and records their rows."""
SPARSITIES = (42, 66, 80)
"""Per cent of zeros after each round of the lottery: each takes two fifths of what is left."""
EARLY = 0.05
"""Share of a training after which tickets' weights are put back."""
TUNING = Training(Schedule(1), matrix_lr=3e-3, vector_lr=1.5e-3, matrix_decay=0.0, log_every=20)
SCRATCH = Training(Schedule(1), matrix_lr=5e-3, vector_lr=3e-3, matrix_decay=0.1, log_every=20)
COSTLY = 1.2
"""A step's time over that of its gradients."""


def quiet(stage: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """What all experiments share. teacher: the original, on the device, in bfloat16 there if that is a GPU. folder: room for
    checkpoints. record: takes a finished row."""

    run: Run
    teacher: TrainableDecoder
    batches: TokenRows
    folder: Path
    record: Callable[[dict[str, Any]], None]
    grid_rate: float | None = None
    """Learning rate on grids; None: the recipe's default."""

    @property
    def source(self) -> Checkpoint:
        return self.run.source

    @property
    def device(self) -> torch.device:
        return self.batches.stream.device

    def made(self, recipe: str, source: Checkpoint | None = None, unrounded: Path | None = None) -> Checkpoint:
        """What `compress` makes of the original, or of `source`, in a new folder. unrounded: see Job."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "made"
        Job(source or self.source, read_recipe(recipe), self.run.texts, folder, self.device, unrounded).run(quiet)
        return Checkpoint(folder)

    def trained(self, student: TrainableDecoder, start: Checkpoint) -> Checkpoint:
        """The student in the layout of the checkpoint that its training started from."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "trained"
        save_trained(student, start, folder)
        return Checkpoint(folder)

    def kept(self, student: TrainableDecoder, config: dict[str, Any]) -> Checkpoint:
        """The student, its weights plain now, as an ordinary checkpoint."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "floats"
        release(student)
        save_decoder(student, folder, config)
        return Checkpoint(folder)

    def students_loss(self, student: TrainableDecoder) -> Loss:
        """KL from the teacher, whose parts are compiled on a GPU."""
        term = torch.compile(kl, dynamic=False) if self.device.type == "cuda" else kl

        def loss(rows: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(rows)
            value: Tensor = term(student(rows), wanted)
            return value

        return loss

    def train(self, student: TrainableDecoder, loss: Loss, training: Training) -> int:
        """Train to the end of its schedule; the tokens that took."""
        began = time.monotonic()
        out = Path(tempfile.mkdtemp(dir=self.folder))
        last = Trainer(student, loss, self.batches, training, out).run()
        tokens = training.schedule.steps * self.batches.rows * self.batches.tokens
        print(f"  {tokens / 1e6:.1f}M tokens in {time.monotonic() - began:.1f} s, {last.get('loss')}", flush=True)
        return tokens

    def tell(self, method: str, recipe: str, checkpoint: Checkpoint, tokens: int) -> None:
        """Judge a model and record it. recipe: one that stores weights in the same way."""
        drift = self.run.judge.measure(checkpoint)
        mine = row(self.run, recipe, drift, checkpoint.bytes / 1e6)
        mine |= {"row": f"compression-{self.run.name}-{method}", "method": method, "tuned_tokens": tokens}
        if recipe.startswith("gqa-"):
            mine |= self.run.cache_figures(checkpoint)
        if "scratch" in method or "ticket" in method or method.startswith("dense"):
            mine["calibration_tokens"] = 0
        self.record(mine)


def text_loss(student: TrainableDecoder) -> Loss:
    """Cross entropy on the text itself."""

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(student(rows)[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())

    return loss


def faster(student: TrainableDecoder) -> TrainableDecoder:
    """Its layers compiled if they lie on a GPU. Layers of one shape share one function of their weights; what constrains these is
    worked out before, for its modules are of a class of their own for every weight and would be compiled one by one."""
    if student.norm.weight.is_cuda:
        with torch.device("meta"):
            shape = Layer(student.spec, student.spec.layers[0])
        names = [name for name, _ in shape.named_parameters()]
        for layer in student.layers:
            layer.forward = partial(_through, shape, [(name, attrgetter(name)) for name in names], layer)
    return student


def _through(
    shape: Layer, getters: list[tuple[str, Any]], layer: nn.Module, x: Tensor, turn: Tensor, _: None
) -> Tensor:
    return _layer(shape, {name: get(layer) for name, get in getters}, x, turn)


@partial(torch.compile, dynamic=False)
def _layer(shape: Layer, weights: dict[str, Tensor], x: Tensor, turn: Tensor) -> Tensor:
    out: Tensor = functional_call(shape, weights, (x, turn, None))
    return out


def scheduled(training: Training, steps: int) -> Training:
    return replace(training, schedule=Schedule(steps, warmup=max(1, min(50, steps // 10)), decay_from=0.2))


def steps_in(seconds: float, bench: Bench, student: TrainableDecoder, loss: Loss) -> int:
    """How many steps fit, by the time of a few gradients. Compiles what is to be compiled."""
    began, counted = 0.0, 6
    for number in range(-2, counted):
        if number == 0:
            _wait(bench.device)
            began = time.monotonic()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.device.type == "cuda"):
            value = loss(bench.batches(max(0, number)))
        value.backward()
    _wait(bench.device)
    student.zero_grad()
    return max(10, int(seconds / (COSTLY * (time.monotonic() - began) / counted)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def tuned(bench: Bench, student: TrainableDecoder, seconds: float, training: Training = TUNING) -> int:
    """Train on the teacher's distributions; the tokens that took."""
    loss = bench.students_loss(student)
    return bench.train(student, loss, scheduled(training, steps_in(seconds, bench, student, loss)))


def left(recipe: str) -> Experiment:
    """The recipe, then training of the weights that it leaves."""

    def experiment(bench: Bench, seconds: float) -> None:
        start = bench.made(recipe)
        student = trainable_decoder(start, bench.batches.tokens).to(bench.device)
        if isinstance(start.storage, Bitmask):
            keep_zeros(student)
        rate = default_rate(read_recipe(recipe))
        tokens = tuned(bench, faster(student), seconds, replace(TUNING, matrix_lr=rate, vector_lr=rate / 2))
        bench.tell(f"{recipe}+tuned", recipe, bench.trained(student, start), tokens)

    return experiment


def on_grid(recipe: str) -> Experiment:
    """Quantization-aware training from the codes and scales that the recipe chose."""

    def experiment(bench: Bench, seconds: float) -> None:
        unrounded = Path(tempfile.mkdtemp(dir=bench.folder))
        start = bench.made(recipe, unrounded=unrounded)
        student = trainable_decoder(start, bench.batches.tokens).to(bench.device)
        keep_on_grid(student, start, unrounded)
        rate = bench.grid_rate or default_rate(read_recipe(recipe))
        training = replace(TUNING, matrix_lr=rate, vector_lr=rate / 2)
        # The compiled layers would not round inputs.
        student = student if start.product is int8_inputs else faster(student)
        tokens = tuned(bench, student, seconds, training)
        bench.tell(f"{recipe}+tuned", recipe, bench.trained(student, start), tokens)

    return experiment


def smaller(name: str, taught: str, recipes: Sequence[str]) -> Experiment:
    """A smaller shape, made by the recipes one after another: as cut, trained from there, and trained from scratch."""

    def experiment(bench: Bench, seconds: float) -> None:
        cut = bench.source
        for recipe in recipes:
            cut = bench.made(recipe, cut)
        if len(recipes) > 1:
            bench.tell(name, recipes[-1], cut, 0)
        student = trainable_decoder(cut, bench.batches.tokens).to(bench.device)
        tokens = tuned(bench, faster(student), seconds)
        bench.tell(f"{name}+{taught}", recipes[-1], bench.kept(student, cut.config), tokens)
        torch.manual_seed(0)
        student = faster(TrainableDecoder(cut.spec, bench.batches.tokens).to(bench.device))
        steps = tokens // (bench.batches.rows * bench.batches.tokens)
        tokens = bench.train(student, text_loss(student), scheduled(SCRATCH, steps))
        bench.tell(f"{name}+scratch", recipes[-1], bench.kept(student, cut.config), tokens)

    return experiment


def lottery(bench: Bench, seconds: float) -> None:
    """The shape of the original from scratch; tickets of rising sparsity; one of as many weights drawn by lot."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    config, span = bench.source.config, bench.batches.rows * bench.batches.tokens
    whole = {
        name: torch.ones_like(linear.weight, dtype=torch.bool, device=bench.device)
        for name, linear in linears(bench.teacher).items()
    }

    def student(masks: Masks) -> TrainableDecoder:
        torch.manual_seed(0)
        decoder = TrainableDecoder(bench.source.spec, bench.batches.tokens).to(bench.device)
        keep_masks(decoder, masks or whole)
        return faster(decoder)

    probe = student({})
    steps = steps_in(seconds, bench, probe, text_loss(probe))
    training = scheduled(SCRATCH, steps)

    def start(masks: Masks, out: Path) -> tuple[TrainableDecoder, Trainer]:
        trained = student(masks)
        return trained, Trainer(trained, text_loss(trained), bench.batches, training, out)

    def tell(method: str, share: float, made: TrainableDecoder) -> None:
        kept = bench.kept(made, config)
        recipe = f"magnitude-{round(100 * share)}"
        bench.tell(method, recipe if share else "layers-1", bench.made(recipe, kept) if share else kept, steps * span)

    rewind = max(1, round(EARLY * steps))
    masks: Masks = {}
    for ticket in find_tickets(start, [percent / 100 for percent in SPARSITIES], rewind, folder):
        tell(f"ticket-{round(100 * ticket.share)}" if ticket.share else "dense+scratch", ticket.share, ticket.student)
        masks = ticket.masks
    drawn = train_rewound(start, random_like(masks, seed=1), folder, "random")
    tell(f"random-ticket-{SPARSITIES[-1]}", SPARSITIES[-1] / 100, drawn)


EXPERIMENTS: dict[str, tuple[Experiment, float]] = {
    "sparsegpt-2:4": (left("sparsegpt-2:4"), 0.34),
    "half": (smaller("half", "distilled", ("layers-3", "neurons-50")), 0.14),
    "rtn-int3-g128": (on_grid("rtn-int3-g128"), 0.08),
    "neurons-25": (smaller("neurons-25", "tuned", ("neurons-25",)), 0.07),
    "tickets": (lottery, 0.045),
    "sparsegpt-50": (left("sparsegpt-50"), 0.09),
    "rtn-int4-channel": (on_grid("rtn-int4-channel"), 0.05),
    "gptq-int4-g128": (on_grid("gptq-int4-g128"), 0.05),
    "gptq-int3-g128": (on_grid("gptq-int3-g128"), 0.08),
    "awq-int4-g128": (on_grid("awq-int4-g128"), 0.05),
    "smoothquant-w8a8": (on_grid("smoothquant-w8a8"), 0.05),
    "gqa-2": (left("gqa-2"), 0.1),
    "gqa-1": (left("gqa-1"), 0.1),
    "gqa-2-pca": (left("gqa-2-pca"), 0.1),
    "gqa-1-pca": (left("gqa-1-pca"), 0.1),
}
"""Name -> what to do, and the share of the time that its first training has."""


def bench_of(options: argparse.Namespace, folder: Path) -> Bench:
    device = torch.device(options.device)
    source = Checkpoint(resolve_model(ModelConfig(model=options.model)))
    tokenizer = Tokenizer.load(source.folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = calibration_rows(read_texts(default_calibration()), encode, 512, options.calibration_tokens)
    windows = evaluation_windows(read_texts(options.texts), encode, 512, options.tokens)
    judge = Evaluator(source, windows, device=device)
    ids = np.concatenate([np.load(path) for path in options.ids]).astype(np.int32)
    rows = TokenRows(torch.from_numpy(ids).to(device), options.rows, options.length)
    teacher = trainable_decoder(source, options.length).to(device).requires_grad_(False).eval()
    if device.type == "cuda":
        faster(teacher.cast_parameters(torch.bfloat16))
    machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    about = provenance(machine, options.commit) | {"device": device.type}

    def record(mine: dict[str, Any]) -> None:
        print(
            f"{mine['method']:24} {mine['size_mb']:7.2f} MB  perplexity {mine['perplexity']:8.4f} "
            f"({mine['perplexity_change']:+8.2%})  KL {mine['kl']:.5f}  top-1 {mine['top1']:.4f}",
            flush=True,
        )
        if options.out:
            write_rows(options.out, [mine | about | {"unique_tokens": len(ids)}])

    run = Run(Path(options.model).name or "ridgeline-14m", source, judge, texts)
    return Bench(run, teacher, rows, folder, record, options.grid_rate)


def attempt(name: str, experiment: Callable[[], None]) -> None:
    """The next experiment has its turn even if this one fails."""
    try:
        experiment()
    except (RidgelineError, RuntimeError, ArithmeticError) as error:
        print(f"{name} failed: {error!r:.1500}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, nargs="+", required=True, help="token ids to train on, uint16 [n] each")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="texts to judge by")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to judge by")
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=64, help="rows of a training batch")
    parser.add_argument("--seconds", type=float, default=140, help="of training, shared among all experiments")
    parser.add_argument("--grid-rate", type=float, help="learning rate on grids (default: that of each recipe)")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no experiment is begun")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # shapes, with and without gradients, of one layer's code
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_of(options, Path(folder))
        for name in options.only:
            spent = time.monotonic() - began
            print(f"{spent:.1f} s: {name}", flush=True)
            experiment, share = EXPERIMENTS[name]
            if spent < options.until:
                attempt(name, partial(experiment, bench, share * options.seconds))


if __name__ == "__main__":
    main()
