"""All rows of the H200 table with one command: `python benchmarks/gpu.py --out benchmarks/results/h200.json`.

Start-up is timed on fresh processes, first with empty caches of compiled kernels and modules, then with what that left. The rest is
in process (no HTTP), random weights from config.json alone, temperature 1.0, end tokens ignored, no prefix caching, at most
512 running, context 10,240: as the peers' figures were taken. `--model FOLDER` (a config.json is enough) with
`--lens FILE` runs any other shape and mix and prints its requests and tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import kernels
import torch
from common import HERE, Timed, lens, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.metrics.account import Account, Accounted, Committed
from ridgeline.service.launch import launch

MAX_LEN = 10_240
LEAST_S = 0.3
"""Seconds that the runs of one measurement take together, at least."""
CACHES = {"TRITON_CACHE_DIR": "kernels", "XDG_CACHE_HOME": "others"}
"""Variables that say where a start keeps what it has compiled, and folders that are empty before the cold one."""
SHARE = f"share of {kernels.READ_TB_S} TB/s"

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Row(Generic[Source]):
    """One figure: how it is measured, its floor at the measured ceilings, and what vLLM 0.33.0 takes (results/peers.json)."""

    name: str
    unit: str
    peer: float | None
    floor: float | None
    target: float | None
    measure: Callable[[Source], float]


class Card:
    """What is measured without an engine in this process, while the card is empty."""

    def __init__(self, model: str, engine: EngineConfig) -> None:
        self._model, self._engine = model, engine
        self._startup: tuple[float, float] | None = None

    def startup_s(self, *, cold: bool) -> float:
        """Seconds from starting the engine's process until it is ready, weights made on the card. Both are measured at
        once: the warm one needs what the cold one compiled."""
        if self._startup is None:
            before = {name: os.environ.get(name) for name in CACHES}
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= {name: f"{folder}/{folder_name}" for name, folder_name in CACHES.items()}
                try:
                    self._startup = (asyncio.run(self._ready()), asyncio.run(self._ready()))
                    print(f"of this host: importing torch takes {_import_s(folder):.2f} s", flush=True)
                finally:
                    for name, value in before.items():
                        os.environ.pop(name)
                        if value is not None:
                            os.environ[name] = value
        return self._startup[0 if cold else 1]

    async def _ready(self) -> float:
        started = time.perf_counter()
        model = ModelConfig(model=self._model, load_format="dummy", max_model_len=MAX_LEN)
        process = await launch(model, self._engine)
        try:
            facts = await process.client.wait_ready()
            seconds = time.perf_counter() - started
        finally:
            await process.stop()
        print(f"ready in {seconds:.2f} s: {facts['startup_s']}", flush=True)
        return seconds

    def attention_share(self, rows: int, context: int) -> float:
        """Share of the card's read bandwidth at which decode attention takes in keys and values: of several readings the median,
        as the first of a process is often 8 % low, and so are some that follow the release of much memory."""
        kernels.check()
        readings = [kernels.time_decode(rows, context, "page")() for _ in range(5)]
        torch.cuda.empty_cache()
        return statistics.median(read / microseconds for microseconds, read in readings) * 1e-6 / kernels.READ_TB_S


def _import_s(folder: str) -> float:
    """Seconds in which a fresh process imports torch, compiled as the engine's own finds it."""
    kept = Path(folder, CACHES["XDG_CACHE_HOME"], "ridgeline", "bytecode")
    environ = os.environ | ({"PYTHONPYCACHEPREFIX": str(kept)} if kept.is_dir() else {})
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environ, check=True)
    return time.perf_counter() - started


