"""What each way of drafting gains on the shipped model, on this CPU, request by request beside plain decoding:

    python benchmarks/speculation.py --data FOLDER --out benchmarks/results/speculation.json

FOLDER holds spec_bench.jsonl and humaneval.jsonl; held-out text is in the repository. Three ways to write: greedy, at temperature
0.8, and forced, where the target says what stands in a real text whatever it computes, since a small model's greedy text
loops and flatters every drafter (the share of greedy answers that loop is a row's `loop_rate`). copy: forced answers that quote
their prompt, some words changed. Plain and drafted runs of a prompt follow each other. tok_s: without steps that read prompts.
accepted_len: tokens gained per step, steps without a draft among them, because a drafter that does not pay is off.

With --batch 8 --each 24, say, requests come and go: all of a kind, 8 at a time, who ends makes room for the next. They are of
different lengths (a quarter to all of 128 tokens), so that plain ones do not end together, and tok_s counts while 8 are open.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, write_rows
from drafters import cases, lines

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import device
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import shipped_model
from ridgeline.ops.rows import Int, RowState, Spread
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import StepStats, Submit

ASSETS = shipped_model().parent
WAYS = {
    "reference": "reference",
    "lookahead": "lookahead",
    "recycling": "recycling",
    "medusa": f"medusa:{ASSETS / 'medusa'}",
    "recurrent": f"recurrent:{ASSETS / 'recurrent'}",
    "reference+recurrent": f"reference+recurrent:{ASSETS / 'recurrent'}",
    "auto": "auto",
}
OUTPUT = 128
PROMPT = 700
TAIL, PERIOD = 48, 16
"""A text loops if its last TAIL tokens repeat with a period of at most PERIOD."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """work: its kind. answer: the real text behind it, for forced runs; empty where there is none."""

    work: str
    tokens: list[int]
    answer: list[int]


@dataclass(slots=True)
class Sum:
    """Of all prompts of one kind: tokens of steps that read no prompt, their seconds, their number, texts that loop."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    loops: list[bool] = field(default_factory=list)

    def add(self, other: Sum) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.steps += other.steps
        self.loops += other.loops


class Text:
    """What the target is made to say, by row and place; nothing: what it draws."""

    def __init__(self) -> None:
        self.said: dict[int, torch.Tensor] = {}
        self._held: dict[torch.Size, torch.Tensor] = {}

    def say(self, row: int, tokens: Sequence[int]) -> None:
        """From now on, in this row."""
        self.said[row] = torch.tensor(tokens, dtype=torch.int32)
        for held in self._held.values():
            self._write(held[row], self.said[row])

    @staticmethod
    def _write(held: torch.Tensor, tokens: torch.Tensor) -> None:
        """At each place what is to be said behind it, as it goes on at its end."""
        held.fill_(int(tokens[-1]))
        held[: len(tokens) - 1] = tokens[1:]

    def _behind(self, rows: RowState) -> RowState:
        """Rows that hold it, in the same memory for every text, so that recorded steps serve the next one too."""
        shape = rows.tokens.shape
        if shape not in self._held:
            with torch.inference_mode(False):  # what is made within could not be written to outside
                self._held[shape] = torch.zeros(shape, dtype=torch.int32)
            for row, tokens in self.said.items():
                self._write(self._held[shape][row], tokens)
        return replace(rows, tokens=self._held[shape])

    @contextmanager
    def dictate(self) -> Iterator[None]:
        """Draws are made as ever, and then replaced, by the operation that gathers query tokens: an engine can record it as it
        records its own."""
        plain = device.DeviceStep._drawn

        def drawn_of(step: Any, batch: Any, hidden: Any, bound: int, learn: bool | None) -> Any:
            drawn, logprobs = plain(step, batch, hidden, bound, learn)
            if not self.said:
                return drawn, logprobs
            ragged, nodes = batch.ragged, batch.nodes
            if ragged is None or batch.shape.even:
                spread = None if ragged is None else Spread(ragged.n_query, ragged.row_of, nodes.depth)
                return step.ops.sampler.gather(self._behind(step.rows.state), batch.rows, spread).tokens, logprobs
            # Rows that read a prompt, maybe beside rows that verify: nothing that is recorded.
            place = step.rows.ints[batch.owners, Int.KNOWN] + (0 if nodes is None else nodes.depth)
            held = self._behind(step.rows.state).tokens
            return held[batch.owners, (place - 1).clamp(max=held.shape[1] - 1)], logprobs

        device.DeviceStep._drawn = drawn_of  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            device.DeviceStep._drawn = plain  # type: ignore[method-assign]


