"""A model with experts beside a dense one whose tokens are multiplied by as many weights, on this machine's CPU.

    python benchmarks/experts.py --out benchmarks/results/experts.json

Both have 8 layers of width 512; an expert of 16 has the width 384, a token uses 4, and the dense block has the width 1,536. Random
weights, bfloat16, greedy. Runs alternate; the median of each is reported, in tokens per second. `predicted` is the ratio that the
bytes of a step allow (core.experts): one token reads its own experts alone, a batch reads more of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, timed, write_rows
from shapes import model_config

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_model

SIZES = 8, 8, 4, 64, 8192
"""Layers, heads, KV heads, head_dim, vocabulary."""
WIDTH, COUNT, PER_TOKEN, EXPERT_WIDTH = 512, 16, 4, 384
CONFIGS = {
    "experts": model_config(
        "qwen3_moe", (WIDTH, 1, *SIZES), num_experts=COUNT, num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=EXPERT_WIDTH, norm_topk_prob=True,
    ),
    "dense": model_config("qwen3", (WIDTH, PER_TOKEN * EXPERT_WIDTH, *SIZES)),
}  # fmt: skip
CASES = {"b1": (1, 64, 64), "c8": (8, 64, 32), "prefill512": (1, 512, 1)}
"""Row -> requests at once, prompt tokens, output tokens."""


def predicted(spec: ModelSpec, dense: ModelSpec, case: str) -> float:
    """The rate with experts over that of the dense model, if both are bound by the same resource: bytes, or FLOPs of a prompt."""
    batch, prompt, output = CASES[case]
    if output == 1:
        return step_work(dense, [(0, prompt)]).flops / step_work(spec, [(0, prompt)]).flops
    shares = [(prompt + output // 2, 1)] * batch
    return step_work(dense, shares).bytes / step_work(spec, shares).bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engines, specs = {}, {}
    with ExitStack() as stack:
        for name, config in CONFIGS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "config.json").write_text(json.dumps(config))
            model = ModelConfig(str(folder), load_format="dummy", max_model_len=1024)
            engine = LocalEngine.start(model, EngineConfig(device="cpu", threads=arguments.threads))
            stack.callback(engine.close)
            engines[name], specs[name] = engine, read_model(folder)[0]
        rows: list[dict[str, Any]] = []
        for case, (batch, prompt, output) in CASES.items():
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(arguments.repeats + 1):
                for name, engine in engines.items():
                    run = timed(engine, [(prompt, output)] * batch, specs[name].vocab_size, temperature=0.0)
                    rates[name].append((prompt if output == 1 else batch * output) / run.seconds)
            ours, dense = (statistics.median(rates[name][1:]) for name in ("experts", "dense"))
            expected = predicted(specs["experts"], specs["dense"], case)
            unit = "prompt tok/s" if output == 1 else "output tok/s"
            rows.append(
                {"row": f"experts-{case}", "ours": round(ours, 1), "dense": round(dense, 1), "unit": unit,
                 "ratio": round(ours / dense, 3), "predicted": round(expected, 3), **provenance(cpu_name())}
            )  # fmt: skip
            print(rows[-1])
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
