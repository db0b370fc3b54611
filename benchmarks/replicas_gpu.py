"""Two engines on two GPUs: as replicas behind the router, and as one for prompts and one for the other tokens.

    python benchmarks/replicas_gpu.py --only one,two --out benchmarks/results/multi_gpu.json
    python benchmarks/replicas_gpu.py --only split --resume --out benchmarks/results/multi_gpu.json
    python benchmarks/replicas_gpu.py --device cpu --only one --run-s 2 --rates conv=0.5,long=0.5

one: `ridgeline serve` on the first GPU. two: `ridgeline up` with a replica on each GPU. split: `ridgeline serve --prefill-engines 1
--decode-engines 1`. Each part starts its server, then looks for the highest rate at which nine of ten requests meet --slo.

conv: the lengths of 1,000 conversations of the Azure trace. long: each second prompt has --long tokens and an answer of 128, the
others have 256 tokens and an answer of 256. Arrivals are random (Poisson) with one seed; requests are sent for --run-s seconds.
Rates rise by 1.3 until a run misses, or fall until one meets; then the gap is halved while there is time. Prompts are token ids
that no other run has. A GPU has random weights in the shape of --model, a CPU the shipped model.

Rows: replicas-PART-WORKLOAD has the best run that met the SLO (met: false if none did; then the run of the lowest rate), and
replicas-PART-WORKLOAD-RATE each run. replicas-handover-TOKENS: lone prompts on `split` by the counters of the server: milliseconds
from the ticket to the next token, and bytes. replicas-gain-*: the rates over those of `one`, and of `split` over `two`.

Predicted before the first run, for two H200 and Llama 3.1 8B in bf16 (42,000 prompt tokens per second, 5 ms per step of 64 rows):

- one, conv: a prompt takes 27 ms and a step 6 ms, so that a token takes 6 / (1 - 0.027 rate) ms: 90 % below 15 ms at 16 requests/s.
- two, conv: 1.95 times: two servers with a queue each, and a choice by load.
- split, conv: no token waits for a prompt. The engine for prompts is the limit, by its first token, at three quarters of its time:
  27 requests/s, 0.87 times two replicas.
- long: a prompt takes 52 ms in the mean. one 8 requests/s, by first token; two 16; split 9, because one engine computes all prompts
  and the other one has little to do.
- hand-over of 8,192 tokens, 1.07 GB: 4 ms over NVLink, and one step of the other engine: 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from common import HERE, cpu_name, provenance, read_rows, write_rows
from goodput import figures, folder_of, tell

from ridgeline.bench.efficiency import metric
from ridgeline.bench.figures import invalid_reason, run_json
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.probe import fetch
from ridgeline.bench.record import Run
from ridgeline.bench.search import meets
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.core.errors import RidgelineError

RISE, NEAR = 1.3, 1.08
ATTAIN = 0.9
COUNTERS = ("hand_overs_total", "hand_over_seconds_total", "hand_over_bytes_total")
START_S = 90.0
_READY = re.compile(r"listening on (http://\S+?);")
Row = dict[str, Any]


# --- servers ----------------------------------------------------------------------------------------------------------


def serve_options(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Options of `ridgeline serve`, by field."""
    options: dict[str, Any] = {"device": args.device, "max_num_seqs": 256 if args.device == "cuda" else 16}
    if args.device == "cpu":
        return options | {"threads": 1}
    return options | {
        "model": folder,
        "load_format": "dummy",
        "served_model_name": args.model.name,
        "max_model_len": args.context,
    }


def as_flags(options: Mapping[str, Any]) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "model"]
    return [options["model"], *flags] if "model" in options else flags


@asynccontextmanager
async def fleet(args: argparse.Namespace, options: Mapping[str, Any], place: str, **router: Any) -> AsyncIterator[str]:
    """`ridgeline up` with --engines replicas; yields the router's address when all are ready. router: its further options."""
    file = Path(place) / "fleet.json"
    content: dict[str, Any] = {"replicas": args.engines, "serve": options, "router": {"port": 0, **router}}
    if args.device == "cuda":
        content["gpus"] = list(range(args.engines))
    file.write_text(json.dumps(content))
    command = [sys.executable, "-m", "ridgeline", "up", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    url, ready, lines = "", 0, []

    async def until_ready() -> None:
        nonlocal url, ready
        assert process.stderr is not None
        while ready < args.engines:
            line = (await process.stderr.readline()).decode(errors="replace")
            if not line:
                raise RidgelineError("the fleet did not start:\n" + "".join(lines[-20:]))
            lines.append(line)
            if match := _READY.search(line):
                url = match[1]
            ready += "is ready after" in line

    draining = None
    try:
        await asyncio.wait_for(until_ready(), START_S)
        draining = asyncio.ensure_future(process.stderr.read())
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait() if draining is None else draining, 30.0)
        except TimeoutError:
            process.kill()
        await process.wait()


