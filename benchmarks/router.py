"""What the choice of a replica gains:

    python benchmarks/router.py --trace mooncake_conversation.jsonl.gz --out benchmarks/results/service.json

Simulates the real `Router` (`service/routing.py`) with replicas that compute prompts in order at a fixed rate and keep the trace's
blocks of 512 tokens in an LRU cache. The figures are counts and virtual times: they do not depend on the machine. Rows
`router-hits-{policy}`: hit_rate is the share of prompt tokens that the replicas' caches have, expected_hit_rate what the router's
index expected; ttft_p50_ms and ttft_p99_ms follow from the rate. Row `router-hits-ceiling`: hit_rate of one cache without bound,
shared_hit_rate of one cache that is as large as those of all replicas together.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows

from ridgeline.bench.traces import read_trace
from ridgeline.core.workload import RequestSpec
from ridgeline.service.prefix_index import PrefixIndex
from ridgeline.service.routing import POLICIES, Capacity, Demand, Router, State, Ticket

BLOCK = 512
"""Tokens of a block of the Mooncake trace."""


@dataclass
class Machine:
    """A simulated replica: prompts one after the other, and an LRU cache of blocks."""

    blocks: int
    free_at: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def compute(self, hashes: Sequence[int], tokens: int, now: float, rate: float) -> tuple[float, int]:
        """(time of the first token, cached tokens) of a prompt that arrives now."""
        hit = 0
        while hit < len(hashes) and hashes[hit] in self.cache:
            hit += 1
        cached = min(hit * BLOCK, tokens - 1)
        for block in reversed(hashes):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.blocks:
            self.cache.popitem(last=False)
        self.free_at = max(now, self.free_at) + (tokens - cached) / rate
        return self.free_at, cached


class Simulation:
    """The real router in front of machines, in virtual time."""

    def __init__(self, arguments: argparse.Namespace, policy: str) -> None:
        self._rate, self._tpot = arguments.rate, arguments.tpot_ms / 1e3
        self._router = Router(POLICIES[policy], PrefixIndex(1 << 30, BLOCK), max_waiting=1 << 30)
        capacity = Capacity(arguments.limit, arguments.rate, cache_tokens=arguments.cache_tokens)
        self._machines: dict[str, Machine] = {}
        for number in range(arguments.replicas):
            self._router.add(f"r{number}", capacity)
            self._router.set_state(f"r{number}", State.UP, 0.0)
            self._machines[f"r{number}"] = Machine(arguments.cache_tokens // BLOCK)
        self._events: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self._requests: dict[Ticket, RequestSpec] = {}
        self.cached = self.tokens = 0
        self.ttfts: list[float] = []

    @property
    def expected(self) -> float:
        """Hit rate by the router's index."""
        totals = self._router.totals
        return totals.cached_tokens / totals.prompt_tokens

    def run(self, requests: Sequence[RequestSpec], speedup: float) -> None:
        for request in requests:
            self._at(request.at_s / speedup, "arrive", request)
        while self._events:
            now, _, kind, item = heapq.heappop(self._events)
            if kind == "arrive":
                ticket = self._router.arrive(Demand(item.input, item.blocks), now)
                self._requests[ticket] = item
                if ticket.replica is not None:
                    self._begin(ticket, now)
            elif kind == "first":
                self._router.first_token(item, now)
            else:
                for ticket in self._router.finish(item, now):
                    self._begin(ticket, now)

    def _begin(self, ticket: Ticket, now: float) -> None:
        request = self._requests.pop(ticket)
        first, cached = self._machines[ticket.replica.name].compute(request.blocks, request.input, now, self._rate)
        self.cached += cached
        self.tokens += request.input
        self.ttfts.append(first - ticket.arrived)
        self._at(first, "first", ticket)
        self._at(first + request.output * self._tpot, "end", ticket)

    def _at(self, when: float, kind: str, item: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, item))


def hits(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    requests = [request for request in read_trace(Path(arguments.trace)).requests if request.blocks]
    shape = {
        "trace": Path(arguments.trace).name, "requests": len(requests), "replicas": arguments.replicas,
        "cache_tokens": arguments.cache_tokens, "prefill_tokens_s": arguments.rate, "speedup": arguments.speedup,
        "clock": "simulated",
    }  # fmt: skip
    total = sum(item.input for item in requests)
    ceilings = {}
    for name, blocks in (
        ("hit_rate", sys.maxsize),
        ("shared_hit_rate", arguments.replicas * arguments.cache_tokens // BLOCK),
    ):
        machine = Machine(blocks)
        hit = sum(machine.compute(item.blocks, item.input, 0.0, 1.0)[1] for item in requests)
        ceilings[name] = round(hit / total, 4)
    rows = [{"row": "router-hits-ceiling", **ceilings, **shape}]
    for policy in POLICIES:
        simulation = Simulation(arguments, policy)
        simulation.run(requests, arguments.speedup)
        times = statistics.quantiles(simulation.ttfts, n=100)
        rows.append(
            {
                "row": f"router-hits-{policy}",
                "hit_rate": round(simulation.cached / simulation.tokens, 4),
                "expected_hit_rate": round(simulation.expected, 4),
                "ttft_p50_ms": round(1e3 * times[49], 1),
                "ttft_p99_ms": round(1e3 * times[98], 1),
                **shape,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--trace", required=True, help="a Mooncake trace")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="requests at one replica")
    parser.add_argument("--rate", type=float, default=40_000.0, help="prompt tokens per second of a replica")
    parser.add_argument("--cache-tokens", type=int, default=800_000, help="tokens in a replica's cache")
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--speedup", type=float, default=4.0, help="the trace's times are divided by this")
    arguments = parser.parse_args()
    rows = hits(arguments)
    for row in rows:
        print(row)
    if arguments.out:
        origin = provenance(cpu_name(), arguments.commit)
        write_rows(arguments.out, [{**row, **origin} for row in rows])


if __name__ == "__main__":
    main()
