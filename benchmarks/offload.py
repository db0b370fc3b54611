"""Time to first token of a long shared prompt: computed, reloaded from host memory, and reloaded from files after a restart:

    python benchmarks/offload.py --model benchmarks/models/smollm-135m --out benchmarks/results/kv.json
    python benchmarks/offload.py --model benchmarks/models/llama-3.1-8b --tokens 16384 --device cuda --rounds 3 \\
        --without-files --decoders 8 --machine "1x NVIDIA H200" --out benchmarks/results/kv.json

Random weights, which cost what real ones cost, and the shape's context made long enough for the prompt. The cache holds little
more than one prompt and the tokens of the decoders. A first prompt is computed; others of the same length evict it; it is sent
again. Then the engine ends and starts again with the files alone. Rounds repeat all of it with other prompts. Rows: medians, and
the ratios to the computed prompt.

--decoders: requests that decode before and during the reload from host memory. Row -decode-ratio: their time per token while the
prompt is reloaded, over that before. --without-files: host memory alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.wire.messages import StepStats, Submit

SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
BEFORE = 100
"""Tokens of each decoder before the prompt is sent."""
DECODED = 3000
"""Tokens after which a request that decodes beside the prompt ends by itself."""


@dataclass(slots=True)
class Bench:
    """An engine, the records of its steps, and how many prompts its cache on the device holds at most."""

    args: argparse.Namespace
    folder: str
    steps: list[StepStats] = field(default_factory=list)
    engine: LocalEngine = field(init=False)
    vocab: int = field(init=False)
    fillers: int = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        longest = max(args.tokens + 64, 2 * DECODED if args.decoders else 0)
        shape = _longer(args.model, Path(self.folder), longest)
        model = ModelConfig(str(shape), load_format="dummy", max_model_len=longest)
        spec = served_spec(read_model(shape)[0], model)
        block = 64 if args.device == "cuda" else 16
        layout = kv_layout(spec, block)
        slots = longest + args.decoders * (DECODED + block)
        pages = layout.pages_for(slots, slots) + 2
        config = EngineConfig(
            device=args.device,
            threads=args.threads,
            block_size=block,
            kv_cache_memory=(pages + 1) * layout.page_bytes,
            kv_offload_gb=3 * pages * layout.page_bytes / (1 << 30),  # all prompts of a round
            kv_disk="" if args.without_files else self.folder,
        )
        self.fillers = -(-slots // args.tokens)
        self.engine = LocalEngine.start(model, config, on_step=self.steps.append)
        self.vocab = spec.vocab_size

    def ttft(self, name: str, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a prompt, and how many of its tokens came from the cache."""
        first, cached = 0.0, 0
        started = time.perf_counter()
        self.engine.submit(Submit(name, prompt, SAMPLING, time.monotonic()))
        for delta in self.engine.deltas():
            if delta.error:
                raise RuntimeError(delta.error)
            if not first:
                first, cached = time.perf_counter() - started, delta.cached
        return first, cached

    def slowdown(self, prompt: list[int]) -> float:
        """Time per token of requests that decode while a prompt is reloaded, over that before the prompt was sent."""
        names = [f"decoder {number}" for number in range(self.args.decoders)]
        endless = SamplingParams(temperature=1.0, max_tokens=DECODED, ignore_eos=True)
        for number, name in enumerate(names):
            self.engine.submit(Submit(name, [number + 5] * 16, endless, time.monotonic(), cache=False))
        times: list[float] = []
        sent = 0
        for delta in self.engine.deltas():
            if delta.id == names[0] and not delta.finish:
                times.append(time.perf_counter())
                if len(times) == BEFORE:
                    self.engine.submit(Submit("reloaded", prompt, SAMPLING, time.monotonic()))
                    sent = len(times)
            elif delta.id == "reloaded" and delta.finish:
                for name in names:
                    self.engine.finish(name, 0, "stop", 0)
        before = (times[sent - 1] - times[sent - 1 - BEFORE // 2]) / (BEFORE // 2)
        return (times[-1] - times[sent - 1]) / (len(times) - sent) / before


def _longer(model: Path, folder: Path, tokens: int) -> Path:
    """A copy of a shape whose context has at least so many tokens."""
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    copy = folder / model.name
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Values of each row, one per round: seconds to first token by way, and the slowdown of decoding."""
    chance = random.Random(0)
    values: dict[str, list[float]] = {"recompute": [], "host": [], "disk": [], "decode": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.rounds):
            bench = Bench(args, folder)
            shared, *others = (
                [chance.randrange(bench.vocab) for _ in range(args.tokens)] for _ in range(1 + bench.fillers)
            )
            bench.ttft("warm up", [chance.randrange(bench.vocab) for _ in range(64)])
            for way, prompt in (("recompute", shared), *(("", other) for other in others), ("host", shared)):
                seconds, cached = bench.ttft(f"{way} {number}", prompt)
                _expect(way, cached, args.tokens)
                if way:
                    values[way].append(seconds)
            if args.decoders:
                values["decode"].append(bench.slowdown(others[0]))
            bench.engine.close()
            if not args.without_files:
                bench = Bench(args, folder)
                bench.ttft("warm up", [chance.randrange(bench.vocab) for _ in range(64)])
                seconds, cached = bench.ttft("disk", shared)
                _expect("disk", cached, args.tokens)
                values["disk"].append(seconds)
                bench.engine.close()
    return values


def _expect(way: str, cached: int, tokens: int) -> None:
    """A reloaded prompt was reloaded, and a computed one was computed."""
    if (cached > tokens * 0.9) != (way in ("host", "disk")):
        raise RuntimeError(f"{way or 'the other prompt'}: {cached} of {tokens} tokens came from the cache.")


def rows_of(values: dict[str, list[float]], args: argparse.Namespace) -> list[dict[str, Any]]:
    machine = args.machine or (cpu_name() if args.device == "cpu" else "")
    start, end = f"offload-{args.tokens // 1024}k-", "-cpu" if args.device == "cpu" else ""
    rows: list[dict[str, Any]] = []
    shared = {"model": args.model.name, "rounds": args.rounds, **provenance(machine)}

    def add(name: str, value: float, unit: str, **more: object) -> None:
        rows.append({"row": f"{start}{name}{end}", "value": round(value, 4), "unit": unit, **more, **shared})

    computed = statistics.median(values["recompute"])
    for way, name in (("recompute", ""), ("host", "ttft-ratio"), ("disk", "disk-ttft-ratio")):
        if seconds := values[way]:
            add(f"{way}-ttft", statistics.median(seconds), "s", each=[round(value, 4) for value in seconds])
            if name:
                add(name, statistics.median(seconds) / computed, "of the computed prompt", target=0.25)
    if values["decode"]:
        add("decode-ratio", statistics.median(values["decode"]), "of the time per token before", target=1.05)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--decoders", type=int, default=0)
    parser.add_argument(
        "--folder", help="parent of the folder of the files (default: the system's for temporary files)"
    )
    parser.add_argument("--without-files", action="store_true")
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = rows_of(measure(args), args)
    for row in rows:
        print(row["row"], row["value"], row["unit"])
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
