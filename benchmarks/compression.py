"""What each way to a smaller model does to the shipped model's answers, on held-out text:

    python benchmarks/compression.py [--out benchmarks/results/compression.json] [--model FOLDER] [--only RECIPE ...]

Calibrated on the package's own sample, judged on texts that neither training nor calibration saw, token by token over the
same past, with all logits and activations in float32 (compress.evaluate). The "outliers" rows are of a model that computes
the same with a few inputs 128 times larger (compress.outliers). Speeds are tokens per second of one greedy request behind its
first token, of an engine in this process: the original's and the result's turn by turn, the best of each.

Rows of gqa-N and gqa-N-pca also have the KV bytes of a token and the recall of pairs from windows of RECALL (quality.recall), with
95 % intervals; "ref" is the original's.

No number format serves LOW_BITS. Their weights are on the grid, but stored in the model's dtype; size_mb is that of packed codes.
They have no speed, but also answer the shipped questions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, timed, write_rows

from ridgeline.cli.hosted import Hosted, private
from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.grid import TERNARY, Grid
from ridgeline.compress.inputs import Product, llm_int8
from ridgeline.compress.job import Job
from ridgeline.compress.layerwise import WithProduct
from ridgeline.compress.outliers import add_outliers
from ridgeline.compress.recipes import Recipe, read_recipe
from ridgeline.compress.storage import Floats
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.resolve import resolve
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.recall import Recall, measure_recall, recall_windows
from ridgeline.quality.scores import EngineScorer
from ridgeline.quality.served import Endpoint
from ridgeline.quality.tasks import ask, count, read_tasks, shipped_tasks
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
AT_RUN_TIME: dict[str, Product] = {"llm-int8": llm_int8}
"""What needs no checkpoint of its own: the original's numbers are rounded as they are used."""
LOW_BITS: dict[str, Recipe] = {
    name: Recipe(name, method, Floats(), grid)
    for name, method, grid in (
        ("rtn-int2-g32", "rtn", Grid(2, 32)),
        ("rtn-int2-g32-zp", "rtn", Grid(2, 32, False)),
        ("rtn-int2-g128-zp", "rtn", Grid(2, 128, False)),
        ("gptq-int2-g32-zp", "gptq", Grid(2, 32, False)),
        ("gptq-int2-g64-zp", "gptq", Grid(2, 64, False)),
        ("gptq-int2-g128-zp", "gptq", Grid(2, 128, False)),
        ("rtn-ternary-g32", "rtn", Grid(2, 32, levels=TERNARY)),
        ("rtn-ternary-g128", "rtn", Grid(2, 128, levels=TERNARY)),
        ("gptq-ternary-g32", "gptq", Grid(2, 32, levels=TERNARY)),
        ("gptq-ternary-g128", "gptq", Grid(2, 128, levels=TERNARY)),
    )
}
"""Grids below 3 bits."""
TERNARY_BITS = 1.6
"""Five ternary weights fit a byte."""
REQUEST = (64, 128)
"""Tokens of the timed request and of its answer."""
TURNS = 3
RECALL = (16, (256,) * 24 + (1024,) * 8)
"""Pairs of a list, and tokens of the windows."""
WITH_OUTLIERS = ("rtn-w8a8", "smoothquant-w8a8", "llm-int8")
RECIPES = (
    *("rtn-int4-g128", "gptq-int4-g128", "rtn-int4-g128-zp", "awq-int4-g128", *WITH_OUTLIERS),
    *("magnitude-50", "wanda-50", "sparsegpt-50", "gptq-int4-g128-zp", "rtn-int8-channel", "rtn-int3-g128"),
    *("gptq-int3-g128", "sparsegpt-2:4", "wanda-2:4", "rtn-int4-g32", "neurons-25", "heads-25", "layers-1"),
    *("rtn-int4-channel", "gptq-int4-channel", *LOW_BITS, "gqa-2", "gqa-1", "gqa-2-pca", "gqa-1-pca"),
)


def recipe_of(name: str) -> Recipe:
    return LOW_BITS.get(name) or read_recipe(name)


@cache
def answered(folder: Path) -> list[bool]:
    """Which of the shipped questions a server of a model answers correctly."""
    flags = {"model": str(folder), "device": "cpu", "threads": "1", "kv_cache_memory": "64M", "max_num_seqs": "16"}
    with Hosted(private(resolve(flags, environ=os.environ)), lambda stage, done, total: None) as url:
        return ask(Endpoint(url), read_tasks(shipped_tasks()), lambda stage, done, total: None)


