"""Replicas of several GPUs, 8 to 1,024 of them, simulated with the real scheduler, and published figures beside the simulation.

    python benchmarks/clusters.py --out benchmarks/results/simulation.json [--parts experts,tables,sizes,summary]

Rows `sim-published-*`: a published figure of parallel inference, the same figure from the real scheduler in virtual time with step
times of planner.layout_times, and the error (simulated / published - 1). Nothing is fitted: devices, links and default shares of
the peaks are those of the hardware table and the cost model.

Rows `sim-gpus-*`: a fleet of so many H100, each replica in a layout, behind the service's router, with a load per GPU that is the
same in every size.

Rows `sim-experts-*`: what whole experts cost beside divided widths on two H200s, predicted, and measured by multi_gpu.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from common import HERE, cpu_name, provenance, read_rows, write_rows
from layouts import SHAPES

from ridgeline.core.config import EngineConfig
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.core.workload import RequestSpec, Workload, arrivals
from ridgeline.hardware.serving import cost_model
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.fleet import Fleet, simulate_fleet
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, replica
from ridgeline.planner.servers import replica_server
from ridgeline.planner.simulate import Figures, Server, quantile, serve

BLOCK = 512
TENSORRT = "github.com/NVIDIA/TensorRT-LLM docs/source/performance/perf-overview.md at 258c754 (v0.17), 00f37686 for its successor"
SLO = Slo.parse("ttft=1s,tpot=50ms")


def model(name: str, formats: str) -> ModelSpec:
    layers, width, heads, kv_heads, d_ff, vocabulary = SHAPES[name]
    layer = LayerSpec(heads, kv_heads, width // heads, d_ff, Rope(dim=width // heads))
    spec = ModelSpec(name, vocabulary, width, (layer,) * layers, 8192)
    return replace(spec, quantization="fp8", kv_format="fp8") if formats == "fp8" else spec


def server(spec: ModelSpec, layout: Layout, device: str, lengths: tuple[int, int], rows: int = 2048) -> Server:
    """A replica of the layout on devices of the hardware table. rows: requests that it holds at most."""
    cluster = read_cluster(f"{layout.replica}x{device}")
    engine = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=8192, gpu_memory_utilization=0.95)
    made = replica(spec, layout, cluster, sum(lengths), engine)
    return replica_server(made, cost_model(cluster.device, spec), engine, lengths[0])


# --- published figures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure. layout: of a replica; its `data` are replicas. concurrency: of a closed loop; 0: all requests at once.
    figure: tokens_s or requests_s of all devices, ms of a token (tpot_ms) or of the first one (ttft_ms)."""

    table: str
    name: str
    formats: str
    device: str
    layout: Layout
    lengths: tuple[int, int]
    figure: str
    value: float
    source: str
    requests: int = 2500
    concurrency: int = 0

    @property
    def row(self) -> str:
        load = f" c={self.concurrency}" if self.concurrency else ""
        words = (
            f"{self.table}-{self.name}-{self.formats}-{self.device}-{self.layout}-{self.lengths[0]}+{self.lengths[1]}"
        )
        return f"sim-published-{words}{load} {self.figure}"


