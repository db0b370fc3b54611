"""What the choice of a replica gains:

    python benchmarks/router.py --trace mooncake_conversation.jsonl.gz --out benchmarks/results/service.json

Simulates the service's router with replicas of Llama-3.1-8B on one H100 each (planner.surrogate, uncalibrated step times), whose
caches hold --cache-tokens tokens. The figures are counts and virtual times: they do not depend on the machine. Rows
`router-hits-{policy}`: hit_rate is the share of prompt tokens that the replicas' caches have, expected_hit_rate what the router's
index expected. Row `router-hits-ceiling`: hit_rate of one cache without bound, shared_hit_rate of one cache that is as large as
those of all replicas together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.bench.traces import read_trace
from ridgeline.cli.simulate import server_of
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.workload import Workload
from ridgeline.hardware.table import lookup
from ridgeline.planner.fleet import Fleet, simulate_fleet
from ridgeline.planner.surrogate import Prefixes
from ridgeline.service.routing import POLICIES


def hits(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = ModelConfig(str(HERE / "models" / "llama-3.1-8b"), load_format="dummy")
    server = server_of(model, EngineConfig(), lookup("h100"))
    server = replace(server, pages=arguments.cache_tokens // server.layout.page_tokens)
    trace = read_trace(Path(arguments.trace)).within(server.limits.max_len)
    load = trace.time_scaled(1 / arguments.speedup)
    shape = {
        "trace": Path(arguments.trace).name, "requests": len(load.requests), "replicas": arguments.replicas,
        "cache_tokens": arguments.cache_tokens, "speedup": arguments.speedup, "clock": "simulated",
    }  # fmt: skip
    together = arguments.replicas * arguments.cache_tokens
    ceilings = {"hit_rate": ceiling(load, sys.maxsize), "shared_hit_rate": ceiling(load, together)}
    yield {"row": "router-hits-ceiling", **ceilings, **shape}
    for policy in POLICIES:
        fleet = Fleet(server, arguments.replicas, policy, arguments.limit, surrogate=True, index_bytes=1 << 30)
        result = simulate_fleet(fleet, load)
        yield {
            "row": f"router-hits-{policy}",
            "hit_rate": round(result.hit_rate, 4),
            "expected_hit_rate": round(result.expected_hit_rate, 4),
            "ttft_p50_ms": round(1e3 * result.figures.ttft_s, 1),
            "ttft_p99_ms": round(1e3 * result.figures.slow_ttft_s, 1),
            **shape,
        }


def ceiling(load: Workload, tokens: int) -> float:
    """Share of prompt tokens that one cache of so many tokens has."""
    cache, cached = Prefixes(tokens), 0
    for request in load.requests:
        cached += cache.cached(request)
        cache.store(request)
    return round(cached / sum(request.input for request in load.requests), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--trace", required=True, help="a Mooncake trace")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="requests at one replica")
    parser.add_argument("--cache-tokens", type=int, default=800_000, help="tokens in a replica's cache")
    parser.add_argument("--speedup", type=float, default=2.0, help="the trace's times are divided by this")
    arguments = parser.parse_args()
    rows = list(hits(arguments))
    for row in rows:
        print(row)
    if arguments.out:
        origin = provenance(cpu_name(), arguments.commit)
        write_rows(arguments.out, [{**row, **origin} for row in rows])


if __name__ == "__main__":
    main()
