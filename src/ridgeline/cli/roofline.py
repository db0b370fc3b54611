"""Roofline of a model on an accelerator: for each operation of prefill and decode, the limit (compute or memory) and the shortest
possible time. Also predicts the time of whole steps.

Reads only config.json. Shortest times follow from the accelerator's specification, or from rates measured on this machine if its
processor's specification is unknown. Predictions use a calibration (`ridgeline
calibrate`); without one they are marked as uncalibrated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.flags import Arguments, Parser, check_output_paths, parser_for, whole_number
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import bytes_text, count_text
from ridgeline.core.calibration import load_calibration
from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.host_weights import LINK_SHARE, HostTimes, check_gpu, streamed_s
from ridgeline.core.plural import counted
from ridgeline.core.quantization import check_experts
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.bandwidth import measured_note, with_measured_rates
from ridgeline.hardware.probe import probe, resolve_accelerator
from ridgeline.hardware.serving import cost_model, held_on
from ridgeline.hardware.table import Accelerator, Level
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.chart import HEAD, roofline_chart, roofline_page, rows
from ridgeline.planner.cost import usd_per_unit
from ridgeline.planner.roofline import Load, Phase, Roofline, roofline
from ridgeline.planner.svg import document, si


def parser() -> Parser:
    parser = parser_for("roofline", __doc__ or "", (ModelConfig,))
    load = Load()
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--on", metavar="NAME", help="accelerator of the hardware table (H100, L4, mi300x, cpu; default: this machine)"
    )
    group.add_argument(
        "--batch", type=whole_number, metavar="N", help=f"sequences in a decode step (default: {load.batch})"
    )
    group.add_argument(
        "--context",
        type=whole_number,
        metavar="N",
        help=f"tokens per sequence in a decode step (default: {load.context})",
    )
    group.add_argument(
        "--prompt", type=whole_number, metavar="N", help=f"tokens in the prefill step (default: {load.prompt})"
    )
    group.add_argument("--calibration", metavar="FILE", help="file that `ridgeline calibrate` wrote (default: none)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("--html", metavar="FILE", help="write a self-contained HTML page with chart and tables")
    group.add_argument("--svg", metavar="FILE", help="write the chart as SVG")
    return parser


def run(args: Arguments) -> int:
    resolved = resolve_arguments(args)
    spec = read_spec(resolved.model)
    options = vars(args.options)
    check_output_paths(options, "html", "svg")
    accelerator, caveat = _accelerator(options.get("on"), spec.dtype)
    spec = held_on(spec, accelerator.name, accelerator.kind)
    check_gpu(spec, accelerator.kind)
    check_experts(spec, accelerator.kind)
    load = _load(options, spec.max_len)
    result = roofline(spec, accelerator, load)
    cost = _cost(spec, accelerator, resolved.engine.calibration)
    steps = {phase.name: predicted_s(cost, phase, load) for phase in result.phases}
    lines = (*notes(result, cost, steps), *caveat)
    if "svg" in options:
        Path(options["svg"]).write_text(document(roofline_chart(result, steps)), encoding="utf-8")
    if "html" in options:
        Path(options["html"]).write_text(roofline_page(result, steps, lines), encoding="utf-8")
    if "json" in options:
        print(json.dumps(facts(result, cost, steps), indent=2))
    else:
        _show(Console(), result, lines)
    return 0


def _load(options: Mapping[str, Any], max_len: int) -> Load:
    """Load of the options. Defaults are cut to the context of the model (`max_len` tokens)."""
    default = Load()
    default = replace(default, context=min(default.context, max_len), prompt=min(default.prompt, max_len))
    load = replace(default, **{name: options[name] for name in ("batch", "context", "prompt") if name in options})
    for name, value in asdict(load).items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}: give 1 or more.", param=name)
        if name != "batch" and value > max_len:
            raise ConfigError(f"--{name} is {value}: give at most {max_len}, the context of the model.", param=name)
    return load


def read_spec(model: ModelConfig) -> ModelSpec:
    """Spec that the model would be served with. Reads only its small files, no weights."""
    folder = resolve_model(replace(model, load_format="dummy"))
    return served_spec(read_model(folder)[0], model)


def step_rows(phase: str, load: Load) -> list[tuple[int, int]]:
    """(cached, new) tokens of each row in a step of `phase`."""
    return [(load.context, 1)] * load.batch if phase == "decode" else [(0, load.prompt)]


def predicted_s(cost: CostModel, phase: Phase, load: Load) -> float:
    """Predicted seconds of a step: the cost model, or reads over the host link at the rate that copies reach, if slower."""
    return max(cost.step_s(step_work(cost.spec, step_rows(phase.name, load))), phase.spill_s / LINK_SHARE)


def _accelerator(name: str | None, dtype: str) -> tuple[Accelerator, tuple[str, ...]]:
    """Accelerator of the hardware table or processor of this machine, and notes on its figures."""
    if name is not None and name.lower() != "cpu":
        row = resolve_accelerator(name)
        if row.serves:
            return row, ()
        return row, (f"Ridgeline does not run on this device ({row.software}): the figures are for comparison.",)
    device = probe().device(name or "auto")
    if device.accelerator is None:
        raise ConfigError(f"{device.name} is not in the hardware table: give an accelerator with --on.", param="on")
    row = with_measured_rates(device.accelerator, dtype)
    lines = [f"This processor: {row.source}."] if device.kind == "cpu" else []
    if note := measured_note(row):
        lines.append(note)
    return row, tuple(lines)


def _cost(spec: ModelSpec, accelerator: Accelerator, calibration: str) -> CostModel:
    if calibration:
        cost = load_calibration(Path(calibration), spec).cost
        return replace(cost, host=HostTimes(streamed_s(spec, accelerator.host_link * LINK_SHARE)))
    return cost_model(accelerator, spec)


def notes(result: Roofline, cost: CostModel, steps: dict[str, float]) -> tuple[str, ...]:
    """Sentences that explain the tables: step times, memory, cost, unverified values."""
    load, capacity = result.load, result.capacity
    decode, prefill = result.phase("decode"), result.phase("prefill")
    basis = (
        "calibrated" if cost.calibrated else "uncalibrated: a rough estimate; run `ridgeline calibrate` on that machine"
    )
    lines = []
    if math.isfinite(steps["decode"]):
        lines.append(
            f"A decode step of {counted(load.batch, 'sequence')} with {counted(load.context, 'token')} each takes at least "
            f"{si(decode.floor_s, 's')}, predicted {si(steps['decode'], 's')} = {_rate(load.batch / steps['decode'])} tokens/s "
            f"({basis})."
        )
    if math.isfinite(steps["prefill"]):
        lines.append(
            f"A prefill of {counted(load.prompt, 'token')} takes at least {si(prefill.floor_s, 's')}, predicted "
            f"{si(steps['prefill'], 's')} = {_rate(load.prompt / steps['prefill'])} tokens/s."
        )
    if capacity.fits:
        free = capacity.memory_bytes - capacity.weight_bytes - capacity.kv_bytes
        lines.append(f"Weights {bytes_text(capacity.weight_bytes)} and cache {bytes_text(capacity.kv_bytes)} fit: "
                     f"{bytes_text(free)} are left.")  # fmt: skip
        on_chip = result.accelerator.on_chip
        if on_chip is not None and capacity.weight_bytes <= on_chip.bytes:
            lines.append(
                f"All weights fit into the {level_text(on_chip)}: steps may be faster than these limits, which assume reads "
                "from memory."
            )
    elif result.spec.host_bytes:
        lines.append(f"{bytes_text(capacity.spilled_bytes)} are in host memory. " + _spilled(result))
    else:
        lines.append(f"The model does not fit (capacity-bound): {bytes_text(capacity.spilled_bytes)} would be in host memory "
                     f"(--cpu-offload-gb). " + _spilled(result))  # fmt: skip
    rent = result.accelerator.rent
    if rent is not None and math.isfinite(steps["decode"]):
        price = usd_per_unit(rent.usd, load.batch / steps["decode"]) * 1e6
        lines.append(
            f"Rented at ${rent.usd:.2f} an hour ({rent.date}): ${price:.3f} per million output tokens at this load."
        )
    if result.accelerator.unverified:
        lines.append(f"Unverified values in the hardware table: {', '.join(result.accelerator.unverified)}.")
    return tuple(lines)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def level_text(level: Level) -> str:
    """A level of the memory hierarchy in words."""
    speed = f", read at {si(level.bandwidth, 'B/s')}" if level.bandwidth else ""
    return f"{level.kind} of {bytes_text(level.bytes)}{speed}"


def _spilled(result: Roofline) -> str:
    if math.isinf(result.capacity.spill_s):
        return "This device cannot read host memory: use a smaller load or a larger device."
    slowdown = result.decode_slowdown
    if slowdown < 1.05:
        return f"The transfer takes {si(result.capacity.spill_s, 's')} per step and can overlap with the rest of a decode step."
    return (
        f"Decoding gets {slowdown:.1f} times slower, because each step reads them over the link: the times, rates and prices here "
        "include these reads."
    )


def facts(result: Roofline, cost: CostModel, steps: dict[str, float]) -> dict[str, Any]:
    """The results for JSON, in bytes, FLOPs and seconds."""
    accelerator = result.accelerator
    return {
        "model": {"architecture": result.spec.architecture, "params": result.spec.params, "dtype": result.spec.dtype,
                  "quantization": result.spec.quantization, "weight_bytes": result.spec.weight_bytes,
                  "kv_bytes_per_token": result.spec.kv_bytes_per_token()},
        "accelerator": {"name": accelerator.name, "peak_flops": accelerator.peak(result.spec.matrix_dtype),
                        "bandwidth": accelerator.bandwidth, "memory_bytes": accelerator.memory_bytes,
                        "ridge_flop_per_byte": result.ridge, "source": accelerator.source, "serves": accelerator.serves,
                        "measured": accelerator.measured, "unverified": accelerator.unverified,
                        "on_chip": asdict(accelerator.on_chip) if accelerator.on_chip else None},
        "load": asdict(result.load),
        "fits": result.capacity.fits,
        "spilled_bytes": result.capacity.spilled_bytes,
        "calibrated": cost.calibrated,
        "phases": {phase.name: _phase_facts(phase, steps[phase.name]) for phase in result.phases},
    }  # fmt: skip


def _phase_facts(phase: Phase, predicted_s: float) -> dict[str, Any]:
    operations = [
        {"name": operation.name, "count": operation.count, "flops": operation.flops, "bytes": operation.bytes,
         "activation_bytes": operation.activation_bytes, "intensity": operation.intensity, "bound": operation.bound,
         "floor_s": operation.seconds}
        for operation in phase.points
    ]  # fmt: skip
    return {"tokens": phase.tokens, "flops": phase.flops, "bytes": phase.bytes, "intensity": phase.intensity,
            "bound": phase.bound, "floor_s": _finite(phase.floor_s), "serial_floor_s": _finite(phase.serial_s),
            "spill_s": _finite(phase.spill_s), "predicted_s": _finite(predicted_s), "operations": operations}  # fmt: skip


def _finite(seconds: float) -> float | None:
    """None for a step that the device cannot run, because JSON has no infinity."""
    return seconds if math.isfinite(seconds) else None


def _show(console: Console, result: Roofline, lines: Sequence[str]) -> None:
    accelerator = result.accelerator
    peak = si(accelerator.peak(result.spec.matrix_dtype), "FLOP/s")
    on_chip = f", {level_text(accelerator.on_chip)}" if accelerator.on_chip else ""
    console.print(
        f"[bold]{result.spec.architecture}[/bold], {count_text(result.spec.params)} parameters, {result.spec.dtype} on "
        f"[bold]{accelerator.name}[/bold]: {peak} dense, {si(accelerator.bandwidth, 'B/s')}, ridge {result.ridge:.0f} FLOP/B"
        f"{on_chip}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for phase in result.phases:
        title = f"{phase.name}: {counted(phase.tokens, 'token')}, {phase.bound}-bound, {si(phase.intensity, 'FLOP/B')}"
        table = Table(*HEAD, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows(phase):
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
