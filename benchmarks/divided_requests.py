"""How many tokens and requests fit on CPU ranks that share experts: with divided heads, and with divided requests.

    python benchmarks/divided_requests.py --out benchmarks/results/divided_requests.json

A model of 2 layers with 16 experts and 8 query heads, with 1 KV head and with 4, random weights, float32. Each rank has 2 MiB of KV
cache. kv_tokens: that fit on all ranks together. requests: most of 112 requests of 64 prompt tokens and 16 output tokens that ran
at once. preempted: of them. ratio: kv_tokens over those of one process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows
from shapes import model_config

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Submit

CACHE = 2 << 20
PROMPT, OUTPUT, REQUESTS, VOCAB = 64, 16, 112, 512
WAYS: Mapping[str, Mapping[str, int]] = {
    "one": {},
    "heads-2": {"tensor_parallel_size": 2},
    "requests-2": {"data_parallel_size": 2},
    "heads-4": {"tensor_parallel_size": 4},
    "requests-4": {"data_parallel_size": 4},
}
"""Name and number of ranks -> how they divide attention. All divide whole experts."""


def fits(engine: LocalEngine) -> dict[str, Any]:
    """What fits, from the sizes of the pools and from a run."""
    loop = engine.engine.loop
    scheduler, pool = loop.scheduler, loop.scheduler.leases.pool
    layout = scheduler.leases.layout
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for number in range(REQUESTS):
        prompt = [(7 * number + place) % VOCAB for place in range(PROMPT)]
        engine.submit(Submit(str(number), prompt, sampling, arrival=0.0))
    most = preempted = 0
    while not engine.engine.idle:
        frame = engine.engine.turn()
        most = max(most, len(scheduler.running))
        if frame is not None and frame.stats is not None:
            preempted += frame.stats.preempted
    engine._open.clear()
    tokens = pool.total // len(layout.groups) * layout.page_tokens
    return {"kv_tokens": tokens, "requests": most, "preempted": preempted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kv_heads in (1, 4):
        config = model_config(
            "qwen3_moe", (128, 1, 2, 8, kv_heads, 64, VOCAB), num_experts=16, num_experts_per_tok=4,
            moe_intermediate_size=64, norm_topk_prob=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            whole = 0
            for way, sizes in WAYS.items():
                model = ModelConfig(
                    folder, load_format="dummy", dtype="float32", max_model_len=256, expert_parallel=bool(sizes)
                )
                options: dict[str, Any] = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 512, "threads": 1}
                engine = LocalEngine.start(
                    model,
                    EngineConfig(device="cpu", kv_cache_memory=CACHE, enable_prefix_caching=False, **options, **sizes),
                )
                try:
                    figures = fits(engine)
                finally:
                    engine.close()
                whole = whole or figures["kv_tokens"]
                ratio = round(figures["kv_tokens"] / whole, 2)
                rows.append(
                    {
                        "row": f"{kv_heads}-kv-heads-{way}",
                        **figures,
                        "ratio": ratio,
                        **provenance(cpu_name(), args.commit),
                    }
                )
                print(
                    {key: rows[-1][key] for key in ("row", "kv_tokens", "requests", "preempted", "ratio")}, flush=True
                )
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
