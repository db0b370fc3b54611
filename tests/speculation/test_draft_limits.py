"""Which steps have drafts on a device whose steps run from graphs, on the fake device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

from ridgeline.core.draft import Draft
from ridgeline.core.plan import StepPlan
from ridgeline.engine.constraints import GrammarAndRules
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.speculation.state import DraftLimits
from tests.engine.constrained import OneTwo
from tests.engine.helpers import Bench, oracle

GRAPHS = DraftLimits(1024, host_tokens=32, prompt_tokens=24)


class Guesses:
    """Proposes as many nodes as it may in every step. calls: how often it was asked."""

    needs_repeat = False

    def __init__(self) -> None:
        self.calls = 0
        self._tokens = cycle(range(90))

    def start(self, tokens: Sequence[int]) -> Guesses:
        return self

    def nodes(self, chain: int, cost: float) -> int:
        return chain

    def propose(self, nodes: int, depth: int) -> Draft:
        self.calls += 1
        return Draft(tuple(next(self._tokens) for _ in range(nodes)))

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        """Learns nothing."""


def bench_of(limits: DraftLimits, device: DeviceTraits | None = None, **options: Any) -> tuple[Bench, Guesses]:
    host = Guesses()
    speculation = Speculator(None if device else host, device, Controller((0, 8), fixed=True), limits)
    facts: dict[str, Any] = {"speculation": speculation, "rows": 40, "blocks": 2000, "step_tokens": 160}
    return Bench(**facts | options), host


def query_tokens(plan: StepPlan) -> int:
    return sum(plan.n_query)


def reads_prompt(plan: StepPlan) -> bool:
    return 0 in plan.samples or sum(plan.n_query) > len(plan.rows) + len(plan.drafts)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 33])
def test_the_more_rows_the_fewer_nodes(rows: int, depth: int) -> None:
    bench, host = bench_of(GRAPHS, depth=depth)
    prompts = {str(number): [number, 5, 9, 2] for number in range(rows)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=40)
    bench.run()
    assert all(bench.tokens[name, 0] == oracle(prompt, 40) for name, prompt in prompts.items())
    drafted = [plan for plan in bench.runner.plans if plan.drafts]
    assert all(query_tokens(plan) <= 32 and not reads_prompt(plan) for plan in drafted)
    full = [plan for plan in drafted if len(plan.rows) == rows]
    assert bool(full) is (rows <= 16)
    assert max((max(plan.n_draft) for plan in full), default=0) == max(0, min(8, 32 // rows - 1))
    if rows > 16:
        alone = [plan for plan in bench.runner.plans if len(plan.rows) == rows]
        assert len(alone) >= 39 and not host.calls, "nobody waits for a drafter that is not called"


@pytest.mark.parametrize("device", [None, DeviceTraits(3), DeviceTraits(3, reads_tokens=True)])
def test_no_drafts_beside_a_prompt_where_a_graph_has_only_the_prompt(device: DeviceTraits | None) -> None:
    """A longer prompt has no graph either way, so drafts beside it cost nothing."""
    bench, _ = bench_of(GRAPHS, device, luck=0.5)
    given = {"one": [1, 2, 3], "two": [4, 5, 6, 7]} | {f"short{number}": [number] * 9 for number in range(6)}
    given |= {f"long{number}": [number] * 40 for number in range(6)}
    for name, prompt in given.items():
        bench.submit(name, prompt, max_tokens=60 if name in ("one", "two") else 3)
        for _ in range(4):
            bench.turn()
    bench.run()
    for name, prompt in given.items():
        assert bench.tokens[name, 0] == oracle(prompt, 60 if name in ("one", "two") else 3), name
    plans = [plan for plan in bench.runner.plans if reads_prompt(plan)]
    short = [plan for plan in plans if query_tokens(plan) - len(plan.drafts) <= 24]
    assert len(short) >= 6 and not any(plan.drafts for plan in short)
    assert any(plan.drafts for plan in plans)
    assert any(plan.drafts for plan in bench.runner.plans if not reads_prompt(plan))


@pytest.mark.parametrize("device", [None, DeviceTraits(3), DeviceTraits(3, reads_tokens=True)])
@pytest.mark.parametrize(
    "option",
    [{"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 3}, {"logit_bias": ((4, 1.0),)}, {"temperature": 0.8}],
    ids=lambda option: next(iter(option)),
)
def test_no_drafts_beside_logits_processors(device: DeviceTraits | None, option: dict[str, Any]) -> None:
    """The fake device reads no processor. Temperature is none."""
    bench, _ = bench_of(GRAPHS, device, luck=0.5, depth=1)
    bench.submit("before", [1, 2, 3], max_tokens=90)
    for _ in range(8):
        bench.turn()
    first = len(bench.runner.plans)
    (request,) = bench.submit("processed", [4, 5, 6], max_tokens=20, **option)
    while not request.finish:
        bench.turn()
    last = len(bench.runner.plans)
    bench.run()
    assert bench.tokens["before", 0] == oracle([1, 2, 3], 90)
    plans = bench.runner.plans
    assert any(plan.drafts for plan in plans[:first]) and any(plan.drafts for plan in plans[last:])
    beside = [plan for plan in plans[first + 1 : last] if len(plan.rows) == 2]
    assert len(beside) > 3
    assert any(plan.drafts for plan in beside) is ("temperature" in option)


@pytest.mark.parametrize("limits", [GRAPHS, DraftLimits(1024)])
def test_no_drafts_beside_a_grammar(limits: DraftLimits) -> None:
    bench, _ = bench_of(limits)
    bench.submit("free", [1, 2, 3], max_tokens=60)
    for _ in range(3):
        bench.turn()
    first = len(bench.runner.plans)
    (request,) = bench.submit("bound", [4, 5, 6], max_tokens=20)
    request.constraint = GrammarAndRules(Chains(), ())
    bench.run()
    assert bench.tokens["free", 0] == oracle([1, 2, 3], 60)
    both = [plan for plan in bench.runner.plans[first:] if len(plan.rows) == 2]
    assert both and any(plan.drafts for plan in both) is (limits is not GRAPHS)


class Chains(OneTwo):
    """Allows no draft token."""

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        return Draft(), self.mask()


def test_a_device_without_graphs_verifies_in_every_step() -> None:
    bench, _ = bench_of(DraftLimits(1024))
    for number in range(33):
        bench.submit(str(number), [number, 5, 9, 2], max_tokens=30, logprobs=1 if number == 7 else None)
        bench.turn()
    bench.run()
    assert all(bench.tokens[str(number), 0] == oracle([number, 5, 9, 2], 30) for number in range(33))
    plans = bench.runner.plans
    assert any(plan.drafts and reads_prompt(plan) for plan in plans)
    assert max(query_tokens(plan) for plan in plans if plan.drafts) > 32
