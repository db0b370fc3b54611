"""What each way to a smaller model does to the shipped model's answers, on held-out text:

    python benchmarks/compression.py [--out benchmarks/results/compression.json] [--model FOLDER] [--only RECIPE ...]

Calibrated on the package's own sample, judged on texts that neither training nor calibration saw, token by token over the
same past, with all logits and activations in float32 (compress.evaluate). The "outliers" rows are of a model that computes
the same with a few inputs 128 times larger (compress.outliers). Speeds are tokens per second of one greedy request behind its
first token, of an engine in this process: the original's and the result's turn by turn, the best of each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, timed, write_rows

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.inputs import Product, llm_int8
from ridgeline.compress.job import Job
from ridgeline.compress.layerwise import WithProduct
from ridgeline.compress.outliers import add_outliers
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
AT_RUN_TIME: dict[str, Product] = {"llm-int8": llm_int8}
"""What needs no checkpoint of its own: the original's numbers are rounded as they are used."""
REQUEST = (64, 128)
"""Tokens of the timed request and of its answer."""
TURNS = 3
WITH_OUTLIERS = ("rtn-w8a8", "smoothquant-w8a8", "llm-int8")
RECIPES = (
    *("rtn-int4-g128", "gptq-int4-g128", "rtn-int4-g128-zp", "awq-int4-g128", *WITH_OUTLIERS),
    *("magnitude-50", "wanda-50", "sparsegpt-50", "gptq-int4-g128-zp", "rtn-int8-channel", "rtn-int3-g128"),
    *("gptq-int3-g128", "sparsegpt-2:4", "wanda-2:4", "rtn-int4-g32", "neurons-25", "heads-25", "layers-1"),
    *("rtn-int4-channel", "gptq-int4-channel"),
)


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
        Job(self.source, read_recipe(recipe), self.texts, folder).run(lambda stage, done, total: None)
        made = Checkpoint(folder)
        return self.judge.measure(made), made.bytes / 1e6

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
        saved = 0
        for index in range(len(self.source.spec.layers)):
            stored = self.source.stored_layer(index)
            for name in LINEAR_NAMES:
                weight = stored[f"{name}.weight"]
                saved += weight.nbytes - weight.numel() - 4 * weight.shape[0]
        return self.source.bytes - saved


def row(
    run: Run, recipe: str, drift: Drift, megabytes: float, speeds: tuple[float, float] | None = None
) -> dict[str, Any]:
    """speeds: tokens per second of the model and of the original, where they were measured."""
    parsed = None if recipe in AT_RUN_TIME else read_recipe(recipe)
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
                measured = row(run, recipe, *run.measure(recipe, place), run.speeds(recipe, place)) | about
                print(
                    f"{run.name:24} {recipe:18} {measured['size_mb']:7.2f} MB  perplexity {measured['perplexity']:8.4f} "
                    f"({measured['perplexity_change']:+8.2%})  KL {measured['kl']:.5f}  top-1 {measured['top1']:.4f}",
                    flush=True,
                )
                if options.out:
                    write_rows(options.out, [measured])


if __name__ == "__main__":
    main()
