"""The roofline ledger: where the time of a step goes, operation by operation, against what the hardware allows.

    python benchmarks/ledger.py --model benchmarks/models/llama-3.1-8b --steps decode:1x128,decode:64x4096,prefill:8192

A step is `decode:ROWSxCACHED`, `prefill:NEW` or `prefill:NEW+CACHED` (one row), `mixed:ROWSxCACHED+NEW` (decoding rows
and a chunk of one more) or, for benchmarks/timeline.py alone, `verify:ROWSxCACHED+DRAFTS`; comma-separated. A folder with
only a config.json is enough: weights are random.

Bytes and FLOPs are those of core.operations. A floor is the longer of the bytes at the read bandwidth and the FLOPs at
the matrix rate, both measured when the run starts; activations count as bytes where they are larger than the last cache.
Each line is timed by itself, over all layers (on a GPU as a CUDA graph): first what a step calls, in its order, then the
operations that such calls fuse, and attention the naive way, with the scores materialised. `step` is a whole step of the
engine's runner by device events, `step to step` the time between the ends of two. `rest` is the step less the sum: gaps,
gathering and advancing rows, uploads; where kernels overlap in the step it is negative.

--joules adds what the board takes while a line repeats for three seconds, by its own counter (NVIDIA's): at a card's power limit,
where products of many tokens and reads of memory both stand, it is joules that take time. They are those of a hot card,
microseconds those of short rounds on a cooler one, so one divided by the other is no power.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, write_rows
from pieces import ALONE, NAIVE, RUNS, Pieces, Shares, place
from stopwatch import Energy, Reading, Stopwatch

from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import StepWork, step_work
from ridgeline.core.draft import DEVICE
from ridgeline.core.operations import Operation, operations
from ridgeline.core.plan import Join, Logits, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.sizing import hardware_defaults
from ridgeline.core.spec import DTYPE_BYTES, ModelSpec, kv_layout
from ridgeline.engine.runner import build_runner
from ridgeline.engine.shape import Sizes
from ridgeline.hardware.bandwidth import matmul_rate, read_bandwidth
from ridgeline.hardware.power import board_joules
from ridgeline.kv.store import KvStore
from ridgeline.models.build import DTYPES, LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.choose import choose

MATRICES = frozenset(("qkv", "out", "gate+up", "down"))
QUANTIZED = MATRICES | {name for name, parts in RUNS.items() if MATRICES & set(parts)}
"""The operations and runs whose FLOPs are at the rate of quantized products, where the model has them."""
WARMING = 3
"""Steps before those that are timed."""


# --- what to run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One step. shares: (cached, new) tokens of its rows; drafts: how many of a row's new tokens are drafts."""

    name: str
    shares: tuple[tuple[int, int], ...]
    drafts: int = 0

    @property
    def decode(self) -> bool:
        return all(count == 1 + self.drafts for _, count in self.shares)

    @property
    def longest(self) -> int:
        return max(start + count for start, count in self.shares)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.shares)


def parse(text: str) -> Case:
    """One of --steps. SystemExit says what is wrong with it."""
    drafts = 0
    if match := re.fullmatch(r"decode:(\d+)x(\d+)", text):
        rows, cached = map(int, match.groups())
        shares = ((cached, 1),) * rows
    elif match := re.fullmatch(r"prefill:(\d+)(?:\+(\d+))?", text):
        shares = ((int(match[2] or 0), int(match[1])),)
    elif match := re.fullmatch(r"mixed:(\d+)x(\d+)\+(\d+)", text):
        rows, cached, new = map(int, match.groups())
        shares = ((cached, 1),) * rows + ((0, new),)
    elif match := re.fullmatch(r"verify:(\d+)x(\d+)\+(\d+)", text):
        rows, cached, drafts = map(int, match.groups())
        shares = ((cached, 1 + drafts),) * rows
    else:
        raise SystemExit(
            f"--steps: {text!r} is none of decode:ROWSxCACHED, verify:ROWSxCACHED+DRAFTS, prefill:NEW+CACHED, "
            "mixed:ROWSxCACHED+NEW"
        )
    if any(count < 1 for _, count in shares) or not shares:
        raise SystemExit(f"--steps: {text!r} has no tokens to run")
    return Case(text, shares, drafts)


