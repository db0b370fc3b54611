"""Simulates the controller of speculation on recorded step times and acceptance, on a virtual clock:

    python benchmarks/controller.py --out benchmarks/results/controller.json

The scheduler, the speculator, its controller and the n-gram drafter are the server's. Only the device is simulated. Requests
say a given text: held-out documents, copies of their prompt, or a loop. Device drafts are right with the recorded chance of each
node. Steps take the recorded time of their rows, nodes and questions, 3 % of them 1.2 to 2.5 times as long.

ratio: tokens per second against the same work without speculation, the mean over the seeds; worst: of one seed. best_fixed: of the
best number of nodes, always drafted, for scenarios without the n-gram drafter. Rows with the label " (before)" are of the
controller that this one replaced, at the commit they name.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from common import provenance, write_rows

from ridgeline.core.draft import DEVICE
from ridgeline.core.plan import Flag, Join, StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.request import Request
from ridgeline.engine.scheduler import Scheduler
from ridgeline.models.hub import shipped_model
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.heads import Candidate, tree
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from ridgeline.speculation.ngram import NGram, NGramProposer
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.speculation.state import DraftLimits
from ridgeline.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).parents[1] / "tests" / "data" / "heldout.jsonl"
ACCURACIES = json.loads((shipped_model().parent / "recurrent" / "config.json").read_text())["accuracies"]
FIRST_DRAWS = {
    "sampled": (0.521, 0.544, 0.570, 0.602),
    "greedy": (0.60, 0.70, 0.72, 0.74),
    "loop": (0.93, 0.95, 0.95, 0.95),
    "forced": (0.388, 0.476, 0.504, 0.543),
}
"""Acceptance of the shipped draft by place (src/ridgeline/assets/recurrent/README.md); its greedy answers are split into those
that loop, half of them, and others, so that both together are kept as often as the README says."""
PROMPT, OUTPUT = 128, 128
PAGE = 64


@dataclass(frozen=True)
class Device:
    """Times in plain steps. The formula of a step: 1 + verify (rows, nodes per row) + draft (nodes) + questions.

    verify: time added by n nodes a row. draft: time added by drafting n nodes. question: host time of a call per request.
    build: time added by the first two steps of a shape. hiccups: chance of a step, with drafts or without, to take EAGER longer.
    in_flight: steps in flight.
    """

    verify: Callable[[float], float]
    draft: Callable[[int], float]
    question: float = 0.0
    build: float = 0.0
    hiccups: float = 0.0
    in_flight: int = 0


def table(*added: float) -> Callable[[float], float]:
    """Linear between the times added by 0, 1, 2, .. nodes, and beyond."""

    def at(nodes: float) -> float:
        low = min(int(nodes), len(added) - 2)
        return added[low] + (nodes - low) * (added[low + 1] - added[low])

    return at


def cpu(verify: float = 1.0, draft: float = 1.0, question: float = 0.25) -> Device:
    """Two cores, in steps of 225 to 360 µs: two nodes and their draft take 1.65, five 2.0, seven 2.3; a call of the n-gram drafter
    60 to 138 µs (docs/log/2026-11-23-recorded-steps-changing-batches.md, docs/speculation.md)."""
    times = table(0.0, 0.3, 0.38, 0.46, 0.58, 0.72, 0.86, 1.0, 1.08)
    return Device(
        lambda nodes: verify * times(nodes),
        lambda nodes: draft * 0.27 * bool(nodes),
        question,
        build=2.5,
    )


def cpu_batch() -> Device:
    """Eight rows of the same machine: a plain step of 800 µs, 0.5 to 1 ms to build a shape."""
    times = table(0.0, 0.35, 0.5, 0.7, 0.9, 1.1, 1.35, 1.6)
    return Device(times, lambda nodes: 0.4 * bool(nodes), 0.1, build=0.9)


H200 = {
    1: (0, 0.03, 0.06, 0.09, 0.123),
    8: (0, 0.03, 0.06, 0.09, 0.117),
    32: (0, 0.1, 0.2, 0.32, 0.443),
    128: (0, 0.45, 0.85, 1.28, 1.718),
}
"""Time added by nodes a row; benchmarks/results/speculation.json, step_ratio."""
EAGER = 20.0
"""Time added to a step that no graph runs."""
DRAFT_MODEL = {1: 0.206, 8: 0.222, 32: 0.2085, 128: 0.265}
"""Time added by a node of a draft model of the shape of Llama-3.2-1B."""


def h200(rows: int, draft: float = 0.0) -> Device:
    return Device(table(*H200[rows]), lambda nodes: draft * nodes, in_flight=1)


def h200_host(rows: int, eager: float = 0.0) -> Device:
    """A target of 107M parameters: a step takes 0.3 ms, and a call of the n-gram drafter 30 µs. eager: time added to a step with
    drafts because no graph has its shape (docs/log/2026-11-24-drafts-of-a-107m-target.md)."""
    times = table(*H200[rows])
    return Device(lambda nodes: eager * bool(nodes) + times(nodes), lambda nodes: 0.0, question=0.1, in_flight=1)


class Work(NamedTuple):
    """A request and what the target says to it."""

    prompt: list[int]
    answer: list[int]
    kind: str


@dataclass(frozen=True)
class Scenario:
    """requests: in order of arrival, `rows` at a time. kinds: by kind of text the acceptance of device nodes, by depth. spread: how
    different the places of a text are, 0 for not at all. engine: the ratio that the engine measured with the controller before this
    one, where there is such a measurement (benchmarks/results/speculation.json)."""

    name: str
    device: Device
    requests: list[Work]
    rows: int = 1
    traits: DeviceTraits | None = None
    nodes: Sequence[Candidate] = ()
    sizes: tuple[int, ...] = (0,)
    ngram: bool = False
    kinds: dict[str, Sequence[float]] = field(default_factory=dict)
    spread: float = 0.0
    engine: float | None = None


class SimulatedDevice:
    """A runner whose steps take `device`'s times. Says each request's text."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.now, self.questions, self.tokens = 0.0, 0, 0
        self._scenario, self._random = scenario, random.Random(seed)
        self._texts = [prompt + answer for prompt, answer, _ in scenario.requests]
        self._kinds = [kind for *_, kind in scenario.requests]
        self._rows: dict[int, tuple[Join, int]] = {}
        """Row -> its join and the tokens it knows."""
        self._right: dict[int, list[bool]] = {}
        """Row -> of each node of its device draft, whether the node is right if its parent is."""
        self._shapes: dict[Any, int] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        device = self._scenario.device
        for row in plan.leaves:
            self._rows.pop(row, None)
        for join in plan.joins:
            self._rows[join.row] = join, len(join.tokens)
        result = StepResult(plan.step, plan.rows, plan.generations, [], [], [])
        first = 0
        for place, row in enumerate(plan.rows):
            last = first + plan.n_draft[place]
            gained, flag = self._run(row, plan, place, (first, last), result)
            result.counts.append(len(gained))
            result.tokens += gained
            result.flags.append(flag)
            first = last
        rows = len(plan.rows)
        drafted = plan.ahead if any(plan.samples) else 0
        took = 1 + device.verify(len(plan.drafts) / rows) + device.draft(drafted)
        shape = (tuple(plan.n_draft), tuple(plan.n_query), drafted)
        seen = self._shapes.get(shape, 0)
        self._shapes[shape] = seen + 1
        prompt = sum(plan.n_query) > rows + len(plan.drafts)
        result.fresh = seen < 2 and device.build > 0 and not prompt
        took += device.build * result.fresh
        if prompt:
            took = 1.0  # prompts cost the same with and without speculation
        if self._random.random() < 0.03:
            took *= self._random.uniform(1.2, 2.5)
        took += EAGER * (device.hiccups > 0 and self._random.random() < device.hiccups)
        result.device_s = took * 1e-3 * self._random.uniform(0.98, 1.02)
        questions, self.questions = self.questions, 0
        result.gap_s = questions * device.question * 1e-3
        self.now += result.device_s + result.gap_s
        self.tokens += len(result.tokens)
        self._results.append(result)

    def _run(
        self, row: int, plan: StepPlan, place: int, drafts: tuple[int, int], result: StepResult
    ) -> tuple[list[int], int]:
        join, known = self._rows[row]
        if not plan.samples[place] or known >= join.limit:
            return [], 0
        text, kind = self._texts[join.seed], self._kinds[join.seed]
        tokens = plan.drafts[slice(*drafts)]
        parents = list(plan.tree[slice(*drafts)]) or range(-1, len(tokens) - 1)
        gained, kept, at = [text[known]], list[int](), -1
        while known + len(gained) < join.limit:
            wanted, right = text[known + len(gained) - 1], self._right.get(row, [])
            children = [node for node, parent in enumerate(parents) if parent == at]
            fits = [node for node in children if (right[node] if tokens[node] == DEVICE else tokens[node] == wanted)]
            if not fits:
                break
            at = fits[0]
            kept.append(at)
            gained.append(text[known + len(gained)])
        if len(tokens):
            result.kept[place] = kept
            behind = dict(zip([-1, *kept], gained, strict=True))
            result.drawn[place] = [behind.get(node, -1) for node in range(-1, len(tokens))]
        self._rows[row] = join, known + len(gained)
        if plan.ahead:
            self._draft(row, kind, plan.ahead, result, place)
        return gained, int(Flag.LIMIT) if known + len(gained) >= join.limit else 0

    def _draft(self, row: int, kind: str, count: int, result: StepResult, place: int) -> None:
        """Which nodes will be right, and how many are worth verifying."""
        scenario, chance = self._scenario, self._random
        means, nodes = scenario.kinds[kind], scenario.nodes[:count]
        right, chances, quality = [], list[float](), dict[int, float]()
        taken = dict[int, bool]()
        for node in nodes:
            mean = means[min(node.head, len(means) - 1)]
            if node.parent not in quality:
                spread = scenario.spread
                quality[node.parent] = chance.betavariate(mean / spread, (1 - mean) / spread) if spread else mean
                taken[node.parent] = False
            value, rank = quality[node.parent], ACCURACIES[0]
            share = value if not node.rank else (1 - value) * rank[min(node.rank, 7)] / (1 - rank[0])
            left = value if not node.rank else share / max(1e-6, 1 - value)
            hit = not taken[node.parent] and chance.random() < left
            taken[node.parent] |= hit
            right.append(hit)
            chances.append(share * (1.0 if node.parent < 0 else chances[node.parent]))
        self._right[row] = right
        if scenario.traits is not None and scenario.traits.cuts:
            promised = most = 0.0
            worth = 0
            for at, chance_of_level in enumerate(chances, 1):
                promised += chance_of_level - 0.08
                if at in (2, 3, 5, count) and promised > most:
                    most, worth = promised, at
            result.worth[place] = worth

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