@cache
def recalled(folder: Path, tokenizer: Path) -> Recall:
    """Recall of a model whose folder may have no tokenizer of its own."""
    pairs, lengths = RECALL
    windows = recall_windows(Tokenizer.load(tokenizer), pairs, lengths)
    engine = EngineConfig(device="cpu", threads=torch.get_num_threads(), kv_cache_memory=64 << 20, max_num_seqs=4)
    local = LocalEngine.start(ModelConfig(str(folder), max_model_len=max(lengths) + 1), engine)
    try:
        scorer = EngineScorer(folder.name, local)
        return measure_recall(
            windows, scorer.score([window.window for window in windows], 1, lambda stage, done, total: None)
        )
    finally:
        local.close()


@dataclass(frozen=True, slots=True)
class Run:
    """One model, with a judge of what is made of it. texts: rows to calibrate with."""

    name: str
    source: Checkpoint
    judge: Evaluator
    texts: list[tuple[int, ...]]

    def measure(self, recipe: str, folder: Path) -> tuple[Drift, float]:
        """Drift from the original, and megabytes of weights."""
        if recipe in AT_RUN_TIME:
            return self.judge.measure(WithProduct(self.source, AT_RUN_TIME[recipe])), self._int8_bytes() / 1e6
        Job(self.source, recipe_of(recipe), self.texts, folder).run(lambda stage, done, total: None)
        made = Checkpoint(folder)
        return self.judge.measure(made), (
            self._packed_bytes(recipe_of(recipe).grid) if recipe in LOW_BITS else made.bytes
        ) / 1e6

    def answers(self, folder: Path) -> dict[str, Any]:
        """Right answers of the shipped questions, and of the original."""
        questions, right = read_tasks(shipped_tasks()), (answered(self.source.folder), answered(folder))
        tally = count(questions, right[1], right[0])
        figures: dict[str, Any] = {"questions": tally.questions}
        for key, estimate in tally.figures.items():
            interval = [round(estimate.low or 0, 4), round(estimate.high or 0, 4)]
            figures |= {key: round(estimate.value, 4), f"{key}_interval": interval}
        return figures

    def cache_figures(self, made: Checkpoint) -> dict[str, Any]:
        """KV bytes of a token and the recall task, and those of the original."""
        figures: dict[str, Any] = {}
        for side, checkpoint in (("", made), ("_ref", self.source)):
            result = recalled(checkpoint.folder, self.source.folder)
            figures[f"kv_bytes_per_token{side}"] = checkpoint.spec.kv_bytes_per_token()
            figures["recall_answers"] = result.answers
            for name, estimate in (("accuracy", result.accuracy), ("probability", result.probability)):
                figures[f"recall_{name}{side}"] = round(estimate.value, 4)
                interval = [round(estimate.low or 0, 4), round(estimate.high or 0, 4)]
                figures[f"recall_{name}{side}_interval"] = interval
        return figures

    def speeds(self, recipe: str, folder: Path) -> tuple[float, float]:
        """Tokens per second of the result and of the original."""
        engine = EngineConfig(device="cpu", threads=torch.get_num_threads(), kv_cache_memory=32 << 20, max_num_seqs=1)
        kept = str(self.source.folder)
        made = ModelConfig(kept, quantization=recipe) if recipe in AT_RUN_TIME else ModelConfig(str(folder))
        pair = [LocalEngine.start(config, engine) for config in (made, ModelConfig(kept))]
        best = [0.0, 0.0]
        for _ in range(TURNS):
            for side, local in enumerate(pair):
                run = timed(local, [REQUEST], self.source.spec.vocab_size, temperature=0.0)
                best[side] = max(best[side], (run.output_tokens - 1) / (run.seconds - run.ttft_s[0]))
        for local in pair:
            local.close()
        return best[0], best[1]

    def _int8_bytes(self) -> int:
        """Linears of the layers in 8 bits with a float32 scale per output, the rest as it is."""
        return self._bytes_with(lambda outputs, inputs: outputs * (inputs + 4))

    def _packed_bytes(self, grid: Grid) -> int:
        """Linears of the layers in packed codes with a float16 scale per group, and codes of zero points, the rest as it is."""
        bits = TERNARY_BITS if grid.levels == TERNARY else grid.bits
        per_group = 16 + (0 if grid.symmetric else bits)
        return self._bytes_with(
            lambda outputs, inputs: round(outputs * (inputs * bits + grid.groups(inputs) * per_group) / 8)
        )

    def _bytes_with(self, bytes_of: Callable[[int, int], int]) -> int:
        """Bytes of the model if a linear of (outputs, inputs) takes so many."""
        total = self.source.bytes
        for index in range(len(self.source.spec.layers)):
            stored = self.source.stored_layer(index)
            for name in LINEAR_NAMES:
                weight = stored[f"{name}.weight"]
                total += bytes_of(*weight.shape) - weight.nbytes
        return total


