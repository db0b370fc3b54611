"""What a router gains by knowing more of its replicas' caches:

    python benchmarks/cache_events.py --trace mooncake_conversation.jsonl.gz --out benchmarks/results/service.json

The simulation of router.py (eight replicas, policy prefix) with other knowledge in the router. Rows:

`cache-events-contents-{tokens}`: hit_rate with the real contents of every cache at the moment of each decision (no stream can tell
more), predicted_hit_rate with the index of what was sent, by size of a replica's cache.
`cache-events-believed-{factor}`: hit_rate if the index takes a cache to be so many times as large as it is.
`cache-events-routers-{count}`: hit_rate of so many routers, each request at the next one, whose indexes know only what each has
sent; shared_hit_rate if each also learns what the others send (service/prompt_log.py), delay_requests requests later: about 1 s,
the time after which a lost stream of events is opened again. The routers know the load of all replicas.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.bench.traces import read_trace
from ridgeline.cli.simulate import server_of
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.hardware.table import lookup
from ridgeline.planner.fleet import Fleet, FleetFigures, Simulation, chunks_of
from ridgeline.planner.surrogate import Surrogate
from ridgeline.service.prefix_index import PrefixIndex

INDEX_BYTES = 1 << 30
DELAY_REQUESTS = 7


class Contents(PrefixIndex):
    """Hits are those that the replicas' caches have now. load: of the simulation, whose blocks the chunks are."""

    def __init__(self, simulation: Simulation, load: Workload) -> None:
        super().__init__(INDEX_BYTES, load.requests[0].block)
        self._simulation = simulation
        self._blocks = {chunk: block for spec in load.requests for chunk, block in _pairs(spec)}

    def hits(self, chunks: Sequence[int]) -> dict[int, int]:
        blocks = [self._blocks[chunk] for chunk in chunks]
        depths = {}
        for name, replica in self._simulation.replicas.items():
            assert isinstance(replica.server, Surrogate)
            if depth := replica.server.prefixes.depth(blocks):
                depths[self._simulation.router.replicas[name].id] = depth * self.chunk_tokens
        return depths


class Indexes(PrefixIndex):
    """The indexes of several routers: each request asks the next one.

    delay: requests after which the other routers learn where a request was sent; None: they never do.
    """

    def __init__(self, count: int, chunk_tokens: int, delay: int | None) -> None:
        super().__init__(INDEX_BYTES, chunk_tokens)
        self._indexes = [PrefixIndex(INDEX_BYTES, chunk_tokens) for _ in range(count)]
        self._delay = delay
        self._unshared: deque[tuple[PrefixIndex, int, Sequence[int]]] = deque()
        """Of the last requests: the index that knows them already, the replica and the chunks."""
        self._turn = 0

    def add_replica(self, replica: int, cache_tokens: float) -> None:
        for index in self._indexes:
            index.add_replica(replica, cache_tokens)

    def remove_replica(self, replica: int) -> None:
        for index in self._indexes:
            index.remove_replica(replica)

    def hits(self, chunks: Sequence[int]) -> dict[int, int]:
        self._turn = (self._turn + 1) % len(self._indexes)
        return self._indexes[self._turn].hits(chunks)

    def add(self, replica: int, chunks: Sequence[int]) -> None:
        informed = self._indexes[self._turn]
        informed.add(replica, chunks)
        if self._delay is None:
            return
        self._unshared.append((informed, replica, chunks))
        while len(self._unshared) > self._delay:
            informed, replica, chunks = self._unshared.popleft()
            for index in self._indexes:
                if index is not informed:
                    index.add(replica, chunks)


def _pairs(spec: RequestSpec) -> Iterator[tuple[int, int]]:
    return zip(chunks_of(spec), spec.blocks, strict=False)


def simulate(
    fleet: Fleet, load: Workload, index: Callable[[Simulation], PrefixIndex] | None = None, believed: float = 1.0
) -> FleetFigures:
    """index: instead of the router's. believed: size of a cache in the router over the real one."""
    simulation = Simulation(fleet, load)
    simulation.capacity = replace(simulation.capacity, cache_tokens=simulation.capacity.cache_tokens * believed)
    if index is not None:
        simulation.router.index = index(simulation)
    return simulation.run()


