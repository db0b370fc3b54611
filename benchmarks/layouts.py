"""Predictions of `ridgeline plan` against published tables of tensor and context parallel inference.

    python benchmarks/layouts.py --out benchmarks/results/layouts.json

The tables are in workloads/published_layouts.json with source and date; nothing runs. Predictions use the defaults of the cost
model: no factor is fitted to these tables. A row has the published and the predicted figure, and their error (predicted /
published - 1; of a rate, above 0 means that the prediction is too fast). Rows `scaling` compare gains instead: how many times the
figure with twice the devices, which does not depend on how fast one device is. Rows `plan` are the time to rank layouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.serving import cost_model
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, replica, with_context
from ridgeline.planner.ranking import Demand, ReplicaLoad, Variant, rank

SHAPES = {
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": (126, 16384, 128, 8, 53248, 128256),
}
"""Layers, width, heads, KV heads, feed-forward width and vocabulary, of the models' config.json."""
ENGINE = EngineConfig(max_num_seqs=2048, max_num_batched_tokens=8192, gpu_memory_utilization=0.95)
"""TensorRT-LLM's limits of a step, which its table does not print."""
FIGURES = ("throughput_ratio", "latency_ratio", "tokens_s", "tokens_s_gpu", "ttft_ms", "itl_ms", "e2e_ms")