def row(
    run: Run, recipe: str, drift: Drift, megabytes: float, speeds: tuple[float, float] | None = None
) -> dict[str, Any]:
    """speeds: tokens per second of the model and of the original, where they were measured."""
    parsed = None if recipe in AT_RUN_TIME else recipe_of(recipe)
    figures = {name: round(figure.value, 6) for name, figure in drift.figures.items()}
    intervals = {
        f"{name}_interval": [round(figure.low, 6), round(figure.high, 6)]
        for name, figure in drift.figures.items()
        if name in ("kl", "top1", "perplexity_change") and figure.low is not None and figure.high is not None
    }
    return {
        "row": f"compression-{run.name}-{recipe}",
        "model": run.name,
        "method": recipe,
        "bits": 8 if parsed is None else parsed.bits or 16,
        "group": None if parsed is None or parsed.bits is None else parsed.grid.group,
        "size_mb": round(megabytes, 3),
        "size_mb_ref": round(run.source.bytes / 1e6, 3),
        "perplexity": figures["perplexity"],
        "perplexity_ref": figures["perplexity_reference"],
        "perplexity_change": figures["perplexity_change"],
        "kl": figures["kl"],
        "top1": figures["top1"],
        **intervals,
        "tok_s": round(speeds[0], 1) if speeds else None,
        "tok_s_ref": round(speeds[1], 1) if speeds else None,
        "device": "cpu",
        "tokens": drift.tokens,
        "documents": drift.documents,
        "calibration_tokens": sum(map(len, run.texts)) if parsed is not None and parsed.needs_texts else 0,
    }


def runs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """The model as it is with all recipes, then the one with outliers."""
    source = Checkpoint(resolve_model(ModelConfig(model=options.model)))
    name = Path(options.model).name or "ridgeline-14m"
    tokenizer = Tokenizer.load(source.folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = calibration_rows(read_texts(default_calibration()), encode, options.length, options.calibration_tokens)
    windows = evaluation_windows(read_texts(options.texts), encode, options.length, options.tokens)
    judge = Evaluator(source, windows)
    yield Run(name, source, judge, texts), RECIPES
    add_outliers(source, folder / "outliers")
    yield Run(f"{name}-outliers", Checkpoint(folder / "outliers"), judge, texts), WITH_OUTLIERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="texts to judge by")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens to judge by")
    parser.add_argument("--calibration-tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="these recipes alone")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = provenance(cpu_name(), options.commit)
    with tempfile.TemporaryDirectory() as folder:
        for run, recipes in runs(options, Path(folder)):
            for recipe in recipes:
                if options.only and recipe not in options.only:
                    continue
                place = Path(folder) / f"{run.name}-{recipe.replace(':', '-')}"
                judged = run.measure(recipe, place)
                speeds = None if recipe in LOW_BITS else run.speeds(recipe, place)
                measured = row(run, recipe, *judged, speeds) | about
                if recipe in LOW_BITS:
                    measured |= run.answers(place)
                elif recipe.startswith("gqa-"):
                    measured |= run.cache_figures(Checkpoint(place))
                print(
                    f"{run.name:24} {recipe:18} {measured['size_mb']:7.2f} MB  perplexity {measured['perplexity']:8.4f} "
                    f"({measured['perplexity_change']:+8.2%})  KL {measured['kl']:.5f}  top-1 {measured['top1']:.4f}",
                    flush=True,
                )
                if options.out:
                    write_rows(options.out, [measured])


if __name__ == "__main__":
    main()
