"""What the engine serves on a device of the hardware table: number formats, and predicted speed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ridgeline.core.calibration import FACTORS, load_calibration, read_calibration
from ridgeline.core.cost import CostModel, expert_layers
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Space
from ridgeline.core.gpu_blocks import converted, most_rows
from ridgeline.core.host_weights import LINK_SHARE, HostTimes, streamed_s
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.hardware.probe import Device, probe
from ridgeline.hardware.table import ACCELERATORS, Accelerator, find

Measure = TypeVar("Measure")

KV_FORMATS_SERVED: Mapping[str, tuple[str, ...]] = {"cuda": (), "cpu": ()}
"""Formats of the KV cache by device type that `core.fit` and `diagnose` propose. None yet: the cost model reads every format at the
rate of the model's dtype. A GPU reads 8 bits at 0.88 and 4 bits at 0.47 of the read rate, on Hopper only
(benchmarks/results/kv.json)."""
HOPPER = "H100|H200"
"""In the names of GPUs of that architecture."""
PREFERRED: Mapping[str, tuple[str, ...]] = {
    "cuda": ("fp8", "int8", "llm-int8", "w8a8", "int4", "int3"),
    "cpu": ("int8", "fp8", "fp8-weight", "llm-int8", "w8a8", "int4", "int3"),
}
"""Number formats by device type, in the order in which equally good ones are named (docs/compression.md). Others follow."""

PRODUCT_TIMES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "cuda": {
        "fp8": (0.57, 0.56), "int8": (0.55, 1.12), "llm-int8": (0.90, 1.34), "w8a8": (0.55, 0.78), "int4": (0.47, 1.16),
        "int3": (0.47, 1.16), "fp8-weight": (0.71, 1.16),
    },
    "cpu": {
        "int8": (0.53, 1.09), "fp8": (0.71, 1.10), "fp8-weight": (0.70, 1.11), "llm-int8": (0.49, 0.80), "w8a8": (0.45, 0.68),
        "int4": (0.33, 1.09), "int3": (0.28, 1.12),
    },
}  # fmt: skip
"""Time of a layer's products by device type and format, relative to unquantized weights: with one token, and with thousands. Those
of integers on a GPU are of one form; in both forms (core.gpu_blocks), many tokens take the time of unquantized weights.

GPU, one token: fp8 by benchmarks/results/h200.json (8B, without the output layer), int8 by diagnose.json, int4 by shapes.json
(relative to fp8 on Qwen3-4B; int3 as int4), the others by their ratio to fp8 in products_w8a8.json. Thousands: products_w8a8.json
(8,192 tokens), and products_int.json for int4. fp8-weight: fp8_weight.json (2,048 tokens). CPU: cpu_formats.json."""

EXPERT_LAYER_S = 38e-6
"""Seconds of a layer with experts on a GPU that its bytes do not explain: the short kernels of attention and of the experts (five:
routing, order, two products, sum), one after the other."""
EXPERT_READS: Mapping[str, float] = {
    "": 0.92, "fp8": 0.72, "int8": 0.72, "fp8-weight": 0.675, "fp8-block": 0.675, "int4": 0.495, "int3": 0.495,
}  # fmt: skip
"""Share of a GPU's published bandwidth at which steps of few tokens read a model with experts, by number format. Unpacking limits
codes of 4 bits.

Both are fitted to steps of 1 to 64 requests of a Qwen3-30B-A3B on an H200 (qwen3-30b-a3b in benchmarks/results/shapes.json), within
7.1 %. fp8-block is as fp8-weight, int8 as fp8 and int3 as int4, whose experts take about as long (products_experts.json)."""


def weight_formats(kind: str, row: Accelerator | None, experts: bool = False) -> tuple[str, ...]:
    """Number formats that a device serves weights in, preferred ones first. Each is named once.

    kind: "cuda" or "cpu". row: None for an unknown device. experts: for a model with experts, for which a GPU has fewer. Products
    of fp8 on a GPU need a unit for e4m3 (models.build).
    """
    ordered = [*PREFERRED[kind], *NUMBER_FORMATS]
    names = {NUMBER_FORMATS[name]: name for name in reversed(ordered)}  # of equal formats the first name stays
    fp8 = kind == "cpu" or (row is not None and "float8_e4m3" in row.flops)
    served = [name for stored, name in names.items() if not stored.published and (fp8 or name != "fp8")]
    if experts and kind == "cuda":
        served = [name for name in served if NUMBER_FORMATS[name].on_gpu_experts]
    return tuple(sorted(served, key=ordered.index))


def kind_on(name: str, kind: str) -> str:
    """As ops.blocks.kind_of, of a device with this name of the table or of a driver."""
    return "hopper" if kind == "cuda" and re.search(HOPPER, name) else kind


def held_on(spec: ModelSpec, name: str, kind: str) -> ModelSpec:
    """The model as a device holds it, whose name and kind are as in `kind_on`."""
    return converted(spec, kind_on(name, kind))


def _times(kind: str, spec: ModelSpec) -> tuple[float, float] | None:
    """PRODUCT_TIMES of a model's format. None: not measured. Experts have other kernels."""
    if not spec.quantization or spec.has_experts:
        return None if spec.quantization else (1.0, 1.0)
    return _measured(PRODUCT_TIMES.get(kind, {}), spec.quantization)


def _measured(table: Mapping[str, Measure], name: str) -> Measure | None:
    """The entry of a number format; integers of any group as the ones that were measured."""
    return table.get(name) or (table.get(name.partition("-")[0]) if name.startswith("int") else None)


def _read_rate(spec: ModelSpec, one_token: float) -> float:
    """Bytes per second of a step of one token, in those of unquantized weights. The head is read at their rate. one_token: see
    PRODUCT_TIMES."""
    layers = replace(spec, quantization="").layer_bytes
    return spec.step_weight_bytes / (one_token * layers + spec.step_weight_bytes - spec.layer_bytes)


