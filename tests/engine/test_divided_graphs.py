"""Ranks that divide requests run padded steps, as CUDA graphs do, and say what a single rank says. Here the graphs run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.spec import kv_layout
from ridgeline.engine.divided_leases import DividedLeases
from ridgeline.engine.divided_runner import DividedRunner
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.runner import Runner, build_runner
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.models.build import build
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.gloo import GlooGroup
from ridgeline.parallel.mesh import Mesh
from tests.engine.runners import MAX_LEN, PAGE, PROMPT, DeviceBench, alone
from tests.models.families import save

RANKS, FAMILY, TIMEOUT_S = 2, "qwen2-moe", 60.0
SIZES = Sizes(24, 64, MAX_LEN, 200)


class GraphRank:
    """A rank whose steps run as graphs. graphs: its executor."""

    def __init__(self, rank: int, folder: Path, store: torch.distributed.Store) -> None:
        group = GlooGroup(rank, RANKS, store, TIMEOUT_S)
        mesh = Mesh(rank, RANKS, group, divides_requests=True)
        config = ModelConfig(str(folder), max_model_len=MAX_LEN, expert_parallel=True)
        model = build(folder, model=config, ops=REFERENCE, device=torch.device("cpu"), mesh=mesh)
        layout = kv_layout(model.rank_spec, PAGE)
        self.runner: Runner = build_runner(model, layout, SIZES, kind=DividedRunner)
        with torch.inference_mode():
            self.graphs = GraphExecutor(self.runner._step, SIZES, Uncaptured)
            self.graphs.capture(lambda stage, done, total: None)
        self.runner.executor = self.graphs


class Ranks:
    """A runner that is all ranks, each in a thread. Their results must be equal."""

    def __init__(self, ranks: Sequence[GraphRank], pool: ThreadPoolExecutor) -> None:
        self._runners, self._pool = [rank.runner for rank in ranks], pool

    def launch(self, plan: StepPlan) -> None:
        list(self._pool.map(lambda runner: runner.launch(plan), self._runners))

    def collect(self) -> StepResult:
        results = [runner.collect() for runner in self._runners]
        assert all(result.error is None and result.tokens == results[0].tokens for result in results)
        return results[0]


class GraphBench(DeviceBench):
    """A scheduler before ranks that divide requests and run graphs."""

    def __init__(self, ranks: Sequence[GraphRank], pool: ThreadPoolExecutor) -> None:
        layout = ranks[0].runner.store.layout
        self.scheduler = Scheduler(
            layout,
            DividedLeases(layout, SIZES.blocks, RANKS, True, 0.3),
            Limits(SIZES.rows, SIZES.step_tokens, MAX_LEN),
            admission("continuous"),
        )
        runner: Any = Ranks(ranks, pool)
        self.loop = Loop(self.scheduler, runner)
        self.tokens, self.logprobs, self.scores, self.finish, self.errors = {}, {}, {}, {}, {}
        self._arrivals = 0


@contextmanager
def started(folder: Path) -> Iterator[tuple[Sequence[GraphRank], ThreadPoolExecutor]]:
    save(FAMILY, folder)
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        yield list(pool.map(lambda rank: GraphRank(rank, folder, store), range(RANKS))), pool


@pytest.mark.long
def test_graphs_of_ranks_say_what_a_single_rank_says(tmp_path: Path) -> None:
    """Prompts in chunks beside decode steps, more rows than a rank may have in the smallest graph, and a request alone."""
    with started(tmp_path) as (ranks, pool):
        bench = GraphBench(ranks, pool)
        for number in range(20):
            bench.submit(str(number), [*PROMPT, number], max_tokens=4 + number % 5)
        bench.run()
        bench.submit("alone", PROMPT * 9, max_tokens=6)
        bench.run()
        for number in range(20):
            assert bench.tokens[str(number), 0] == alone([*PROMPT, number], FAMILY, max_tokens=4 + number % 5)
        assert bench.tokens["alone", 0] == alone(PROMPT * 9, FAMILY, max_tokens=6)


@pytest.mark.long
def test_uneven_ranks_get_a_larger_graph(tmp_path: Path) -> None:
    with started(tmp_path) as (ranks, _):
        graphs = ranks[0].graphs
        assert graphs.padded(StepShape.decoding(16, share=9), True) == StepShape.decoding(16, share=16)
        assert graphs.padded(StepShape.decoding(20, share=22), True) == StepShape.decoding(24, share=22)
        assert graphs.padded(StepShape.decoding(24, share=23), True) is None, "it runs without a graph"


def test_the_shape_of_a_decode_graph_has_room_for_uneven_ranks() -> None:
    assert Mesh().share(64) == 0, "no rank of one device has a bound"
    ranks = Mesh(0, 4, divides_requests=True)
    assert [ranks.share(rows) for rows in (1, 8, 16, 64, 256)] == [1, 8, 12, 27, 87]
