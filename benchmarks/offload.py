"""Time to first token of a long prompt that the KV cache has evicted: computed again, from host memory, from files.

    offload.py --model benchmarks/models/smollm-135m --tokens 1920 --kv-bytes 46080000 --machine "..."
    offload.py --model benchmarks/models/llama-3.1-8b --tokens 16384 --kv-bytes 2200000000 --device cuda --machine "..."

Writes the row offload-<tokens>-ttft-ratio (on a CPU with -cpu): host memory against computing, and the ratio of files beside it.
The weights are random, which changes no time. Each time is the median of `--rounds`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Submit

TARGET = 0.25


class Bench:
    """An engine whose cache holds one prompt, so that each other prompt evicts it."""

    def __init__(self, arguments: argparse.Namespace, **tiers: Any) -> None:
        self._tokens, self._runs = arguments.tokens, 0
        model = ModelConfig(model=arguments.model, load_format="dummy", max_model_len=arguments.tokens + 64)
        config = EngineConfig(device=arguments.device, kv_cache_memory=arguments.kv_bytes, **tiers)
        self.engine = LocalEngine.start(model, config)
        self._ask(-1)  # the first run of any prompt is slower

    def _ask(self, seed: int) -> tuple[float, int]:
        """Seconds to the first token of the prompt of this number, and its cached tokens."""
        self._runs += 1
        prompt = [(seed + 7) * 1009 % 40_000 + place % 997 for place in range(self._tokens)]
        started, first, cached = time.perf_counter(), 0.0, 0
        self.engine.submit(
            Submit(str(self._runs), prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), time.time())
        )
        for delta in self.engine.deltas():
            if delta.tokens and not first:
                first, cached = time.perf_counter() - started, delta.cached
        return first, cached

    def again(self, rounds: int) -> list[tuple[float, int]]:
        """Ask for prompt 0 after another prompt, so many times."""
        timed = []
        for number in range(1, rounds + 1):
            self._ask(number)
            timed.append(self._ask(0))
        return timed

    def close(self) -> None:
        self.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=1920)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-bytes", type=int, required=True, help="for little more than one prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offload-gb", type=float, default=1.0)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    cached: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {"kv_disk": folder, "kv_disk_gb": 4 * arguments.offload_gb}
        for name, rounds, tiers in (
            ("compute", arguments.rounds, {}),
            ("host", arguments.rounds + 1, {"kv_offload_gb": arguments.offload_gb}),
            ("write", 2, {"kv_offload_gb": arguments.offload_gb, **files}),
            ("disk", 1, {"kv_offload_gb": arguments.offload_gb, **files}),
        ):
            bench = Bench(arguments, **tiers)
            # The first ask of the host tier computes the prompt. A restart finds it in files.
            timed = bench.again(rounds)[name == "host" :]
            bench.close()
            seconds[name], cached[name] = statistics.median(second for second, _ in timed), timed[-1][1]
            print(name, [f"{second * 1e3:.0f} ms, {hit} cached" for second, hit in timed], flush=True)
    row = {
        "row": f"offload-{arguments.tokens}-ttft-ratio" + ("-cpu" if arguments.device == "cpu" else ""),
        "value": round(seconds["host"] / seconds["compute"], 4),
        "unit": "of the time to compute the prompt",
        "target": TARGET,
        "disk_ratio": round(seconds["disk"] / seconds["compute"], 4),
        "ttft_ms": {name: round(1000 * seconds[name], 1) for name in ("compute", "host", "disk")},
        "cached_tokens": {name: cached[name] for name in ("compute", "host", "disk")},
        "model": Path(arguments.model).name,
    }
    print(row)
    write_rows(Path(arguments.out) / "kv.json", [row | provenance(arguments.machine)])


if __name__ == "__main__":
    main()