class TimedNGram(NGram):
    """Charges the device for every call."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(min_chance=0.35)
        self._device = device

    def start(self, tokens: Sequence[int]) -> NGramProposer:
        proposer, plain = super().start(tokens), NGramProposer.propose

        def propose(nodes: int, depth: int) -> Any:
            self._device.questions += 1
            return plain(proposer, nodes, depth)

        proposer.propose = propose  # type: ignore[method-assign]
        return proposer


def run(scenario: Scenario, seed: int, make: Callable[[SimulatedDevice], Speculation]) -> float:
    """Tokens per plain step."""
    device = SimulatedDevice(scenario, seed)
    layout = KvLayout((KvGroup((0,), None, 8),), PAGE, 64, KV_FORMATS["float32"])
    leases = Leases(layout, 64 * (1 + scenario.rows), prefix_cache=False)
    limits = Limits(scenario.rows, 8192, 4096)
    scheduler = Scheduler(layout, leases, limits, admission("continuous"), make(device))
    loop = Loop(scheduler, device, steps_in_flight=scenario.device.in_flight, clock=lambda: device.now)
    waiting, running = deque(enumerate(scenario.requests)), 0
    while waiting or not scheduler.idle:
        while waiting and running < scenario.rows:
            scheduler.add(_request(*waiting.popleft(), device.now))
            running += 1
        running -= sum(bool(update.finish) for update in loop.turn().each())
    return device.tokens / device.now / 1e3


def _request(number: int, work: Work, now: float) -> Request:
    sampling = SamplingParams(max_tokens=len(work.answer), temperature=0.8 if work.kind == "sampled" else 0.0)
    return Request(
        id=str(number),
        choice=0,
        tokens=array("i", work.prompt),
        prompt_len=len(work.prompt),
        sampling=sampling,
        limit=len(work.prompt) + len(work.answer),
        stop_ids=(),
        seed=number,
        order=(0, number),
        arrival=now,
        root=b"",
        cache=False,
    )


def speculator(scenario: Scenario, fixed: int | None = None) -> Callable[[SimulatedDevice], Speculation]:
    """fixed: always so many device nodes."""

    def make(device: SimulatedDevice) -> Speculation:
        host = TimedNGram(device) if scenario.ngram else None
        sizes = scenario.sizes if fixed is None else (0, fixed)
        return Speculator(host, scenario.traits, Controller(sizes, fixed=fixed is not None), DraftLimits(1024))

    return make


# --- scenarios ------------------------------------------------------------------------------------------------------


def texts() -> list[list[int]]:
    tokenizer = Tokenizer.load(shipped_model())
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    documents = [tokenizer.encode(json.loads(line)["text"], add_special_tokens=False) for line in lines]
    return [document for document in documents if len(document) >= PROMPT + OUTPUT]


def forced(documents: Sequence[list[int]], count: int) -> list[Work]:
    return [
        Work(document[:PROMPT], document[PROMPT : PROMPT + OUTPUT], "forced")
        for document in (documents[number % len(documents)] for number in range(count))
    ]


def sampled(documents: Sequence[list[int]], count: int) -> list[Work]:
    return [Work(prompt, answer, "sampled") for prompt, answer, _ in forced(documents[::-1], count)]


def greedy(documents: Sequence[list[int]], count: int) -> list[Work]:
    """Half of them loop from somewhere in their first half on, as the shipped model's greedy answers do."""
    chance, nodes = random.Random(1), []
    for number, (prompt, answer, _) in enumerate(forced(documents[7:], count)):
        kind = "loop" if number % 2 else "greedy"
        if kind == "loop":
            start, period = chance.randint(8, OUTPUT // 2), chance.randint(4, 24)
            loop = answer[start : start + period]
            answer = (answer[:start] + loop * OUTPUT)[:OUTPUT]
        nodes.append(Work(prompt, answer, kind))
    return nodes


def copies(documents: Sequence[list[int]], count: int) -> list[Work]:
    """Answers that say their prompt again, 0, 5 or 15 % of the tokens changed."""
    chance, result = random.Random(2), []
    for number, (prompt, _, _) in enumerate(forced(documents[3:], count)):
        changed = (0.0, 0.05, 0.15)[number % 3]
        answer = [chance.randrange(8192) if chance.random() < changed else token for token in prompt]
        result.append(Work(prompt, answer[:OUTPUT], "forced"))
    return result


def mixed(documents: Sequence[list[int]], count: int) -> list[Work]:
    kinds = (greedy(documents, count), sampled(documents, count), forced(documents, count))
    return [kinds[number % 3][number] for number in range(count)]


def come_and_go(requests: list[Work]) -> list[Work]:
    """Of different lengths, a quarter to all."""
    chance = random.Random(3)
    return [Work(prompt, answer[: chance.randint(OUTPUT // 4, OUTPUT)], kind) for prompt, answer, kind in requests]


CHAIN = tuple(Candidate(node - 1, node, 0) for node in range(4))
TREE = tree(ACCURACIES, 7)
RECURRENT = DeviceTraits(7, tuple(node.parent for node in TREE), cuts=True)
WIDE = tree(((0.2, 0.1, 0.08), (0.2, 0.1), (0.2,)), 12)


def scenarios(count: int) -> Iterator[Scenario]:
    documents = texts()
    shipped = {"nodes": TREE, "traits": RECURRENT, "sizes": (0, 7), "kinds": FIRST_DRAWS, "spread": 0.6}
    quoting = {"ngram": True, "sizes": (0, 1, 2, 3, 4, 6, 8, 11)}
    both = shipped | {"ngram": True, "sizes": (0, 7, 11)}
    works = {"greedy": greedy, "sampled": sampled, "forced": forced, "copy": copies, "mixed": mixed}
    measured = {
        ("recurrent", "greedy"): 1.737, ("recurrent", "sampled"): 1.136, ("recurrent", "forced"): 1.056,
        ("recurrent", "mixed"): 1.332, ("recurrent", "copy"): 1.008, ("reference", "greedy"): 1.624,
        ("reference", "sampled"): 0.985, ("reference", "forced"): 0.998, ("reference", "mixed"): 1.198,
        ("reference", "copy"): 2.28, ("auto", "greedy"): 2.07, ("auto", "sampled"): 1.11, ("auto", "forced"): 1.004,
        ("auto", "mixed"): 1.381, ("auto", "copy"): 2.232,
    }  # fmt: skip
    for name, how in (("recurrent", shipped), ("reference", quoting), ("auto", both)):
        for work, made in works.items():
            known = measured[name, work]
            yield Scenario(f"cpu-{name}-{work}-b1", cpu(), made(documents, count), engine=known, **how)  # type: ignore[arg-type]
    never = {
        "nodes": WIDE,
        "traits": DeviceTraits(12, tuple(node.parent for node in WIDE)),
        "sizes": (0, 1, 2, 3, 4, 6, 8, 12),
    }
    yield Scenario("cpu-recycling-mixed-b1", cpu(), mixed(documents, count), engine=0.984,
                   kinds=dict.fromkeys(FIRST_DRAWS, (0.12,)), **never)  # type: ignore[arg-type]  # fmt: skip
    for name, how in (("recurrent", shipped), ("reference", quoting), ("auto", both)):
        for work in ("mixed", "copy"):
            requests = come_and_go(works[work](documents, 3 * count))
            yield Scenario(f"cpu-{name}-{work}-b8", cpu_batch(), requests, rows=8, **how)  # type: ignore[arg-type]
    yield Scenario("cpu-slow-auto-mixed-b1", cpu(0.7, 0.7, 0.12), mixed(documents, count), **both)  # type: ignore[arg-type]
    yield Scenario("cpu-dear-recurrent-mixed-b1", cpu(2.0, 3.0), mixed(documents, count), **shipped)  # type: ignore[arg-type]
    yield Scenario(
        "cpu-recurrent-short-b1", cpu(), [Work(p, a[:32], k) for p, a, k in mixed(documents, 3 * count)], **shipped
    )  # type: ignore[arg-type]
    yield from _h200(documents)
    for rows, eager, work in product((1, 8, 32), ("", "eager-"), ("mixed", "copy")):
        requests = come_and_go(works[work](documents, max(count, 10 * rows)))
        device = h200_host(rows, EAGER * bool(eager))
        yield Scenario(f"h200-reference-{eager}{work}-b{rows}", device, requests, rows=rows, **quoting)  # type: ignore[arg-type]
    for rows, often in product((1, 8), (500, 4000)):
        device, requests = replace(h200_host(rows), hiccups=1 / often), come_and_go(copies(documents, 4 * count))
        yield Scenario(f"h200-reference-hiccup-{often}-b{rows}", device, requests, rows=rows, **quoting)  # type: ignore[arg-type]


def _h200(documents: list[list[int]]) -> Iterator[Scenario]:
    """Batches of equal requests, 257 tokens each, one batch after the other."""
    long = [document for document in documents if len(document) >= 1 + 257] or documents
    measured = {
        ("free", 0.8, 1): 3.083, ("free", 0.8, 8): 2.993, ("free", 0.8, 32): 2.3, ("free", 0.8, 128): 1.305,
        ("free", 0.05, 1): 0.996, ("free", 0.05, 8): 1.017, ("free", 0.05, 32): 0.986, ("free", 0.05, 128): 0.991,
        ("1b", 0.8, 1): 1.651, ("1b", 0.8, 8): 1.647, ("1b", 0.8, 32): 1.479, ("1b", 0.8, 128): 1.068,
        ("1b", 0.05, 1): 0.994, ("1b", 0.05, 8): 0.976, ("1b", 0.05, 32): 0.95, ("1b", 0.05, 128): 0.993,
    }  # fmt: skip
    for name in ("free", "1b"):
        for rows in (1, 8, 32, 128):
            for rate in (0.8, 0.5, 0.05):
                device = h200(rows, DRAFT_MODEL[rows] if name == "1b" else 0.0)
                answers = [(long[number % len(long)] * 3)[:257] for number in range(rows * (6 if rows < 100 else 4))]
                requests = [Work(answer[:8], answer[:257], "greedy") for answer in answers]
                yield Scenario(
                    f"h200-{name}-{rate}-b{rows}", device, requests, rows=rows, nodes=CHAIN,
                    traits=DeviceTraits(4, reads_tokens=name == "1b"), sizes=(0, 1, 2, 3, 4),
                    kinds={"greedy": (rate,)}, engine=measured.get((name, rate, rows)),
                )  # fmt: skip


def measure(scenario: Scenario, seeds: int) -> dict[str, Any]:
    ratios, fixed = [], [1.0]
    for seed in range(seeds):
        plain = run(scenario, seed, lambda _: NO_SPECULATION)
        ratios.append(run(scenario, seed, speculator(scenario)) / plain)
        if not (scenario.ngram or seed):
            fixed += [run(scenario, seed, speculator(scenario, size)) / plain for size in scenario.sizes if size]
    return {
        "row": scenario.name,
        "ratio": round(sum(ratios) / len(ratios), 3),
        "worst": round(min(ratios), 3),
        "best_fixed": None if scenario.ngram else round(max(fixed), 3),
        "engine": scenario.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the scenarios to run")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--label", default="", help="added to the rows' names")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    started = time.perf_counter()
    for scenario in scenarios(args.requests):
        if args.only in scenario.name:
            measurement = measure(scenario, args.seeds)
            print(*measurement.values(), sep="\t", flush=True)
            if args.out:
                measurement["row"] += args.label
                write_rows(Path(args.out), [measurement | provenance("virtual clock", args.commit)])
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
