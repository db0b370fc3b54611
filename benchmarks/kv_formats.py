"""KV formats on one GPU: how fast decode attention reads its bytes, and the time per output token of an 8B shape.

    python benchmarks/kv_formats.py [--only attention|step|engine] [--sweep] [--out benchmarks/results/kv.json]

Attention: replays of a CUDA graph that calls it once per layer over 64 rows of 4,096 slots; the share is of the read bandwidth
that the card reaches with a plain read. Engine: 64 requests of 4,096 random tokens; the median of the steps in which all of them
decode, on the device. --sweep checks and times other tiles for fp8 and int4, prints them,
prints a step kernel by kernel, and runs the engine with the fastest tiles; results of such a run are not for the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from common import provenance, timed, write_rows
from gpu import Composition
from kernels import DIM, DTYPE, HEADS, KV_HEADS, LAYERS, PAGE, Batch, make, microseconds
from ledger import Case, Whole, fill, load, parse
from timeline import Share, shares, trace

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import KV_FORMATS, QUANTIZED_KV, LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.engine.local import LocalEngine
from ridgeline.kv.store import KvStore
from ridgeline.models.build import LoadedModel
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.triton import tuning
from ridgeline.ops.triton.attention import SPLIT
from ridgeline.ops.triton.tuning import Tile

ROWS, CONTEXT = 64, 4096
SWEEP: dict[str, tuple[tuple[int, int, int, int, int | None], ...]] = {
    "fp8": (
        (32, 1, 3, 8, None),
        (32, 1, 3, 11, None),
        (32, 1, 2, 8, None),
        (32, 1, 4, 8, None),
        (16, 1, 4, 12, None),
        (64, 2, 3, 4, None),
        (64, 2, 3, 6, None),
        (64, 4, 3, 4, None),
        (64, 4, 3, 5, None),
        (32, 1, 3, 8, 224),
        (64, 2, 3, 4, 240),
        (64, 4, 3, 4, 128),
    ),
    "int4": (
        (32, 1, 3, 8, None),
        (32, 1, 4, 8, None),
        (32, 1, 5, 8, None),
        (32, 1, 4, 4, None),
        (16, 1, 4, 8, None),
        (16, 1, 6, 8, None),
        (64, 2, 3, 4, None),
        (64, 2, 4, 4, None),
        (64, 4, 3, 3, None),
        (64, 4, 4, 4, None),
        (32, 1, 4, 8, 255),
        (64, 2, 4, 4, 255),
    ),
}
"""Slots, warps and stages of a tile, programs per processor for which keys are split, and the registers of programs that load keys
before the wait (None: they do not, see Tile)."""


def use(name: str, entry: tuple[int, int, int, int, int | None]) -> None:
    """Use an entry of SWEEP for a format."""
    keys, warps, stages, each, registers = entry
    bits = KV_FORMATS[name].bits
    tuning.WORD_TILES[bits][DIM] = Tile(16, keys, warps, stages, registers)
    tuning.WORD_PROGRAMS_PER_PROCESSOR[bits] = each
    SPLIT.choices.cache_clear()


def batch_in(name: str, rows: int = ROWS, context: int = CONTEXT, layers: int = LAYERS) -> Batch:
    """A batch whose cache is in a format: `name` of KV_FORMATS."""
    layer = LayerSpec(HEADS, KV_HEADS, DIM, 128, Rope())
    spec = ModelSpec("Bench", 32, 128, (layer,) * layers, context, dtype="bfloat16", kv_format=name)
    batch = make([(context, 1)] * rows, "page", layers=1)
    store = KvStore(kv_layout(spec, PAGE), spec.layers, rows * -(-context // PAGE) + 1, torch.device("cuda"))
    fill(store)
    views = [
        replace(batch.views[0], kv=kv, scales=scales, format=KV_FORMATS[name])
        for kv, scales in zip(store.kv, store.scales, strict=True)
    ]
    return replace(batch, views=views)


def read_rate() -> float:
    """Bytes per second of a plain read of 8 GiB: the largest of float32 numbers."""
    memory = torch.zeros(1 << 31, dtype=torch.float32, device="cuda")
    rate = memory.nbytes / microseconds(memory.amax, 5) * 1e6
    del memory
    torch.cuda.empty_cache()
    return rate


def graphed(batch: Batch) -> float:
    """Microseconds of a layer's attention."""
    fresh = replace(batch, step=replace(batch.step))
    fresh.layer(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(len(batch.views)):
            fresh.layer(layer)
    return microseconds(graph.replay, 10) / len(batch.views)


def check(name: str) -> None:
    """Stop before timing anything that is wrong."""
    batch = batch_in(name, 3, 700, 2)
    out = batch.layer(1)
    want, _ = REFERENCE.attention.attend(batch.q.double(), None, None, batch.views[1], batch.step)
    error = float((out.double() - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"attention in {name} is wrong: relative error {error:.3g}")


def tried(name: str, batch: Batch, floor_s: float) -> None:
    """Check and time the tiles of SWEEP, print them, and leave the fastest in use."""
    want = replace(batch, step=replace(batch.step)).layer(1).double()
    times = {}
    for entry in SWEEP[name]:
        use(name, entry)
        try:
            check(name)
            out = replace(batch, step=replace(batch.step)).layer(1).double()
            error = float((out - want).norm() / want.norm())
            times[entry] = graphed(batch) if error < 1e-2 else float("inf")
        except Exception as problem:  # a tile that does not fit the shared memory
            print(f"  {name} {entry}: {type(problem).__name__}: {problem}", flush=True)
            continue
        print(
            f"  {name} {entry}: {times[entry]:.1f} us, {floor_s * 1e6 / times[entry]:.3f}, error {error:.1e}",
            flush=True,
        )
    use(name, min(times, key=times.__getitem__))


def attention(sweep: bool) -> Iterator[dict[str, Any]]:
    rate = read_rate()
    for name in ("bfloat16", *QUANTIZED_KV):
        check(name)
        batch = batch_in(name)
        read = ROWS * CONTEXT * 2.0 * KV_HEADS * KV_FORMATS[name].vector_bytes(DIM)
        shipped = graphed(batch)
        yield {
            "row": f"kv-{name}-attention-b64-4k", "value": round(read / shipped * 1e6 / rate, 4), "unit": "share of the read rate",
            "microseconds": round(shipped, 2), "read_tb_s": round(rate / 1e12, 3), "target": 0.85,
        }  # fmt: skip
        if sweep and name in SWEEP:
            tried(name, batch, read / rate)
        del batch
        torch.cuda.empty_cache()


@torch.inference_mode()
def step(loaded: LoadedModel, case: Case) -> tuple[float, list[Share]]:
    """(milliseconds on the device, the kernels that the step waits for)."""
    whole = Whole(loaded, [case], 20)
    return whole.seconds(case)[0] * 1e3, shares(trace(whole, case, 20), 20)


def steps(model: str) -> Iterator[dict[str, Any]]:
    """A step of 64 rows with 4,096 tokens, without a prefill, and the kernels that it waits for: with the tiles in use, and with
    the first tile of SWEEP that loads keys before the wait."""
    case, unquantized = parse(f"decode:{ROWS}x{CONTEXT}"), 0.0
    for name in ("auto", *SWEEP):
        with torch.inference_mode():
            loaded = load(argparse.Namespace(model=model, quantization=""), torch.device("cuda"), name)
        early = [entry for entry in SWEEP.get(name, ()) if entry[-1]][:1]
        for entry in (None, *early):
            if entry:
                use(name, entry)
            milliseconds, kernels = step(loaded, case)
            unquantized = unquantized or milliseconds
            for share in kernels[:12]:
                about = f"{share.runs:6.1f} runs, {share.step_us:8.1f} us a step, {share.alone_us / share.runs:7.2f} us alone"
                print(f"  {share.kernel:52} {about}", flush=True)
            yield {
                "row": f"kv-{name}-step-b64-4k-{'early' if entry else 'in-use'}", "value": round(milliseconds, 3), "unit": "ms",
                "of_bf16": round(milliseconds / unquantized, 4), "tile": entry,
            }  # fmt: skip
            torch.cuda.empty_cache()
        del loaded
        torch.cuda.empty_cache()


def engine(model: str) -> Iterator[dict[str, Any]]:
    times: dict[str, float] = {}
    for name in ("auto", *QUANTIZED_KV):
        config = ModelConfig(model=model, load_format="dummy", max_model_len=CONTEXT + 256, kv_cache_dtype=name)
        local = LocalEngine.start(config, EngineConfig(device="cuda", enable_prefix_caching=False, max_num_seqs=ROWS))
        composition = Composition(local.engine.setup.account)
        local.engine.setup = replace(local.engine.setup, account=composition)
        vocab = local.engine.setup.vocab_size
        timed(local, [(64, 40)] * ROWS, vocab)
        for length, out in ((128, 100), (CONTEXT, 100)):
            composition.row = str(length)
            seconds = timed(local, [(length, out)] * ROWS, vocab).seconds
            steps = [step[3] for step in composition.steps[str(length)] if len(step[0]) == ROWS and not step[1]]
            tpot, short = statistics.median(steps) * 1e3, "128" if length == 128 else "4k"
            times[f"{name}-{short}"] = tpot
            yield {
                "row": f"kv-{name}-b64-{short}-tpot-ms", "value": round(tpot, 3), "unit": "ms", "steps": len(steps),
                "seconds": round(seconds, 2),
            }  # fmt: skip
        local.close()
        del local, composition
        torch.cuda.empty_cache()
    targets = {"fp8": 0.72, "int8": 0.72, "int4": 0.60}
    for name in QUANTIZED_KV:
        yield {
            "row": f"kv-{name}-b64-4k-tpot-ratio", "value": round(times[f"{name}-4k"] / times["auto-4k"], 4),
            "unit": "of the model's dtype", "target": targets[name],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("attention", "step", "engine"), default="")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--model", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args()
    facts = provenance(torch.cuda.get_device_name(), args.commit)
    parts = {
        "attention": lambda: attention(args.sweep),
        "step": lambda: steps(args.model) if args.sweep else (),
        "engine": lambda: engine(args.model),
    }
    for name, part in parts.items():
        for row in part() if args.only in ("", name) else ():
            print(row, flush=True)
            if args.out and not args.sweep:
                write_rows(args.out, [row | {"dtype": str(DTYPE)} | facts])


if __name__ == "__main__":
    main()