def _expert_reads(spec: ModelSpec) -> float | None:
    """EXPERT_READS of a model's format. None: not measured, or no experts."""
    return _measured(EXPERT_READS, spec.quantization) if spec.has_experts else None


def with_experts(cost: CostModel, kind: str) -> CostModel:
    """An uncalibrated cost model with what is measured of experts; as it is for a model without, and on a CPU. kind: see in_format.

    The time of a layer replaces that of an empty step, of which layers without experts keep their part.
    """
    spec = cost.spec
    if kind != "cuda" or not spec.has_experts:
        return cost
    dense = 1 - expert_layers(spec) / len(spec.layers)
    return replace(
        cost,
        overhead_s=cost.overhead_s * dense,
        expert_s=EXPERT_LAYER_S,
        memory_share=_expert_reads(spec) or cost.memory_share,
        kv_share=cost.kv_share or cost.memory_share,
    )


def in_format(cost: CostModel, spec: ModelSpec, kind: str) -> CostModel:
    """The cost model of a device for another number format of the same model, with the measured speed of its products. Where that
    is unknown, steps differ by their bytes.

    kind: "cuda" or "cpu". On a GPU the model holds for both forms too, as spec.both_forms says.
    """
    old, new = _times(kind, cost.spec), _times(kind, spec)
    before, after = _expert_reads(cost.spec), _expert_reads(spec)
    if kind == "cuda" and before and after:
        shares = cost.memory_share * after / before, cost.kv_share or cost.memory_share
        return replace(cost, spec=spec, memory_share=shares[0], kv_share=shares[1])
    if old is None or new is None:
        return replace(cost, spec=spec)
    many_tokens = new[1] / old[1]
    rows = most_rows([spec.quantization]) if kind == "cuda" and not cost.spec.quantization else 0
    return replace(
        cost,
        spec=spec,
        flops_per_s=cost.flops_per_s / many_tokens,
        memory_share=cost.memory_share * _read_rate(spec, new[0]) / _read_rate(cost.spec, old[0]),
        kv_share=cost.kv_share or cost.memory_share,
        attention_share=(cost.attention_share or cost.compute_share) * many_tokens,
        wide=cost if rows else None,
        wide_rows=rows,
    )


def cost_model(row: Accelerator, spec: ModelSpec) -> CostModel:
    """Uncalibrated cost model from the published figures of a device, and the measured speed of products in the model's number
    format where it is known. Attention computes in the model's dtype, whatever the products of the weights do."""
    host = HostTimes(streamed_s(spec, row.host_link * LINK_SHARE))
    if spec.quantization and _times(row.kind, spec):
        plain = replace(spec, quantization="", head_format="", both_forms=False, host_bytes=0)
        return replace(in_format(cost_model(row, plain), spec, row.kind), host=host)
    cost = CostModel(spec, row.peak(spec.matrix_dtype), row.bandwidth, host=host)
    cost = replace(cost, attention_share=cost.compute_share * row.peak(spec.dtype) / cost.flops_per_s)
    return with_experts(cost, row.kind)


def calibrated_cost(path: Path, spec: ModelSpec, row: Accelerator) -> CostModel:
    """Cost model of a file that `ridgeline calibrate` wrote. Raises ConfigError if it was measured on another device."""
    calibrated = load_calibration(path, spec)
    if find(calibrated.device) != row:
        raise ConfigError(
            f"--calibration {path} was measured on {calibrated.device}, and this is for {row.name}: use a file of that device, or "
            "leave it out.",
            param="calibration",
        )
    return replace(calibrated.cost, host=HostTimes(streamed_s(spec, row.host_link * LINK_SHARE)))


def transferred_cost(path: Path, spec: ModelSpec, row: Accelerator) -> CostModel | None:
    """Cost model of a model with the factors that a calibration measured with another model or number format on the same device,
    which are shares of its published peaks and times of its host. None: it was measured on another device."""
    calibrated, properties = read_calibration(path, spec)
    if find(calibrated.device) != row:
        return None
    measured, stored = calibrated.cost, replace(spec, quantization=str(properties["quantization"]))
    if not all(_times(row.kind, known) or _expert_reads(known) for known in (spec, stored)):
        stored = spec
    cost = with_experts(CostModel(stored, row.peak(stored.matrix_dtype), row.bandwidth), row.kind)
    factors = {name: getattr(measured, name) for name in FACTORS}
    if measured.attention_share is not None:
        factors["attention_share"] = measured.attention_share * measured.flops_per_s / cost.flops_per_s
    host = HostTimes(streamed_s(spec, row.host_link * LINK_SHARE))
    return replace(in_format(replace(cost, **factors), spec, row.kind), host=host)


def search_space(device: Device, checkpoint: ModelSpec) -> Space:
    """What `core.fit` may change on a device. A checkpoint in a number format can be served in no other."""
    row = device.accelerator
    known = row if row is not None and row.flops and row.bandwidth else None
    return Space(
        weight_formats=() if checkpoint.quantization else weight_formats(device.kind, row, checkpoint.has_experts),
        kv_formats=KV_FORMATS_SERVED[device.kind],
        cost=partial(cost_model, known) if known else None,
        devices={gpu.name: gpu.memory_bytes for gpu in ACCELERATORS if gpu.kind == "cuda" and gpu.serves},
    )


def space_here(kind: str, checkpoint: ModelSpec) -> Space:
    """search_space of this machine's device of type `kind` ("cuda" or "cpu")."""
    device = probe().device(kind)
    return search_space(device if device.kind == kind else Device(kind, "", 0, 0), checkpoint)
