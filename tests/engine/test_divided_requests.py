"""Ranks that divide requests say what a single rank says, and each has the keys and values of its own requests only."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import StepPlan
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.engine.divided_leases import DividedLeases
from ridgeline.engine.divided_runner import plan_of_rank, share_of
from ridgeline.engine.group import GroupRunner
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.scheduler import Scheduler
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.divided import divide, step_of_rank
from ridgeline.ops.step import StepInputs
from ridgeline.wire.messages import Cancel, Submit
from tests.engine.constrained import Grammars, OneTwo
from tests.engine.fake import FakeRunner, next_token
from tests.engine.helpers import PLAIN, VOCAB, Bench
from tests.engine.test_group import CONFIG, answers, ended_within, opened, requests
from tests.models.families import save

WHOLE = {"expert_parallel": True}
FEW_BLOCKS = {"kv_cache_memory": 120_000}
CASES = {
    "a shared expert": ("qwen2-moe", 2, WHOLE, {}),
    "five experts over two": ("mixtral", 2, WHOLE, {}),
    "idle ranks": ("mixtral", 5, WHOLE, {"max_num_seqs": 3}),
    "more ranks than KV heads": ("qwen3-moe", 4, WHOLE, {}),
    "dense layers between": ("qwen3-moe-mixed", 2, WHOLE, {}),
    "windows, biases and sinks": ("gpt-oss", 2, WHOLE, {}),
    "a norm of all heads": ("olmoe", 2, WHOLE, {}),
    "divided widths": ("qwen3-moe", 2, {}, {}),
    "int8": ("qwen3-moe", 2, WHOLE | {"quantization": "int8"}, {}),
    "int8 cache": ("qwen3-moe", 2, WHOLE | {"kv_cache_dtype": "int8"}, {}),
    "preempted": ("qwen3-moe", 2, WHOLE | {"max_model_len": 128}, FEW_BLOCKS),
    "four ranks, preempted": ("mixtral", 4, WHOLE | {"max_model_len": 128}, FEW_BLOCKS),
    "drafts": ("qwen3-moe", 2, WHOLE, {"speculate": "lookahead"}),
    "no prefix cache": ("mixtral", 2, WHOLE, {"enable_prefix_caching": False}),
    "deterministic": ("qwen3-moe", 3, WHOLE, {"deterministic": True}),
    "planned ahead": ("qwen3-moe", 2, WHOLE, {"steps_in_flight": 1}),
}
"""Name -> family, ranks, options of model and engine."""
SHORT = ("a shared expert",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case not in SHORT)) for case in CASES])
def test_ranks_say_what_a_single_rank_says(case: str, tmp_path: Path) -> None:
    family, ranks, model, engine = CASES[case]
    save(family, tmp_path)
    options: dict[str, Any] = dict(engine)
    with opened(tmp_path, replace(CONFIG, **options), **{**model, "expert_parallel": False}) as alone:
        expected = answers(alone)
    with opened(tmp_path, replace(CONFIG, data_parallel_size=ranks, **options), **model) as several:
        leases = several.engine.loop.scheduler.leases
        assert isinstance(leases, DividedLeases) and len(leases.parts) == ranks
        preempted = 0
        for _ in range(2):  # the second time from cached prefixes
            tokens: dict[str, list[int]] = {}
            waiting = [msgspec.structs.replace(submit, priority=-number) for number, submit in enumerate(requests())]
            while waiting or not several.engine.idle:
                if waiting:  # later ones are more urgent
                    several.submit(waiting.pop(0))
                frame = several.engine.turn()
                for delta in frame.each() if frame is not None else ():
                    tokens.setdefault(f"{delta.id}/{delta.choice}", []).extend(delta.tokens)
                if frame is not None and frame.stats is not None:
                    preempted += frame.stats.preempted
            several._open.clear()
            assert tokens == expected
        assert preempted or case != "preempted"
        assert leases.pool.used == 0
        if options.get("enable_prefix_caching", True):
            assert sum(part.pool.cached > 0 for part in leases.parts) > 1, "several ranks had requests"


class FirstTokens(OneTwo):
    """Allows tokens 1 and 2 of a vocabulary of 320."""

    def mask(self) -> bytes:
        return (0b110).to_bytes(40, "little")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_structured_output_is_that_of_a_single_rank(ranks: int, tmp_path: Path) -> None:
    """Masks of grammars, beside requests with allowed tokens, biases and none of them."""
    save("qwen3-moe", tmp_path)
    kinds = (
        SamplingParams(temperature=0.9, seed=1, max_tokens=12, grammar=Grammar("regex", "[12]{3}"), ignore_eos=True),
        SamplingParams(temperature=0.9, seed=2, max_tokens=12, allowed_token_ids=(7, 8, 9), ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, logit_bias={11: 9.0}, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True),
    )
    said = []
    for size in (1, ranks):
        with opened(tmp_path, replace(CONFIG, data_parallel_size=size), expert_parallel=size > 1) as engine:
            grammars = cast(Any, Grammars(lambda grammar: FirstTokens()))
            engine.engine.setup = replace(engine.engine.setup, grammars=grammars)
            tokens: dict[str, list[int]] = {}
            submits = [Submit(str(at), [*range(9, 30), at], kinds[at % 4], arrival=0.0) for at in range(6)]
            for delta in engine.run(submits):
                tokens.setdefault(delta.id, []).extend(delta.tokens)
            said.append(tokens)
    assert said[0] == said[1]
    assert len(said[0]["0"]) == len(said[0]["4"]) == 3 and {*said[0]["0"], *said[0]["4"]} <= {1, 2}
    assert {*said[0]["1"], *said[0]["5"]} <= {7, 8, 9}


@pytest.mark.long
def test_cancelled_requests_and_a_request_alone(tmp_path: Path) -> None:
    """A cancelled request leaves no block behind, on any rank. With a request alone the other ranks have none."""
    save("mixtral", tmp_path)
    sampling = SamplingParams(temperature=0.8, seed=2, max_tokens=30, ignore_eos=True)
    submits = [Submit(name, [*range(9, 40), number], sampling, arrival=0.0) for number, name in enumerate("abcd")]
    said = []
    for ranks in (1, 3):
        with opened(tmp_path, replace(CONFIG, data_parallel_size=ranks), expert_parallel=ranks > 1) as engine:
            tokens: dict[str, list[int]] = {}
            for delta in engine.run(submits):
                tokens.setdefault(delta.id, []).extend(delta.tokens)
                engine.engine.handle(Cancel("b"))
            assert engine.engine.loop.scheduler.leases.pool.used == 0
            alone = [token for delta in engine.run([submits[3]]) for token in delta.tokens]
            assert alone == tokens["d"]
            said.append([tokens[name] for name in "acd"])
    assert said[0] == said[1] and len(said[0][0]) == 30


@pytest.mark.long
def test_a_lost_rank_ends_the_engine(tmp_path: Path) -> None:
    """Within five seconds, with the reason, and no process stays."""
    save("mixtral", tmp_path)
    with opened(tmp_path, replace(CONFIG, data_parallel_size=2), expert_parallel=True) as engine:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        pids = [follower.process.pid for follower in runner._group.followers if follower.process]
        for request in requests():
            engine.submit(request)
        for _ in range(3):
            engine.engine.turn()
        os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineFailed, match="A rank of the model is lost: rank 1 has ended with status -9"):
            while time.monotonic() - began < 10:
                engine.engine.turn()
                time.sleep(0.01)
        assert time.monotonic() - began < 5
        engine._open.clear()
    assert ended_within(1.0, pids)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with pytest.raises(ConfigError, match="this model has none: start one server per replica") as caught:
        LocalEngine.start(ModelConfig(str(tmp_path)), replace(CONFIG, data_parallel_size=2))
    assert caught.value.param == "data_parallel_size"


def test_a_rank_has_whole_attention_and_a_part_of_the_experts(tmp_path: Path) -> None:
    save("qwen2-moe", tmp_path)
    spec = served_spec(read_model(tmp_path)[0], ModelConfig(str(tmp_path), expert_parallel=True))
    divided, heads = spec.on_rank(2, 1), spec.on_rank(2)
    for layer, whole, by_heads in zip(divided.layers, spec.layers, heads.layers, strict=True):
        assert (layer.n_heads, layer.n_kv_heads) == (whole.n_heads, whole.n_kv_heads)
        assert layer.experts == by_heads.experts and by_heads.n_heads == whole.n_heads // 2
    assert heads.weight_bytes < divided.weight_bytes < spec.weight_bytes


# --- scheduling ----------------------------------------------------------------------------------------------------------


class DividedBench(Bench):
    """An engine without a device whose ranks divide requests. blocks: of each rank."""

    def __init__(self, ranks: int, blocks: int, rows: int = 8, step_tokens: int = 16, depth: int = 0) -> None:
        super().__init__(rows=rows, step_tokens=step_tokens, depth=depth)
        self.parts = DividedLeases(PLAIN, blocks, ranks, True, 0.3)
        self.leases, self.blocks = self.parts, blocks
        limits = Limits(rows, step_tokens, 256, 0.0, 1)
        self.scheduler = Scheduler(PLAIN, self.leases, limits, admission("continuous"))
        self.runner = FakeRunner(PLAIN, ranks * blocks, vocab=VOCAB)
        self.loop = Loop(self.scheduler, self.runner, steps_in_flight=depth, clock=self.clock)

    def turn(self) -> None:
        super().turn()
        for request in self.scheduler.running:
            for block in (block for table in request.tables for block in table if block):
                assert (block - 1) // self.blocks == request.rank


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 4), blocks=st.integers(12, 40), depth=st.integers(0, 1))
def test_blocks_are_those_of_the_rank(data: st.DataObject, ranks: int, blocks: int, depth: int) -> None:
    """With prefixes, choices that fork, preemption, priorities and cancels the tokens are those of each request alone."""
    bench = DividedBench(ranks, blocks, depth=depth)
    expected, cancelled = {}, set[str]()
    for number in range(data.draw(st.integers(1, 12))):
        name, shared = str(number), data.draw(st.sampled_from([0, 4, 9, 17]))
        prompt = [*range(shared), *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))]
        n, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 14))
        bench.submit(name, prompt, n=n, priority=data.draw(st.integers(-1, 1)), max_tokens=count, seed=number)
        for choice in range(n):
            expected[name, choice] = tokens_after(prompt, number, choice, count)
        if data.draw(st.booleans()):
            bench.turn()
        if data.draw(st.integers(0, 4)) == 0:
            cancelled.add(name)
            bench.scheduler.cancel(name)
    bench.run()
    for (name, choice), tokens in expected.items():
        if name not in cancelled:
            assert bench.tokens[name, choice] == tokens


def tokens_after(prompt: Sequence[int], seed: int, choice: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, choice, VOCAB))
    return tokens[len(prompt) :]


def test_requests_are_spread_and_find_their_prefixes() -> None:
    bench = DividedBench(3, 40, rows=12, step_tokens=96)
    made = [bench.submit(str(number), [number] * 9, max_tokens=20)[0] for number in range(9)]
    bench.turn()
    assert Counter(request.rank for request in made) == {0: 3, 1: 3, 2: 3}
    bench.run()
    for number in (5, 1, 7):
        again = bench.submit(f"again {number}", [number] * 9, max_tokens=2)[0]
        bench.run()
        assert again.rank == made[number].rank and bench.cached[again.id, 0] == 8
    assert bench.leases.reset_prefix_cache() > 9 and bench.leases.pool.cached == 0


def test_a_full_rank_preempts_its_own_requests_only() -> None:
    """The last requests are of the other rank, and its blocks would not help."""
    bench = DividedBench(2, 12, step_tokens=64)
    size = PLAIN.page_tokens
    first = bench.submit("first", [1] * 4 * size, max_tokens=4 * size)[0]
    other = bench.submit("other", [2] * 2 * size, max_tokens=size)[0]
    third = bench.submit("third", [3] * 4 * size, max_tokens=6 * size)[0]
    last = bench.submit("last", [4] * 2 * size, max_tokens=size)[0]
    bench.turn()
    assert (first.rank, other.rank, third.rank, last.rank) == (0, 1, 0, 1)
    bench.run()
    assert third.preempted and not (first.preempted or other.preempted or last.preempted)


# --- what a rank runs -----------------------------------------------------------------------------------------------------


def test_a_plan_has_the_blocks_of_a_rank() -> None:
    plan = StepPlan(1, pages=array("i", [1, 0, 0, 3, 2, 0, 0, 13, 1, 0, 1, 10]), copies=array("i", [13, 14, 2, 9]))
    first, second = (plan_of_rank(plan, rank, 10) for rank in range(2))
    assert first.pages.tolist() == [1, 0, 0, 3, 2, 0, 0, 0, 1, 0, 1, 10] and first.copies.tolist() == [2, 9]
    assert second.pages.tolist() == [1, 0, 0, 0, 2, 0, 0, 3, 1, 0, 1, 0] and second.copies.tolist() == [3, 4]
    assert plan_of_rank(empty := StepPlan(2), 1, 10) is empty
    assert share_of(np.array([0, 2, 0]), [3, 4, 2]) == 5 and share_of(np.array([], dtype=np.int32), []) == 0


@given(
    rows=st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 5)), min_size=1, max_size=6),
    decode=st.booleans(),
    bounded=st.booleans(),
)
def test_every_token_is_on_the_rank_of_its_row(rows: list[tuple[int, int]], decode: bool, bounded: bool) -> None:
    """Owner -1: the scratch row, whose tokens no rank has. decode: each row has one token."""
    owners, counts = [owner for owner, _ in rows], [1 if decode else count for _, count in rows]
    of_token = [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]
    share = max([1, *(of_token.count(rank) for rank in range(3))]) if bounded else 0
    step = _step(owners, counts, share)
    stream, parts = torch.arange(len(of_token)).view(-1, 1), []
    division = divide(step, 3)
    for rank in range(3):
        part, order = step_of_rank(step, rank, division), division.order[rank].tolist()
        held = [token for token, owner in enumerate(of_token) if owner == rank]
        padding = [0] * ((share or len(of_token)) - len(held))
        assert order == held + [-1 for _ in padding]
        assert part.position.tolist() == [*step.position[held].tolist(), *padding]
        assert part.rows[part.row_of.long()].tolist() == [*step.rows[step.row_of[held].long()].tolist(), *padding]
        assert part.q_start.tolist()[-1] == (len(order) if step.decode else len(held))
        for token, at in zip(held, part.row_of.tolist(), strict=False):
            row = int(step.row_of[token])
            assert part.length[at] == step.length[row]
            assert part.q_start.diff()[at] == counts[row]
        parts.append(stream[division.order[rank].clamp(min=0)])
        assert torch.equal(division.parts(stream)[rank][: len(held)], stream[held])
    held = [token for token, owner in enumerate(of_token) if owner >= 0]
    assert torch.equal(division.joined(torch.stack(parts))[held], stream[held])


def _step(owners: Sequence[int], counts: Sequence[int], share: int) -> StepInputs:
    """A step whose rows belong to these ranks and have so many query tokens."""
    count = torch.tensor(counts, dtype=torch.int32)
    numbers = torch.arange(len(counts), dtype=torch.int32)
    rows = torch.tensor([at + 1 if owner >= 0 else 0 for at, owner in enumerate(owners)], dtype=torch.int32)
    starts = torch.cat((count.new_zeros(1), count.cumsum(0, dtype=torch.int32)))
    position = torch.arange(100, 100 + sum(counts), dtype=torch.int32)
    ranks = torch.tensor([-1, *owners], dtype=torch.int32)
    row_of, most = numbers.repeat_interleave(count), max(counts)
    return StepInputs(rows, starts, count + 7, position, row_of, most, 64, ranks=ranks, share=share)
