"""What Ray costs as the launcher of a replica's two ranks: seconds to ready and the time per token, against the same without Ray.

    python benchmarks/ray_ranks.py --out benchmarks/results/ray_ranks.json

A fleet of one replica of the model that ships, float32, one thread per rank, two tensor parallel ranks. "one host": the first rank
starts the other. "by hand": both are started as hosts of `--nnodes 2`, the second right before the fleet. "ray": two nodes of a
local cluster that runs already, whose workers have the usual priority (Ray's default is niceness 15). ready_s: from the fleet's
order to the first good health check. token_ms: of one stream of TOKENS tokens, through the router. The best of --rounds rounds,
which alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from common import cpu_name, provenance, write_rows

from ridgeline.service.fleet.file import read_fleet
from ridgeline.service.fleet.fleet import Fleet
from ridgeline.service.fleet.launcher import LocalLauncher
from ridgeline.service.fleet.rank_places import rank_places
from ridgeline.service.fleet.ray_cluster import RayLauncher
from ridgeline.service.fleet.server import routing
from ridgeline.service.listen import bind

WAYS = ("one host", "by hand", "ray")
SERVE = {"dtype": "float32", "threads": 1, "kv_cache_memory": "64M", "max_model_len": 2048, "tensor_parallel_size": 2}
TOKENS = 150
STORE = 80 << 20
"""Bytes of a node's object store, which holds nothing here."""


@asynccontextmanager
async def second_host(serve: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    """Runs the second rank; yields the options of the first."""
    places = rank_places(serve, 2.0, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    rank = await LocalLauncher(places.options(serve, 1, "127.0.0.1", port), (), {}, lambda line: None).spawn("rank", 0)
    try:
        yield places.options(serve, 0, "127.0.0.1", port)
    finally:
        await rank.stop(5.0)


@asynccontextmanager
async def unchanged(serve: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    yield serve


async def run(way: str, address: str, folder: Path) -> dict[str, float]:
    """One start of a fleet, one stream, and its end."""
    path = folder / "fleet.json"
    place = {"launcher": "ray", "ray_address": address, "replica_cpus": 2} if way == "ray" else {}
    path.write_text(json.dumps({"router": {"port": 0}, "serve": SERVE, **place}))
    file = read_fleet(path, {})
    async with (
        second_host(file.serve) if way == "by hand" else unchanged(file.serve) as serve,
        routing(file.service, file.router, bind("127.0.0.1", 0)) as server,
        aiohttp.ClientSession() as client,
        Fleet(
            file,
            RayLauncher(file.fleet, serve, {}) if way == "ray" else LocalLauncher(serve, (), {}, lambda line: None),
            server.balancer,
        ) as fleet,
    ):
        await fleet.scale(1)
        (member,) = fleet.members.values()
        await member.up.wait()
        times = [await token_ms(client, server.url) for _ in range(2)]
        return {"ready_s": fleet.cold_start_s, "token_ms": min(times)}


async def token_ms(client: aiohttp.ClientSession, url: str) -> float:
    """Milliseconds per token of a stream, from its first event to its last."""
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.post(f"{url}/v1/completions", json=body) as reply:
        times = [time.perf_counter() async for line in reply.content if line.startswith(b"data: {")]
    return 1e3 * (times[-1] - times[0]) / (TOKENS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=cpu_name())
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Imported on demand: Ray is an optional dependency.
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    readings: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(args.rounds):
                for way in WAYS:
                    readings[way].append(asyncio.run(run(way, cluster.address, Path(folder))))
                    print(way, readings[way][-1], flush=True)
    finally:
        cluster.shutdown()
    about, rows = provenance(args.machine, args.commit), []
    for way, figures in readings.items():
        for name in ("ready_s", "token_ms"):
            values = [round(figure[name], 2) for figure in figures]
            row = {"row": f"ray-ranks-{way.replace(' ', '-')}-{name}", "value": min(values), "target": None}
            rows.append({**row, "median": statistics.median(values), "worst": max(values), **about})
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