# --- how fast it could be ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine reaches. bytes_s: reading memory. flops_s: square products in the model's dtype; matrices_flops_s:
    in the format of the layers' matrices. cache_bytes: of the last cache."""

    bytes_s: float
    flops_s: float
    matrices_flops_s: float
    cache_bytes: int

    def floor_s(self, operation: Operation) -> float:
        """Seconds below which the operation alone cannot be."""
        rate = self.matrices_flops_s if operation.name in QUANTIZED else self.flops_s
        return max(self.moved(operation) / self.bytes_s, operation.flops / rate)

    def moved(self, operation: Operation) -> int:
        """Bytes that memory must move: activations stay in a cache that holds those of one run."""
        stays = operation.activation_bytes <= operation.count * self.cache_bytes
        return operation.bytes + (0 if stays else operation.activation_bytes)

    def step_floor_s(self, work: StepWork, parts: Sequence[Operation]) -> float:
        """Seconds below which the whole step cannot be, however its operations are fused or overlapped."""
        quantized = sum(part.flops for part in parts if part.name in MATRICES)
        arithmetic = quantized / self.matrices_flops_s + (work.flops - quantized) / self.flops_s
        return max(work.bytes / self.bytes_s, arithmetic)


def measure_ceilings(device: torch.device, dtype: torch.dtype, quantization: str) -> Ceilings:
    """Small probes, each the best of several runs."""
    if device.type == "cpu":
        rate = matmul_rate(device, dtype, 2048)
        return Ceilings(read_bandwidth(device), rate, rate, _cpu_cache())
    rate = matmul_rate(device, dtype, 8192)
    matrices = fp8_rate(device) if quantization == "fp8" else rate
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return Ceilings(read_bandwidth(device, 1 << 32), rate, matrices, cache)


def fp8_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a square e4m3 product with a scale per row, as cuBLAS does it."""
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones(size, 1, device=device)
    product = lambda: torch._scaled_mm(left, right.t(), ones, ones.t(), out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * size**3 / Stopwatch(device, 10).seconds([product] * 4) * 4


def _cpu_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache of the first core, 0 if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in root.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


# --- the whole step ---------------------------------------------------------------------------------------------------


def fill(store: KvStore) -> None:
    """Random keys and values; in 8 and 4 bits random codes, none of which is NaN in e4m3, with equal scales."""
    for kv, scales in zip(store.kv, store.scales, strict=True):
        if scales is None:
            kv.normal_()
        else:
            kv.view(torch.uint8).random_(0, 120 if kv.dtype.is_floating_point else 256)
            scales.fill_(0.01)


class Whole:
    """A runner for all cases, its cache full of random numbers, and steps run on it as the engine would."""

    def __init__(self, model: LoadedModel, cases: Sequence[Case], repeats: int) -> None:
        self._model, self._repeats = model, repeats
        drafts = tuple(sorted({case.drafts for case in cases}))
        self._gained = 1 + drafts[-1]
        device = model.decoder.embedding.device
        page = hardware_defaults(device.type, 0)["block_size"]
        self._layout = kv_layout(model.spec, page)
        self._steps = iter(range(1, 1 << 30))
        blocks = max(sum(self._pages(share) for share in case.shares) for case in cases) * len(self._layout.groups)
        rows = max(len(case.shares) for case in cases)
        most = max(case.tokens for case in cases)
        longest = max(case.longest for case in cases) + self._margin
        if longest > model.spec.max_len:
            raise SystemExit(f"--steps: rows grow to {longest} tokens, the model's context is {model.spec.max_len}")
        self.runner = build_runner(model, self._layout, Sizes(rows, most, longest, blocks, drafts=drafts))
        fill(self.runner.store)

    @property
    def _margin(self) -> int:
        """Tokens that decoding rows may gain while they are timed, and a few."""
        return self._gained * (2 * self._repeats + 8)

    def _pages(self, share: tuple[int, int]) -> int:
        return -(-(sum(share) + self._margin) // self._layout.page_tokens)

    def seat(self, case: Case) -> None:
        """Rows 1, 2, ... hold the case's rows, about to run it; their pages lie in random order."""
        plan, step = StepPlan(next(self._steps)), 0
        plan.leaves.extend(range(1, self.runner.rows.ints.shape[0]))
        order = (torch.randperm(self.runner.store.pages - 1) + 1).tolist()
        for row, (start, count) in enumerate(case.shares, 1):
            known = start + count - case.drafts
            tokens = torch.randint(self._model.spec.vocab_size, (known,)).tolist()
            sampling = SamplingParams(temperature=1.0, max_tokens=self._margin, ignore_eos=True)
            plan.joins.append(Join(row, row, tokens, len(tokens), start, 1 << 30, (), row, 0, sampling))
            for group in range(len(self._layout.groups)):
                for index in range(self._pages((start, count))):
                    plan.pages.extend((row, group, index, order[step]))
                    step += 1
        self._run([plan])

    def _step(self, case: Case, gained: int = 0) -> StepPlan:
        """The case's step, when its rows have gone through `gained` already. Drafts are what a row's places happen to hold, so
        nearly all are refused."""
        plan = StepPlan(next(self._steps))
        for row, (_, count) in enumerate(case.shares, 1):
            plan.rows.append(row)
            plan.generations.append(row)
            plan.n_query.append(count)
            plan.n_draft.append(case.drafts)
            plan.drafts.extend((DEVICE,) * case.drafts)
            plan.logits.append(Logits.LAST)
            plan.samples.append(1)
        plan.bound = case.longest + 1 + gained * (1 + case.drafts)
        return plan

    def _run(self, plans: Sequence[StepPlan]) -> list[float]:
        """Seconds of each plan on the device, two in flight."""
        seconds = []
        for number in range(len(plans) + 1):
            if number < len(plans):
                self.runner.launch(plans[number])
            if number:
                result = self.runner.collect()
                if result.error:
                    raise RuntimeError(result.error)
                seconds.append(result.device_s)
        return seconds

    def run(self, case: Case, first: int, steps: int) -> list[float]:
        """Seconds of each of `steps` steps. Decoding rows go on from step to step, seated when `first` is 0; other steps
        are taken back and run again."""
        if case.decode:
            if not first:
                self.seat(case)
            return self._run([self._step(case, number) for number in range(first, first + steps)])
        readings = []
        for _ in range(steps):
            self.seat(case)
            readings += self._run([self._step(case)])
        return readings

    def seconds(self, case: Case) -> tuple[float, float]:
        """(median seconds on the device, seconds from one step's end to the next, with the first one's upload shared by all); steps
        that are taken back have no next one."""
        self.run(case, 0, WARMING)
        started = time.perf_counter()
        spans = self.run(case, WARMING, self._repeats)
        middle = statistics.median(spans)
        return middle, (time.perf_counter() - started) / len(spans) if case.decode else middle


