"""What a load costs: dollars and joules per request, goodput per dollar, and prices of input, cached and output tokens.

    python benchmarks/economics.py --out benchmarks/results/economics.json                     # the shipped model on a CPU
    python benchmarks/economics.py --device cuda --shape benchmarks/models/llama-3.1-8b --rates 1,4,16 --input-len 1024 \\
        --prefix-len 512 --output-len 256 --usd-hour 2.95 --out benchmarks/results/economics.json

One server, prompts with a common prefix, an open loop at each rate. Energy is that of the server's counter; without one it is
unknown. A shape has random weights.
Row prefix-lookup is the time of the host to hash a prompt token and to find it in the prefix index.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows
from goodput import folder_of

from ridgeline.bench.economics import ENTRIES, economics, measured_load
from ridgeline.bench.figures import throughput
from ridgeline.bench.options import LoadConfig, ResultConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.core.spec import KvGroup
from ridgeline.kv.prefix import PrefixIndex, chain_root, extend_chain
from ridgeline.planner.prices import prices

LOOKUP_TOKENS = 1 << 16
BLOCK_TOKENS = 16


def lookup_row() -> dict[str, Any]:
    """Nanoseconds per prompt token of a prefix lookup that hits every block; the best of five."""
    tokens, index = array("i", range(LOOKUP_TOKENS)), PrefixIndex([KvGroup((0,), None, 1)], BLOCK_TOKENS)
    root = chain_root("", "")
    known: list[bytes] = []
    extend_chain(known, tokens, BLOCK_TOKENS, root)
    for block, key in enumerate(known, start=1):
        index.insert(key, 0, block)
    seconds = []
    for _ in range(5):
        begin, chain = time.perf_counter(), list[bytes]()
        extend_chain(chain, tokens, BLOCK_TOKENS, root)
        hits, _ = index.match(chain, len(chain))
        seconds.append(time.perf_counter() - begin)
        assert hits == len(known)
    return {
        "row": "prefix-lookup",
        "value": round(min(seconds) / LOOKUP_TOKENS * 1e9, 1),
        "unit": "ns per prompt token",
    }


def row_of(run: Run, rate: float, name: str) -> dict[str, Any]:
    """Figures of one run."""
    figures, load, rates = economics(run), measured_load(run), throughput(run)
    assert figures.usd is not None
    shares = prices(figures.usd, load.tokens, load.costs)
    values = {entry.name: getattr(figures, entry.name) for entry in ENTRIES}
    return {
        "row": f"{name}-rate-{rate:g}",
        "model": name,
        "rate": rate,
        "mean_input": sum(row.input_tokens for row in run.completed) / len(run.completed),
        "mean_cached": sum(row.cached_tokens for row in run.completed) / len(run.completed),
        "mean_output": sum(row.output_tokens for row in run.completed) / len(run.completed),
        "usd_hour": figures.usd_hour,
        "price_source": figures.price_source,
        "energy_source": figures.energy_source,
        "requests_per_s": rates["requests_per_s"],
        "attainment": rates["attainment"],
        "busy_share": load.busy_share,
        **values,
        "tokens": {kind: getattr(load.tokens, kind) for kind in ("input", "cached", "output")},
        "usd_million_requests": (figures.usd_per_request or 0.0) * 1e6,
        "usd_billion_tokens": {kind: getattr(shares, kind) * 1e3 for kind in ("input", "cached", "output")},
        "bill_usd": figures.usd,
        "priced_usd": shares.bill(load.tokens),
    }


async def runs_of(args: argparse.Namespace) -> list[tuple[float, Run]]:
    """One run at each rate, on one server."""
    workload = WorkloadConfig(
        input_len=str(args.input_len), output_len=str(args.output_len), prefix_len=args.prefix_len, seed=1
    )
    result = ResultConfig(slo=args.slo, usd_hour=args.usd_hour, watts=args.watts)
    runs = []
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(args.shape, place)
        flags = [*([folder, "--load-format", "dummy"] if folder else []), "--device", args.device, *args.serve.split()]
        async with serving(flags) as url, Session(BenchConfig(workload=workload, result=result), url) as session:
            for rate in args.rates:
                load = LoadConfig(rate=rate, duration=args.seconds, warmup=2)
                runs.append((rate, await session.measure(load)))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="", help="folder with a config.json (default: the shipped model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--serve", default="", help="further options for `ridgeline serve`")
    parser.add_argument("--rates", type=lambda text: [float(word) for word in text.split(",")], default=[1.0, 4.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--prefix-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--slo", default="ttft=500ms,tpot=50ms")
    parser.add_argument("--usd-hour", type=float, default=0.1)
    parser.add_argument("--watts", type=float, help="mean power, where the device has no counter")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    name = Path(args.shape).name or "shipped"
    runs = asyncio.run(runs_of(args))
    machine = cpu_name() if args.device == "cpu" else runs[0][1].facts["server"]["facts"]["device"]
    rows = [{**row_of(run, rate, name), "prefix_len": args.prefix_len} for rate, run in runs]
    where = provenance(machine)
    for row in (lookup_row(), *rows):
        print(row)
        write_rows(args.out, [{**row, **where}])


if __name__ == "__main__":
    main()
