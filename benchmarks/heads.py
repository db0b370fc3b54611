"""What a head in 8 bits changes beside layers in each number format, against a head in the model's dtype.

    python benchmarks/heads.py [--formats int8,int4] [--out benchmarks/results/heads.json]

On a CPU: drift of the shipped model from the unquantized one on held-out text, as in benchmarks/formats.py, and the speed of the
SmolLM-135M shape with random weights, both heads in turn. On a GPU: steps of an 8B's first layers and its head, as in
benchmarks/shapes.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import formats
import shapes
import torch
from common import HERE, cpu_name, provenance, timed, write_rows
from ledger import Whole

from ridgeline.core import quantization
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.quality.drift import by_document, measure, token_drift

HEADS = {"16bit": "", "8bit": quantization.HEAD_FORMAT}
CASES = {"b1": (1, 16, 64), "b16": (16, 16, 32)}
"""Name: requests at once, tokens in, tokens out."""
STEPS = ",".join(f"decode:{rows}x256" for rows in (1, 4, 16, 64, 128, 256, 448)) + ",prefill:512"


@contextmanager
def head(name: str) -> Iterator[None]:
    """Quantized models that are loaded meanwhile have a head in this format."""
    usual, quantization.HEAD_FORMAT = quantization.HEAD_FORMAT, name
    try:
        yield
    finally:
        quantization.HEAD_FORMAT = usual


def drift(names: list[str]) -> Iterator[dict[str, Any]]:
    """Of the shipped model from the unquantized one."""
    table = formats.Table(formats.options(["--work", ".", "--device", "cpu", "--prompts", "1", "--repeats", "1"]))
    folder, documents = str(table.folder), [window.document for window in table.windows]
    plain = table.measure(ModelConfig(folder))
    for name in names:
        for size, head_format in HEADS.items():
            with head(head_format):
                here = table.measure(ModelConfig(folder, quantization=name))
            parts = [token_drift(*pair) for pair in zip(plain.scores, here.scores, strict=True)]
            figures = measure(by_document(parts, documents)).figures
            shown = {key: round(figures[key].value, 6) for key in ("kl", "top1", "perplexity_change")}
            yield {"row": f"heads-drift-{name}-{size}", **shown, "weight_bytes": here.weight_bytes}


def cpu_speed(names: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Output tokens per second, the best of some turns."""
    folder, threads = str(HERE / "models" / "smollm-135m"), len(os.sched_getaffinity(0))
    config = EngineConfig(device="cpu", threads=threads, kv_cache_memory=1 << 28)
    spec = read_model(Path(folder))[0]
    for name in names:
        model, engines, sizes = ModelConfig(folder, load_format="dummy", quantization=name), {}, {}
        for size, head_format in HEADS.items():
            with head(head_format):
                engines[size] = LocalEngine.start(model, config)
                sizes[size] = served_spec(spec, model).step_weight_bytes
        for case, (batch, given, asked) in CASES.items():
            best = dict.fromkeys(HEADS, 0.0)
            for _ in range(repeats + 1):
                for size, engine in engines.items():
                    run = timed(engine, [(given, asked)] * batch, spec.vocab_size, temperature=0.0)
                    best[size] = max(best[size], run.output_tokens / run.seconds)
            for size, rate in best.items():
                row = {"row": f"heads-smollm135m-{name}-{size}-{case}", "tok_s": round(rate, 1)}
                yield row | {"ratio": round(rate / best["16bit"], 3), "step_bytes": sizes[size]}
        for engine in engines.values():
            engine.close()


def gpu_steps(names: list[str], layers: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Microseconds of a step on the device."""
    device, cases = torch.device("cuda"), [shapes.case_of(step) for step in STEPS.split(",")]
    for name in names:
        base: dict[str, float] = {}
        for size, head_format in HEADS.items():
            with head(head_format):
                whole = Whole(shapes.load(f"llama-3.1-8b:{name}", layers, device), cases, repeats)
            for case in cases:
                seconds, _ = whole.seconds(case)
                change = 1e6 * (seconds - base.setdefault(case.name, seconds))
                row = {"row": f"heads-llama-3.1-8b-{name}-{size}-{case.name}", "us": round(1e6 * seconds, 1)}
                yield row | {"change_us": round(change, 1), "layers": layers}
            del whole
            shapes.free(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int8,int4,int3,fp8,w8a8,llm-int8")
    parser.add_argument("--parts", default="drift,speed", help="drift, speed or both")
    parser.add_argument("--layers", type=int, default=8, help="of the 8B on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    args = parser.parse_args()
    names, cuda = args.formats.split(","), torch.cuda.is_available()
    about, parts = provenance(torch.cuda.get_device_name() if cuda else cpu_name()), dict[str, Any]()
    if cuda:
        parts["speed"] = lambda: gpu_steps(names, args.layers, args.repeats)
    else:
        parts = {"drift": lambda: drift(names), "speed": lambda: cpu_speed(names, args.repeats)}
    with torch.inference_mode():
        for part in args.parts.split(","):
            for row in parts[part]() if part in parts else ():
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                if args.out:
                    write_rows(args.out, [row | about])


if __name__ == "__main__":
    main()
