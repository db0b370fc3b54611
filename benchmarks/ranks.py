"""What it costs and gains on a CPU to divide a model over processes: tensor and pipeline parallel against one process.

    python benchmarks/ranks.py --model benchmarks/models/smollm-135m --out benchmarks/results/ranks.json

Random weights, each process with one thread. "one, two threads" is one process on the cores of two. prompt: tokens of one prompt
per second until its first token. decode: output tokens per second of --rows requests that run together, after the last
first token. start_s: until the engine is ready. The best of --rounds rounds, which alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine

WAYS: Mapping[str, Mapping[str, int]] = {
    "one process": {"threads": 1},
    "one process, two threads": {"threads": 2},
    "two tensor parallel ranks": {"threads": 1, "tensor_parallel_size": 2},
    "two stages": {"threads": 1, "pipeline_parallel_size": 2},
}
PROMPT, OUTPUT = 1024, 96


def run(engine: LocalEngine, rows: int) -> dict[str, float]:
    """Tokens per second of one long prompt, and of `rows` requests that decode together."""
    vocab = engine.engine.setup.vocab_size
    prompt = timed(engine, [(PROMPT, 1)], vocab)
    together = timed(engine, [(16, OUTPUT)] * rows, vocab)
    return {
        "prompt": PROMPT / prompt.seconds,
        "decode": rows * (OUTPUT - 1) / (together.seconds - max(together.ttft_s)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = ModelConfig(str(args.model), dtype=args.dtype, load_format="dummy", max_model_len=2048)
    best: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for _ in range(args.rounds):
        for way, options in WAYS.items():
            began = time.perf_counter()
            engine = LocalEngine.start(
                model,
                EngineConfig(device="cpu", enable_prefix_caching=False, max_num_seqs=args.rows, **options),  # type: ignore[arg-type]
            )
            start_s = time.perf_counter() - began
            try:
                run(engine, args.rows)  # builds the shapes of its steps
                figures = run(engine, args.rows)
            finally:
                engine.close()
            kept = best[way]
            for name, value in figures.items():
                kept[name] = max(value, kept.get(name, 0.0))
            kept["start_s"] = min(start_s, kept.get("start_s", start_s))
    about = provenance(cpu_name(), args.commit)
    rows: list[dict[str, Any]] = []
    for way, figures in best.items():
        row = {"row": f"{args.model.name}-{way}", "way": way, "rows": args.rows, "dtype": args.dtype}
        row |= {name: round(value, 2 if name == "start_s" else 1) for name, value in figures.items()}
        row |= {f"{name}_ratio": round(figures[name] / best["one process"][name], 3) for name in ("prompt", "decode")}
        rows.append(row | about)
        print({name: row[name] for name in ("way", "prompt", "decode", "prompt_ratio", "decode_ratio", "start_s")})
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