class Composition:
    """An engine's account that also notes what each step was made of: [cached tokens of rows that decode, (cached, new)
    tokens of the others, rows that drew, device seconds], by the row of the table that it ran for."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.row = "start"
        self.steps: dict[str, list[Any]] = {}

    def step(self, committed: Committed, prompt_tokens: int, device_s: float) -> Accounted:
        ends, counts = committed.ends, committed.plan.n_query
        logits = sum(committed.plan.samples) + len(committed.plan.drafts)
        decode = [end - 1 for end, count in zip(ends, counts, strict=True) if count == 1]
        chunks = [(end - count, count) for end, count in zip(ends, counts, strict=True) if count != 1]
        self.steps.setdefault(self.row, []).append([decode, chunks, logits, round(device_s, 7)])
        return self._account.step(committed, prompt_tokens, device_s)


class Bench:
    """An engine with dummy weights, and medians of several runs on it."""

    def __init__(self, model: str, repeats: int, engine: EngineConfig, quantization: str = "") -> None:
        config = ModelConfig(model=model, load_format="dummy", max_model_len=MAX_LEN, quantization=quantization)
        self.local = LocalEngine.start(config, engine)
        setup = self.local.engine.setup
        self.composition = Composition(setup.account)
        self.local.engine.setup = replace(setup, account=self.composition)
        self.facts = setup.facts
        self.repeats = repeats
        self._vocab = self.local.engine.setup.vocab_size

    def run(self, shapes: list[tuple[int, int]]) -> Timed:
        return timed(self.local, shapes, self._vocab)

    def seconds(self, shapes: list[tuple[int, int]]) -> float:
        """Median seconds of the runs after one that warms up; short ones are repeated more often."""
        self.run(shapes)
        samples: list[float] = []
        while len(samples) < self.repeats or sum(samples) < LEAST_S:
            samples.append(self.run(shapes).seconds)
        return statistics.median(samples)

    def tpot_ms(self, batch: int, length: int) -> float:
        many = self.seconds([(length, 257)] * batch)
        single = self.seconds([(length, 1)] * batch)
        return (many - single) / 256 * 1e3


def _conv(bench: Bench) -> float:
    shapes = lens("azure_conv_1000")
    bench.run(shapes[:100])
    return len(shapes) / bench.run(shapes).seconds


def _nano(bench: Bench) -> float:
    bench.run(lens("nano_256")[:64])
    result = bench.run(lens("nano_256"))
    return result.output_tokens / result.seconds


def _prefill(bench: Bench) -> float:
    return 16 * 8192 / bench.seconds([(8192, 1)] * 16)


EMPTY_CARD: list[Row[Card]] = [
    Row("8b-startup-s", "s", None, None, 10.0, lambda c: c.startup_s(cold=False)),
    Row("8b-startup-cold-s", "s", 75.0, None, 25.0, lambda c: c.startup_s(cold=True)),
    Row("attention-b64-4k-bandwidth-share", SHARE, None, 1.0, 0.88, lambda c: c.attention_share(64, 4096)),
    Row("attention-b1-32k-bandwidth-share", SHARE, None, 1.0, 0.88, lambda c: c.attention_share(1, 32_768)),
]
# (model folder, quantization) -> its rows.
TABLE: dict[tuple[str, str], list[Row[Bench]]] = {
    ("llama-3.1-8b", ""): [
        Row("8b-bf16-single128-tpot-ms", "ms", 4.96, 3.24, 3.75, lambda b: b.tpot_ms(1, 128)),
        Row("8b-bf16-single4096-tpot-ms", "ms", 5.10, 3.36, 3.95, lambda b: b.tpot_ms(1, 4096)),
        Row("8b-bf16-ttft128-ms", "ms", 9.06, 4.0, 6.0, lambda b: b.seconds([(128, 1)]) * 1e3),
        Row("8b-bf16-batch16-tpot-ms", "ms", 5.16, 3.5, 3.95, lambda b: b.tpot_ms(16, 128)),
        Row("8b-bf16-batch64-tpot-ms", "ms", 6.08, 3.8, 4.9, lambda b: b.tpot_ms(64, 128)),
        Row("8b-bf16-batch128-tpot-ms", "ms", 7.51, 4.2, 5.4, lambda b: b.tpot_ms(128, 128)),
        Row("8b-bf16-batch256-tpot-ms", "ms", 11.47, 6.5, 8.3, lambda b: b.tpot_ms(256, 128)),
        Row("8b-bf16-prefill-tok-s", "tok/s", 38_643, 47_000, 42_000, _prefill),
        Row("8b-bf16-conv-req-s", "req/s", 22.37, 31.5, 26.0, _conv),
    ],
    ("llama-3.1-8b", "fp8"): [
        Row("8b-fp8-single128-tpot-ms", "ms", 3.50, 1.74, 2.25, lambda b: b.tpot_ms(1, 128)),
        Row("8b-fp8-batch64-tpot-ms", "ms", 4.54, 2.3, 2.9, lambda b: b.tpot_ms(64, 128)),
        Row("8b-fp8-prefill-tok-s", "tok/s", 56_196, 78_700, 62_000, _prefill),
        Row("8b-fp8-conv-req-s", "req/s", 29.9, None, 36.0, _conv),
    ],
    ("qwen3-0.6b", ""): [
        Row("0.6b-bf16-single128-tpot-ms", "ms", 1.78, 0.26, 0.70, lambda b: b.tpot_ms(1, 128)),
        Row("0.6b-bf16-batch64-tpot-ms", "ms", 2.61, 0.5, 0.95, lambda b: b.tpot_ms(64, 128)),
        Row("0.6b-bf16-nano-tok-s", "tok/s", 21_096, 34_500, 29_000, _nano),
    ],
    ("gemma-3-4b", ""): [
        Row("gemma3-4b-single128-tpot-ms", "ms", None, 1.7, 2.05, lambda b: b.tpot_ms(1, 128)),
        Row("gemma3-4b-batch64-tpot-ms", "ms", None, 2.1, 2.7, lambda b: b.tpot_ms(64, 128)),
    ],
    ("qwen2.5-14b", ""): [
        Row("qwen2.5-14b-single128-tpot-ms", "ms", None, 6.1, 6.5, lambda b: b.tpot_ms(1, 128)),
        Row("qwen2.5-14b-batch64-tpot-ms", "ms", None, 6.8, 7.9, lambda b: b.tpot_ms(64, 128)),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--rows", default="", help="comma-separated beginnings of row names; empty runs all")
    parser.add_argument("--model", default=None, help="folder with a config.json, for --lens")
    parser.add_argument("--lens", default=None, help="workload file of (input, output) lengths")
    parser.add_argument("--quantization", default="", help="number format of the weights, for --lens (fp8)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--steps", default="", help="folder for what every step was made of (benchmarks/prediction.py)")
    parser.add_argument("--commit", default="", help="what was measured, where there is no .git to ask")
    arguments = parser.parse_args()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    engine = EngineConfig(max_num_seqs=512, enable_prefix_caching=False, enforce_eager=arguments.eager, device="auto")
    if arguments.lens:
        bench = Bench(arguments.model, 1, engine, arguments.quantization)
        result = bench.run(lens(arguments.lens))
        print(f"{len(result.ttft_s) / result.seconds:.2f} req/s, {result.output_tokens / result.seconds:.0f} out tok/s")
        return
    wanted = tuple(arguments.rows.split(",")) if arguments.rows else ("",)
    about = provenance(machine, arguments.commit)
    card = Card(str(HERE / "models" / "llama-3.1-8b"), engine)
    for pattern in EMPTY_CARD:
        if pattern.name.startswith(wanted):
            report(pattern, pattern.measure(card), about, arguments.out)
    for (model, quantization), rows in TABLE.items():
        chosen = [row for row in rows if row.name.startswith(wanted)]
        if not chosen:
            continue
        bench = Bench(str(HERE / "models" / model), arguments.repeats, engine, quantization)
        print(f"{model} {quantization}: {bench.facts}", flush=True)
        for row in chosen:
            bench.composition.row = row.name
            report(row, row.measure(bench), about, arguments.out)
        if arguments.steps:
            name = f"steps-{model}{'-' if quantization else ''}{quantization}.json"
            (Path(arguments.steps) / name).write_text(json.dumps(bench.composition.steps, separators=(",", ":")))
        bench.local.close()


def report(row: Row[Any], value: float, about: dict[str, str], out: str | None) -> None:
    """Print one row beside floor, peer and target; add it to the result file."""
    peer = f"{row.peer:g}" if row.peer is not None else "-"
    print(f"{row.name:32} {value:10.3f} {row.unit:6} floor {row.floor} vLLM {peer} target {row.target}", flush=True)
    if out:
        entry: dict[str, Any] = {"row": row.name, "value": round(value, 4), "unit": row.unit, "floor": row.floor}
        write_rows(out, [entry | {"peer": row.peer, "target": row.target, **about}])


if __name__ == "__main__":
    main()