@asynccontextmanager
async def server(args: argparse.Namespace, part: str, place: str) -> AsyncIterator[str]:
    """The server of a part; yields its address."""
    options = serve_options(args, folder_of(str(args.model) if args.device == "cuda" else "", place))
    if part == "two":
        async with fleet(args, options, place) as url:
            yield url
        return
    if part == "split":
        options |= {"prefill_engines": args.engines // 2, "decode_engines": args.engines - args.engines // 2}
    async with serving(as_flags(options)) as url:
        yield url


# --- runs -------------------------------------------------------------------------------------------------------------


async def seek(session: Session, load: LoadConfig, ends: float) -> list[Run]:
    """Runs at several rates, first at that of `load`. ends: on the clock of time.perf_counter; no run is begun that would end
    later, if it takes as long as the one before."""
    runs: list[Run] = []
    low, high, rate, took = 0.0, float("inf"), float(load.rate or 1.0), 0.0
    while high > NEAR * low and (not runs or time.perf_counter() + took < ends):
        began = time.perf_counter()
        run = await session.measure(replace(load, rate=rate, warmup=0 if runs else load.warmup))
        took = time.perf_counter() - began
        tell(run)
        runs.append(run)
        if good(run):
            low = max(low, rate)
        else:
            high = min(high, rate)
        rate = low * RISE if high == float("inf") else high / RISE if low == 0.0 else (low * high) ** 0.5
    return runs


def good(run: Run) -> bool:
    """Completions over arrivals are not looked at: in a run of seconds most answers end after the last arrival, and a queue that
    grows misses first tokens."""
    return meets(run, ATTAIN) and not invalid_reason(run)


def shown(run: Run) -> Row:
    return {name: value for name, value in figures(run).items() if name != "kept_up"}


def rate_of(run: Run) -> float:
    return float(run.facts["rate"])


async def counters(session: Session) -> dict[str, float]:
    text = (await fetch(session.client, "/metrics")).text
    return {name: metric(text, f"ridgeline:{name}") or 0.0 for name in COUNTERS}


def asked(trace: Path, args: argparse.Namespace) -> BenchConfig:
    return BenchConfig(
        TargetConfig(prompts="ids"), WorkloadConfig(trace=str(trace)), LoadConfig(), ResultConfig(slo=args.slo)
    )


def trace_of(args: argparse.Namespace, name: str, place: str) -> Path:
    if name == "conv":
        return HERE / "workloads" / "azure_conv_1000.json"
    return written(place, [(args.long, 128), (256, 256)] * 500)


def written(place: str, lengths: Sequence[tuple[int, int]]) -> Path:
    """A workload file in `place`."""
    file = Path(place) / "long.json"
    file.write_text(json.dumps({"name": "long", "lens": lengths}))
    return file


async def workload_rows(args: argparse.Namespace, part: str, name: str, url: str, ends: float) -> list[Row]:
    """The rows of a workload: the best run, and each."""
    with tempfile.TemporaryDirectory() as place:
        async with Session(asked(trace_of(args, name, place), args), url) as session:
            before = await counters(session) if part == "split" else {}
            rate = args.rates[name] * (1.0 if part == "one" else args.engines * 0.9)
            runs = await seek(session, LoadConfig(rate=rate, duration=args.run_s, warmup=16), ends)
            after = await counters(session) if part == "split" else {}
    met = [run for run in runs if good(run)]
    best = max(met, key=rate_of) if met else min(runs, key=rate_of)
    title = f"replicas-{part}-{name}"
    bounded = any(not good(run) for run in runs)
    head: Row = {"row": title, **shown(best), "met": bool(met), "bounded": bounded}
    if part == "split":
        head |= hand_over_figures(before, after)
    return [head, *({"row": f"{title}-{rate_of(run):.3g}", **shown(run)} for run in runs)]


def hand_over_figures(before: Mapping[str, float], after: Mapping[str, float]) -> Row:
    """What the counters say of the hand-overs between two readings."""
    number, seconds, size = (after[name] - before[name] for name in COUNTERS)
    count = max(number, 1.0)
    return {
        "hand_overs": round(number),
        "hand_over_ms": round(seconds / count * 1e3, 2),
        "hand_over_mb": round(size / count / 1e6, 1),
    }


async def lone_rows(args: argparse.Namespace, url: str) -> list[Row]:
    """Hand-overs of lone prompts."""
    rows = []
    for length in (int(size) for size in args.lone.split(",") if size):
        with tempfile.TemporaryDirectory() as place:
            async with Session(asked(written(place, [(length, 16)] * 6), args), url) as session:
                load = LoadConfig(concurrency=1)
                await session.measure(load)  # the first pages make copies and kernels ready
                before = await counters(session)
                run = await session.measure(load)
                after = await counters(session)
        rows.append({"row": f"replicas-handover-{length}", **hand_over_figures(before, after), **short(run)})
    return rows


def short(run: Run) -> Row:
    of_run = run_json(run)
    return {name: round(of_run[name], 2) for name in ("p50_ttft_ms", "p50_tpot_ms")}


async def part_rows(args: argparse.Namespace, part: str, began: float) -> AsyncIterator[list[Row]]:
    ends = began + args.seconds
    with tempfile.TemporaryDirectory() as place:
        async with server(args, part, place) as url:
            print(f"{part} is ready after {time.perf_counter() - began:.1f} s", flush=True)
            yield [{"row": f"replicas-{part}-start", "s": round(time.perf_counter() - began, 1)}]
            if part == "split" and args.lone:
                yield await lone_rows(args, url)
            names = args.workloads.split(",")
            for index, name in enumerate(names):
                now = time.perf_counter()
                yield await workload_rows(args, part, name, url, now + (ends - now) / (len(names) - index))


def gains(rows: Mapping[str, Row]) -> Iterator[Row]:
    """Ratios of rates, where both met the SLO."""
    for title, over in (("two", "one"), ("split", "one"), ("split", "two")):
        for name in ("conv", "long"):
            first, second = rows.get(f"replicas-{title}-{name}"), rows.get(f"replicas-{over}-{name}")
            if first and second and first["met"] and second["met"]:
                yield {"row": f"replicas-gain-{title}-{over}-{name}", "gain": round(first["rate"] / second["rate"], 3)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="one,two,split", help="comma-separated parts")
    parser.add_argument("--workloads", default="conv,long", help="comma-separated")
    parser.add_argument("--resume", action="store_true", help="leave out parts of which the file has all workloads")
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--engines", type=int, default=2, help="replicas, or engines of `split`")
    parser.add_argument("--slo", default="ttft=200ms,tpot=15ms")
    parser.add_argument("--rates", default="conv=14,long=7", help="requests/s of the first run of `one`")
    parser.add_argument("--run-s", type=float, default=8.0, help="seconds in which the requests of a run are sent")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompts of `long`")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--lone", default="8192", help="tokens of the lone prompts that `split` hands over")
    parser.add_argument("--seconds", type=float, default=95.0, help="of each part, start included")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.rates = {name: float(rate) for name, _, rate in (each.partition("=") for each in args.rates.split(","))}
    return args


async def run_part(args: argparse.Namespace, part: str, rows: dict[str, Row], about: Row) -> None:
    async for made in part_rows(args, part, time.perf_counter()):
        for row in made:
            rows[row["row"]] = row
            print(json.dumps(row), flush=True)
        if args.out:
            write_rows(args.out, [row | about for row in made])


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        import torch  # this process needs no GPU otherwise

        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    about: Row = dict(provenance(name if args.device == "cuda" else cpu_name(), args.commit))
    rows: dict[str, Row] = {row["row"]: row for row in read_rows(args.out)} if args.out else {}
    for part in args.only.split(","):
        if args.resume and all(f"replicas-{part}-{name}" in rows for name in args.workloads.split(",")):
            continue
        try:
            uvloop.run(run_part(args, part, rows, about))
        except Exception as error:  # the other parts do not need this one
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
    made = list(gains(rows))
    print(*map(json.dumps, made), sep="\n", flush=True)
    if args.out:
        write_rows(args.out, [row | about for row in made])


if __name__ == "__main__":
    main()
