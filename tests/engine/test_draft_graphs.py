"""Steps with drafts in graphs: requests say what they say without, and nothing is captured after start-up. Everything but the
capture itself, for which the work stands in, run again on the same buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from ridgeline.core.draft import Draft
from ridgeline.core.plan import StepPlan
from ridgeline.engine import graphs
from ridgeline.engine.device import Outcome
from ridgeline.engine.executor import LoadedStep
from ridgeline.engine.graph_shapes import draft_limits
from ridgeline.engine.shape import Sizes
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import NoDrafter
from ridgeline.speculation.host import HostDrafter
from ridgeline.speculation.lookahead import DraftShape, Lookahead
from ridgeline.speculation.ngram import NGram
from ridgeline.speculation.recycling import Recycling
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.combinations import crossed
from tests.engine.runners import MAX_LEN, PROMPT, DeviceBench, alone, pair
from tests.engine.test_drafters import Scripted, drafters, speculating

ROWS, TOKENS = 6, 32


class Recorder:
    """Stands in for the capture of CUDA graphs. replayed: names of what ran again; ready: nothing may be recorded any more."""

    def __init__(self) -> None:
        self.replayed: list[str] = []
        self.ready = False

    def __call__(self, work: Any) -> Replayed:
        assert not self.ready, work
        return Replayed(work, self.replayed)


class Replayed:
    def __init__(self, work: Any, replayed: list[str]) -> None:
        self._work, self._replayed = work, replayed

    def replay(self, *given: object) -> Any:
        self._replayed.append(self._work.func.__name__)
        return self._work()


def with_graphs(bench: DeviceBench) -> Recorder:
    recorder = Recorder()
    bench.use_graphs(recorder)
    recorder.ready = True
    return recorder


def check(bench: DeviceBench, recorder: Recorder) -> None:
    options: list[dict[str, object]] = [
        {"temperature": 0.6 * (number % 2), "seed": number, "max_tokens": 9 + 4 * number} for number in range(7)
    ]
    given = [(PROMPT * 2)[number:] for number in range(7)]
    for number, option in enumerate(options):
        bench.submit(f"r{number}", given[number], **option)  # type: ignore[arg-type]
        bench.turn()
    bench.run()
    for number, option in enumerate(options):
        assert bench.tokens[f"r{number}", 0] == alone(given[number], **option), option
    assert bench.scheduler.counts.drafted > 0
    assert {"step", "draw"} <= set(recorder.replayed)


@pytest.mark.parametrize(
    "name",
    [
        *("itself", "medusa", "recurrent-tree", "recycling", "eagle3"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("recurrent", "eagle")),
    ],
)
def test_what_the_device_drafts(name: str) -> None:
    bench = speculating("llama-gqa", name, step_tokens=TOKENS)
    check(bench, with_graphs(bench))


@pytest.mark.parametrize("host", [NGram(min_chance=0.0), Lookahead(DraftShape(2, 3, 3))], ids=["quotes", "lookahead"])
def test_what_the_host_drafts(host: HostDrafter) -> None:
    speculation = Speculator(host, None, Controller((0, 1, 2, 4, 6), fixed=True))
    bench = DeviceBench(speculation=speculation, host_drafts=6, step_tokens=TOKENS)
    check(bench, with_graphs(bench))


class Guesses:
    """A host drafter that proposes as many nodes as it may in every step, as a chain and as a tree in turns."""

    needs_repeat = False

    def __init__(self) -> None:
        self._branches = cycle((False, True))

    def start(self, tokens: Sequence[int]) -> Guesses:
        return self

    def nodes(self, chain: int, cost: float) -> int:
        return chain

    def propose(self, nodes: int, depth: int) -> Draft:
        return Draft.of(range(7, 7 + nodes), [-1] * nodes if next(self._branches) else range(-1, nodes - 1))

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """Learns nothing."""


DRAFTING = (
    *("guesses+itself", "recurrent-tree", "guesses", "recycling", "eagle"),
    *("quotes", "lookahead", "itself", "medusa", "guesses+eagle3"),
)
"""The first two are quick: drafts of the device, and of the host beside them, chains and trees."""


@pytest.mark.parametrize(
    ("name", "depth"), crossed(DRAFTING, (0, 1), quick=lambda name, depth: name < 2 and depth == 1)
)
def test_no_step_with_drafts_runs_without_a_graph(name: str, depth: int) -> None:
    """Requests come while others verify drafts, prompts are read in pieces, and one needs logits processors for a while."""
    bench = with_limits(name, depth)
    with_graphs(bench)
    padded = watch(bench)
    given = {f"r{number}": (PROMPT * 3)[number : 20 + 2 * number] for number in range(9)}
    options: dict[str, dict[str, object]] = {name: {"max_tokens": 60} for name in given}
    options["r3"] = {"max_tokens": 12, "logprobs": 2, "presence_penalty": 1.0}
    for name, prompt in given.items():
        bench.submit(name, prompt, **options[name])  # type: ignore[arg-type]
        for _ in range(6):
            bench.turn()
    bench.run()
    for name, prompt in given.items():
        assert bench.tokens[name, 0] == alone(prompt, **options[name]), name
    assert all(padded) and len(padded) > 50
    assert bench.scheduler.counts.drafts > 3


def with_limits(name: str, depth: int) -> DeviceBench:
    """A bench whose drafts are limited to what has a graph, and are made whenever that is possible."""
    hosts: dict[str, HostDrafter] = {"guesses": Guesses(), "quotes": NGram(min_chance=0.0), "lookahead": Lookahead()}
    *_, last = parts = name.split("+")
    host, (drafter, shape) = hosts.get(parts[0]), (NoDrafter(), None) if last in hosts else drafters("llama-gqa")[last]
    drafts = (0, shape.max_nodes) if shape is not None else ()
    limits = draft_limits(Sizes(ROWS, TOKENS, MAX_LEN, 200), pair("llama-gqa")[1].spec)
    controller = Controller((*drafts, 6) if host else drafts, fixed=True)
    return DeviceBench(
        depth=depth,
        step_tokens=TOKENS,
        speculation=Speculator(host, shape, controller, limits),
        drafter=drafter,
        drafts=drafts,
        host_drafts=6 if host else 0,
    )


def watch(bench: DeviceBench) -> list[bool]:
    """Whether each later step runs from a graph."""
    executor, padded = bench.runner.executor, list[bool]()
    run = executor.run

    def noted(loaded: LoadedStep, plan: StepPlan) -> Outcome:
        padded.append(loaded.padded)
        return run(loaded, plan)

    executor.run = noted  # type: ignore[method-assign]
    return padded


@pytest.mark.parametrize("tokens", [5, *(pytest.param(tokens, marks=pytest.mark.long) for tokens in (2, 128))])
def test_a_draft_model_reads_what_was_said_while_it_was_off(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of so many tokens, of rows that have read differently much: a draft that is the target is always right if it has
    read every token."""
    monkeypatch.setattr(graphs, "UNREAD_TOKENS", tokens)
    drafter, shape = drafters("llama-gqa")["itself"]
    controller = Scripted((0, 1, 3), [3, 0, 0, 0, 0, 3, 0, 0, 1, 1, 0, 3, 3] * 9)
    bench = DeviceBench(
        speculation=Speculator(None, shape, controller, sampled=controller),
        drafter=drafter,
        drafts=(0, 1, 3),
        step_tokens=TOKENS,
    )
    recorder = with_graphs(bench)
    options: list[dict[str, object]] = [{"max_tokens": 40}, {"max_tokens": 50, "temperature": 0.8, "seed": 2}]
    for number, option in enumerate(options):
        bench.submit(f"r{number}", PROMPT[number:], **option)  # type: ignore[arg-type]
        bench.turn()
        bench.turn()
    bench.run()
    for number, option in enumerate(options):
        assert bench.tokens[f"r{number}", 0] == alone(PROMPT[number:], **option), option
    counts = bench.scheduler.counts
    assert counts.accepted >= counts.drafted - 2 * 3 > 0
    assert "read" in recorder.replayed


class Seeing(Recycling):
    """Counts the steps whose logits it was shown."""

    seen = 0

    def see(self, *given: Any) -> None:
        self.seen += 1
        super().see(*given)


def test_a_drafter_learns_from_graphs() -> None:
    """They hold what shows it the logits."""
    drafter = Seeing(pair("llama-gqa")[1].spec.vocab_size, torch.device("cpu"))
    speculation = Speculator(None, DeviceTraits(9, drafter.parents[:9]), Controller((0, 9), fixed=True))
    bench = DeviceBench(speculation=speculation, drafter=drafter, drafts=(0, 9), step_tokens=TOKENS)
    with_graphs(bench)
    drafter.seen = 0
    bench.submit("a", PROMPT * 2, max_tokens=20)
    bench.run()
    assert drafter.seen


def test_steps_of_a_draft_model_are_captured_on_a_cpu() -> None:
    """While it has read everything. fresh: the first two of a shape."""
    bench = speculating("llama-gqa", "itself", step_tokens=TOKENS)
    bench.submit("a", PROMPT * 2, max_tokens=30)
    bench.run()
    assert 2 <= sum(result.fresh for result in bench.results) < len(bench.results)
