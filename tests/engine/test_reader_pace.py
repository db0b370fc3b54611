"""Requests ahead of their readers leave their part of a step to prompts: when, for how long, and without another token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.plan import StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.request import READER_LEAD, Request
from ridgeline.wire.messages import Submit
from tests.engine.helpers import VOCAB, Bench, oracle, prompts

PACE_S = 0.1
"""A turn of a Bench takes 0.02 s, so that requests come ahead of such readers."""


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


def turns(bench: Bench, count: int) -> Iterator[StepPlan]:
    """The plans of so many turns."""
    for _ in range(count):
        bench.turn()
        yield bench.runner.plans[-1]


def running(bench: Bench, *readers: bool) -> list[Request]:
    """Requests with and without a reader, each with 30 tokens of its answer."""
    made = [
        bench.submit(f"runs{index}", words(index, 4), max_tokens=90, has_reader=reader)[0]
        for index, reader in enumerate(readers)
    ]
    for _ in range(31):
        bench.turn()
    return made


def rows(plan: StepPlan, requests: list[Request]) -> list[bool]:
    """Which of the requests have a part of the step."""
    return [request.row in plan.rows for request in requests]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_takes_the_steps_of_those_ahead_and_of_nobody_else(depth: int) -> None:
    bench = Bench(step_tokens=16, pace_s=PACE_S, depth=depth)
    made = running(bench, True, False, True)
    bench.submit("prompt", words(9, 64), max_tokens=4)
    for plan in turns(bench, 4):
        assert rows(plan, made) == [False, True, False]
        assert plan.n_tokens == 16, "the prompt takes the whole step"
    bench.run()
    assert bench.tokens["prompt", 0] == oracle(words(9, 64), 4)
    for index in range(3):
        assert bench.tokens[f"runs{index}", 0] == oracle(words(index, 4), 90)


def test_without_the_option_or_a_prompt_all_run() -> None:
    off = Bench(step_tokens=16)
    made = running(off, True, True)
    off.submit("prompt", words(9, 40), max_tokens=4)
    assert all(rows(plan, made) == [True, True] for plan in turns(off, 3))
    alone = Bench(step_tokens=16, pace_s=PACE_S)
    made = running(alone, True, True)
    assert all(rows(plan, made) == [True, True] for plan in turns(alone, 10))


def test_a_reader_who_has_caught_up_is_served_in_every_step() -> None:
    """A stream of prompts takes all the steps that it can get, and a reader still finds his next tokens."""
    bench = Bench(step_tokens=16, pace_s=PACE_S, prefix_cache=False)
    (reads,) = running(bench, True)
    shares, spare = [], []
    for number in range(150):
        if len(bench.scheduler.running) < 3:
            bench.submit(f"p{number}", words(number, 60), max_tokens=1)
        bench.turn()
        read = (bench.clock.now - reads.first_token) / PACE_S
        shares.append(reads.row in bench.runner.plans[-1].rows)
        spare.append(len(reads.tokens) - reads.prompt_len - read)
    assert not any(shares[:80]), "30 tokens of its answer last for 2 s"
    assert 0.1 < sum(shares[100:]) / 50 < 0.35, "then it gets a token in a fifth of the steps"
    assert min(spare) > READER_LEAD - 2, "and a reader always has some before him"


@pytest.mark.parametrize(("free_rows", "paced"), [(1, False), (2, True)])
def test_who_waits_for_a_row_gains_only_by_the_end_of_others(free_rows: int, paced: bool) -> None:
    """While a request waits for a row, those ahead take what prompts leave of a step: the sooner one ends, the sooner it runs."""
    bench = Bench(step_tokens=32, rows=2 + free_rows, pace_s=PACE_S)
    made = running(bench, True, True)
    bench.submit("prompt", words(9, 16), max_tokens=4)
    bench.submit("waits", words(10, 8), max_tokens=4)
    (plan,) = turns(bench, 1)
    assert len(plan.joins) == free_rows
    assert rows(plan, made) == [not paced, not paced]


def test_a_static_batch_is_not_paced_for_those_it_does_not_admit() -> None:
    bench = Bench(step_tokens=16, batching="static:2", pace_s=PACE_S)
    made = running(bench, True, True)
    bench.submit("next", words(9, 40), max_tokens=4)
    assert all(rows(plan, made) == [True, True] for plan in turns(bench, 10))


def test_a_preempted_request_is_computed_again_although_it_is_ahead() -> None:
    """Nobody but itself has a prompt then, so it does not wait for its reader."""
    bench = Bench(step_tokens=16, blocks=30, pace_s=1000.0)
    for index in range(2):
        bench.submit(f"r{index}", words(index, 20), max_tokens=70, has_reader=True)
    bench.run(turns=400)
    assert bench.scheduler.counts.preempted > 0
    for index in range(2):
        assert bench.tokens[f"r{index}", 0] == oracle(words(index, 20), 70)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_only_requests_ahead_of_readers_are_left_out_and_only_for_prompts(data: st.DataObject) -> None:
    """For any arrivals, paces and sizes: who is not ahead is in every step that has room for him, a step that leaves
    somebody out computes a prompt, and each request gets the tokens that it would get alone."""
    pace_s = data.draw(st.sampled_from([0.03, 0.1, 0.4]))
    bench = Bench(
        step_tokens=data.draw(st.integers(8, 24)), rows=8, blocks=200, depth=data.draw(st.integers(0, 1)), pace_s=pace_s
    )
    wanted = prompts(data.draw(st.integers(0, 99)), data.draw(st.integers(2, 7)))
    made: list[Request] = []
    for index, prompt in enumerate(wanted):
        made += bench.submit(f"r{index}", prompt, max_tokens=40, has_reader=data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(0, 30))):
            check_turn(bench, made, pace_s)
    for _ in range(1000):
        if bench.scheduler.idle:
            break
        check_turn(bench, made, pace_s)
    for index, prompt in enumerate(wanted):
        assert bench.tokens[f"r{index}", 0] == oracle(prompt, 40)


def check_turn(bench: Bench, made: list[Request], pace_s: float) -> None:
    """A turn. Requests that need a token and are not in its step are ahead, and the step computes a prompt."""
    now, launched = bench.clock.now + 0.01, len(bench.runner.plans)  # the next reading of the clock is that of the plan
    candidates = [request for request in made if request.row and request.expected < request.limit]
    candidates = [request for request in candidates if request.planned < request.expected]
    ahead = {
        request
        for request in candidates
        if request.has_reader
        and len(request.tokens) - request.prompt_len - READER_LEAD > (now - request.first_token) / pace_s
    }
    kept = {request: request.row for request in candidates}
    bench.turn()
    if len(bench.runner.plans) == launched:
        assert not candidates
        return
    plan = bench.runner.plans[launched]
    if plan.n_tokens < bench.scheduler.limits.step_tokens:
        out = {request for request, row in kept.items() if row not in plan.rows}
        assert out <= ahead
        assert not out or any(count > 1 for count in plan.n_query)


def local(pace: str) -> LocalEngine:
    """The shipped model with small steps, whose tokens do not depend on the batch."""
    config = EngineConfig(
        device="cpu", max_num_seqs=8, max_num_batched_tokens=32, deterministic=True, enable_prefix_caching=False,
        threads=1, kv_cache_memory=32 << 20, reader_pace=pace,
    )  # fmt: skip
    return LocalEngine.start(ModelConfig(max_model_len=512), config)


def answers(engine: LocalEngine) -> tuple[dict[str, list[int]], int]:
    """Tokens of two readers, one of a text without a reader and a newcomer with a long prompt; and how many tokens the readers
    got before the newcomer's first one."""
    answered: dict[str, list[int]] = {name: [] for name in ("reader 0", "reader 1", "no reader", "newcomer")}
    for number, name in enumerate(list(answered)[:3]):
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=60, ignore_eos=True)
        engine.submit(Submit(name, words(number, 9), sampling, time.monotonic(), has_reader=name != "no reader"))
    before, asked = 0, False
    for delta in engine.deltas():
        answered[delta.id] += delta.tokens
        if asked and not answered["newcomer"] and delta.id.startswith("reader"):
            before += len(delta.tokens)
        if not asked and min(len(answered[name]) for name in list(answered)[:3]) == READER_LEAD + 4:
            asked = True
            sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            engine.submit(Submit("newcomer", words(9, 300), sampling, time.monotonic(), has_reader=True))
    engine.close()
    return answered, before


def test_on_a_real_model_a_newcomer_takes_the_steps_of_readers_and_no_token_changes() -> None:
    threads = torch.get_num_threads()
    plain, delayed_by = answers(local(""))
    paced, left = answers(local("100s"))
    torch.set_num_threads(threads)
    assert paced == plain and [len(tokens) for tokens in plain.values()] == [60, 60, 60, 5]
    assert delayed_by >= 2 * 9, "300 tokens of a prompt take at least 9 steps of 32"
    assert left <= 2, "tokens that were committed together with the arrival"