def model(row: Mapping[str, Any]) -> ModelSpec:
    """The model of a published row, in its formats."""
    layers, width, heads, kv_heads, d_ff, vocabulary = SHAPES[row["model"]]
    layer = LayerSpec(heads, kv_heads, width // heads, d_ff, Rope(dim=width // heads))
    spec = ModelSpec(row["model"], vocabulary, width, (layer,) * layers, row["input"] + row.get("output", 1))
    if row["table"] == "vLLM":
        return spec
    if row["device"] == "a100 80gb":
        return replace(spec, dtype="float16")
    return replace(spec, quantization="fp8", kv_format="" if row["table"] == "context parallel" else "fp8")


def predicted(row: Mapping[str, Any], figure: str) -> float:
    """The predicted figure. Raises ConfigError if the layout cannot be."""
    if figure == "throughput_ratio":  # as many pipeline stages as tensor-parallel ranks, and what they gain
        return predicted({**row, "tp": 1, "pp": row["tp"]}, "tokens_s") / predicted(row, "tokens_s")
    if figure == "latency_ratio":
        alone = {**row, "batch": 1}
        return predicted({**alone, "tp": 1, "pp": row["tp"]}, "itl_ms") / predicted(alone, "itl_ms")
    layout, spec = Layout(row["tp"], row.get("pp", 1), row.get("cp", 1)), model(row)
    cluster = read_cluster(f"{layout.devices}x{row['device']}")
    times = Times(replica(spec, layout, cluster, spec.max_len, ENGINE), cost_model(cluster.device, spec))
    latency, prompt = times.prefill(row["input"])
    if figure == "ttft_ms":
        return latency * 1e3
    demand = Demand(row["input"], row["output"])
    load = ReplicaLoad(times, prompt, demand)
    if figure == "tokens_s":
        batch = min(times.replica.memory.requests, times.replica.rows * layout.pipeline)
        return load.rate(batch) * demand.output
    batch = row["batch"]
    if figure == "itl_ms":
        return load.tpot(batch, load.rate(batch)) * 1e3
    seconds = batch * prompt.total + demand.output * times.decode(batch, load.context).total
    return seconds * 1e3 if figure == "e2e_ms" else batch * demand.output / seconds / row["tp"]


def compare(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Published and predicted figures with their errors."""
    made = []
    for row in rows:
        figure = next(name for name in FIGURES if name in row)
        lengths = f"{row['input']}+{row['output']}" if "output" in row else str(row["input"])
        batch = f" batch {row['batch']}" if "batch" in row else ""
        layout = f"TP{row['tp']}" + (f" x CP{row['cp']}" if "cp" in row else "")
        name = f"{row['table']}: {row['model']} {row['device']} {layout}{batch} {lengths} {figure}"
        entry: dict[str, Any] = {"row": name, **row, "figure": figure, "published": row[figure]}
        try:
            value = predicted(row, figure)
            entry |= {"predicted": round(value, 3), "error": round(value / row[figure] - 1, 4)}
        except ConfigError as error:
            entry["refused"] = error.message
        made.append({key: value for key, value in entry.items() if key not in FIGURES})
    return made


def scaling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gain from twice the devices, published and predicted, of each pair of rows."""
    known = {
        (row["table"], row["model"], row["device"], row["tp"], row["input"], row.get("output")): row
        for row in rows
        if "predicted" in row and row["table"] == "saturated"
    }
    made = []
    for (table, name, device, tensor, *lengths), row in known.items():
        other = known.get((table, name, device, 2 * tensor, *lengths))
        if other is not None:
            published, gain = other["published"] / row["published"], other["predicted"] / row["predicted"]
            label = f"scaling: {name} {device} TP{tensor} to TP{2 * tensor} {lengths[0]}+{lengths[1]}"
            made.append(
                {"row": label, "table": "scaling", "device": device, "model": name, "tp": tensor, "input": lengths[0],
                 "output": lengths[1], "published": round(published, 4), "predicted": round(gain, 4),
                 "error": round(gain / published - 1, 4)}
            )  # fmt: skip
    return made


def summary(rows: Sequence[Mapping[str, Any]], tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Median errors by table, and of the large tables by device."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["table"], ""), []).append(row)
        if row["table"] in ("saturated", "scaling"):
            groups.setdefault((row["table"], row["device"]), []).append(row)
    made = []
    for (table, device), members in groups.items():
        errors = [row["error"] for row in members if "error" in row]
        sizes = [abs(error) for error in errors]
        made.append(
            {"row": f"summary: {table}" + (f" {device}" if device else ""), "rows": len(errors),
             "refused": sum("refused" in row for row in members), "median_error": round(statistics.median(errors), 4),
             "median_size": round(statistics.median(sizes), 4), "largest": round(max(sizes), 4),
             "source": tables.get(table, {}).get("source", "")}
        )  # fmt: skip
    return made


def plans(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds of a core to rank all layouts: of the 70B shape by number of H100s, of the 405B shape for long prompts on 128."""
    made = []
    for count in counts:
        demand = Demand(2048, 256, slo=Slo.parse("ttft=500ms,tpot=20ms"))
        made.append(_plan(f"plan: llama-3.1-70b {count}xh100", "llama-3.1-70b", count, demand))
    for length, name in ((131072, "128k"), (1_000_000, "1M")):
        made.append(_plan(f"plan: llama-3.1-405b 128xh100 {name}", "llama-3.1-405b", 128, Demand(length, 256)))
    return made


def _plan(label: str, name: str, count: int, demand: Demand) -> dict[str, Any]:
    spec = with_context(model({"model": name, "table": "", "device": "h100", "input": demand.input}), demand.length)
    cluster, started = read_cluster(f"{count}xh100"), time.process_time()
    ranked, refused = rank(
        [Variant(spec, cost_model(cluster.device, spec))], cluster, demand, EngineConfig(), lambda _: True
    )
    seconds = time.process_time() - started
    best, quickest = ranked[0], min(ranked, key=lambda entry: entry.ttft_s)
    return {
        "row": label, "layouts": len(ranked) + len(refused), "refused": len(refused), "seconds": round(seconds, 3),
        "ms_per_layout": round(seconds / (len(ranked) + len(refused)) * 1e3, 3), "best": str(best.layout),
        "ttft_s": round(best.ttft_s, 4), "tpot_s": round(best.tpot_s, 5), "tokens_s_device": round(best.tokens_s_device, 3),
        "lowest_ttft": str(quickest.layout), "lowest_ttft_s": round(quickest.ttft_s, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    published = json.loads((HERE / "workloads" / "published_layouts.json").read_text())
    rows = compare(published["rows"])
    gains = scaling(rows)
    result = [*summary([*rows, *gains], published["tables"]), *plans((8, 64, 1024)), *rows, *gains]
    origin = provenance(cpu_name(), args.commit)
    write_rows(args.out, [{**row, **origin} for row in result])
    for row in result:
        if row["row"].startswith(("summary", "plan")):
            print(row)


if __name__ == "__main__":
    main()
