"""Two versions of Ridgeline on one CPU, in turns: `python benchmarks/two_trees.py OLD_TREE NEW_TREE --cores 2,3`.

Each tree has a process of its own on the same cores, with the model loaded. They run one case after the other in turns, so that a
machine whose speed drifts slows both. Reported are the medians of both, and the median ratio of neighbouring runs with its 95 %
interval (bootstrap). SmolLM-135M shape, random weights, bfloat16, greedy. A tree is a checkout whose `benchmarks/common.py` has
`timed`; build its compiled operations first (`PYTHONPATH=TREE/src python -m ridgeline.ops.native.build`).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "models" / "smollm-135m"
READY = "ready"


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` requests at once. tokens: what the rate counts."""

    batch: int
    prompt: int
    output: int
    tokens: int
    unit: str


CASES = {
    "b1": Case(1, 128, 64, 64, "output tok/s"),
    "c16": Case(16, 128, 64, 1024, "output tok/s"),
    "prefill512": Case(1, 512, 1, 512, "prompt tok/s"),
}


def serve(threads: int) -> None:
    """The process of one tree: read names of cases, print tokens per second of one run each."""
    import torch
    from common import timed

    from ridgeline.core.config import EngineConfig, ModelConfig
    from ridgeline.engine.local import LocalEngine
    from ridgeline.models.config import read_model

    torch.set_num_threads(threads)
    config = EngineConfig(device="cpu", threads=threads)
    engine = LocalEngine.start(ModelConfig(model=str(MODEL), load_format="dummy"), config)
    vocab = read_model(MODEL)[0].vocab_size
    print(READY, flush=True)
    for line in sys.stdin:
        case = CASES[line.strip()]
        run = timed(engine, [(case.prompt, case.output)] * case.batch, vocab, temperature=0.0)
        print(case.tokens / run.seconds, flush=True)


class Side:
    """A running process of one tree."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        for line in self._answers:
            if line.strip() == READY:
                return
        raise SystemExit("a tree ended before it was ready: see its error above")

    def run(self, case: str) -> float:
        """Tokens per second of one run."""
        print(case, file=self._requests, flush=True)
        return float(self._answers.readline())


@contextmanager
def started(tree: Path, cores: str) -> Iterator[Side]:
    """The process of a tree, pinned to `cores`."""
    paths = [str(tree / "src"), str(tree / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    # Threads that wait must sleep: the other tree runs on the same cores.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive"}
    command = ["taskset", "-c", cores, sys.executable, __file__, "--threads", str(len(cores.split(",")))]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Side(process)
        finally:
            process.kill()


def median_interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40 - 1]


def compare(old: Side, new: Side, case: str, turns: int) -> dict[str, float]:
    """Medians and ratio of one case. The first two runs of each side warm up; the side that begins changes each turn."""
    rates: dict[Side, list[float]] = {old: [], new: []}
    for turn in range(turns + 2):
        for side in (old, new) if turn % 2 else (new, old):
            rates[side].append(side.run(case))
    before, after = rates[old][2:], rates[new][2:]
    ratios = [fast / slow for fast, slow in zip(after, before, strict=True)]
    low, high = median_interval(ratios)
    figures = {"old": statistics.median(before), "new": statistics.median(after), "ratio": statistics.median(ratios)}
    return {name: round(value, 4) for name, value in {**figures, "ratio_low": low, "ratio_high": high}.items()}


def main() -> None:
    from common import cpu_name, provenance, write_rows

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="checkout of the version that the other is compared with")
    parser.add_argument("new", type=Path, help="checkout of the version that is judged")
    parser.add_argument("--cores", default="0,1", help="processor numbers that both run on, joined by commas")
    parser.add_argument("--turns", type=int, default=40, help="runs of each tree and case")
    parser.add_argument("--old-commit", default="", help="commit of the old tree, for the result file")
    parser.add_argument("--commit", default="", help="commit of the new tree, where it has no .git")
    parser.add_argument("--out", default=None, help="result file (JSON list); without it, figures are printed only")
    arguments = parser.parse_args()
    facts = {"turns": arguments.turns, "old_commit": arguments.old_commit, **provenance(cpu_name(), arguments.commit)}
    rows = []
    with (
        started(arguments.old.resolve(), arguments.cores) as old,
        started(arguments.new.resolve(), arguments.cores) as new,
    ):
        for name, case in CASES.items():
            figures = compare(old, new, name, arguments.turns)
            print(name, figures, flush=True)
            rows.append({"row": f"smollm135m-bf16-{name}", "unit": case.unit, **figures, **facts})
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--threads"]:
        serve(int(sys.argv[2]))
    else:
        main()
