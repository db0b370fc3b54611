"""What a token takes whose draw has top-k, top-p or min-p, beside draws by temperature alone:

    python benchmarks/limits.py --out benchmarks/results/limits.json
    python benchmarks/limits.py --model benchmarks/models/llama-3.1-8b --batches 1,64 --out benchmarks/results/limits.json

All ways in one engine and in turns, random prompts of 128 tokens, temperature 1.0; medians. A model that is only a config.json has
random weights, whose logits are flatter than any text's: many tokens are allowed, and telling them takes longest.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine

CASES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p .95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p .95": {"top_k": 20, "top_p": 0.95},
    "min_p .05": {"min_p": 0.05},
}
PROMPT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder; empty: the shipped model")
    parser.add_argument("--batches", default="1,8,32", help="requests at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    given = parser.parse_args()
    real = not given.model or any(Path(given.model).glob("*.safetensors"))
    batches = [int(batch) for batch in given.batches.split(",")]
    model = ModelConfig(given.model, load_format="auto" if real else "dummy", max_model_len=1024)
    engine = LocalEngine.start(model, EngineConfig(max_num_seqs=max(batches), enable_prefix_caching=False))
    vocab = engine.engine.setup.vocab_size
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    name, rows = Path(given.model).name or "ridgeline-14m", []
    for batch in batches:
        times: dict[str, list[float]] = {case: [] for case in CASES}
        for repeat in range(-1, given.repeats):  # the first one warms up
            for case, limits in CASES.items():
                run = timed(engine, [(PROMPT, given.tokens)] * batch, vocab, **limits)
                if repeat >= 0:
                    times[case].append((run.seconds - max(run.ttft_s)) / (given.tokens - 1) * 1e3)
        each = {case: statistics.median(runs) for case, runs in times.items()}
        for case, tpot in each.items():
            row = {"row": f"{name}, {case}, b{batch}", "value": round(tpot, 4), "unit": "ms a token"}
            ratio = round(tpot / each["temperature"], 3)
            rows.append(row | {"of_temperature": ratio} | provenance(machine, given.commit))
            print(f"{row['row']}: {tpot:.4f} ms, {ratio:.3f} of temperature alone", flush=True)
    if given.out:
        write_rows(given.out, rows)


if __name__ == "__main__":
    main()
