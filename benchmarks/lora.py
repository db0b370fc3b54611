"""What LoRA adapters cost in decode steps: time per output token with an adapter for each row, against the model without adapters.

    python benchmarks/lora.py --out benchmarks/results/lora.json

Random weights of a shape, random adapters that change all linears, one step after the other without a scheduler, as CUDA graphs on
a GPU. Rows take the adapters in turn, so that a batch of 64 has two rows of each of 32 adapters. -none: the server has slots, and
no row of the batch has an adapter. bound: 1 plus the bytes of the adapters that a step reads, as a share of those of the model's
weights and of the keys and values of the batch: no kernel can cost less where memory limits a step.
"""

from __future__ import annotations

import argparse
import gc
from array import array
from collections.abc import Iterator
from importlib import import_module
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.core.adapters import AdapterPlan
from ridgeline.core.config import ModelConfig
from ridgeline.core.plan import Join, Logits, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.engine.runner import Runner, build_runner
from ridgeline.engine.shape import Sizes
from ridgeline.models.adapters import Adapter, Linears
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose

STEPS = 40
"""Decode steps of a measurement, of which the first ones are left out."""
LEFT_OUT = 8
TARGET = 1.10


def opened(args: argparse.Namespace, adapters: int) -> tuple[LoadedModel, Runner]:
    """The model with slots for so many adapters, and a runner for the batch."""
    device = torch.device(args.device)
    config = ModelConfig(
        load_format="dummy",
        dtype=args.dtype,
        max_model_len=args.length,
        enable_lora=adapters > 0,
        max_loras=adapters or None,
        max_lora_rank=max(args.ranks),
    )
    model = build(Path(args.model), model=config, ops=choose(device, getattr(torch, args.dtype)), device=device)
    blocks = args.batch * -(-args.length // args.page)
    sizes = Sizes(args.batch, max(args.batch, 2 * args.page), args.length, blocks, device.type == "cuda")
    return model, build_runner(model, kv_layout(model.spec, args.page), sizes)


def fill(model: LoadedModel, adapters: int, rank: int) -> None:
    """Give every slot an adapter of its own memory, all with the same random factors."""
    linears, dtype = Linears.of(model.decoder), model.decoder.embedding.dtype
    factors = {}
    for module, (outputs, inputs) in linears.shapes().items():
        a = torch.randn(rank, inputs, dtype=dtype, device=model.decoder.embedding.device).mul_(inputs**-0.5)
        factors[module] = a, torch.randn(outputs, rank, dtype=dtype, device=a.device).mul_(0.01)
    for slot in range(1, adapters + 1):
        linears.store(slot, Adapter(Path(), rank, "", factors))


def step_s(runner: Runner, args: argparse.Namespace, adapters: int, generation: int) -> float:
    """Seconds on the device of a decode step of the batch, whose rows are nearly full: the median of a GPU's steps. On a CPU the
    fastest counts, because other processes delay the others."""
    rows, known = array("i", range(1, args.batch + 1)), args.length - STEPS - 1
    pages = -(-args.length // args.page)
    times: list[float] = []
    for step in range(STEPS):
        plan = StepPlan(step, rows=rows, generations=array("i", [generation] * args.batch))
        plan.n_query, plan.n_draft = array("i", [1] * args.batch), array("i", [0] * args.batch)
        plan.logits, plan.samples = array("b", [Logits.LAST] * args.batch), array("b", [1] * args.batch)
        plan.bound = args.length
        if step == 0:
            sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 1)
            for row in rows:
                slot = row % adapters + 1 if adapters else 0
                tokens = [7] * known
                plan.joins.append(
                    Join(row, generation, tokens, known, known - 1, args.length, (), 0, 0, sampling, slot)
                )
                for place in range(pages):
                    plan.pages.extend((row, 0, place, 1 + (row - 1) * pages + place))
        runner.launch(plan)
        result = runner.collect()
        assert result.error is None, result.error
        assert len(result.tokens) == args.batch
        times.append(result.device_s)
    runner.launch(StepPlan(STEPS, leaves=rows))
    runner.collect()
    return (median if args.device == "cuda" else min)(times[LEFT_OUT:])


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all cases. Each round measures every case once, and the fastest counts. Models are opened one after the other, in
    turns, because the pages that a process gets later are slower."""
    base, seconds = inf, dict.fromkeys((0, *args.ranks), inf)
    for turn in range(args.rounds):
        for adapters in sorted((0, args.adapters), reverse=turn % 2 > 0):
            model, runner = opened(args, adapters)
            for generation, rank in enumerate(seconds if adapters else (0,), 1):
                if rank:
                    fill(model, args.adapters, rank)
                step = step_s(runner, args, args.adapters if rank else 0, generation)
                if adapters:
                    seconds[rank] = min(seconds[rank], step)
                else:
                    base = min(base, step)
            spec = model.spec
            runner.close()
            del model, runner
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    read = spec.weight_bytes + args.batch * args.length * spec.kv_bytes_per_token()
    name = f"lora-{'' if args.device == 'cuda' else 'cpu-'}{args.adapters}-b{args.batch}"
    names = [f"{name}-none", f"{name}-tpot-ratio", *(f"{name}-r{rank}-tpot-ratio" for rank in args.ranks[1:])]
    for row, rank in zip(names, seconds, strict=True):
        bound = 1.0 + AdapterPlan(min(args.adapters, args.batch), rank).bytes(spec) / read
        yield {
            "row": row,
            "value": round(seconds[rank] / base, 4),
            "target": TARGET if args.device == "cuda" else None,
            "unit": "x time of a step",
            "rank": rank,
            "bound": round(bound, 4),
            "step_ms": round(seconds[rank] * 1e3, 3),
            "batch": args.batch,
            "adapters": args.adapters,
            "context": args.length,
            "base_ms": round(base * 1e3, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="benchmarks/models/llama-3.1-8b", help="folder with a config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--threads", type=int, help="threads of a CPU")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="more on a machine that is not alone")
    parser.add_argument("--out", help="result file, into which the rows are merged")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a constant of ops.triton.adapters"
    )
    args = parser.parse_args()
    for setting in args.set:
        name, _, value = setting.partition("=")
        setattr(import_module("ridgeline.ops.triton.adapters"), name, int(value))
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    rows = []
    for row in measure(args):
        rows.append({**row, "model": Path(args.model).name, **provenance(machine)})
        print(rows[-1], flush=True)
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
