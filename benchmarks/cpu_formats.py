"""Number formats beside bfloat16 on this machine's CPU, in one run: `python benchmarks/cpu_formats.py --out FILE`.

SmolLM-135M shape, random weights, greedy: one request, 4, 16 and 64 at once, and one prompt of 512 tokens up to its first
token. Formats alternate; the best of their runs is reported, because other work on the machine only slows a run, in tokens per
second, with the bytes that a step reads. Let the machine be quiet: threads of one product wait for each other.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model

CASES = {"b1": (1, 16, 64), "c4": (4, 16, 64), "c16": (16, 16, 32), "c64": (64, 16, 16), "prefill512": (1, 512, 1)}
"""Name: requests at once, tokens in, tokens out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default=str(HERE / "models" / "smollm-135m"), help="folder with a config.json")
    parser.add_argument("--formats", default="int8,int4,int4-g32,int3,fp8,fp8-weight,w8a8,llm-int8")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread and its processor time, for a busy machine"
    )
    arguments = parser.parse_args()
    folder, threads = Path(arguments.model), 1 if arguments.processor_time else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    spec, names = read_model(folder)[0], ["", *arguments.formats.split(",")]
    models = {name: ModelConfig(model=str(folder), load_format="dummy", quantization=name) for name in names}
    config = EngineConfig(device="cpu", threads=threads, kv_cache_memory=1 << 28)
    engines = {name: LocalEngine.start(model, config) for name, model in models.items()}
    facts, rows = provenance(cpu_name(), arguments.commit), []
    for case in arguments.cases.split(","):
        batch, given, asked = CASES[case]
        tokens = batch * asked if asked > 1 else given
        rates: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(arguments.repeats + 1):
            for name, engine in engines.items():
                started = time.process_time()
                result = timed(engine, [(given, asked)] * batch, spec.vocab_size, temperature=0.0)
                seconds = time.process_time() - started if arguments.processor_time else result.seconds
                if repeat:
                    rates[name].append(tokens / seconds)
        plain = max(rates[""])
        for name in names:
            rate = max(rates[name])
            row: dict[str, Any] = {"row": f"smollm135m-{name or 'bf16'}-{case}", "ours": round(rate, 2)}
            row |= {"bf16": round(plain, 2), "ratio": round(rate / plain, 3), "unit": "tok/s"}
            row["step_bytes"] = served_spec(spec, models[name]).step_weight_bytes
            rows.append(row | facts)
            print(f"{row['row']}: {rate:.1f} tok/s, {rate / plain:.2f} of bf16", flush=True)
    for engine in engines.values():
        engine.close()
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