def loops(tokens: Sequence[int]) -> bool:
    tail = list(tokens[-TAIL:])
    return len(tail) == TAIL and any(tail[period:] == tail[:-period] for period in range(1, PERIOD + 1))


class Timed:
    """An engine whose steps are counted while `full`, but for those that read prompts."""

    def __init__(self, option: str, threads: int | None) -> None:
        config = EngineConfig(speculate=option, device="cpu", threads=threads, max_num_seqs=16)
        self.engine = LocalEngine.start(ModelConfig(), config, on_step=self._step)
        self.full, self.count, self._last = False, Sum(), 0.0

    def _step(self, stats: StepStats) -> None:
        now = time.perf_counter()
        if self.full and stats.steps and not stats.prompt_tokens:
            self.count.tokens += stats.output_tokens
            self.count.seconds += now - self._last
            self.count.steps += 1
        self._last = now

    def run(self, work: Sequence[Prompt], forced: bool, temperature: float, batch: int, text: Text) -> Sum:
        """Answers to all, `batch` at a time."""
        self.count, said, chance = Sum(), dict[str, list[int]](), random.Random(len(work))
        waiting, scheduler = list(enumerate(work))[::-1], self.engine.engine.loop.scheduler
        text.said.clear()

        def submit() -> None:
            number, request = waiting.pop()
            if forced:  # the row that it will sit in
                text.say(scheduler._free_rows[-1 - len(scheduler.waiting)], request.tokens + request.answer)
            length = min(OUTPUT, len(request.answer)) if forced else OUTPUT
            if batch > 1:
                length = chance.randint(length // 4, length)
            sampling = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=7 + number)
            said[name := f"{time.monotonic_ns()}-{number}"] = []
            self.engine.submit(Submit(name, list(request.tokens), sampling, time.time(), cache=False))

        for _ in range(min(batch, len(waiting))):
            submit()
        self.full = True
        for delta in self.engine.deltas():
            said[delta.id] += delta.tokens
            if delta.finish and waiting:
                submit()
            elif delta.finish:
                self.full = False
        self.full, self.count.loops = False, [loops(tokens) for tokens in said.values()]
        return self.count


def prompts(data: Path, each: int) -> list[Prompt]:
    """`each` prompts of each kind of work."""
    tokenizer = Tokenizer.load(shipped_model())
    loaded = [
        Prompt(
            "spec_bench " + line["category"], tokenizer.encode(line["turns"][0], add_special_tokens=False)[-PROMPT:], []
        )
        for line in lines(data / "spec_bench.jsonl")
    ]
    for case in cases(data, tokenizer):
        if len(case.answer) >= OUTPUT // 2 and case.kind not in ("rag", "summarization"):
            answer = case.answer if case.kind != "humaneval" else []
            loaded.append(Prompt(case.kind, case.prompt[-PROMPT:], answer[:OUTPUT]))
    random.Random(3).shuffle(loaded)
    kinds = dict.fromkeys(sorted(prompt.work for prompt in loaded))
    return [prompt for kind in kinds for prompt in [prompt for prompt in loaded if prompt.work == kind][:each]]


