"""What each kernel of `ridgeline.ops.triton` brings: rows of the tables with it and without it, in turns, in one process.

    python benchmarks/ablation.py --out benchmarks/results/ablation.json [--sources engine:llama-3.1-8b,llama-3.1-8b:int4]

benchmarks/ablation_table.py lists the kernels and how each is switched off, so that the next best path is taken. A row is a step
of benchmarks/shapes.py (eight layers and the head, with CUDA graphs as in the engine) or a row of benchmarks/gpu.py on a whole
engine. Both sides share weights, cache and runner; each has its own CUDA graphs. The sides take turns, and their order changes
every turn, so the drift of the card's clock cancels. `gain` is the time without the kernel divided by the time with it, minus 1.
It is the median of the turns, with the central 95 % of a bootstrap. One more step of each side compares the logits (TOLERANCE).
Launches are counted while the graphs are captured: a kernel that is off must not be launched. The result file is written after
every row, in the order of --sources and of the table, so a run that is cut off keeps its rows. A row that fails is written with
its error, and the next row is measured.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import gpu
import torch
from ablation_table import ENGINE, SCALED, VARIANTS, Asked, Variant
from common import HERE, provenance, write_rows
from ledger import Case, Whole
from measuring import interval
from shapes import case_of, free, load

from ridgeline.core.config import EngineConfig
from ridgeline.engine.executor import Executor
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.runner import Runner
from ridgeline.engine.warm_up import warm_up
from ridgeline.models.decoder import Decoder
from ridgeline.ops.capture import CudaCapture
from ridgeline.ops.triton import cublas, cuda
from ridgeline.ops.triton.chunk import chunk_kernel

WANTED = 0.02
"""The gain on some row from which on a kernel stays."""
TOLERANCE = {"": 0.03, "fp8": 0.1, "int8": 0.05, "int4": 0.05}
"""Relative difference of logits, by the format of the weights: eight layers, each rounding to bfloat16 (fp8: inputs to 8 bits)."""
SIZING = "decode:448x256,prefill:8192"
"""Steps for which every runner has room, as in benchmarks/shapes.py: mixed graphs are padded to as many rows."""
ENGINE_TURNS = 4
"""Turns of a row that takes a whole engine seconds, at most."""
EngineTable = Mapping[tuple[str, str], Sequence[gpu.Row[gpu.Bench]]]
"""(model folder, quantization) -> its rows, as benchmarks/gpu.py has them."""
MEMORY = 0.8
"""Share of the card's memory for an engine: graphs of two sides need room beside its cache."""


# --- which kernels run ------------------------------------------------------------------------------------------------


class Launches:
    """Counts launches from Python by kernel. `forms` holds each kernel with its grid and constants."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.forms: set[tuple[object, ...]] = set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is launched or captured meanwhile."""
        triton_kernel, products = type(chunk_kernel), cublas.Product
        run, launch, multiply = triton_kernel.run, cuda.Kernel.__call__, products.__call__

        def counted_run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            constants = tuple((name, value) for name, value in named.items() if isinstance(value, int | str | float))
            self._note(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}", str(grid), constants)
            return run(kernel, *given, grid=grid, warmup=warmup, **named)

        def counted_launch(kernel: Any, *given: Any, **named: Any) -> None:
            self._note(kernel.name, *given[:2])
            launch(kernel, *given, **named)

        def counted_product(product: Any, *given: Any) -> bool:
            done = multiply(product, *given)
            if done:
                self._note(SCALED)
            return done

        with (
            patch.object(triton_kernel, "run", counted_run),
            patch.object(cuda.Kernel, "__call__", counted_launch),
            patch.object(products, "__call__", counted_product),
        ):
            yield

    def _note(self, name: str, *form: object) -> None:
        self.kernels[name] += 1
        self.forms.add((name, *form))

    def of(self, variant: Variant) -> int:
        """Launches of the variant's kernels."""
        return sum(self.kernels[name] for name in variant.kernels)


def name_kernels() -> AbstractContextManager[object]:
    """Give CUDA C++ kernels a `name` attribute. Enter this before the first kernel is made."""
    make = cuda.Kernel.__init__

    def named(kernel: Any, text: str, name: str, shared: int) -> None:
        make(kernel, text, name, shared)
        kernel.name = name

    return patch.object(cuda.Kernel, "__init__", named)


