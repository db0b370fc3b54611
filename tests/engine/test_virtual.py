"""The real scheduler on a virtual device: what finishes, how long it takes, and what drafts gain."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.draft import DEVICE, Draft
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout, LayerSpec, ModelSpec, Rope
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.request import Request
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.virtual import VirtualRunner
from ridgeline.kv.retention import KEEP_ALL, Retention, read_retention
from ridgeline.speculation.interface import NO_SPECULATION, RequestView, Speculation
from ridgeline.speculation.state import NO_STEP_DRAFTS, StepDrafts

LAYER = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
SPEC = ModelSpec("LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 131_072)
COST = CostModel(SPEC, 989e12, 4.8e12, row_s=1e-6, token_s=2e-7)
LAYOUT = KvLayout((KvGroup(tuple(range(32)), None, 131_072),), 64, 64 * 131_072, KV_FORMATS["bfloat16"])
END = 7


class Simulation:
    """A scheduler and a loop around a virtual runner. Records plans, results and what each request gained."""

    def __init__(
        self,
        runner: VirtualRunner,
        *,
        rows: int = 64,
        depth: int = 0,
        drafts: Speculation = NO_SPECULATION,
        retention: Retention = KEEP_ALL,
    ) -> None:
        leases = Leases(LAYOUT, 4000, prefix_cache=True, retention=retention)
        scheduler = Scheduler(LAYOUT, leases, Limits(rows, 2048, 4096), admission("continuous"), drafts)
        self.runner = self.device = runner
        self.loop = Loop(scheduler, self, steps_in_flight=depth, clock=lambda: runner.now)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.times: list[tuple[float, int]] = []
        """(virtual time, tokens gained) of each commit."""

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.device.launch(plan)

    def collect(self) -> StepResult:
        self.results.append(self.device.collect())
        return self.results[-1]

    def close(self) -> None:
        self.device.close()

    def submit(self, prompt: Sequence[int], output: int, *, seed: int, min_tokens: int = 0) -> None:
        name = str(len(self.tokens))
        self.tokens[name] = []
        self.loop.scheduler.add(
            Request(
                id=name,
                choice=0,
                tokens=array("i", prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(max_tokens=output, min_tokens=min_tokens),
                limit=len(prompt) + output,
                stop_ids=(END,),
                seed=seed,
                order=(0, len(self.tokens)),
                arrival=self.runner.now,
                root=b"",
                cache=True,
            )
        )

    def turn(self) -> None:
        gained = 0
        for update in self.loop.turn().each():
            self.tokens[update.id] += update.tokens
            gained += len(update.tokens)
            if update.finish:
                self.finish[update.id] = update.finish
        self.times.append((self.runner.now, gained))

    def run(self, arrivals: Sequence[tuple[float, Sequence[int], int]] = ()) -> None:
        """Submit (time in seconds, prompt, output tokens) when they arrive and turn until everything has ended."""
        for number, (at, prompt, output) in enumerate(arrivals):
            while self.runner.now < at and not self.loop.scheduler.idle:
                self.turn()
            self.runner.advance(at)
            self.submit(prompt, output, seed=number)
        while not self.loop.scheduler.idle:
            self.turn()


def trace(count: int, apart_s: float) -> list[tuple[float, list[int], int]]:
    """Arrivals with prompts of 1 to 3,000 tokens, a third of which begin alike."""
    chance = random.Random(0)
    common = [chance.randrange(1000) for _ in range(500)]
    made = []
    for index in range(count):
        suffix = [chance.randrange(1000) for _ in range(chance.choice((1, 30, 400, 3000)))]
        made.append((index * apart_s, (common + suffix if index % 3 == 0 else suffix)[:3000], chance.randint(1, 60)))
    return made


@pytest.mark.parametrize("depth", [0, 1])
def test_a_trace_ends_and_takes_the_sum_of_its_predicted_steps(depth: int) -> None:
    simulation = Simulation(VirtualRunner(COST), rows=16, depth=depth)
    arrivals = trace(60, 0.0)
    simulation.run(arrivals)
    assert len(simulation.finish) == 60 and set(simulation.finish.values()) == {"length"}
    assert [len(tokens) for tokens in simulation.tokens.values()] == [output for _, _, output in arrivals]
    predicted, held = 0.0, {}
    for plan in simulation.plans:
        held |= {join.row: join.computed for join in plan.joins}
        shares = [(held[row], count) for row, count in zip(plan.rows, plan.n_query, strict=True)]
        held |= {row: start + count for row, (start, count) in zip(plan.rows, shares, strict=True)}
        predicted += COST.step_s(step_work(SPEC, shares, sum(plan.samples)))
    assert (
        simulation.runner.now
        == pytest.approx(predicted)
        == pytest.approx(sum(result.device_s for result in simulation.results))
    )


def test_a_simulation_knows_no_attention_so_adaptive_retention_drops_nothing() -> None:
    arrivals = trace(6, 0.0)
    plain, adaptive = (
        Simulation(VirtualRunner(COST), retention=policy) for policy in (KEEP_ALL, read_retention("adaptive:0.9", 64))
    )
    for simulation in (plain, adaptive):
        simulation.run(arrivals)
    long_prompts = sum(len(prompt) >= 160 and output > 1 for _, prompt, output in arrivals)
    assert sum(len(plan.measures) for plan in adaptive.plans) == long_prompts > 0
    assert not any(plan.drops for plan in adaptive.plans)
    assert (adaptive.tokens, adaptive.runner.now) == (plain.tokens, plain.runner.now)


def test_time_passes_between_arrivals() -> None:
    simulation = Simulation(VirtualRunner(COST))
    simulation.run([(0.0, [1, 2, 3], 4), (10.0, [1, 2, 3], 4)])
    assert 10 < simulation.runner.now == pytest.approx(10 + sum(result.device_s for result in simulation.results[4:]))
    assert sum(result.gap_s for result in simulation.results) == pytest.approx(
        10 - simulation.results[0].device_s * 4, abs=1e-4
    )


@pytest.mark.parametrize("rows", [1, 64])
def test_a_saturated_batch_decodes_as_the_closed_form_says(rows: int) -> None:
    prompt, output = 256, 512
    simulation = Simulation(VirtualRunner(COST), rows=rows)
    simulation.run([(0.0, [seed + 1] * prompt, output) for seed in range(rows)])
    full = [(now, gained) for now, gained in simulation.times if gained == rows]
    rate = sum(gained for _, gained in full[1:]) / (full[-1][0] - full[0][0])
    assert rate == pytest.approx(rows / COST.decode_s([prompt + output // 2] * rows), rel=0.01)


def test_tokens_follow_from_seed_and_position_and_never_end_unless_asked() -> None:
    def tokens(rows: int, depth: int, stop_probability: float = 0.0, min_tokens: int = 0) -> dict[str, list[int]]:
        simulation = Simulation(VirtualRunner(COST, stop_probability=stop_probability), rows=rows, depth=depth)
        for seed in range(6):
            simulation.submit([1, 2, 3 + seed], 400, seed=seed // 2, min_tokens=min_tokens)
        simulation.run()
        return simulation.tokens

    plain = tokens(1, 0)
    assert plain == tokens(6, 1)
    assert plain["0"] == plain["1"] != plain["2"]
    assert all(END not in said and len(said) == 400 and len(set(said)) > 380 for said in plain.values())
    ended = tokens(6, 1, stop_probability=0.02)
    assert all(said[-1] == END and END not in said[:-1] for said in ended.values())
    late = tokens(6, 1, stop_probability=0.02, min_tokens=350)
    assert all(350 < len(said) <= 400 and END not in said[:350] for said in late.values())


class Always(Speculation):
    """Drafts the same tree for every step of every request; tokens of the host's own, or unknown ones of the device."""

    idle = False

    def __init__(self, parents: tuple[int, ...], *, device: bool) -> None:
        self.max_nodes, self._parents, self._device = len(parents), parents, device

    def waits(self, request: Any) -> bool:
        return not self._device

    def skips(self, request: Any) -> bool:
        return False

    def propose(self, request: Any, nodes: int) -> Draft:
        count = min(len(self._parents), nodes, request.limit - request.expected - 1)
        tokens = (DEVICE,) * count if self._device else tuple(range(10, 10 + count))
        return Draft(tokens, self._parents[:count]) if count > 0 else Draft()

    def begin_step(self, plan: StepPlan, requests: Sequence[RequestView]) -> StepDrafts:
        plan.ahead = self.max_nodes if self._device else 0
        return NO_STEP_DRAFTS


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("parents", "expected"),
    [((-1, 0, 1), 1 + 0.6 + 0.6**2 + 0.6**3), ((-1, -1, 0, 1), 1 + 0.84 * 1.6)],
    ids=["chain", "tree"],
)
def test_drafts_are_kept_with_the_stated_probability(
    parents: tuple[int, ...], expected: float, depth: int, device: bool
) -> None:
    simulation = Simulation(VirtualRunner(COST, acceptance=0.6), depth=depth, drafts=Always(parents, device=device))
    simulation.run([(0.0, [seed], 300) for seed in range(40)])
    assert set(simulation.finish.values()) == {"length"}
    assert all(len(tokens) == 300 for tokens in simulation.tokens.values())
    gained = [
        count
        for plan, result in zip(simulation.plans, simulation.results, strict=True)
        for n_draft, count in zip(plan.n_draft, result.counts, strict=True)
        if n_draft == len(parents) and count
    ]
    assert sum(gained) / len(gained) == pytest.approx(expected, rel=0.03)


def speed(rows: int, steps: int = 1500) -> float:
    """Steps a second of a batch that decodes, by the wall clock."""
    simulation = Simulation(VirtualRunner(COST), rows=rows)
    for seed in range(rows):
        simulation.submit([seed + 1] * 8, steps, seed=seed)
    begin = time.perf_counter()
    simulation.run()
    return len(simulation.plans) / (time.perf_counter() - begin)


if __name__ == "__main__":
    for count in (1, 16, 64, 256):
        print(f"{count} rows: {speed(count):,.0f} steps/s")
