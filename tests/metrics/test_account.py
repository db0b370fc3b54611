"""Useful and executed FLOPs: tokens that count, rejected drafts, recomputation, tokens behind an end, and the draft model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from ridgeline.core.cost import CostModel, WorkMeter, step_work
from ridgeline.core.drafting import DraftWork, ModelDrafts, NetworkDrafts, counts_by_nodes
from ridgeline.core.plan import StepPlan
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.metrics.account import Accounted, Committed, DeviceAccount, Waste, waste_of
from tests.engine.helpers import Bench, Guesser, prompts

SPEC = ModelSpec("LlamaForCausalLM", 97, 32, (LayerSpec(4, 2, 8, 64, Rope(dim=8)),) * 3, 256)
DRAFT = ModelSpec("LlamaForCausalLM", 97, 16, (LayerSpec(2, 1, 8, 32, Rope(dim=8)),), 256)


class Counter:
    """An energy meter that reports what it is given."""

    def take(self, prompt_s: float, output_s: float) -> tuple[float, float, float, float]:
        return 5.0, prompt_s, output_s, prompt_s + output_s


def account(drafts: DraftWork | None = None) -> DeviceAccount:
    cost = CostModel(SPEC, 1e12, 1e11)
    return DeviceAccount(cost, Counter(), drafts) if drafts else DeviceAccount(cost, Counter())


def plan_of(n_query: Sequence[int], n_draft: Sequence[int], ahead: int = 0) -> StepPlan:
    plan = StepPlan(1, n_query=array("i", n_query), n_draft=array("i", n_draft), samples=array("b", [1] * len(n_query)))
    plan.drafts, plan.ahead = array("i", [0] * sum(n_draft)), ahead
    return plan


def test_rejected_drafts_are_executed_and_not_useful() -> None:
    """A row verifies four nodes and keeps one; another only decodes."""
    waste = waste_of(0, 5, 100, 102, 0)
    assert waste == (Waste(0, 100, 2, False),)
    accounted = account().step(Committed([102, 51], plan_of([5, 1], [4, 0]), waste), 0, 0.01)
    assert accounted.flops == step_work(SPEC, [(100, 5), (50, 1)], 6).flops
    assert accounted.useful_flops == step_work(SPEC, [(100, 2), (50, 1)], 3).flops


def test_a_prompt_computed_again_is_executed_and_not_useful() -> None:
    """A request that had computed 40 tokens is preempted. The step computes tokens 16 to 48, of which eight are new."""
    waste = waste_of(0, 32, 16, 48, 40)
    assert waste == (Waste(0, 16, 8, True),)
    accounted = account().step(Committed([48], plan_of([32], [0]), waste), 32, 0.01)
    assert accounted.flops == step_work(SPEC, [(16, 32)], 1).flops
    assert accounted.useful_flops == step_work(SPEC, [(40, 8)], 1).flops
    assert waste_of(0, 32, 16, 48, 0) == waste_of(0, 1, 40, 41, 40) == ()


def test_tokens_behind_an_end_are_not_useful() -> None:
    """The row had ended before the step was committed."""
    accounted = account().step(Committed([20, 31], plan_of([1, 1], [0, 0]), waste_of(0, 1, 20, 20, 0)), 0, 0.01)
    assert accounted.flops == step_work(SPEC, [(20, 1), (30, 1)]).flops
    assert accounted.useful_flops == step_work(SPEC, [(30, 1)]).flops


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("chance", [None, 0.5])
def test_each_token_is_useful_once(depth: int, chance: float | None) -> None:
    """Preempted, speculated and with steps in flight: useful query tokens are those that the answers needed."""
    options = {} if chance is None else {"speculation": Guesser(chance, 4, seed=5)}
    bench = Bench(depth=depth, blocks=24, step_tokens=64, prefix_cache=False, **options)
    wanted = prompts(7, 9)
    for index, prompt in enumerate(wanted):
        bench.submit(f"r{index}", prompt, max_tokens=20)
    useful = executed = last = preempted = 0
    while not bench.scheduler.idle:
        bench.turn()
        preempted += bench.loop.take_counts().preempted
        if bench.scheduler.last_step == last:
            continue
        last = bench.scheduler.last_step
        _, plan, waste = bench.scheduler.committed
        executed += sum(plan.n_query)
        useful += sum(plan.n_query) - sum(plan.n_query[row.place] - row.useful for row in waste)
        accounted = account().step(bench.scheduler.committed, 0, 0.01)
        assert 0 <= accounted.useful_flops <= accounted.flops and (accounted.useful_flops < accounted.flops) is bool(
            waste
        )
    assert preempted > 0
    assert useful == sum(len(prompt) + 20 - 1 for prompt in wanted) < executed


def test_a_draft_model_counts_as_executed() -> None:
    """Three nodes ahead for two rows: a pass over the last two tokens of each, then two passes over one token."""
    plan = plan_of([1, 1], [0, 0], ahead=3)
    plan.unread = array("i", [2, 7])
    accounted = account(ModelDrafts(DRAFT, 2)).step(Committed([51, 21], plan), 0, 0.01)
    first, later = step_work(DRAFT, [(49, 2), (19, 2)], 2), step_work(DRAFT, [(50, 1), (20, 1)], 2)
    behind = WorkMeter(DRAFT).work([21], [5], 0)
    assert accounted.draft_flops == behind.flops + first.flops + 2 * later.flops
    assert accounted.draft_bytes == behind.bytes + first.bytes + 2 * later.bytes
    assert accounted.flops == accounted.useful_flops == step_work(SPEC, [(50, 1), (20, 1)]).flops


def test_a_draft_model_reads_prompts() -> None:
    accounted = account(ModelDrafts(DRAFT, 2)).step(Committed([32], plan_of([32], [0])), 32, 0.01)
    assert accounted.draft_flops == step_work(DRAFT, [(0, 32)], 0).flops
    idle = account(ModelDrafts(DRAFT, 2)).step(Committed([33], plan_of([1], [0])), 0, 0.01)
    assert (idle.draft_flops, idle.draft_bytes) == (0, 0)


def test_a_network_counts_its_runs() -> None:
    """Nodes of two levels, with three parents: the last token and two nodes."""
    parents, depths = (-1, -1, 0, 1), (0, 0, 1, 1)
    work = NetworkDrafts(counts_by_nodes(parents), counts_by_nodes(depths), 1000, 700, SPEC.layers[0], 64)
    accounted = account(work).step(Committed([51, 21], plan_of([1, 1], [0, 0], ahead=4)), 0, 0.01)
    assert accounted.draft_flops == 3 * (2 * 2 * 1000 + SPEC.layers[0].attention_flops(0, 1) * 72)
    assert accounted.draft_bytes == 2 * 700 + 3 * 72 * 64
    assert work.of(plan_of([1, 1], [0, 0]), [51, 21]) == (0, 0)


def test_device_seconds_are_divided_by_query_tokens() -> None:
    accounted = account().step(Committed([30, 51], plan_of([30, 1], [0, 0])), 30, 0.031)
    assert accounted.joules == 5.0 and accounted.metered_s == pytest.approx(0.031)
    assert (accounted.prompt_joules, accounted.output_joules) == (pytest.approx(0.03), pytest.approx(0.001))
    assert Accounted() == Accounted(*[0.0] * len(Accounted._fields))