class Setting:
    """The simulated fleet, the trace and the members of every row."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        model = ModelConfig(str(HERE / "models" / "llama-3.1-8b"), load_format="dummy")
        self._arguments, self._server = arguments, server_of(model, EngineConfig(), lookup("h100"))
        trace = read_trace(Path(arguments.trace)).within(self._server.limits.max_len)
        self.cache_tokens = arguments.cache_tokens
        self.load = trace.time_scaled(1 / arguments.speedup)
        self.shape = {
            "trace": Path(arguments.trace).name, "requests": len(self.load.requests), "replicas": arguments.replicas,
            "speedup": arguments.speedup, "clock": "simulated",
        }  # fmt: skip

    def fleet(self, cache_tokens: int) -> Fleet:
        server = replace(self._server, pages=cache_tokens // self._server.layout.page_tokens)
        replicas, limit = self._arguments.replicas, self._arguments.limit
        return Fleet(server, replicas, "prefix", limit, surrogate=True, index_bytes=INDEX_BYTES)


def contents(setting: Setting) -> Iterator[dict[str, Any]]:
    load = setting.load
    for tokens in (200_000, 400_000, 800_000, 1_600_000):
        known = simulate(setting.fleet(tokens), load, lambda simulation: Contents(simulation, load))
        predicted = simulate(setting.fleet(tokens), load)
        yield {
            "row": f"cache-events-contents-{tokens}", **figures(known), **figures(predicted, "predicted_"),
            "expected_hit_rate": round(predicted.expected_hit_rate, 4), "cache_tokens": tokens, **setting.shape,
        }  # fmt: skip


def believed(setting: Setting) -> Iterator[dict[str, Any]]:
    tokens = setting.cache_tokens
    for factor in (0.25, 0.5, 2.0, 4.0):
        result = simulate(setting.fleet(tokens), setting.load, believed=factor)
        yield {"row": f"cache-events-believed-{factor:g}", **figures(result), "cache_tokens": tokens, **setting.shape}


def routers(setting: Setting) -> Iterator[dict[str, Any]]:
    tokens, load = setting.cache_tokens, setting.load
    for count in (2, 4):
        alone, shared = (
            simulate(setting.fleet(tokens), load, indexes(count, load, delay)) for delay in (None, DELAY_REQUESTS)
        )
        yield {
            "row": f"cache-events-routers-{count}", **figures(alone), **figures(shared, "shared_"),
            "delay_requests": DELAY_REQUESTS, "cache_tokens": tokens, **setting.shape,
        }  # fmt: skip


PARTS = {"contents": contents, "believed": believed, "routers": routers}


def indexes(count: int, load: Workload, delay: int | None) -> Callable[[Simulation], Indexes]:
    return lambda simulation: Indexes(count, load.requests[0].block, delay)


def figures(result: FleetFigures, prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}hit_rate": round(result.hit_rate, 4),
        f"{prefix}ttft_p50_ms": round(1e3 * result.figures.ttft_s, 1),
        f"{prefix}ttft_p99_ms": round(1e3 * result.figures.slow_ttft_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--trace", required=True, help="a Mooncake trace")
    parser.add_argument("--parts", default=",".join(PARTS), help="names of rows (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="requests at one replica")
    parser.add_argument(
        "--cache-tokens", type=int, default=800_000, help="tokens in a replica's cache (parts believed and routers)"
    )
    parser.add_argument("--speedup", type=float, default=2.0, help="the trace's times are divided by this")
    arguments = parser.parse_args()
    setting, made = Setting(arguments), []
    for part in arguments.parts.split(","):
        for row in PARTS[part](setting):
            print(row, flush=True)
            made.append(row)
    if arguments.out:
        origin = provenance(cpu_name(), arguments.commit)
        write_rows(arguments.out, [{**row, **origin} for row in made])


if __name__ == "__main__":
    main()
