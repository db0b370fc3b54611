"""Ours beside transformers on this machine's CPU, in one run: `python benchmarks/cpu.py --out benchmarks/results/cpu.json`.

SmolLM-135M shape, random weights, bfloat16, greedy: 128 tokens in, 64 out, for one request and for 16 at once; and one prompt
of 512 tokens up to its first token. Both sides alternate and the median of their runs is reported, in tokens per second;
output tokens count the prompt's time too. The share of bandwidth counts the weights once per step and the KV read, over the
memory read rate measured here. Start-up is from the order to load the model (dummy weights) to ready, imports done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from common import HERE, cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.bandwidth import read_bandwidth
from ridgeline.models.config import read_model

PROMPT, OUTPUT = 128, 64
PREFILL = 512


class Peer:
    """transformers' generate on the same shape, bf16, static batch."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.name = f"transformers {transformers.__version__} generate()"

    def seconds(self, batch: int, prompt: int, output: int) -> float:
        ids = torch.randint(1, 1000, (batch, prompt))
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape == (batch, prompt + output)
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `batch` requests at once; tokens: what its rate counts."""

    row: str
    batch: int
    prompt: int
    output: int
    tokens: int
    unit: str


CASES = (
    Case("smollm135m-bf16-b1", 1, PROMPT, OUTPUT, OUTPUT, "output tok/s"),
    Case("smollm135m-bf16-c16", 16, PROMPT, OUTPUT, 16 * OUTPUT, "output tok/s"),
    Case("smollm135m-bf16-prefill512", 1, PREFILL, 1, PREFILL, "prompt tok/s"),
)


def measure(case: Case, engine: LocalEngine, peer: Peer, vocab: int, repeats: int) -> tuple[float, float]:
    """(ours, the peer's) tokens per second: medians of `repeats` runs that alternate, after one each to warm up."""
    ours, theirs = [], []
    for _ in range(repeats + 1):
        result = timed(engine, [(case.prompt, case.output)] * case.batch, vocab, temperature=0.0)
        ours.append(case.tokens / result.seconds)
        theirs.append(case.tokens / peer.seconds(case.batch, case.prompt, case.output))
    return statistics.median(ours[1:]), statistics.median(theirs[1:])


def bandwidth_share(spec: ModelSpec, batch: int, tok_s: float, read_bytes_s: float) -> float:
    """Bytes that decoding must read per second at this rate, over what the memory was measured to give."""
    per_step = spec.step_weight_bytes + batch * spec.kv_read_bytes(PROMPT + OUTPUT // 2, 1)
    return per_step * tok_s / batch / read_bytes_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default=str(HERE / "models" / "smollm-135m"), help="folder with a config.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(arguments.model)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    started = time.perf_counter()
    engine = LocalEngine.start(
        ModelConfig(model=str(folder), load_format="dummy"), EngineConfig(device="cpu", threads=threads)
    )
    start_s = time.perf_counter() - started
    spec = read_model(folder)[0]
    peer = Peer(folder)
    read = read_bandwidth(torch.device("cpu"))
    facts = {"ops": engine.engine.setup.facts["ops"], **provenance(cpu_name())}
    print(f"memory read {read / 1e9:.1f} GB/s, ops {facts['ops']}, ready after {start_s:.2f} s")
    rows: list[dict[str, Any]] = [{"row": "smollm135m-bf16-start", "ours": round(start_s, 2), "unit": "s", **facts}]
    for case in CASES:
        mine, its = measure(case, engine, peer, spec.vocab_size, arguments.repeats)
        shares = {}
        if case.output > 1:
            shares["share_of_bandwidth"] = round(bandwidth_share(spec, case.batch, mine, read), 3)
        rows.append(
            {
                "row": case.row,
                "ours": round(mine, 2),
                "peer": round(its, 2),
                "peer_name": peer.name,
                "ratio": round(mine / its, 3),
                "unit": case.unit,
                **shares,
                **facts,
            }
        )
        print(
            f"{case.row}: ours {mine:.1f} {case.unit}, {peer.name} {its:.1f}, ratio {mine / its:.2f}",
            shares,
            flush=True,
        )
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
