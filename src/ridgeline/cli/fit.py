"""Check whether a model fits into the memory of this machine (or another one), and print the best command that serves it.

Reads only config.json. The exit status is 1 if the model does not fit, or if the engine does not run on the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.cli.progress import Lines, find_model
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import announcer, bytes_text, count_text
from ridgeline.core.adapters import plan_adapters, with_adapters
from ridgeline.core.calibration import load_calibration
from ridgeline.core.compatibility import check_together
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError, DoesNotFit
from ridgeline.core.fit import REQUEST_TOKENS, Deployment, Risk, alternatives, command, flags, size
from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.core.host_weights import LINK_SHARE, HostTimes, streamed_s
from ridgeline.core.plural import counted
from ridgeline.core.resolve import Resolved, parse
from ridgeline.core.sizing import Memory, MemoryPlan
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.policy import admission
from ridgeline.hardware.bandwidth import measured_note, with_measured_rates
from ridgeline.hardware.probe import Device, probe, resolve_accelerator
from ridgeline.hardware.serving import in_format, kind_on, search_space
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.speculation.build import choice_of, memory_of_drafters


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
    resolved, say = resolve_arguments(args), announcer("text")
    # "dummy" fetches only the small files of a hub model; sizes of weights follow from config.json.
    folder = find_model(replace(resolved.model, load_format="dummy"), say)
    with Lines(say, lambda: "measuring the device"):
        deployment, device = _deployment(args, resolved, folder)
    return _report(deployment, device)


def _deployment(args: Arguments, resolved: Resolved, folder: Path) -> tuple[Deployment, Device]:
    """The model as it would be served, and the device to plan for, whose rates are measured if it is this machine."""
    model, engine = resolved.model, resolved.engine
    checkpoint, _ = read_model(folder)
    device = _device(args, engine.device)
    spec = served_spec(
        checkpoint, model, kind_on(device.accelerator.name if device.accelerator else device.name, device.kind)
    )
    admission(engine.batching)  # raises for an invalid --batching: the printed command must start
    total = device.free_bytes if device.kind == "cpu" else device.memory_bytes
    memory = Memory(device.kind, total, 0 if device.kind == "cpu" else total - device.free_bytes)
    wanted, beside = memory_of_drafters(engine, spec, folder, memory.kind)
    check_together(choice_of(model, engine, spec, wanted, memory.kind))
    beside = with_adapters(beside, model, spec, engine.tensor_parallel_size)
    if device.accelerator is not None:
        device = replace(device, row=with_measured_rates(device.accelerator, spec.dtype))
    space = search_space(device, checkpoint)
    if engine.calibration:
        calibrated = load_calibration(Path(engine.calibration), spec).cost
        link = device.accelerator.host_link * LINK_SHARE if device.accelerator is not None else 0.0
        space = replace(space, cost=partial(_recalibrated, calibrated, link, device.kind))
    return Deployment(spec, engine, memory, model, beside, space), device


def _recalibrated(calibrated: CostModel, link: float, kind: str, spec: ModelSpec) -> CostModel:
    """The calibrated cost model for another format of the same model, for which it is a guess. link: bytes per second of copies of
    weights from host memory."""
    same = (spec.dtype, spec.quantization) == (calibrated.spec.dtype, calibrated.spec.quantization)
    return replace(in_format(calibrated, spec, kind), calibrated=same, host=HostTimes(streamed_s(spec, link)))


def _report(deployment: Deployment, device: Device) -> int:
    """Print model, memory and alternatives. Returns the exit status."""
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    _describe(table, deployment.spec, device)
    row = device.accelerator
    if row is not None and not row.serves:
        console.print(table)
        console.print(
            f"\n[bold]not supported[/bold]  Ridgeline does not run on {row.name} ({row.software}): plan for an NVIDIA GPU or a "
            "processor with --on, as in --on h100.",
            soft_wrap=True,
            highlight=False,
        )
        return 1
    try:
        plan = size(deployment)
    except DoesNotFit as error:
        verdict, status = f"[bold]does not fit[/bold]  {escape(error.message)}", 1
    else:
        _plan(table, plan, deployment)
        verdict, status = f"[bold]fits[/bold]  {escape(command(deployment, {}))}", 0
    console.print(table)
    if row is not None and (note := measured_note(row)):
        console.print(f"\n{note}", soft_wrap=True, highlight=False)
    console.print(f"\n{verdict}", soft_wrap=True, highlight=False)
    _alternatives(console, deployment)
    return status


def _alternatives(console: Console, deployment: Deployment) -> None:
    """Table of the candidates that fit, best first."""
    candidates = alternatives(deployment)
    if not candidates:
        return
    known = deployment.space.cost is not None
    speeds = ("one request", "all requests") if known else ()
    table = Table("added risk", "context", *speeds, "options", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for candidate in candidates:
        latency = f"{candidate.request_s * 1e3:.2f} ms/token"
        throughput = f"{candidate.tokens_s:,.0f} tokens/s ({candidate.requests})"
        table.add_row(
            candidate.risk.name.lower(),
            str(candidate.plan.max_len),
            *((latency, throughput) if known else ()),
            " ".join(flags(candidate.change)) or "as given",
        )
    console.print("\n[bold]what fits, best first[/bold]")
    Console(width=max(console.width, 200)).print(table)  # a command is copied from one line
    notes = [
        f"All requests: as many as fit at once (their number), of {min(REQUEST_TOKENS, deployment.spec.max_len)} tokens each."
    ]
    if any(candidate.plan.max_len < candidate.asked_len for candidate in candidates):
        notes.append(f"A context below {deployment.spec.max_len} is a loss of function: longer requests are refused.")
    if any(candidate.risk >= Risk.MEDIUM and "quantization" in candidate.change for candidate in candidates):
        notes.append(
            "--quantization rounds to nearest; a recipe of `ridgeline compress`, such as awq-int4-g128, loses about half as much."
        )
    console.print(" ".join(notes if known else notes[1:]), soft_wrap=True, highlight=False)


def _describe(table: Table, spec: ModelSpec, device: Device) -> None:
    heads = "+".join(dict.fromkeys(f"{layer.n_heads}/{layer.n_kv_heads}" for layer in spec.layers))
    table.add_row(
        "model",
        f"{spec.architecture}, {counted(len(spec.layers), 'layer')} of width {spec.d_model}, query/KV heads {heads}",
    )
    table.add_row("parameters", count_text(spec.params))
    table.add_row("weights", f"{bytes_text(spec.weight_bytes)} in {_formats(spec)}")
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    note = f" (some layers keep the last {', '.join(map(str, windows))} tokens)" if windows else ""
    table.add_row("KV per token", bytes_text(spec.kv_bytes_per_token()) + note)
    table.add_row("context", f"{spec.max_len} tokens, {bytes_text(spec.kv_bytes(spec.max_len))} of KV cache when full")
    free = f", {bytes_text(device.free_bytes)} free" if device.free_bytes != device.memory_bytes else ""
    table.add_row("device", f"{device.name}, {bytes_text(device.memory_bytes)}{free}")


def _formats(spec: ModelSpec) -> str:
    """Number formats of the weights, that of the layers first."""
    if not spec.quantization:
        return spec.dtype
    if NUMBER_FORMATS[spec.quantization].experts:
        return f"{spec.quantization} (experts) and {spec.dtype}"
    layers = dict.fromkeys((spec.quantization, *chain.from_iterable(layer.formats for layer in spec.layers)))
    rest = "the rest" if "" in layers else "embedding" if spec.head_format else "embedding and head"
    head = f", head in {spec.head_format}" if spec.head_format and spec.head_format not in layers else ""
    return f"{', '.join(filter(None, layers))}{head}, {rest} in {spec.dtype}"


def _plan(table: Table, plan: MemoryPlan, deployment: Deployment) -> None:
    table.add_row("usable memory", bytes_text(plan.usable_bytes))
    if plan.host_bytes:
        table.add_row(
            "host memory", f"{bytes_text(plan.host_bytes)} of the weights, copied to the device in every step"
        )
    if plan.device_kind == "cuda" and (expanded := _expanded(plan, deployment)):
        table.add_row("expanded weights", expanded)
    table.add_row("working memory", bytes_text(plan.workspace_bytes + plan.graph_bytes))
    adapters, ranks = plan_adapters(deployment.model), deployment.engine.tensor_parallel_size
    if adapters.slots:
        size = bytes_text(adapters.bytes(deployment.spec, ranks))
        table.add_row("adapters", f"{size}, {counted(adapters.slots, 'slot')} of rank {adapters.rank}")
    blocks = f"{counted(plan.n_pages, 'block')} of {counted(plan.page_tokens, 'token')}"
    table.add_row("KV cache", f"{bytes_text(plan.kv_bytes)}, {blocks} ({bytes_text(plan.layout.page_bytes)} each)")
    full = counted(plan.sequences, "sequence")
    table.add_row("concurrency", f"{full} of {plan.max_len} tokens, at most {counted(plan.max_rows, 'request')}")
    if deployment.space.cost is not None:
        spec = deployment.spec
        cost = deployment.space.cost(spec)
        basis = "calibrated" if cost.calibrated else "uncalibrated"
        table.add_row(
            "one request",
            f"about {cost.decode_s([min(REQUEST_TOKENS, spec.max_len)]) * 1e3:.2f} ms per token ({basis})",
        )


def _expanded(plan: MemoryPlan, deployment: Deployment) -> str:
    """What quantized linears take that a GPU has in 16 bits too; "" if it has none of them."""
    spec = deployment.spec
    if plan.expanded_bytes:
        return f"{bytes_text(plan.expanded_bytes)}: quantized linears are in {spec.dtype} too, for steps of many tokens"
    if not (size := deployment.planner(spec, {}).expandable_bytes):
        return ""
    return (
        f"none: in {spec.dtype} linears take {bytes_text(size)}, more than may be taken from the KV cache, so steps of many "
        "tokens are slower than with the 16-bit checkpoint"
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