def writings(prompt: Prompt) -> list[tuple[str, float]]:
    """(how, temperature) of the ways in which a prompt is answered."""
    # Drafts are the likeliest tokens then: noise that a drafter shares with the target says nothing of a text neither drew.
    forced = [("forced", 0.0)] if prompt.answer else []
    if prompt.work.startswith("copy"):
        return forced
    return [("greedy", 0.0), ("sampled", 0.8), *forced]


def measure(args: argparse.Namespace, engines: dict[str, Timed], text: Text) -> dict[tuple[str, str, str], Sum]:
    """By (way of drafting, work, writing)."""
    sums: dict[tuple[str, str, str], Sum] = defaultdict(Sum)
    kinds: dict[tuple[str, str, float], list[Prompt]] = defaultdict(list)
    for prompt in prompts(args.data, args.each):
        for how, temperature in writings(prompt):
            kinds[prompt.work, how, temperature].append(prompt)
    alone = args.batch == 1
    groups = [
        (kind, part) for kind, work in kinds.items() for part in ([[prompt] for prompt in work] if alone else [work])
    ]
    for dictated in (False, True):
        for timed in engines.values():
            timed.engine.engine.loop.runner._forget()  # type: ignore[attr-defined]  # a recorded step draws, or is dictated to
        for number, ((work, how, temperature), part) in enumerate(groups):
            if (how == "forced") != dictated:
                continue
            names = list(engines)
            # Who comes first changes, so that no way is always measured on a warmer machine.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                # The faster of two runs counts, since whatever disturbs one makes it longer.
                runs = [engines[name].run(part, dictated, temperature, args.batch, text) for _ in range(2)]
                sums[name, work, how].add(min(runs, key=lambda run: run.seconds / max(1, run.tokens)))
    return sums


def added(parts: Sequence[Sum]) -> Sum:
    total = Sum()
    for part in parts:
        total.add(part)
    return total


def rows(args: argparse.Namespace, sums: dict[tuple[str, str, str], Sum]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[Sum]] = defaultdict(list)
    for (name, work, how), total in sums.items():
        groups[name, work, how].append(total)
        groups[name, "copy" if work.startswith("copy") else "all", how].append(total)
        if not work.startswith("copy"):
            groups[name, "all", "all"].append(total)
    for (name, work, how), parts in groups.items():
        if name == "plain":
            continue
        drafted, plain = added(parts), added(groups["plain", work, how])
        tok_s, plain_tok_s = drafted.tokens / drafted.seconds, plain.tokens / plain.seconds
        yield {
            "row": f"cpu-{name}-{work}-{how}-b{args.batch}",
            "drafter": name,
            "work": f"{work}, {how}",
            "temperature": {"greedy": 0.0, "sampled": 0.8}.get(how),
            "batch": args.batch,
            "tok_s": round(tok_s, 1),
            "plain_tok_s": round(plain_tok_s, 1),
            "ratio": round(tok_s / plain_tok_s, 3),
            "accepted_len": round(drafted.tokens / max(1, drafted.steps), 3) if args.batch == 1 else None,
            "loop_rate": round(sum(drafted.loops) / len(drafted.loops), 3) if how == "greedy" else None,
            "prompts": len(drafted.loops),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind of work")
    parser.add_argument("--batch", type=int, default=1, help="requests open at once; give --each more than that")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="benchmarks/results/speculation.json")
    args = parser.parse_args()
    text = Text()
    with text.dictate():
        engines = {
            name: Timed(option, args.threads)
            for name, option in {"plain": "", **{name: WAYS[name] for name in args.ways.split(",")}}.items()
        }
        measurement = measure(args, engines, text)
    common = {"device": cpu_name(), "model": "ridgeline-14m, bfloat16", **provenance(cpu_name(), args.commit)}
    done = list(rows(args, measurement))
    for row in done:
        if row["work"].startswith(("all", "copy,")):
            print(*(row[name] for name in ("drafter", "work", "batch", "tok_s", "ratio", "accepted_len", "loop_rate")))
    write_rows(args.out, [row | common for row in done])


if __name__ == "__main__":
    main()
