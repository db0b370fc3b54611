"""Throughput with drafts of the host, against none, by requests at once, on a GPU with random weights:

    python benchmarks/host_drafts.py --out benchmarks/results/host_drafts.json

Random weights say nothing that can be drafted for, so the target computes everything and then says a given text: held-out documents
(natural) or copies of the prompt, 0 to 15 % of the tokens changed (copies). Requests come and go, `rows` at a time, each with its
own text of 32 to 128 tokens after a prompt of 128. tok_s: output tokens per second while `rows` requests are open, the prompts of
those that come later included. ratio: against the same work without drafts, in one run after a short one that is not counted.
eager: steps with drafts, of `steps` in all, that no CUDA graph ran. The bound of the controller's regret: docs/speculation.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, write_rows
from controller import Work, come_and_go, copies, forced, texts

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.plan import StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import device
from ridgeline.engine.device import Outcome
from ridgeline.engine.executor import LoadedStep
from ridgeline.engine.local import LocalEngine
from ridgeline.ops.rows import Int
from ridgeline.wire.messages import StepStats, Submit

PLACES = 512
"""Context of the engine, in tokens."""
CACHE_BYTES = 4 << 30
WAYS = ("reference", "lookahead")


class Text:
    """What the target is made to say, int32 [rows, PLACES]. It exists before graphs are captured, and they read it."""

    def __init__(self, rows: int, place: str) -> None:
        self.said = torch.zeros(1 + rows, PLACES, dtype=torch.int32, device=place)

    def say(self, row: int, tokens: Sequence[int]) -> None:
        self.said[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    @contextmanager
    def dictate(self) -> Iterator[None]:
        """Draws are made as ever, and then replaced."""
        drawn_of = device.DeviceStep._drawn

        def dictated(step: Any, batch: Any, hidden: Any, bound: int, learn: bool) -> Any:
            drawn, logprobs = drawn_of(step, batch, hidden, bound, learn)
            places = step.rows.ints[batch.owners, Int.KNOWN] + (0 if batch.nodes is None else batch.nodes.depth)
            drawn.copy_(self.said[batch.owners, places.clamp(max=PLACES - 1)])
            return drawn, logprobs

        device.DeviceStep._drawn = dictated  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            device.DeviceStep._drawn = drawn_of  # type: ignore[method-assign]


class Timed:
    """An engine that counts tokens, seconds and steps without a graph while `rows` requests are open."""

    def __init__(self, speculate: str, args: argparse.Namespace, text: Text) -> None:
        config = EngineConfig(
            device=args.device,
            speculate=speculate,
            max_num_seqs=max(args.rows),
            enforce_eager=args.device == "cpu",
            enable_prefix_caching=False,
            kv_cache_memory=CACHE_BYTES if args.device == "cuda" else None,
        )
        model = ModelConfig(args.model, load_format="dummy", max_model_len=PLACES)
        self._text, self._full, self._last = text, False, 0.0
        self.engine = LocalEngine.start(model, config, on_step=self._step)
        executor = self.engine.engine.loop.runner.executor
        run = executor.run

        def noted(loaded: LoadedStep, plan: StepPlan) -> Outcome:
            self.eager += self._full and bool(plan.drafts) and not loaded.padded
            return run(loaded, plan)

        executor.run = noted
        self.forget()

    def forget(self) -> None:
        self.tokens = self.steps = self.eager = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def _step(self, stats: StepStats) -> None:
        now = time.perf_counter()
        if self._full and stats.steps:
            self.tokens += stats.output_tokens
            self.steps += 1
            self.drafted += stats.drafted
            self.accepted += stats.accepted
            self.seconds += now - self._last
        self._last = now

    def run(self, work: Sequence[Work], rows: int) -> None:
        """Answer all, `rows` at a time."""
        self.forget()
        waiting, scheduler = list(enumerate(work))[::-1], self.engine.engine.loop.scheduler

        def submit() -> None:
            number, (prompt, answer, _) = waiting.pop()
            self._text.say(scheduler._free_rows[-1 - len(scheduler.waiting)], prompt + answer)
            sampling = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True, seed=number)
            self.engine.submit(
                Submit(f"{time.monotonic_ns()}-{number}", list(prompt), sampling, time.monotonic(), cache=False)
            )

        for _ in range(rows):
            submit()
        self._full = True
        for delta in self.engine.deltas():
            if delta.finish and waiting:
                submit()
            elif delta.finish:
                self._full = False


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    documents, text = texts(), Text(max(args.rows), args.device)
    works = {"natural": forced, "copies": copies}
    with text.dictate():
        engines = {way: Timed(way, args, text) for way in ("", *args.ways.split(","))}
        for name, made in works.items():
            for rows in args.rows:
                work = come_and_go(made(documents, args.turns * rows + 4))
                for timed in engines.values():
                    timed.run(work[: rows + 4], rows)
                    timed.run(work, rows)
                undrafted = engines[""]
                for way, timed in engines.items():
                    if way:
                        yield {
                            "row": f"{Path(args.model).name}-{way}-{name}-b{rows}",
                            "drafter": way,
                            "text": name,
                            "rows": rows,
                            "tok_s": round(timed.tokens / timed.seconds),
                            "undrafted_tok_s": round(undrafted.tokens / undrafted.seconds),
                            "ratio": round(timed.tokens / timed.seconds / (undrafted.tokens / undrafted.seconds), 3),
                            "drafted": timed.drafted,
                            "accepted": timed.accepted,
                            "eager": timed.eager,
                            "steps": timed.steps,
                        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "models" / "smollm-135m"), help="folder with a config.json")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script: then no step has a graph")
    parser.add_argument("--ways", default=",".join(WAYS), help="options of --speculate, separated by commas")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="requests open at once")
    parser.add_argument("--turns", type=int, default=8, help="requests of a run, for each open one")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    done = []
    for row in measure(args):
        print(*row.values(), sep="\t", flush=True)
        done.append(row | provenance(machine, args.commit))
    if args.out:
        write_rows(args.out, done)


if __name__ == "__main__":
    main()