def published() -> Iterator[Published]:
    """Figures with a load that the source names."""
    offline = {  # output tokens per second of 70B at TP1, 2, 4, 8
        ("h200", "fp8", (128, 128)): (4021, 6823, 11099, 15356),
        ("h100", "fp8", (128, 128)): (0, 6645, 11128, 14731),
        ("h100", "bf16", (128, 128)): (0, 0, 6393, 10960),
        ("h200", "fp8", (2048, 128)): (466, 809, 1358, 1983),
        ("h100", "fp8", (2048, 128)): (0, 773, 1303, 1923),
        ("h100", "bf16", (2048, 128)): (0, 0, 780, 1351),
        ("h200", "fp8", (1000, 1000)): (0, 5165, 8911, 13181),
    }
    for (device, formats, lengths), values in offline.items():
        for tensor, value in zip((1, 2, 4, 8), values, strict=True):
            if value:
                yield Published(
                    "tensorrt-llm",
                    "llama-3.1-70b",
                    formats,
                    device,
                    Layout(tensor),
                    lengths,
                    "tokens_s",
                    value,
                    TENSORRT,
                )
    for tensor, value in ((1, 93.9), (2, 149.0), (4, 217.0), (8, 276.0)):
        yield Published(
            "gpt-fast", "llama-3.1-8b", "bf16", "a100 80gb", Layout(tensor), (128, 200), "tokens_s", value,
            "github.com/pytorch-labs/gpt-fast README; lengths assumed", 1, 1,
        )  # fmt: skip
    nim, two = "docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance", Layout(2)
    for count, figure, value in ((1, "ttft_ms", 407.0), (1, "tpot_ms", 18.6), (50, "tokens_s", 814.0)):
        yield Published("nim", "llama-3.1-70b", "fp8", "h100", two, (5000, 500), figure, value, nim, 2 * count, count)
    chart = "github.com/vllm-project/vllm-project.github.io 2024-09-05, read off a chart; mean lengths"
    yield Published("vllm-0.6", "llama-3.1-70b", "bf16", "h100", Layout(4), (202, 179), "requests_s", 17.4, chart, 2000)
    mlperf = "github.com/mlcommons/inference_results_v5.1 summary_results.json; lengths of 294 assumed"
    for layout in (Layout(1, data=8), Layout(2, data=4), Layout(8)):
        yield Published(
            "mlperf-5.1", "llama-2-70b", "fp8", "h200", layout, (294, 294), "tokens_s", 35317.0, mlperf, 8000
        )


