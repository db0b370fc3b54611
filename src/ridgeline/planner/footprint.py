"""What a replica of a model takes on a GPU: weights, working memory, the cache that its rate needs, and a share of the time.

Memory is `core.sizing`, times are those of `planner.layout_times`, as in `fit` and `plan`. A share s of a GPU is a GPU that is s
times as fast: replicas that share it take turns. The less time a replica has, the more requests it must hold at once to serve its
rate, because only larger batches take less time for a request: a smaller share takes more memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import GIB, Memory, Planner
from ridgeline.core.slo import Latencies
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.serving import cost_model, held_on
from ridgeline.hardware.table import Accelerator
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, rank_spec, replica, stages
from ridgeline.planner.placement import Footprint, Gpu
from ridgeline.planner.ranking import Demand, ReplicaLoad

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of a GPU's time that a replica may have."""
MOST_REQUESTS = 512
"""Requests that a replica holds at most."""


@dataclass(frozen=True, slots=True)
class ReplicaNeed:
    """What a model is needed for. demand: lengths, objectives, and requests per second of all replicas together; without a rate, a
    replica has room for `requests` requests and takes the share `share` of its GPUs. replicas: 0 if the rate decides. tensor:
    numbers of GPUs that may share a replica, in order; the first that works is taken, or all if `every`."""

    demand: Demand
    replicas: int = 0
    requests: int = 1
    share: float = 0.0
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    every: bool = False


def replica_bytes(spec: ModelSpec, tensor: int, requests: int, length: int, engine: EngineConfig) -> int:
    """Bytes on each of `tensor` GPUs of a replica that has room for `requests` requests of `length` tokens.

    Raises ConfigError where the model cannot be divided.
    """
    options = replace(
        engine, max_num_seqs=requests, max_num_batched_tokens=max(requests, engine.max_num_batched_tokens or 2048)
    )
    plan, _ = Planner(rank_spec(spec, tensor), options, Memory("cuda", 0)).plan(length)
    pages = requests * plan.layout.pages_for(length, plan.max_step_tokens) + 1
    return plan.weight_bytes + plan.workspace_bytes + plan.graph_bytes + pages * plan.layout.page_bytes


def footprints(
    spec: ModelSpec, need: ReplicaNeed, gpu: Gpu, row: Accelerator | None, engine: EngineConfig
) -> tuple[list[Footprint], str]:
    """(The ways to run a replica on GPUs of a kind, why there are none).

    row: of the hardware table; None where only the memory is known, which suffices without a rate.
    """
    made, reason = list[Footprint](), ""
    spec = held_on(spec, gpu.name, "cuda")
    for tensor in need.tensor:
        if tensor > gpu.per_host:
            continue
        try:
            ways = _Ways(spec, need, gpu, tensor, engine).made(row)
        except ConfigError as error:
            if error.param:
                raise
            reason = error.message
            continue
        made += ways
        if made and not need.every:
            break
    return made, reason


class _Ways:
    """The ways to run a replica on `tensor` GPUs. Raises ConfigError, whose message is the reason, if there are none."""

    def __init__(self, spec: ModelSpec, need: ReplicaNeed, gpu: Gpu, tensor: int, engine: EngineConfig) -> None:
        self._spec, self._need, self._gpu, self._tensor, self._engine = spec, need, gpu, tensor, engine

    def made(self, row: Accelerator | None) -> list[Footprint]:
        need, most = self._need, self._most_requests()
        wanted = 1 if need.demand.rate is not None else need.requests
        if most < wanted:
            least = self._bytes(wanted)
            raise ConfigError(
                f"memory: a replica with room for {wanted:,} requests takes {least / GIB:.1f} GiB of each of {self._tensor} GPUs, "
                f"and {self._gpu.name} offers {self._gpu.memory_bytes / GIB:.1f} GiB."
            )
        if need.demand.rate is None:
            return [Footprint(self._gpu.name, self._bytes(need.requests), self._tensor, need.share)]
        if row is None:
            raise ConfigError(
                f"{self._gpu.name} is not in the hardware table, so the rate of a replica is unknown: give replicas instead.",
                param="rate",
            )
        return self._at_rate(self._load(row), most, need.demand.rate)

    def _bytes(self, requests: int) -> int:
        return replica_bytes(self._spec, self._tensor, requests, self._need.demand.length, self._engine)

    def _most_requests(self) -> int:
        """Requests for which a GPU has room; 0 if not even for one."""
        low, high = 0, MOST_REQUESTS
        while low < high:
            middle = (low + high + 1) // 2
            if self._bytes(middle) <= self._gpu.memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _load(self, row: Accelerator) -> tuple[ReplicaLoad, Times]:
        need, cluster = self._need, read_cluster(f"{self._tensor}x{row.name}")
        cluster = replace(
            cluster, device=replace(row, memory=replace(row.memory, bytes=max(row.memory_bytes, 1 << 42)))
        )
        made = replica(
            self._spec, Layout(self._tensor), cluster, need.demand.length, self._engine
        )  # memory is checked here
        # As in _bytes, linears in blocks are in that form only: no memory is left for another one.
        blocks = replace(made, spec=self._spec, stages=stages(self._spec, made.layout))
        times = Times(blocks, cost_model(row, self._spec))
        return ReplicaLoad(times, times.prefill(need.demand.input)[1], need.demand), times

    def _at_rate(self, parts: tuple[ReplicaLoad, Times], most: int, rate: float) -> list[Footprint]:
        """A footprint for each share with which a replica serves its part of the rate and keeps the objectives."""
        (load, times), need = parts, self._need
        prefill_s = times.prefill(need.demand.input)[0]
        capacity = load.rate(load.largest(most, prefill_s))
        replicas = need.replicas or math.ceil(rate / capacity - 1e-9)
        each, made, verdict = rate / replicas, list[Footprint](), ""
        if each > capacity * (1 + 1e-9):
            raise ConfigError(f"rate: a replica on {self._tensor} GPUs serves {capacity:.3g} of {each:.3g} requests/s.")
        for share in SHARES:
            whole = each / share  # of a replica that has the GPU alone, to which a share of the time is like
            batch = load.needed(whole, most)
            if load.rate(batch) < whole * (1 - 1e-9):
                continue
            ttft = (prefill_s + load.wait(whole) + times.step_s(batch, load.context)) / share
            tpot = load.tpot(batch, whole) / share
            verdict = need.demand.slo.verdict(Latencies(ttft, ttft, tpot, ttft + (need.demand.output - 1) * tpot))
            if not verdict:
                made.append(
                    Footprint(self._gpu.name, self._bytes(batch), self._tensor, share, 1.0 if need.replicas else each)
                )
        if not made:
            raise ConfigError(f"objectives: {verdict} with {each:.3g} requests/s on {self._tensor} GPUs.")
        return made
