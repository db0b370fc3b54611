"""Memory of a sleeping engine, and the seconds until it is awake again:

    python benchmarks/sleep.py --out benchmarks/results/sleep.json
    python benchmarks/sleep.py --device cuda --model benchmarks/models/llama-3.1-8b --machine "1x NVIDIA H200" \\
        --out benchmarks/results/sleep.json

Without --model: the shipped model with its weights; with one: its shape with random weights. The engine runs in this process. Each
round answers a request, sleeps, and wakes up, at level 1 and then at level 2; after each wake the tokens must be those of before.
Rows: medians of the rounds. memory: of the process on a CPU, of the whole device on a GPU; before the engine starts, awake and
asleep. The start is that of an engine in this process, without imports.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import shipped_model
from ridgeline.wire.messages import Control, Reply, Submit

PROMPT = list(range(5, 205))
SAMPLING = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
TARGET_S = 2.0
"""Seconds in which a model of the shape of Llama 3.1 8B must be awake again, on a GPU at level 1."""


def used_bytes(device: str) -> int:
    """Memory that is in use: of the device, or of this process."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def order(engine: LocalEngine, name: str, argument: str = "") -> float:
    """Seconds of an order between two steps. Raises RuntimeError if it fails."""
    while not engine.engine.idle:  # the last step of a request may still be in flight
        engine.engine.turn()
    started = time.perf_counter()
    (reply,) = engine.engine.handle(Control(name, name, argument))
    assert isinstance(reply, Reply)
    if "error" in reply.facts:
        raise RuntimeError(reply.facts["error"])
    return time.perf_counter() - started


def answer(engine: LocalEngine, name: str) -> tuple[list[int], float]:
    """The tokens of the prompt, and the seconds until all have come."""
    started = time.perf_counter()
    deltas = engine.run([Submit(name, PROMPT, SAMPLING, time.monotonic())])
    return [token for delta in deltas for token in delta.tokens], time.perf_counter() - started


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Value of each row by name."""
    values: dict[str, list[float]] = {"memory-before": [used_bytes(args.device)]}
    model = ModelConfig(args.model or str(shipped_model()), load_format="dummy" if args.model else "auto")
    config = EngineConfig(
        device=args.device, enable_sleep_mode=True, kv_cache_memory=args.kv_bytes, threads=args.threads
    )
    started = time.perf_counter()
    engine = LocalEngine.start(model, config)
    values["start-s"] = [time.perf_counter() - started]
    first, _ = answer(engine, "first")
    values["memory-awake"] = [used_bytes(args.device)]
    for level in ("1", "2"):
        for number in range(args.rounds):
            slept = order(engine, "sleep", level)
            # The first sleep at level 1 copies the weights of a GPU to host memory, and later ones find the copy.
            kind = "first-sleep" if number == 0 and level == "1" else f"sleep-{level}"
            values.setdefault(f"{kind}-s", []).append(slept)
            values.setdefault(f"memory-asleep-{level}", []).append(used_bytes(args.device))
            values.setdefault(f"wake-{level}-s", []).append(order(engine, "wake_up"))
            tokens, seconds = answer(engine, f"{level}-{number}")
            if tokens != first:
                raise RuntimeError(f"After sleep at level {level} the model says something else.")
            values.setdefault(f"answer-after-wake-{level}-s", []).append(seconds)
    engine.close()
    return {name: statistics.median(some) for name, some in values.items()}


def rows(args: argparse.Namespace, values: dict[str, float]) -> list[dict[str, Any]]:
    where = provenance(args.machine or cpu_name())
    name = f"{args.device}-{Path(args.model).name if args.model else 'shipped'}"
    made = []
    for row, value in values.items():
        seconds = row.endswith("-s")
        target = TARGET_S if row == "wake-1-s" and args.device == "cuda" else None
        unit = "s" if seconds else "MB"
        made.append(
            {
                "row": f"{name}-{row}",
                "value": round(value if seconds else value / 1e6, 4),
                "unit": unit,
                "target": target,
            }
            | where
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder with a config.json; empty: the shipped model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--kv-bytes", type=int, default=None, help="bytes of the KV cache (default: as the server chooses)"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    values = measure(args)
    for name, value in values.items():
        print(f"{name:28} {value if name.endswith('-s') else value / 1e6:12.4f} {'s' if name.endswith('-s') else 'MB'}")
    if args.out:
        write_rows(args.out, rows(args, values))


if __name__ == "__main__":
    main()
