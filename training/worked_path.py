"""From a corpus to a table of drafters and number formats: train a model, its drafts, and measure both with the engine.

    python training/worked_path.py STAGE ... --corpus CORPUS --data FOLDER --work WORK [--target-seconds 330] [--tiny]

| stage | what it does | predicted on one H200 |
| --- | --- | --- |
| data | tokenizes the corpus with the shipped tokenizer (`data.py`) | 20 s |
| target | trains and converts the target; held-out loss (`train.py --shape 107m`) | --target-seconds and 110 s |
| draft | trains and converts the draft model before its distillation (`--shape 10m`) | --draft-seconds and 35 s |
| drafters | draft model, recurrent draft and Medusa heads (`drafters.py`) | --drafters-seconds and 15 s |
| compress | writes the folders of the compression recipes (`benchmarks/formats.py`) | 120 s |
| acceptance | how often drafts are kept, by kind of text (`acceptance.py`) | 40 s |
| equality | drafted against plain answers in float32 (`benchmarks/speculation.py`) | 100 s |
| speed | every drafter against plain decoding at batch 1, 8 and 32 (`benchmarks/speculation.py`) | 200 s |
| formats | the compression table (`benchmarks/formats.py`) | 260 s |

Stages run in the order given. A finished stage is not run again, and a stopped one starts from its beginning, except that
`compress` and `formats` go on. FOLDER holds spec_bench.jsonl and humaneval.jsonl. Writes WORK/results/drafters_0.1b.json,
WORK/results/compression_0.1b.json, losses by kind of text, and WORK/logs. `--tiny` runs all of it on a CPU with models of 1 million
parameters, which learn nothing: it tests the path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "src" / "ridgeline" / "assets" / "model" / "tokenizer.json"
TASKS = ROOT / "src" / "ridgeline" / "assets" / "tasks.jsonl"
Command = list[str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between the real run and a dry run: shapes, and options of the scripts."""

    target: str
    draft: str
    data: str
    training: str
    target_rates: str
    draft_rates: str
    drafters: str
    acceptance: str
    speed: str
    equality: str
    compression: str
    formats: str


FULL = Sizes(
    target="107m",
    draft="10m",
    data=f"--workers {os.cpu_count()}",
    # Short rows: attention of 2,048 tokens would cost a fifth of the time. Batches of 131,072 tokens, because the run is short.
    training="--batch-tokens 131072 --micro-tokens 65536 --main-context 1024 --final-context 2048 --warmup-steps 100",
    # Smaller steps for the wider model; a weak decay, because every token is seen about three times (twenty for the shipped model).
    target_rates="--matrix-lr 4e-3 --vector-lr 2e-3 --matrix-decay 0.1",
    draft_rates="--matrix-lr 5e-3 --vector-lr 3e-3 --matrix-decay 0.1",
    drafters="--corpus-tokens 12000000 --rows 16 --tokens 1024 --written-batches 4 --written-rows 4096 --held-out 24 --matrix-lr 4e-3",
    acceptance="--rows 64",
    speed="--batch 1 8 32 --each 32 --ways reference,lookahead,recycling,medusa,recurrent,draft,reference+draft",
    equality="--batch 1 8 --each 6 --ways reference,lookahead,recycling,medusa,recurrent,draft",
    compression="",
    formats="",
)
TINY = Sizes(
    target="tiny",
    draft="tiny-draft",
    data="--workers 2 --limit 60",
    training="--batch-tokens 512 --micro-tokens 512 --main-context 256 --final-context 512 --warmup-steps 2",
    target_rates="--matrix-lr 4e-3",
    draft_rates="--matrix-lr 4e-3",
    drafters="--tiny --held-out 1",
    acceptance="--rows 1",
    speed="--batch 1 2 --each 1 --ways reference,medusa,recurrent,draft",
    equality="--batch 1 --each 1 --ways lookahead,recycling,recurrent,draft",
    compression="--calibration-tokens 600 --recipes gptq-int4-g128,sparsegpt-2:4",
    formats="--formats int8 --tokens 600 --prompts 1 --repeats 1 --batch 4",
)


