"""Ours beside transformers on this machine's CPU, in one run: `python benchmarks/cpu.py --out benchmarks/results/cpu.json`.

SmolLM-135M shape, random weights, bfloat16, greedy: 128 tokens in, 64 out, for one request and for 16 at once. Both sides
alternate and the median of their runs is reported, in output tokens per second, the prompt's time included. The share of
bandwidth counts the weights once per step and the KV read, over the memory read rate measured here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import transformers
from common import HERE, cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.bandwidth import read_bandwidth
from ridgeline.models.config import read_model

PROMPT, OUTPUT = 128, 64


class Peer:
    """transformers' generate on the same shape, bf16, static batch."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.name = f"transformers {transformers.__version__} generate()"

    def tok_s(self, batch: int) -> float:
        ids = torch.randint(1, 1000, (batch, PROMPT))
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT,
                min_new_tokens=OUTPUT,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape == (batch, PROMPT + OUTPUT)
        return batch * OUTPUT / (time.perf_counter() - started)


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
    engine = LocalEngine.start(
        ModelConfig(model=str(folder), load_format="dummy"), EngineConfig(device="cpu", threads=threads)
    )
    spec = read_model(folder)[0]
    peer = Peer(folder)
    read = read_bandwidth(torch.device("cpu"))
    print(f"memory read {read / 1e9:.1f} GB/s, ops {engine.engine.setup.facts['ops']}")
    rows = []
    for batch in (1, 16):
        ours, theirs = [], []
        for _ in range(arguments.repeats + 1):
            result = timed(engine, [(PROMPT, OUTPUT)] * batch, spec.vocab_size, temperature=0.0)
            ours.append(result.output_tokens / result.seconds)
            theirs.append(peer.tok_s(batch))
        mine, its = statistics.median(ours[1:]), statistics.median(theirs[1:])
        rows.append(
            {
                "row": f"smollm135m-bf16-{'b1' if batch == 1 else 'c16'}",
                "ours": round(mine, 2),
                "peer": round(its, 2),
                "peer_name": peer.name,
                "ratio": round(mine / its, 3),
                "unit": "output tok/s",
                "share_of_bandwidth": round(bandwidth_share(spec, batch, mine, read), 3),
                **provenance(cpu_name()),
            }
        )
        print(
            f"batch {batch:2}: ours {mine:7.1f} tok/s, {peer.name} {its:7.1f}, ratio {mine / its:.2f}, "
            f"{rows[-1]['share_of_bandwidth']:.0%} of measured bandwidth",
            flush=True,
        )
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
