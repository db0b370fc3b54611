"""What training in compressed form gives back: pruned models whose zeros stay, and weights trained on their grid (QAT):

    python benchmarks/tuning.py --ids POOL.ids.npy [...] [--device cuda] [--out benchmarks/results/compression.json]

Each recipe is applied, the result trained on the original's distributions (compress.distill) and packed again; the rows stand
beside those of benchmarks/compression.py, the method followed by "+tuned". The token ids are those of training/data.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import cpu_name, provenance, write_rows
from compression import TEXTS, Run, row

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import save_decoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.evaluate import Judge
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration, judging_windows
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import keep_on_grid, keep_zeros, release, trainable
from ridgeline.core.config import ModelConfig
from ridgeline.models.hub import resolve_model
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

RECIPES = {
    "sparsegpt-2:4": "magnitude-2:4",
    "sparsegpt-50": "magnitude-50",
    "gptq-int3-g128": "rtn-int3-g128",
    "gptq-int4-channel": "rtn-int4-channel",
}
"""What a run begins with -> what packs its end without changing it."""


def quiet(stage: str, done: int, total: int) -> None: ...


def tuned(
    source: Checkpoint, begin: str, stream: torch.Tensor, folder: Path, options: argparse.Namespace
) -> Checkpoint:
    """The model of recipe `begin`, in `folder`, trained in its form and packed again."""
    student = trainable(Checkpoint(folder / "begin"), options.length)
    teacher = trainable(source, options.length).to(stream.device)
    student.to(stream.device)
    pack = read_recipe(RECIPES[begin])
    if pack.bits is None:
        keep_zeros(student)
    else:
        keep_on_grid(student, pack.grid)
    schedule = Schedule(options.steps, warmup=max(1, options.steps // 20))
    training = Training(schedule, matrix_lr=options.rate, vector_lr=options.rate / 2, matrix_decay=0.0, log_every=20)
    rows = TokenRows(stream, options.rows, options.length)
    Trainer(student, Distillation(student, teacher), rows, training, folder / "run").run()
    release(student)
    save_decoder(student, folder / "floats", source.config)
    Job(Checkpoint(folder / "floats"), pack, [], folder / "packed", stream.device).run(quiet)
    return Checkpoint(folder / "packed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, nargs="+", required=True, help="token ids to train on, uint16 [n] each")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="texts to judge by")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens to judge by")
    parser.add_argument("--calibration-tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=64, help="rows of a training batch")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=2e-3, help="step size of matrices")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    options = parser.parse_args()
    device = torch.device(options.device)
    source = Checkpoint(resolve_model(ModelConfig(model=options.model)))
    tokenizer = Tokenizer.load(source.folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = calibration_rows(read_texts(default_calibration()), encode, options.length, options.calibration_tokens)
    windows = judging_windows(read_texts(options.texts), encode, options.length, options.tokens)
    judge = Judge(source, windows, device=device)
    run = Run(Path(options.model).name or "ridgeline-14m", source, judge, texts)
    ids = np.concatenate([np.load(path) for path in options.ids]).astype(np.int32)
    stream = torch.from_numpy(ids).to(device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    about = provenance(machine, options.commit) | {"device": device.type}
    for begin in options.only:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            Job(source, read_recipe(begin), texts, folder / "begin", device).run(quiet)
            found = tuned(source, begin, stream, folder, options)
            drift = judge.measure(found)
            mine = row(run, begin, drift, found.bytes / 1e6) | about
            mine |= {"row": mine["row"] + "+tuned", "method": f"{begin}+tuned"}
            mine["tuned_tokens"] = options.steps * options.rows * options.length
        print(
            f"{mine['method']:24} {mine['size_mb']:7.2f} MB  perplexity {mine['perplexity']:8.4f} "
            f"({mine['perplexity_change']:+8.2%})  KL {mine['kl']:.5f}  top-1 {mine['top1']:.4f}",
            flush=True,
        )
        if options.out:
            write_rows(options.out, [mine])


if __name__ == "__main__":
    main()
