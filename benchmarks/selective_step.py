"""Selection of pages on a GPU: attention alone and whole decode steps against full attention, long contexts of an 8B shape.

    python benchmarks/selective_step.py --out benchmarks/results/kv.json

Random weights, and keys and values that are written directly instead of by prompts. So it says what choosing and reading cost. The
share of attention that the chosen pages hold (mass) is that of random keys, which have few pages that matter: not a quality.
"""

from __future__ import annotations

import argparse
import gc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.core.config import ModelConfig
from ridgeline.core.plan import Join, Logits, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.engine.runner import Runner, build_runner
from ridgeline.engine.shape import Sizes
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops import selective
from ridgeline.ops.choose import choose
from ridgeline.ops.step import KvView, StepInputs

STEPS = 24
"""Decode steps of a measurement, of which the first ones are left out."""
LEFT_OUT = 4


def runner_of(args: argparse.Namespace, budget: int) -> tuple[LoadedModel, Runner]:
    """The model and a runner whose cache holds the longest rows, filled with random keys and values and their bounds."""
    device = torch.device(args.device)
    rows, longest = max(args.batches), max(args.lengths)
    config = ModelConfig(load_format="dummy", max_model_len=longest, kv_selection=budget)
    model = build(Path(args.model), model=config, ops=choose(device, torch.bfloat16), device=device)
    blocks = rows * -(-longest // args.page)
    sizes = Sizes(rows, 2 * args.page, longest, blocks, device.type == "cuda")
    runner = build_runner(model, kv_layout(model.spec, args.page), sizes)
    last = torch.arange(blocks + 1, device=device) * args.page + args.page - 1
    with torch.inference_mode():
        for layer, kv in enumerate(runner.store.kv):
            kv.normal_()
            selection = runner.store.selections[layer]
            if selection is not None:
                view = KvView(kv, runner.rows.tables[0], last, None, None, 1.0, selection=selection)
                if device.type == "cuda":
                    from ridgeline.ops.triton.selective import write_bounds

                    write_bounds(view, selection)
                else:
                    selective.write_bounds(view, selection)
    return model, runner


def steps(runner: Runner, page: int, length: int, rows: int) -> float:
    """Median seconds on the device of decode steps of rows that begin with about `length` slots."""
    generation = length * 100 + rows
    numbers, known = array("i", range(1, rows + 1)), length - STEPS - 1
    pages = -(-length // page)
    times: list[float] = []
    for step in range(STEPS):
        plan = StepPlan(step, rows=numbers, generations=array("i", [generation] * rows))
        plan.n_query, plan.n_draft = array("i", [1] * rows), array("i", [0] * rows)
        plan.logits, plan.samples, plan.bound = array("b", [Logits.LAST] * rows), array("b", [1] * rows), length
        if step == 0:
            sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 1)
            tokens = [7] * known
            plan.joins = [
                Join(row, generation, tokens, known, known - 1, length, (), 0, 0, sampling) for row in numbers
            ]
            for row in numbers:
                for place in range(pages):
                    plan.pages.extend((row, 0, place, 1 + (row - 1) * pages + place * 7919 % pages))
        runner.launch(plan)
        result = runner.collect()
        assert result.error is None, result.error
        assert len(result.tokens) == rows
        times.append(result.device_s)
    runner.launch(StepPlan(STEPS, leaves=numbers))
    runner.collect()
    return median(times[LEFT_OUT:])


def attention(model: LoadedModel, runner: Runner, length: int, rows: int) -> tuple[float, float, float]:
    """Microseconds of a layer's full attention, of selection, and the share of full attention that the chosen pages hold."""
    store, tables, spec, longest = runner.store, runner.rows.tables, model.spec, runner._step.longest
    count = torch.arange(rows + 1, dtype=torch.int32, device=runner.device)
    size = torch.full((rows,), length, dtype=torch.int32, device=runner.device)
    step = StepInputs(count[:-1] + 1, count, size, size - 1, count[:-1], 1, longest)
    slots = torch.zeros(rows, dtype=torch.int64, device=runner.device)
    layer = spec.layers[-1]
    q = torch.randn(rows, layer.n_heads, layer.head_dim, dtype=torch.bfloat16, device=runner.device)
    fresh_keys = torch.randn(rows, layer.n_kv_heads, layer.head_dim, dtype=torch.bfloat16, device=runner.device)
    views = [
        KvView(kv, tables[0], slots, None, None, spec.scale_of(layer), selection=selection)
        for kv, selection in zip(store.kv, store.selections, strict=True)
        if selection is not None
    ]
    times, sums = [], []
    for chosen in (views, [replace(view, selection=None) for view in views]):
        attend = model.ops.attention.attend
        _, lse = attend(q, fresh_keys, fresh_keys, chosen[0], replace(step), True)
        assert lse is not None
        sums.append(lse)
        graph, fresh = torch.cuda.CUDAGraph(), replace(step)
        with torch.cuda.graph(graph):
            for view in chosen:
                attend(q, fresh_keys, fresh_keys, view, fresh)
        each = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end) * 1e3 / len(chosen))
        times.append(median(each[2:]))
    return times[1], times[0], float((sums[0] - sums[1]).exp().mean())


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    full: dict[tuple[int, int], float] = {}
    cases = [(length, rows) for length in args.lengths for rows in args.batches]
    for budget in (0, args.budget):
        model, runner = runner_of(args, budget)
        for length, rows in cases:
            seconds = steps(runner, args.page, length, rows)
            if not budget:
                full[length, rows] = seconds
                continue
            name = f"selective-{length // 1024}k-b{rows}"
            about = {"budget": budget, "page": args.page}
            yield {
                "row": f"{name}-speedup", "value": round(full[length, rows] / seconds, 3), "unit": "times the full step",
                "full_ms": round(full[length, rows] * 1e3, 3), "selective_ms": round(seconds * 1e3, 3), **about,
            }  # fmt: skip
            if args.device == "cuda":
                whole, part, mass = attention(model, runner, length, rows)
                yield {
                    "row": f"{name}-attention", "value": round(whole / part, 3), "unit": "times full attention",
                    "full_us": round(whole, 2), "selective_us": round(part, 2), "mass_of_random_keys": round(mass, 4),
                    **about,
                }  # fmt: skip
        runner.close()
        del model, runner
        gc.collect()  # cycles keep the pages of the runner
        if args.device == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[32768, 131072])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", default="")
    parser.add_argument("--commit", default="")
    args = parser.parse_args(arguments)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    for row in measure(args):
        print(row, flush=True)
        if args.out:
            write_rows(args.out, [{**row, **provenance(machine, args.commit)}])


if __name__ == "__main__":
    main()
