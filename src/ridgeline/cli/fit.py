"""Check whether a model fits into the memory of this machine (or another one), and print the command that serves it.

Reads only config.json. The exit status is 1 if the model does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import bytes_text, count_text
from ridgeline.core.calibration import load_calibration
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError, DoesNotFit
from ridgeline.core.plural import counted
from ridgeline.core.resolve import parse
from ridgeline.core.sizing import Memory, MemoryPlan, command, size
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.policy import admission
from ridgeline.hardware.bandwidth import with_measured_rates
from ridgeline.hardware.probe import Device, probe, resolve_accelerator
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.speculation.build import memory_of_drafters


def parser() -> Parser:
    parser = parser_for("fit", __doc__ or "", (ModelConfig, EngineConfig))
    parser.add_argument(
        "--on",
        metavar="NAME",
        help="accelerator of the hardware table to plan for (H100, L4, ...; default: this machine)",
    )
    parser.add_argument("--memory", metavar="N", help="memory of the device to plan for, in bytes, as in 24G")
    return parser


def run(args: Arguments) -> int:
    resolved = resolve_arguments(args)
    model, engine = resolved.model, resolved.engine
    # "dummy" fetches only the small files of a hub model; sizes of weights follow from config.json.
    folder = resolve_model(replace(model, load_format="dummy"))
    spec = served_spec(read_model(folder)[0], model)
    device = _device(args, engine.device)
    admission(engine.batching)  # raises for an invalid --batching: the printed command must start
    cost = _cost(spec, engine, device)
    total = device.free_bytes if device.kind == "cpu" else device.memory_bytes
    memory = Memory(device.kind, total, 0 if device.kind == "cpu" else total - device.free_bytes)
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    _describe(table, spec, device)
    _, beside = memory_of_drafters(engine, spec, folder, memory.kind, memory.taken)
    try:
        plan = size(spec, engine, total, device.kind, model=model, drafters=beside)
    except DoesNotFit as error:
        console.print(table)
        console.print(f"\n[bold]does not fit[/bold]  {escape(error.message)}", soft_wrap=True, highlight=False)
        return 1
    _plan(table, plan, spec, cost)
    console.print(table)
    console.print("\n[bold]fits[/bold]  " + escape(command(engine, memory, model, {})), soft_wrap=True, highlight=False)
    return 0


def _describe(table: Table, spec: ModelSpec, device: Device) -> None:
    heads = "+".join(dict.fromkeys(f"{layer.n_heads}/{layer.n_kv_heads}" for layer in spec.layers))
    table.add_row(
        "model",
        f"{spec.architecture}, {counted(len(spec.layers), 'layer')} of width {spec.d_model}, query/KV heads {heads}",
    )
    table.add_row("parameters", count_text(spec.params))
    table.add_row("weights", f"{bytes_text(spec.weight_bytes)} in {spec.dtype}")
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    note = f" (some layers keep the last {', '.join(map(str, windows))} tokens)" if windows else ""
    table.add_row("KV per token", bytes_text(spec.kv_bytes_per_token()) + note)
    table.add_row("context", f"{spec.max_len} tokens, {bytes_text(spec.kv_bytes(spec.max_len))} of KV cache when full")
    free = f", {bytes_text(device.free_bytes)} free" if device.free_bytes != device.memory_bytes else ""
    table.add_row("device", f"{device.name}, {bytes_text(device.memory_bytes)}{free}")


def _cost(spec: ModelSpec, engine: EngineConfig, device: Device) -> CostModel | None:
    """Cost model of --calibration, of the hardware table or of this processor's measured rates; None if there is neither."""
    if engine.calibration:
        return load_calibration(Path(engine.calibration), spec).cost
    row = device.accelerator
    if row is None:
        return None
    row = with_measured_rates(row, spec.dtype)
    return CostModel(spec, row.peak(spec.matrix_dtype), row.bandwidth)


def _plan(table: Table, plan: MemoryPlan, spec: ModelSpec, cost: CostModel | None) -> None:
    table.add_row("usable memory", bytes_text(plan.usable_bytes))
    table.add_row("working memory", bytes_text(plan.workspace_bytes + plan.graph_bytes))
    blocks = f"{counted(plan.n_pages, 'block')} of {counted(plan.page_tokens, 'token')}"
    table.add_row("KV cache", f"{bytes_text(plan.kv_bytes)}, {blocks} ({bytes_text(plan.layout.page_bytes)} each)")
    full = counted(plan.sequences, "sequence")
    table.add_row("concurrency", f"{full} of {plan.max_len} tokens, at most {counted(plan.max_rows, 'request')}")
    if cost is not None:
        basis = "calibrated" if cost.calibrated else "uncalibrated"
        table.add_row(
            "one request", f"about {cost.decode_s([min(1024, spec.max_len)]) * 1e3:.2f} ms per token ({basis})"
        )


def _device(args: Arguments, device_option: str) -> Device:
    """Device to plan for: that of --on and --memory, otherwise the device of this machine."""
    name, memory = getattr(args.options, "on", None), getattr(args.options, "memory", None)
    device = probe().device(device_option)
    if name is None and device_option == "cuda" and device.kind == "cpu":
        raise ConfigError(
            "--device is cuda, but this machine has no GPU: give one with --on, as in --on h100.", param="device"
        )
    if name is not None:
        row = resolve_accelerator(name)
        kind = "cpu" if row.kind == "cpu" else "cuda"  # memory planning is the same for all accelerators
        if device_option not in ("auto", kind):
            raise ConfigError(
                f"--on {row.name} and --device {device_option} contradict each other: leave one of them out.",
                param="device",
            )
        device = Device(kind, row.name, row.memory_bytes, row.memory_bytes, row)
    if memory is not None:
        count = parse("memory", memory, (int, False), "flag")
        if count < 1:
            raise ConfigError(f"--memory is {memory}: give a number of bytes above 0.", param="memory")
        device = replace(device, memory_bytes=count, free_bytes=count)
    return device
