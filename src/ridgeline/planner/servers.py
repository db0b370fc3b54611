"""Servers for simulation, from a memory plan: one device, or one replica that is divided over several."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import NamedTuple

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel, StepWork, WorkMeter, expert_layers
from ridgeline.core.sizing import MemoryPlan
from ridgeline.engine.policy import Limits
from ridgeline.kv.retention import read_retention
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Replica, Stage
from ridgeline.planner.simulate import Server

HOST_S = 0.002
"""Seconds of the host per step, which a step in flight hides."""


def planned_server(cost: CostModel, plan: MemoryPlan, engine: EngineConfig) -> Server:
    """A server with the memory and the limits of a plan. cost: step times of the model as served."""
    return Server(
        cost,
        plan.layout,
        plan.n_pages,
        Limits(plan.max_rows, plan.max_step_tokens, plan.max_len),
        prefix_cache=engine.enable_prefix_caching,
        retention=read_retention(engine.kv_retention, plan.layout.page_tokens),
        batching=engine.batching,
        steps_in_flight=plan.steps_in_flight,
        host_s=HOST_S,
    )


def replica_server(replica: Replica, cost: CostModel, engine: EngineConfig, prompt: int) -> Server:
    """A replica on its devices as one server. cost: of the model on one device. prompt: tokens of a typical prompt.

    Chunks of prompts follow each other through the stages of a pipeline, so a step of prompts takes as long as the slowest stage.
    The time in which the last chunk passes the other stages is added to each request.
    """
    server = planned_server(replace(cost, spec=replica.spec), replica.plan, engine)
    if replica.layout.replica == 1:
        return server
    divided = divided_cost(replica, cost)
    pages = max(1, replica.memory.cache_bytes // replica.plan.layout.page_bytes - 1)
    chunk = min(replica.chunk, prompt)
    work = WorkMeter(replica.spec).work([chunk], [chunk], 1)
    return replace(server, cost=divided, pages=pages, outside_s=divided.through_s(work) - divided.step_s(work))


class StageShare(NamedTuple):
    """What a rank of a stage has of the work of a step: shares of the FLOPs of products and of attention, and of the bytes of
    weights and of the cache."""

    stage: Stage
    products: float
    attention: float
    weights: float
    cache: float


@dataclass(frozen=True, slots=True)
class DividedCost(CostModel):
    """Step times of a replica on several devices. spec: of the whole model; the rates are those of one device. `layout_times` has
    the formulas. A step with prompts and decoding rows counts as one of prompts."""

    times: Times | None = None
    shares: tuple[StageShare, ...] = field(default=(), compare=False)
    links: LinkTimes | None = field(default=None, compare=False)

    def step_s(self, work: StepWork) -> float:
        if work.chunked:
            return max(self._chunk_s(share, work) for share in self.shares)
        # Each stage of a pipeline has a part of the rows, and a token passes all of them before the next one starts.
        flying = max(1, min(len(self.shares), work.tokens))
        rows = -(-work.tokens // flying)
        seconds = [self._rows_s(share, work, flying, rows) for share in self.shares]
        return max(sum(seconds) + self._sends(rows), flying * max(seconds))

    def through_s(self, work: StepWork) -> float:
        """Seconds in which a chunk passes all stages."""
        return sum(self._chunk_s(share, work) for share in self.shares) + self._sends(work.tokens)

    def _sends(self, tokens: int) -> float:
        return sum(self.times.sends(tokens)) if self.times is not None and len(self.shares) > 1 else 0.0

    def _chunk_s(self, share: StageShare, work: StepWork) -> float:
        assert self.times is not None and self.links is not None
        ranks = self.times.replica.layout.context
        part = _part(share, work, products=1 / ranks, attention=1 / ranks)
        logits = work.logits if share.stage.last else 0
        held = part._replace(tokens=-(-work.tokens // ranks), logits=logits)
        return CostModel.step_s(self, held) + self.links.chunk(share.stage, work.tokens, min(1, logits))

    def _rows_s(self, share: StageShare, work: StepWork, flying: int, rows: int) -> float:
        assert self.times is not None and self.links is not None
        ranks = self.times.replica.layout.context
        part = _part(share, work, products=1 / flying, attention=1 / flying / ranks)
        held = part._replace(tokens=rows, logits=rows if share.stage.last else 0)
        return CostModel.step_s(self, held) + self.links.rows(share.stage, rows)


class LinkTimes:
    """Seconds of collectives by numbers of tokens. The cache belongs to a replica, whose links do not change."""

    def __init__(self, times: Times) -> None:
        self.chunk = lru_cache(4096)(times.chunk_links)
        self.rows = lru_cache(4096)(times.row_links)


def _part(share: StageShare, work: StepWork, *, products: float, attention: float) -> StepWork:
    """The work of a rank of a stage. products, attention: the share of its FLOPs, and of the cache for attention, that it runs."""
    linear = (work.flops - work.attention_flops) * share.products * products
    attended, read = work.attention_flops * share.attention * attention, work.kv_bytes * share.cache * attention
    weights = (work.bytes - work.kv_bytes) * share.weights
    return work._replace(
        flops=int(linear + attended),
        bytes=int(weights + read),
        attention_flops=int(attended),
        kv_bytes=int(read),
        expert_layers=expert_layers(share.stage.spec),
    )


def divided_cost(replica: Replica, cost: CostModel) -> DividedCost:
    """The cost model of a replica with more than one device. cost: of the model on one of them."""
    values = {entry.name: getattr(cost, entry.name) for entry in fields(CostModel)}
    times = Times(replica, cost)
    shares = tuple(_share(stage, replica) for stage in replica.stages)
    return DividedCost(**values | {"spec": replica.spec}, times=times, shares=shares, links=LinkTimes(times))


def _share(stage: Stage, replica: Replica) -> StageShare:
    """The shares of a stage, of a decode step with one row."""
    rank, whole = (meter.work([1024], [1], 1) for meter in (stage.meter, WorkMeter(replica.spec)))
    return StageShare(
        stage,
        (rank.flops - rank.attention_flops) / (whole.flops - whole.attention_flops),
        rank.attention_flops / whole.attention_flops,
        (rank.bytes - rank.kv_bytes) / (whole.bytes - whole.kv_bytes),
        rank.kv_bytes / whole.kv_bytes,
    )
