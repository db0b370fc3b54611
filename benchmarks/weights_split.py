"""Steps of a model of which a part stays in host memory (`--cpu-offload-gb`), predicted and measured:

    python benchmarks/weights_split.py --machine "1x NVIDIA H200" --out benchmarks/results/split.json

Random weights, which cost what real ones cost. For each number of GiB in host memory an engine decodes 1, 16 and 32 requests, and
computes a prompt of 4,096 tokens. Up to 16 tokens, the CPU multiplies a part of these weights; from 32 on all are copied. Rows:
medians of the steps, the rate at which a step reads host memory as a share of the measured rate of the link, and the largest
relative error of the predictions. With 0 GiB nothing is copied.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import HERE, provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.host_weights import host_weights
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.wire.messages import StepStats, Submit

SHORT_PROMPT, OUTPUTS, WARM_STEPS = 64, 24, 4
BATCHES = (1, 16, 32)
"""The last one copies all weights."""


@dataclass(slots=True)
class Case:
    """An engine with `gib` GiB of its weights in host memory, and the records of its steps."""

    args: argparse.Namespace
    gib: float
    steps: list[StepStats] = field(default_factory=list)
    engine: LocalEngine = field(init=False)
    model: ModelConfig = field(init=False)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        self.model = ModelConfig(
            str(args.model),
            load_format="dummy",
            max_model_len=args.prompt + SHORT_PROMPT + OUTPUTS,
            quantization=args.quantization,
            cpu_offload_gb=self.gib,
        )
        config = EngineConfig(
            device=args.device,
            max_num_seqs=max(BATCHES),
            kv_cache_memory=args.kv_bytes,
            enable_prefix_caching=False,
            enforce_eager=args.eager,
        )
        started = time.perf_counter()
        self.engine = LocalEngine.start(self.model, config, on_step=self.steps.append)
        self.started_s = time.perf_counter() - started

    def run(self, prompts: Sequence[int], outputs: int) -> list[StepStats]:
        """The records of all steps of requests with so many prompt tokens."""
        self.steps.clear()
        draw = random.Random(1)
        sampling = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        requests = [
            Submit(
                f"{number}", [draw.randrange(10, 1000) for _ in range(length)], sampling, time.monotonic(), cache=False
            )
            for number, length in enumerate(prompts)
        ]
        for delta in self.engine.run(requests):
            if delta.error:
                raise RuntimeError(delta.error)
        return [step for step in self.steps if step.steps]

    def decode(self, batch: int) -> tuple[float, float]:
        """(measured, predicted) seconds of a step that decodes `batch` requests."""
        steps = [step for step in self.run([SHORT_PROMPT] * batch, OUTPUTS) if not step.prompt_tokens]
        return _medians([step for step in steps if step.output_tokens == batch][WARM_STEPS:])

    def prefill(self) -> tuple[float, float]:
        """(measured, predicted) seconds of a step with the long prompt."""
        tokens = self.args.prompt
        rounds = [self.run([tokens], 1) for _ in range(4)]
        return _medians([step for steps in rounds[1:] for step in steps if step.prompt_tokens == tokens])


def _medians(steps: Sequence[StepStats]) -> tuple[float, float]:
    return statistics.median(step.device_s for step in steps), statistics.median(step.predicted_s for step in steps)


def measure(args: argparse.Namespace, gib: float) -> list[dict[str, Any]]:
    case = Case(args, gib)
    ending = "".join(f"-{word}" for word in (args.quantization, "eager" * args.eager) if word)
    name, origin = f"split-{gib:g}gb", provenance(args.machine)
    moved = host_weights(served_spec(read_model(args.model)[0], case.model))
    shared = {"model": args.model.name, "host_gib": round(moved.bytes / (1 << 30), 3)}
    rows: list[dict[str, Any]] = []

    def add(what: str, value: float, unit: str, **more: object) -> None:
        row = {"row": f"{name}-{what}{ending}", "value": round(value, 4), "unit": unit, **more, **shared, **origin}
        print(row["row"], row["value"], unit, more, flush=True)
        rows.append(row)

    link = case.engine.engine.setup.facts["ceilings"].get("host_link", 0.0)
    errors = []
    for what, times in (
        *((f"tpot-{batch}", case.decode(batch)) for batch in BATCHES),
        (f"prefill-{args.prompt}", case.prefill()),
    ):
        measured, predicted = times
        errors.append(abs(predicted - measured) / measured)
        add(what, measured * 1e3, "ms", predicted_ms=round(predicted * 1e3, 3))
        if link and what == f"tpot-{BATCHES[0]}":
            add("read-rate", moved.bytes / measured / 1e9, "GB/s of host memory, by copies and CPU together")
        if link and what == f"tpot-{BATCHES[-1]}":
            add("link-rate", link / 1e9, "GB/s, pinned copies alone")
            add("streamed-rate", moved.bytes / measured / 1e9, "GB/s of a decode step")
            add("link-share", moved.bytes / measured / link, "of the measured rate of the link", target=0.8)
    if link:
        add("predicted-error", max(errors), "largest of these steps", target=0.15)
    if torch.cuda.is_available():
        add("memory", torch.cuda.max_memory_allocated() / (1 << 30), "GiB on the device, cache included")
    add("start", case.started_s, "s")
    case.engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with config.json")
    parser.add_argument("--gib", type=float, nargs="+", default=[8.0, 4.0, 0.0], help="GiB in host memory")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--kv-bytes", type=int, default=4 << 30)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the measured rates
    for gib in args.gib:
        write_rows(args.out, measure(args, gib))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