def is_off(variant: Variant, on: Launches, off: Launches) -> bool:
    """Whether the kernel ran while it was on, and did not while it was off."""
    if not variant.kernels:
        return on.forms != off.forms
    return off.of(variant) < on.of(variant) if variant.shared else on.of(variant) > 0 == off.of(variant)


# --- two sides of one runner ------------------------------------------------------------------------------------------


class Sides:
    """A runner with a kernel on and off, in turns. Each side has its own graphs."""

    def __init__(self, runner: Runner, variant: Variant) -> None:
        self._runner, self._variant = runner, variant
        self._before = runner.executor
        self._steps = {True: runner.executor}
        with variant.off():
            self._steps[False] = self._new_steps()
        self.launches = {on: Launches() for on in (True, False)}

    def _new_steps(self) -> Executor:
        runner = self._runner
        if not isinstance(runner.executor, GraphExecutor):
            return runner.executor
        with torch.inference_mode():
            steps = GraphExecutor(runner._step, runner._sizes, CudaCapture())
            warm_up(runner._step, steps, runner._sizes, lambda stage, done, total: None)
        return steps

    @contextmanager
    def side(self, on: bool, graphs: bool = True) -> Iterator[None]:
        """Run the steps of the block on one side. graphs: replay CUDA graphs as the engine does; False: launch from Python."""
        self._runner.executor = self._steps[on] if graphs else Executor(self._runner._step)
        self._runner.executor.forget()
        try:
            with nullcontext() if on else self._variant.off():
                yield
        finally:
            self._runner.executor = self._before
            self._runner.executor.forget()

    def settle(self) -> None:
        """Drop the steps in flight behind a failed step."""
        self._runner.close()

    def turns(self, measure: Callable[[], float], count: int) -> dict[bool, list[float]]:
        """`count` readings of each side. A first reading of each side captures, loads and counts launches, and is dropped."""
        for on in (True, False):
            with self.side(on), self.launches[on].counted():
                measure()
        readings: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(count):
            for on in (True, False) if turn % 2 == 0 else (False, True):
                with self.side(on):
                    readings[on].append(measure())
        return readings

    def logits(self, whole: Whole, case: Case, on: bool) -> torch.Tensor:
        """Logits of one step of the case. Rows and pages are the same in every call."""
        seen: list[torch.Tensor] = []
        logits_of = Decoder.logits

        def noted(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(logits_of(decoder, hidden))
            return seen[-1]

        with self.side(on, graphs=False), patch.object(Decoder, "logits", noted):
            torch.manual_seed(1)
            whole.seat(case)
            whole._run([whole._step(case)])
        return seen[-1].float()


@dataclass(frozen=True, slots=True)
class Reading:
    """Readings of one row by side (True: the kernel is on), in `unit`, and how far the logits of the sides differ."""

    readings: dict[bool, list[float]]
    unit: str
    difference: float | None = None
    same_tokens: float | None = None

    @property
    def gains(self) -> list[float]:
        """Of each turn, positive where the kernel is faster."""
        pairs = zip(self.readings[True], self.readings[False], strict=True)
        rate = self.unit.endswith("/s")
        return [on / off - 1 if rate else off / on - 1 for on, off in pairs]


def agreement(on: torch.Tensor, off: torch.Tensor) -> tuple[float, float]:
    """(relative difference of logits [N, V], share of rows with the same likeliest token)."""
    difference = float((on - off).norm() / off.norm())
    return difference, float((on.argmax(1) == off.argmax(1)).float().mean())


def step_reading(whole: Whole, case: Case, sides: Sides, *, turns: int) -> Reading:
    readings = sides.turns(lambda: whole.seconds(case)[0] * 1e6, turns)
    on, off = (sides.logits(whole, case, side) for side in (True, False))
    return Reading(readings, "us", *agreement(on, off))


def engine_reading(bench: gpu.Bench, row: gpu.Row[gpu.Bench], sides: Sides, *, turns: int) -> Reading:
    return Reading(sides.turns(lambda: row.measure(bench), turns), row.unit)


class Bench(gpu.Bench):
    """Takes one run where benchmarks/gpu.py takes the median of several, because turns repeat it."""

    def seconds(self, shapes: list[tuple[int, int]]) -> float:
        readings: list[float] = []
        while sum(readings) < gpu.LEAST_S:
            readings.append(self.run(shapes).seconds)
        return median(readings)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Where rows go. until: the clock's time after which no row is begun. rows: those measured so far."""

    about: dict[str, str]
    out: str | None
    until: float
    turns: int
    rows: list[dict[str, Any]]

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.until

    def row(self, variant: Variant, asked: Asked, sides: Sides, measure: Callable[[Sides], Reading]) -> None:
        """Measure, print and write one row. A failed row has `error` instead of figures."""
        try:
            row = self._figures(variant, asked, measure(sides), sides.launches)
            text = (
                f"{row['with']:>11} {row['without']:>11} {row['unit']:6} {100 * row['gain']:+6.2f} % "
                f"({100 * row['gain_low']:+.2f} to {100 * row['gain_high']:+.2f}, predicted {asked.predicted:+g}) "
            )
        except RuntimeError as error:
            sides.settle()
            row, text = {"variant": variant.name, "of": name_of(asked), "error": str(error)}, ""
        row = {"row": f"{variant.name}: {name_of(asked)}", **row, **self.about}
        print(f"{row['row']:64} {text}{remarks(row)}", flush=True)
        if self.out:
            write_rows(self.out, [row])
        self.rows.append(row)

    def _figures(
        self, variant: Variant, asked: Asked, reading: Reading, launches: dict[bool, Launches]
    ) -> dict[str, Any]:
        gains = reading.gains
        low, high = interval(gains)
        tolerance = TOLERANCE[asked.source.removeprefix(ENGINE).partition(":")[2]]
        return {
            "variant": variant.name,
            "of": name_of(asked),
            "unit": reading.unit,
            "with": round(median(reading.readings[True]), 4),
            "without": round(median(reading.readings[False]), 4),
            "gain": round(median(gains), 5),
            "gain_low": round(low, 5),
            "gain_high": round(high, 5),
            "predicted": asked.predicted / 100,
            "turns": len(gains),
            "off": is_off(variant, launches[True], launches[False]),
            "launches_with": launches[True].of(variant),
            "launches_without": launches[False].of(variant),
            "logits_differ": None if reading.difference is None else round(reading.difference, 6),
            "same_tokens": reading.same_tokens,
            "agree": None if reading.difference is None else reading.difference <= tolerance,
        }


def name_of(asked: Asked) -> str:
    """The row's name in h200.json or shapes.json."""
    return asked.row if asked.source.startswith(ENGINE) else f"{asked.source}-{asked.row}"


def remarks(row: dict[str, Any]) -> str:
    """What is wrong with a row; empty: nothing."""
    if "error" in row:
        return f"FAILED: {row['error']}"
    faults = {"NOT SWITCHED OFF": not row["off"], "LOGITS DIFFER": row["agree"] is False}
    return ", ".join(fault for fault, true in faults.items() if true)


def chosen(variants: Sequence[Variant], source: str) -> list[tuple[Variant, Asked]]:
    """Rows of a source, in the order of the table."""
    return [(variant, asked) for variant in variants for asked in variant.rows if asked.source == source]


def step_rows(source: str, pairs: Sequence[tuple[Variant, Asked]], args: Any, report: Report) -> None:
    """Rows of a model of benchmarks/shapes.py."""
    device = torch.device(args.device)
    model = load(source, args.layers, device)
    steps = dict.fromkeys((*args.sizing, *(asked.row for _, asked in pairs)))
    whole = Whole(model, [case_of(step) for step in steps], args.repeats)
    for variant, asked in pairs:
        if report.late:
            break
        case = case_of(asked.row)
        sides = Sides(whole.runner, variant)
        report.row(variant, asked, sides, partial(step_reading, whole, case, turns=report.turns))
        del sides
        free(device)
    del model, whole
    free(device)


def engine_rows(source: str, pairs: Sequence[tuple[Variant, Asked]], engines: EngineTable, report: Report) -> None:
    """Rows of benchmarks/gpu.py, on an engine with all layers."""
    name, _, quantization = source.removeprefix(ENGINE).partition(":")
    table = {row.name: row for row in engines[name, quantization]}
    config = EngineConfig(max_num_seqs=512, enable_prefix_caching=False, gpu_memory_utilization=MEMORY)
    bench = Bench(str(HERE / "models" / name), 1, config, quantization)
    print(f"{source}: {bench.facts['ops']}, start {bench.facts['startup_s']}", flush=True)
    runner = bench.local.engine.loop.runner
    for variant, asked in pairs:
        if report.late:
            break
        sides = Sides(runner, variant)
        turns = min(ENGINE_TURNS, report.turns)
        report.row(variant, asked, sides, partial(engine_reading, bench, table[asked.row], turns=turns))
        del sides
        gc.collect()
    bench.local.close()


# --- the whole --------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each variant: its best row, whether that is enough to stay, and how many rows need a look: they failed, the kernel
    was not off, or the logits differ."""
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        of_variant = [row for row in rows if row["variant"] == name]
        sound = [row for row in of_variant if "error" not in row and row["off"]]
        line = f"{name:38} not measured"
        if sound:
            best = max(sound, key=lambda row: row["gain"])
            line = (
                f"{name:38} {'stays' if best['gain'] >= WANTED else 'goes':6} best {100 * best['gain']:+6.1f} % "
                f"({100 * best['gain_low']:+.1f} to {100 * best['gain_high']:+.1f}) on {best['of']}"
            )
        faults = sum(bool(remarks(row)) for row in of_variant)
        lines.append(line + (f"; {faults} rows at fault" if faults else ""))
    return lines


def sources_of(variants: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(asked.source for variant in variants for asked in variant.rows))


def parse(words: Sequence[str] | None = None, variants: Sequence[Variant] = VARIANTS) -> argparse.Namespace:
    """The arguments. SystemExit names what no table has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", default="", help="comma-separated models and engines, in order; empty: all")
    parser.add_argument("--variants", default="", help="comma-separated beginnings of variants' names; empty: all")
    parser.add_argument("--turns", type=int, default=6, help="readings of each side")
    parser.add_argument("--repeats", type=int, default=5, help="steps of a reading")
    parser.add_argument("--layers", type=int, default=8, help="of each model of benchmarks/shapes.py, at most")
    parser.add_argument("--sizing", default=SIZING, help="comma-separated steps for which every runner has room")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what was measured, where there is no .git to ask")
    args = parser.parse_args(words)
    beginnings = tuple(args.variants.split(",")) if args.variants else ("",)
    args.table = [variant for variant in variants if variant.name.startswith(beginnings)]
    known = sources_of(args.table)
    args.sources, args.sizing = args.sources.split(",") if args.sources else known, args.sizing.split(",")
    for beginning in beginnings:
        if not any(variant.name.startswith(beginning) for variant in variants):
            names = ", ".join(variant.name for variant in variants)
            raise SystemExit(f"--variants: no variant begins with {beginning!r}; there are {names}")
    if unknown := [source for source in args.sources if source not in known]:
        raise SystemExit(f"--sources: {unknown[0]!r} has no row of these variants; there are {', '.join(known)}")
    if args.turns < 1 or args.repeats < 1:
        raise SystemExit("--turns and --repeats: give at least 1")
    return args


def run(args: argparse.Namespace, rows: list[dict[str, Any]], engines: EngineTable = gpu.TABLE) -> None:
    """Measure, print and write all rows that are asked for, into `rows` too. engines: rows of each engine."""
    started = time.perf_counter()
    about = provenance(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", args.commit)
    report = Report(about, args.out, started + args.seconds, args.turns, rows)
    with name_kernels():
        for source in args.sources:
            pairs = chosen(args.table, source)
            if report.late:
                print(f"{source}: no time left", flush=True)
            elif source.startswith(ENGINE):
                engine_rows(source, pairs, engines, report)
            else:
                with torch.inference_mode():
                    step_rows(source, pairs, args, report)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)


def main(words: Sequence[str] | None = None, variants: Sequence[Variant] = VARIANTS) -> None:
    args = parse(words, variants)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    try:
        run(args, rows)
    finally:
        print("\n".join(summary(rows)), flush=True)


if __name__ == "__main__":
    main()