def compared(figure: Published) -> dict[str, Any]:
    replicas, layout = figure.layout.data, replace(figure.layout, data=1)
    made = server(model(figure.name, figure.formats), layout, figure.device, figure.lengths)
    # Replicas are equal and so are their shares of the requests: one stands for all.
    requests = (RequestSpec(0.0, *figure.lengths, (), BLOCK),) * (figure.requests // replicas)
    began = time.process_time()
    served = serve(made, Workload(figure.row, requests, timed=False), figure.concurrency or None)
    figures = Figures.of(*served)
    simulated = {
        "tokens_s": replicas * figures.tokens_s,
        "requests_s": replicas * figures.tokens_s / figure.lengths[1],
        "tpot_ms": figures.tpot_s * 1e3,
        "ttft_ms": figures.ttft_s * 1e3,
    }[figure.figure]
    return {
        "row": figure.row, "table": figure.table, "gpus": figure.layout.devices, "tp": layout.tensor, "requests": figure.requests,
        "published": figure.value, "simulated": round(simulated, 3), "error": round(simulated / figure.value - 1, 4),
        "cpu_s": round(time.process_time() - began, 1), "source": figure.source,
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Median errors of each table, and of its gains from twice the GPUs."""
    rows = [row for row in rows if "published" in row and "simulated" in row]
    by_table: dict[str, list[float]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row["error"])
    by_name = {row["row"]: row for row in rows}
    for row in rows:
        half = by_name.get(
            row["row"].replace(f"-TP{row['tp']}-", "-TP{}-".format(row["tp"] // 2).replace("TP1", "1 device"))
        )
        if half is not None and half is not row and row["tp"] > 1:
            gains = row["simulated"] / half["simulated"], row["published"] / half["published"]
            by_table.setdefault(f"gain from twice the GPUs, {row['table']}", []).append(gains[0] / gains[1] - 1)
    for table, errors in by_table.items():
        sizes = [abs(error) for error in errors]
        yield {
            "row": f"sim-published-summary {table}", "rows": len(errors), "median_error": round(statistics.median(errors), 4),
            "value": round(statistics.median(sizes), 4), "unit": "median size of the error", "largest": round(max(sizes), 4),
        }  # fmt: skip


# --- 8 to 1,024 GPUs -----------------------------------------------------------------------------------------------------

PER_GPU_S = {"llama-3.1-70b": 3.0, "llama-3.1-405b": 0.5}
"""Requests per second of a GPU."""
SECONDS = 4.0
"""Of arrivals."""
SIZES = (8, 64, 1024)
WAYS = {"llama-3.1-70b": (Layout(2), Layout(8), Layout(8, 2)), "llama-3.1-405b": (Layout(8, 2),)}
LENGTHS = (512, 32)


def fleet_row(name: str, layout: Layout, gpus: int) -> dict[str, Any]:
    rate = gpus * PER_GPU_S[name]
    count = int(rate * SECONDS)
    load = Workload(name, (RequestSpec(0.0, *LENGTHS, (), BLOCK),) * count, timed=False)
    times = arrivals(count, rate, 1.0, 7)
    load = replace(
        load,
        requests=tuple(replace(request, at_s=at) for request, at in zip(load.requests, times, strict=True)),
        timed=True,
    )
    made = server(model(name, "fp8"), layout, "h100", LENGTHS, rows=256)
    began = time.process_time()
    result = simulate_fleet(Fleet(made, gpus // layout.replica, policy="least-work"), load)
    ttft = sorted(outcome.ttft_s for outcome in result.outcomes.values())
    tpot = sorted(outcome.tpot_s for outcome in result.outcomes.values())
    return {
        "row": f"sim-gpus-{gpus} {name} {layout}", "gpus": gpus, "replicas": gpus // layout.replica, "requests": count,
        "requests_s": round(rate, 2), "value": round(result.attainment(SLO), 4), "unit": f"share within {SLO}",
        "ttft_p50_s": round(quantile(ttft, 0.5), 4), "ttft_p99_s": round(quantile(ttft, 0.99), 4),
        "tpot_p50_s": round(quantile(tpot, 0.5), 5), "busy": round(result.busy_s / result.replica_s, 4),
        "cpu_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def sizes(only: str) -> Iterator[dict[str, Any]]:
    for name, ways in WAYS.items():
        for layout in ways:
            for gpus in SIZES:
                if gpus >= layout.replica and only in f"sim-gpus-{gpus} {name} {layout}":
                    yield fleet_row(name, layout, gpus)


# --- whole experts -------------------------------------------------------------------------------------------------------


def experts() -> Iterator[dict[str, Any]]:
    """Times of Qwen3-30B-A3B's shape with whole experts, over those with divided widths."""
    kind = ExpertSpec(128, 8, 768, normalized=True)
    layer = LayerSpec(32, 4, 128, kind.active_width, Rope(dim=128), experts=kind)
    spec = ModelSpec("Qwen3Moe", 151936, 2048, (layer,) * 48, 40960, qk_norm="head")
    cluster, cost = read_cluster("2xh200"), cost_model(read_cluster("h200").device, spec)
    divided, whole = (
        Times(replica(spec, layout, cluster, 8449, EngineConfig()), cost)
        for layout in (Layout(2), Layout(2, experts=2))
    )
    measured = {row["row"]: row for row in read_rows(HERE / "results" / "multi_gpu.json")}
    for case in ("decode-1", "decode-64", "prefill"):
        field = "ms" if case != "prefill" else "tok_s"
        pair = [measured[f"experts-{way}-{case}"][field] for way in ("whole", "tensor")]
        real = pair[0] / pair[1] if field == "ms" else pair[1] / pair[0]
        seconds = [
            made.prefill(8192)[1].total if case == "prefill" else made.decode(int(case[7:]), 256).total
            for made in (whole, divided)
        ]
        predicted = seconds[0] / seconds[1]
        yield {
            "row": f"sim-experts-{case}", "predicted": round(predicted, 4), "measured": round(real, 4),
            "value": round(predicted / real - 1, 4), "unit": "relative error of the time with whole experts over divided widths",
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="result file that gets the rows")
    parser.add_argument("--parts", default="experts,tables,sizes,summary")
    parser.add_argument("--only", default="", help="figures and fleets of which a part of the row's name is this")
    args = parser.parse_args()
    parts = args.parts.split(",")
    made: Iterator[dict[str, Any]] = chain(
        experts() if "experts" in parts else (),
        map(compared, (figure for figure in published() if args.only in figure.row)) if "tables" in parts else (),
        sizes(args.only) if "sizes" in parts else (),
        (row for part in parts if part == "summary" for row in summary(read_rows(args.out))),
    )
    for row in made:
        print(row, flush=True)
        write_rows(args.out, [{**row, **provenance(cpu_name())}])


if __name__ == "__main__":
    main()