@dataclass(frozen=True, slots=True)
class Run:
    """The places and options of one run."""

    args: argparse.Namespace
    sizes: Sizes

    def at(self, name: str) -> str:
        return str(self.args.work / name)

    def script(self, place: str, *options: object) -> Command:
        return [sys.executable, str(ROOT / place), *map(str, options)]

    @property
    def target(self) -> str:
        return self.at(f"target-{self.sizes.target}")

    def data(self) -> Iterator[Command]:
        options = ("--corpus", self.args.corpus, "--tokenizer", TOKENIZER, "--out", self.at("pools"))
        yield self.script("training/data.py", *options, *self.sizes.data.split())

    def train(self, shape: str, seconds: float, rates: str, out: str) -> Iterator[Command]:
        """Train a model of a shape from scratch into the folder `out`, and take its held-out loss."""
        run, rest = f"{out}.run", (*self.sizes.training.split(), *rates.split())
        shutil.rmtree(run, ignore_errors=True)
        options = ("--pools", self.at("pools"), "--out", run, "--shape", shape, "--seconds", seconds, *rest)
        yield self.script("training/train.py", *options)
        yield self.script("training/convert.py", "--run", run, "--tokenizer", TOKENIZER, "--out", out, "--unchecked")
        if not self.args.tiny:
            losses = self.at(f"results/loss_{shape}.json")
            yield self.script("training/evaluate.py", "--model", out, "--corpus", self.args.corpus, "--out", losses)

    def train_target(self) -> Iterator[Command]:
        yield from self.train(self.sizes.target, self.args.target_seconds, self.sizes.target_rates, self.target)

    def train_draft(self) -> Iterator[Command]:
        yield from self.train(self.sizes.draft, self.args.draft_seconds, self.sizes.draft_rates, self.at("small"))

    def drafters(self) -> Iterator[Command]:
        options = ("--model", self.target, "--pools", self.at("pools"), "--corpus", self.args.corpus)
        students = ("--students", "draft", "recurrent", "medusa", "--draft", self.at("small"))
        rest = ("--out", self.at("drafters"), "--seconds", self.args.drafters_seconds, *self.sizes.drafters.split())
        yield self.script("training/drafters.py", *options, *students, *rest)

    def acceptance(self) -> Iterator[Command]:
        folders = (
            word for name in ("draft", "recurrent", "medusa") for word in (f"--{name}", self.at(f"drafters/{name}"))
        )
        options = ("--model", self.target, "--corpus", self.args.corpus, *folders, "--machine", self.args.machine)
        rest = (
            "--commit",
            self.args.commit,
            "--out",
            self.at("results/drafters_0.1b.json"),
            *self.sizes.acceptance.split(),
        )
        yield self.script("training/acceptance.py", *options, *rest)

    def drafted(self, *options: str) -> Command:
        given = (
            "--data",
            self.args.data,
            "--model",
            self.target,
            "--drafters",
            self.at("drafters"),
            "--device",
            self.device,
        )
        rest = ("--mixed", "--writings", "greedy,sampled", "--out", self.at("results/drafters_0.1b.json"))
        return self.script("benchmarks/speculation.py", *given, *rest, *options)

    def speed(self) -> Iterator[Command]:
        yield self.drafted(*self.sizes.speed.split())

    def equality(self) -> Iterator[Command]:
        yield self.drafted("--dtype", "float32", *self.sizes.equality.split())

    def compressed(self, *options: str) -> Command:
        given = ("--model", self.target, "--work", self.at("compressed"), "--device", self.device)
        return self.script("benchmarks/formats.py", *given, *self.sizes.compression.split(), *options)

    def compress(self) -> Iterator[Command]:
        yield self.compressed("--build-only")

    def formats(self) -> Iterator[Command]:
        tasks = () if self.args.tiny else ("--tasks", str(TASKS))
        yield self.compressed("--out", self.at("results/compression_0.1b.json"), *tasks, *self.sizes.formats.split())

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


STAGES: dict[str, Callable[[Run], Iterator[Command]]] = {
    "data": Run.data,
    "target": Run.train_target,
    "draft": Run.train_draft,
    "drafters": Run.drafters,
    "compress": Run.compress,
    "acceptance": Run.acceptance,
    "equality": Run.equality,
    "speed": Run.speed,
    "formats": Run.formats,
}
"""The commands of each stage."""


def finish(stage: str, commands: Iterator[Command], work: Path, environ: dict[str, str]) -> None:
    """Run the commands of a stage that is not finished, and note that it is. Raises CalledProcessError of the first that fails."""
    done, begin = work / "done" / stage, time.monotonic()
    if done.is_file():
        print(f"{stage}: finished before, in {done.read_text()} s", flush=True)
        return
    with (work / "logs" / f"{stage}.log").open("ab") as log:
        for command in commands:
            print(f"{stage}: {' '.join(command[1:])}", flush=True)
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=True)
    done.write_text(f"{time.monotonic() - begin:.0f}")
    print(f"{stage}: {done.read_text()} s", flush=True)


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stages", nargs="+", choices=(*STAGES, "all"), metavar="STAGE", help="stages in their order, or all"
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench.jsonl and humaneval.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder of all that is written; kept between stages")
    parser.add_argument("--target-seconds", type=float, default=330)
    parser.add_argument("--draft-seconds", type=float, default=40)
    parser.add_argument("--drafters-seconds", type=float, default=240, help="of which training gets about two fifths")
    parser.add_argument("--machine", default="unnamed", help="for the result files")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    parser.add_argument("--tiny", action="store_true", help="dry run")
    given = parser.parse_args(words)
    if given.tiny:
        given.target_seconds, given.draft_seconds, given.drafters_seconds = 4, 2, 20
    return given


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    for folder in ("done", "logs", "results"):
        (args.work / folder).mkdir(parents=True, exist_ok=True)
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "BENCHMARK_COMMIT": args.commit}
    run = Run(args, TINY if args.tiny else FULL)
    for stage in STAGES if "all" in args.stages else args.stages:
        try:
            finish(stage, STAGES[stage](run), args.work, environ)
        except subprocess.CalledProcessError as error:
            log = args.work / "logs" / f"{stage}.log"
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]), file=sys.stderr)
            print(f"{stage} failed with status {error.returncode}; see {log}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