# --- the ledger -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of a step. bytes: of weights, keys and values, as memory must move them (`activation_bytes` beside).
    share: of the step's time on the device. lost_us: measured less floor. peak_bytes: of one run of `count`. joules: of all of
    them, if they were asked for."""

    step: str
    operation: str
    count: int
    flops: int
    bytes: int
    activation_bytes: int
    floor_us: float
    measured_us: float | None
    share: float | None
    peak_bytes: int | None
    joules: float | None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of weights, keys and values."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def lost_us(self) -> float | None:
        return None if self.measured_us is None else self.measured_us - self.floor_us

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "intensity": self.intensity, "lost_us": self.lost_us}


def covered(spec: ModelSpec, shares: Shares, parts: Sequence[Operation]) -> dict[str, Operation]:
    """Work of each of RUNS. Norms share theirs by their number; a post norm belongs to the sum behind it. What a run hands
    over within itself need not pass through memory: normed activations, and gate and up before their product."""
    by_name = {part.name: part for part in parts}
    width, rows = DTYPE_BYTES[spec.dtype], len(shares)
    # The last layer goes on with one token of each row.
    tokens = [sum(count for _, count in shares)] * (len(spec.layers) - 1) + [rows]
    work = {}
    for name, names in RUNS.items():
        others = [by_name[name] for name in names if name != "norm"]
        count = others[0].count if others else 1
        flops, held = sum(other.flops for other in others), sum(other.bytes for other in others)
        moved = sum(other.activation_bytes for other in others) if others else 2 * rows * spec.d_model * width
        joined = name.endswith("+sum") and spec.post_norms
        if "norm" in names or joined:
            held += by_name["norm"].bytes // by_name["norm"].count * count
        if joined:
            moved += sum(tokens) * spec.d_model * width
        if "activation" in names:
            moved -= sum(2 * n * 2 * layer.d_ff * width for n, layer in zip(tokens, spec.layers, strict=True))
        work[name] = Operation(name, count, flops, held, moved)
    return work


def lines(model: LoadedModel, whole: Whole, case: Case, ceilings: Ceilings, watch: Stopwatch) -> Iterator[Line]:
    """What a step calls, in its order; their sum, the step and what lies between; then operations by themselves."""
    device_s, wall_s = whole.seconds(case)
    whole.seat(case)
    pieces = Pieces(model, place(model, whole.runner, case.shares), case.shares)
    parts = operations(model.spec, case.shares)
    floors = total = 0.0
    joules: float | None = 0.0

    def line(operation: Operation, floor: float, read: Reading) -> Line:
        share = None if read.seconds is None else read.seconds / device_s
        sizes = (operation.count, operation.flops, operation.bytes, operation.activation_bytes)
        taken = (read.seconds and read.seconds * 1e6, share, read.peak_bytes, read.joules)
        return Line(case.name, operation.name, *sizes, floor * 1e6, *taken)

    for name, run in covered(model.spec, case.shares, parts).items():
        floor = ceilings.floor_s(run)
        read = watch.read(partial(pieces.run, name))
        if read.seconds is None:
            raise SystemExit(f"{case.name}: {name} does not fit beside the model; ask for a smaller step")
        floors, total = floors + floor, total + read.seconds
        joules = None if read.joules is None or joules is None else joules + read.joules
        yield line(run, floor, read)
    work = step_work(model.spec, case.shares)
    everything = (1, work.flops, work.bytes, sum(part.activation_bytes for part in parts))
    bound = ceilings.step_floor_s(work, parts)
    yield line(Operation("sum", *everything), floors, Reading(total, joules=joules))
    yield line(Operation("step", *everything), bound, Reading(device_s))
    yield line(Operation("step to step", *everything), bound, Reading(wall_s))
    yield line(Operation("rest", 1, 0, 0, 0), 0.0, Reading(device_s - total))
    by_name = {part.name: part for part in parts}
    for name in ALONE:
        run = replace(by_name["attention" if name == NAIVE else name], name=name)
        yield line(run, ceilings.floor_s(run), watch.read(partial(pieces.alone, name)))


HEADER = (
    f"{'':17}{'runs':>5}{'MB':>10}{'GFLOP':>10}{'FLOP/B':>8}"
    f"{'floor us':>11}{'us':>11}{'share':>8}{'lost us':>11}{'peak MiB':>10}{'mJ':>10}"
)


def text(line: Line) -> str:
    """One line of the table; "-" for what there is not."""
    dash = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    size = None if line.peak_bytes is None else line.peak_bytes / (1 << 20)
    cells = [
        f"{line.operation:17}{line.count:5}",
        f"{line.bytes / 1e6:10.2f}{line.flops / 1e9:10.2f}{dash(line.intensity, '.1f'):>8}",
        f"{line.floor_us:11.1f}{dash(line.measured_us, '.1f'):>11}{dash(line.share, '.1%'):>8}",
        f"{dash(line.lost_us, '.1f'):>11}{dash(size, '.1f'):>10}{dash(line.joules and line.joules * 1e3, '.1f'):>10}",
    ]
    return "".join(cells)


def load(arguments: argparse.Namespace, device: torch.device, kv: str = "auto") -> LoadedModel:
    """The model with random weights, as it would be served with a KV format."""
    folder = Path(arguments.model)
    config = ModelConfig(str(folder), load_format="dummy", quantization=arguments.quantization, kv_cache_dtype=kv)
    ops = choose(device, DTYPES[served_spec(read_model(folder)[0], config).dtype])
    return build(folder, model=config, ops=ops, device=device)


def _energy(device: torch.device) -> Callable[[], float]:
    """What the board has taken so far. SystemExit where nobody counts it."""
    counter = board_joules(device.index or 0) if device.type == "cuda" else None
    if counter is None:
        raise SystemExit(
            "--joules: only NVIDIA's GPUs of Volta and later count what they take, and their library must be there"
        )
    return counter


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--steps", required=True, help="comma-separated steps, see above")
    parser.add_argument("--quantization", default="", help="number format of the layers' matrices (fp8)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--joules", action="store_true", help="energy of each line too; some four seconds more for each"
    )
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what was measured, where there is no .git to ask")
    arguments = parser.parse_args(words)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler of memory says that it starts and stops
    device = torch.device(arguments.device)
    cases = [parse(step) for step in arguments.steps.split(",")]
    if any(case.drafts for case in cases):
        raise SystemExit(
            "--steps: a step that verifies has several draws a row, which the lines do not know: use timeline.py"
        )
    watch = Stopwatch(device, arguments.repeats, Energy(_energy(device)) if arguments.joules else None)
    with torch.inference_mode():
        model = load(arguments, device)
        spec = model.spec
        ceilings = measure_ceilings(device, DTYPES[spec.dtype], spec.quantization)
        name = "-".join(filter(None, (Path(arguments.model).name, spec.quantization)))
        machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
        about = {"ops": model.ops.name, **asdict(ceilings), **provenance(machine, arguments.commit)}
        print(
            f"{name} on {machine}, ops {model.ops.name}: reads {ceilings.bytes_s / 1e9:,.0f} GB/s, multiplies", end=" "
        )
        print(f"{ceilings.flops_s / 1e12:,.1f} TFLOP/s (matrices {ceilings.matrices_flops_s / 1e12:,.1f})")
        whole = Whole(model, cases, arguments.repeats)
        for case in cases:
            print(f"\n{case.name}\n{HEADER}", flush=True)
            rows = []
            for line in lines(model, whole, case, ceilings, watch):
                print(text(line), flush=True)
                rows.append({"row": f"{name}-{case.name}-{line.operation}", **line.row(), **about})
            if arguments.out:
                write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
