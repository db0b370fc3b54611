"""Weights in the blocks of a checkpoint beside other formats on this machine's CPU: `python benchmarks/cpu_blocks.py --out FILE`.

Products: one matrix of 4,096 outputs and inputs times 1, 4, 16 and 64 tokens, milliseconds. Model: the shape of Llama 3.2 1B with 4
of its layers and a vocabulary of 8,192 tokens, random weights, greedy: 1 and 16 requests, and a prompt of 512 tokens, tokens per
second. One thread, and processor time, because other work on the machine does not add to it. The best of --repeats; formats
alternate. int4 has groups of 128 inputs and int8 one scale for each output, as --quantization makes them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.ops import native_cpu
from ridgeline.ops.blocks import arrays
from ridgeline.ops.table import IntMatrix, MatmulOps
from ridgeline.quant.blocks import round_to_blocks
from ridgeline.quant.integer import round_to_nearest

SIDE = 4096
TOKENS = (1, 4, 16, 64)
PLAIN = ("int8", "int4")
"""Formats of --quantization."""
BLOCKS = {"q8_0": "int8-g32", "q4_0": "int4-g32", "q4_k": "q4_k", "q5_k": "q5_k", "q6_k": "q6_k", "mxfp4": "mxfp4"}
"""Number format by the type in a file."""
MODELS = {name: BLOCKS[name] for name in ("q8_0", "q4_0", "q4_k", "q6_k")}
CASES = {"b1": (1, 16, 48), "c16": (16, 16, 16), "prefill512": (1, 512, 1)}
"""Name: requests, tokens in, tokens out."""
LAYERS, VOCABULARY = 4, 8192


def best(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of processor time."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def packed(matmul: MatmulOps, weight: torch.Tensor) -> dict[str, tuple[IntMatrix, Callable[..., torch.Tensor]]]:
    """Name: matrix, product."""
    made = {}
    for name in PLAIN:
        numbers = NUMBER_FORMATS[name]
        matrix = matmul.integer.pack(*round_to_nearest(weight, numbers), numbers.bits, numbers.group)
        made[name] = matrix, matmul.integer.linear
    for name, number_format in BLOCKS.items():
        blocks = round_to_blocks(weight, NUMBER_FORMATS[number_format])
        made[name] = matmul.blocks.pack(blocks), matmul.blocks.linear
    return made


def products(repeats: int) -> list[dict[str, Any]]:
    ops, detail = native_cpu.load()
    if ops is None:
        raise SystemExit(detail)
    floats, weight, rows = ops.matmul.unquantized, torch.randn(SIDE, SIDE) * 0.02, []
    dense, matrices = floats.pack(weight.bfloat16()), packed(ops.matmul, weight)
    for tokens in TOKENS:
        x = torch.randn(tokens, SIDE).bfloat16()
        plain = best(lambda x=x: floats.linear(x, dense, None), repeats)  # type: ignore[misc]
        for name, (matrix, product) in matrices.items():
            seconds = best(lambda x=x, matrix=matrix, product=product: product(x, matrix, None), repeats)  # type: ignore[misc]
            row = {
                "row": f"product4096-{name}-m{tokens}",
                "ours": round(1e3 * seconds, 3),
                "bf16": round(1e3 * plain, 3),
            }
            row |= {"ratio": round(seconds / plain, 3), "unit": "ms"}
            rows.append(row | {"bytes": sum(tensor.nbytes for tensor in arrays(matrix)), "bf16_bytes": 2 * SIDE * SIDE})
            print(f"{row['row']}: {row['ours']} ms, {row['ratio']} of bf16", flush=True)
    return rows


def models(folder: Path, repeats: int) -> list[dict[str, Any]]:
    config = json.loads((HERE / "models" / "llama-3.2-1b" / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": 0}
    settings, engines, sizes = EngineConfig(device="cpu", threads=1, kv_cache_memory=1 << 27), {}, {}
    for name in ("bf16", *PLAIN, *MODELS):
        place = folder / name
        place.mkdir()
        stored = {"quant_method": "gguf", "format": MODELS.get(name), "layers": [], "head": ""}
        section = {"quantization_config": stored} if name in MODELS else {}
        (place / "config.json").write_text(json.dumps(config | section))
        quantization = name if name in PLAIN else ""
        model = ModelConfig(model=str(place), load_format="dummy", max_model_len=1024, quantization=quantization)
        engines[name] = LocalEngine.start(model, settings)
        sizes[name] = served_spec(read_model(place)[0], model).layer_bytes
    rows = []
    for case, (batch, given, asked) in CASES.items():
        tokens, times = batch * asked if asked > 1 else given, {name: [] for name in engines}
        for _ in range(repeats):
            for name, engine in engines.items():
                run = lambda engine=engine: timed(engine, [(given, asked)] * batch, VOCABULARY, temperature=0.0)  # noqa: B023, E731
                times[name].append(best(run, 1))
        plain = tokens / min(times["bf16"])
        for name in (*PLAIN, *MODELS):
            rate = tokens / min(times[name])
            row = {"row": f"llama1b-4layers-{name}-{case}", "ours": round(rate, 2), "bf16": round(plain, 2)}
            row |= {"ratio": round(rate / plain, 3), "unit": "tok/s"}
            rows.append(row | {"bytes": sizes[name], "bf16_bytes": sizes["bf16"]})
            print(f"{row['row']}: {rate:.1f} tok/s, {rate / plain:.2f} of bf16", flush=True)
    for engine in engines.values():
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = products(4 * arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        rows += models(Path(folder), arguments.repeats)
    if arguments.out:
        write_rows(arguments.out, [row | provenance(cpu_name(), arguments.commit) for row in rows])


if __name__ == "__main__":
    main()
