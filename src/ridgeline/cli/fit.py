"""Check whether a model fits into this machine (or another one), and print the command that works.

Reads only config.json. The exit status is 1 if the model does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.flags import Given, Parser, parser_for
from ridgeline.cli.serve import read
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
from ridgeline.hardware.probe import Device, meant, probe
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.speculation.build import memory_of_drafters


def parser() -> Parser:
    found = parser_for("fit", __doc__ or "", (ModelConfig, EngineConfig))
    found.add_argument(
        "--on",
        metavar="NAME",
        help="accelerator of the hardware table to plan for (H100, L4, ...; default: this machine)",
    )
    found.add_argument("--memory", metavar="N", help="memory of the device to plan for, in bytes (24G)")
    return found


def run(given: Given) -> int:
    resolved = read(given)
    model, engine = resolved.model, resolved.engine
    # As for dummy weights only the small files of a hub model are fetched: no weight is needed to know its size.
    folder = resolve_model(replace(model, load_format="dummy"))
    spec = served_spec(read_model(folder)[0], model)
    device = _device(given, engine.device)
    admission(engine.batching)  # a command that is shown has to start
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
    heads = "+".join(dict.fromkeys(f"{one.n_heads}/{one.n_kv_heads}" for one in spec.layers))
    table.add_row(
        "model",
        f"{spec.architecture}, {counted(len(spec.layers), 'layer')} of width {spec.d_model}, query/KV heads {heads}",
    )
    table.add_row("parameters", count_text(spec.params))
    table.add_row("weights", f"{bytes_text(spec.weight_bytes)} in {spec.dtype}")
    windows = sorted({one.window for one in spec.layers if one.window is not None})
    note = f" (some layers keep the last {', '.join(map(str, windows))} tokens)" if windows else ""
    table.add_row("KV per token", bytes_text(spec.kv_bytes_per_token()) + note)
    table.add_row("context", f"{spec.max_len} tokens, {bytes_text(spec.kv_bytes(spec.max_len))} of KV cache when full")
    free = f", {bytes_text(device.free_bytes)} free" if device.free_bytes != device.memory_bytes else ""
    table.add_row("device", f"{device.name}, {bytes_text(device.memory_bytes)}{free}")


def _cost(spec: ModelSpec, engine: EngineConfig, device: Device) -> CostModel | None:
    """What predicts steps: the calibration that was named, or the table's row; None where there is neither."""
    if engine.calibration:
        return load_calibration(Path(engine.calibration), spec).cost
    row = device.accelerator
    return None if row is None else CostModel(spec, row.peak(spec.dtype), row.bandwidth)


def _plan(table: Table, plan: MemoryPlan, spec: ModelSpec, cost: CostModel | None) -> None:
    table.add_row("usable memory", bytes_text(plan.usable_bytes))
    table.add_row("working memory", bytes_text(plan.workspace_bytes + plan.graph_bytes))
    blocks = f"{counted(plan.n_pages, 'block')} of {counted(plan.page_tokens, 'token')}"
    table.add_row("KV cache", f"{bytes_text(plan.kv_bytes)}, {blocks} ({bytes_text(plan.layout.page_bytes)} each)")
    full = counted(plan.sequences, "sequence")
    table.add_row("concurrency", f"{full} of {plan.max_len} tokens, at most {counted(plan.max_rows, 'request')}")
    if cost is not None:
        word = "calibrated" if cost.calibrated else "uncalibrated"
        table.add_row(
            "one request", f"about {cost.decode_s([min(1024, spec.max_len)]) * 1e3:.2f} ms per token ({word})"
        )


def _device(given: Given, wanted: str) -> Device:
    """The device to plan for: --on, --memory, or this machine's."""
    name, memory = getattr(given.rest, "on", None), getattr(given.rest, "memory", None)
    device = probe().device(wanted)
    if name is None and wanted == "cuda" and device.kind == "cpu":
        raise ConfigError(
            "--device is cuda, but this machine has no GPU: give one with --on, as in --on h100.", param="device"
        )
    if name is not None:
        row = meant(name)
        kind = "cpu" if row.kind == "cpu" else "cuda"  # memory is planned alike on every device that is not a processor
        if wanted not in ("auto", kind):
            raise ConfigError(
                f"--on {row.name} and --device {wanted} contradict each other: leave one of them out.", param="device"
            )
        device = Device(kind, row.name, row.memory_bytes, row.memory_bytes)
    if memory is not None:
        count = parse("memory", memory, (int, False), "flag")
        if count < 1:
            raise ConfigError(f"--memory is {memory}: give a number of bytes above 0.", param="memory")
        device = Device(device.kind, device.name, count, count)
    return device
