"""Placement of 100 models on 1,000 GPUs: time on one core, and the gap to the bound.

    python benchmarks/placement.py --out benchmarks/results/placement.json

Models have 8, 13, 34 and 70 billion parameters at 8 bits, and footprints of `planner.footprint` with rates, lengths and objectives
drawn with a fixed seed; every fourth model is spread. GPUs are of five kinds of the hardware table. Rows: `fixed chips` (GPUs are
given, the most load), `fixed load` (GPUs are rented, the fewest dollars), each with HiGHS and by first fit; `changed load` (that of
every model changes by up to 30 %), from nothing, and with the placement before it as input. seconds: processor time of the answer,
without the footprints.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.table import lookup
from ridgeline.planner.footprint import ReplicaNeed, footprints
from ridgeline.planner.place import attempt
from ridgeline.planner.placement import Fleet, Gpu, ModelLoad, Placement
from ridgeline.planner.ranking import Demand

SHAPES = {"8b": (32, 4096, 32, 8, 14336, 128256), "13b": (40, 5120, 40, 40, 13824, 32000),
          "34b": (48, 8192, 64, 8, 22016, 32000), "70b": (80, 8192, 64, 8, 28672, 32000)}  # fmt: skip
"""Layers, width, heads, KV heads, feed-forward width and vocabulary."""
KINDS = {"h100 sxm": 300, "a100 sxm 80gb": 200, "a100 sxm 40gb": 200, "l40s": 200, "l4": 100}
"""GPUs by kind: 1,000 in all."""
PRICES = {"a100 sxm 40gb": 1.0}
"""Dollars per hour where the table has none."""
SEED = 7
SECONDS = 20.0


def gpus() -> tuple[Gpu, ...]:
    made = []
    for name, count in KINDS.items():
        row = lookup(name)
        price = row.rent.usd if row.rent else PRICES[name]
        made.append(Gpu(name, int(row.memory_bytes * 0.9), count, price, row.watts))
    return tuple(made)


def models(count: int, rng: random.Random, change: random.Random | None = None) -> tuple[ModelLoad, ...]:
    """change: draws how much the load of each model changes."""
    made = []
    for number in range(count):
        size = rng.choice(list(SHAPES))
        layers, width, heads, kv_heads, d_ff, vocabulary = SHAPES[size]
        layer = LayerSpec(heads, kv_heads, width // heads, d_ff, Rope(dim=width // heads))
        spec = ModelSpec(size, vocabulary, width, (layer,) * layers, 8192, quantization="int8")
        rate = rng.lognormvariate(1.8, 1.0) * (change.uniform(0.7, 1.3) if change else 1.0)
        demand = Demand(rng.choice((256, 1024, 4096)), rng.choice((64, 256, 512)), rate, Slo.parse("tpot=200ms"))
        feet = [
            foot
            for gpu in gpus()
            for foot in footprints(spec, ReplicaNeed(demand), gpu, lookup(gpu.name), EngineConfig())[0]
        ]
        made.append(ModelLoad(f"{size}-{number}", tuple(feet), rate, spread=number % 4 == 0))
    return tuple(made)


def row(name: str, placement: Placement, seconds: float) -> dict[str, Any]:
    fleet = placement.fleet
    made = {
        "row": name, "models": len(fleet.models), "gpus": sum(placement.used.values()), "replicas": len(placement.replicas),
        "goal": fleet.goal, "objective": round(placement.objective, 4), "bound": round(placement.bound, 4),
        "gap": round(placement.gap, 6), "method": placement.method, "seconds": round(seconds, 1),
    }  # fmt: skip
    return {**made, **({"moves": len(placement.moves)} if fleet.previous else {}), **provenance(cpu_name())}


def timed(name: str, fleet: Fleet, solver: bool) -> tuple[Placement, dict[str, Any]]:
    start = time.process_time()
    placement = attempt(fleet, SECONDS, solver)
    made = row(name, placement, time.process_time() - start)
    print(made, flush=True)
    return placement, made


def rows(count: int) -> Iterator[dict[str, Any]]:
    loads, owned = models(count, random.Random(SEED)), gpus()
    rented = tuple(replace(gpu, count=None) for gpu in owned)
    for name, fleet in (("fixed chips", Fleet(owned, loads, "most")), ("fixed load", Fleet(rented, loads, "cheapest"))):
        placement, made = timed(name, fleet, True)
        yield made
        yield timed(f"{name}, first fit", fleet, False)[1]
    again = replace(fleet, models=models(count, random.Random(SEED), random.Random(SEED + 1)))
    yield timed("changed load, from nothing", again, True)[1]
    yield timed("changed load, moves", replace(again, previous=placement.replicas, move_cost=0.05), True)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="file of results")
    parser.add_argument("--models", type=int, default=100)
    args = parser.parse_args()
    made = list(rows(args.models))
    if args.out:
        write_rows(HERE.parent / args.out, made)


if __name__ == "__main__":
    main()
