"""Rank the parallel layouts of a model on several devices: tensor, pipeline, context and data parallel sizes, with the predicted
time to first token, time per token, throughput and price of each, and why they rank so.

Reads only config.json, and computes: nothing runs. Predictions for a device without a calibration are marked uncalibrated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.bench.traces import read_trace
from ridgeline.cli.flags import Arguments, Parser, finite_number, parser_for, whole_number
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import bytes_text
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Deployment, command
from ridgeline.core.plural import counted
from ridgeline.core.sizing import Memory
from ridgeline.core.slo import Slo
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.serving import calibrated_cost, cost_model, weight_formats
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.cluster import Cluster, LinkRates, read_cluster
from ridgeline.planner.layouts import Layout, with_context
from ridgeline.planner.ranking import NAMES, Demand, Ranked, Refused, Variant, rank, reasons, seconds_text, why
from ridgeline.planner.split import ATTAIN, Goodput, plan_split

SERVED, PLANNED = ("tensor", "pipeline", "context"), ("data",)
"""Dimensions of a layout whose size an option may fix: options of the engine, and of this command."""


def parser() -> Parser:
    parser = parser_for("plan", __doc__ or "", (ModelConfig, EngineConfig))
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--gpus", metavar="TEXT", help="number and kind, as in 8xh100; kinds are those of the hardware table"
    )
    group.add_argument(
        "--gpus-per-host", type=whole_number, metavar="N", help="devices of one host (default: the table's)"
    )
    link = "GB/s of one device in one direction (default: the table's)"
    group.add_argument("--link-gb-s", type=finite_number, metavar="X", help=f"rate between devices of a host: {link}")
    group.add_argument("--network-gb-s", type=finite_number, metavar="X", help=f"rate between hosts: {link}")
    for name in PLANNED:
        group.add_argument(
            f"--{name}-parallel-size",
            type=whole_number,
            metavar="N",
            help=f"only layouts with this {name} parallel size",
        )
    default, group = Demand(), parser.add_argument_group("workload")
    for name in ("input", "output"):
        group.add_argument(
            f"--{name}-len",
            type=whole_number,
            metavar="N",
            help=f"tokens of {name} (default: {getattr(default, name)})",
        )
    group.add_argument(
        "--trace", metavar="FILE", help="take the mean lengths, and the rate if it has times, from a trace"
    )
    group.add_argument(
        "--rate", type=finite_number, metavar="X", help="requests per second (default: as many as possible)"
    )
    group.add_argument("--slo", metavar="TEXT", help="objectives: ttft=500ms,tpot=50ms,e2e=10s")
    group.add_argument(
        "--formats", metavar="LIST", help="also rank these number formats of the weights: fp8,int4 or all"
    )
    group.add_argument(
        "--split",
        action="store_true",
        help="also simulate engines for prompts apart from engines for the other tokens, one device each (about a minute)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=whole_number, metavar="N", default=10, help="layouts to print (default: 10)")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(args: Arguments) -> int:
    """Returns 1 if no layout fits."""
    options, resolved = vars(args.options), resolve_arguments(args)
    cluster, demand = _cluster(options), _demand(options, Slo.parse(resolved.service.slo))
    folder = resolve_model(replace(resolved.model, load_format="dummy"))
    checkpoint, _ = read_model(folder)
    variants = _variants(checkpoint, resolved.model, resolved.engine, cluster, options.get("formats", ""))
    notes = [*cluster.notes]
    if demand.length > variants[0].spec.max_len:
        notes.append(
            f"Requests have {demand.length:,} tokens, more than the model's context of {variants[0].spec.max_len:,}: a model of "
            "the same shape with a longer context is planned."
        )
        variants = [replace(variant, spec=with_context(variant.spec, demand.length)) for variant in variants]
    if demand.slo.of_windows:
        notes.append(
            "Percentiles and shares of --slo are compared with predicted means: a plan has no distribution of requests."
        )
    ranked, refused = rank(
        variants,
        cluster,
        demand,
        replace(resolved.engine, tensor_parallel_size=1, pipeline_parallel_size=1, context_parallel_size=1),
        _sizes(args),
    )
    if not ranked and not refused:
        raise ConfigError(
            f"No layout of {cluster.count} devices has the given parallel sizes: give divisors of {cluster.count}."
        )
    split = plan_split(variants[0], cluster, demand, resolved.engine) if "split" in options else []
    if "json" in options:
        facts = _facts(cluster, demand, ranked, refused, notes) | ({"split": _split_facts(split)} if split else {})
        print(json.dumps(facts, indent=2))
    else:
        shown = ranked[: options["top"]]
        commands = [_command(entry, (cluster, demand), resolved.model, resolved.engine) for entry in shown]
        _show(Console(), (cluster, demand), shown, commands)
        if split:
            _show_split(Console(), split)
        _say_rest(Console(), refused, notes)
    return 0 if ranked else 1


def _cluster(options: Mapping[str, Any]) -> Cluster:
    if "gpus" not in options:
        raise ConfigError("--gpus is missing: give number and kind of the devices, as in --gpus 8xh100.", param="gpus")
    for name in ("link_gb_s", "network_gb_s", "gpus_per_host", "top"):
        if name in options and options[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {options[name]:g}: give a number above 0.", param=name)
    within, between = (options.get(name, 0.0) * 1e9 for name in ("link_gb_s", "network_gb_s"))
    return read_cluster(options["gpus"], LinkRates(within, between, options.get("gpus_per_host", 0)))


def _demand(options: Mapping[str, Any], slo: Slo) -> Demand:
    """Raises ConfigError that names the option."""
    demand = Demand(slo=slo)
    if "trace" in options:
        workload = read_trace(Path(options["trace"]))
        lengths = [(request.input, request.output) for request in workload.requests]
        prompt, answer = (max(1, round(statistics.fmean(column))) for column in zip(*lengths, strict=True))
        rate = workload.rate if workload.timed and math.isfinite(workload.rate) else None
        demand = replace(demand, input=prompt, output=answer, rate=rate)
    lengths_given = {name: options[f"{name}_len"] for name in ("input", "output") if f"{name}_len" in options}
    for name, value in lengths_given.items():
        if value < 1:
            raise ConfigError(f"--{name}-len is {value}: give 1 token or more.", param=f"{name}_len")
    if options.get("rate", 1.0) <= 0:
        raise ConfigError(f"--rate is {options['rate']:g}: give requests per second above 0.", param="rate")
    return replace(demand, **lengths_given, **({"rate": options["rate"]} if "rate" in options else {}))


def _variants(
    checkpoint: ModelSpec, model: ModelConfig, engine: EngineConfig, cluster: Cluster, formats: str
) -> list[Variant]:
    """The model as asked for, and in the formats of --formats."""
    if model.cpu_offload_gb:
        raise ConfigError(
            "`ridgeline plan` divides models between devices and leaves no weights in host memory: leave --cpu-offload-gb out.",
            param="cpu_offload_gb",
        )
    names = [model.quantization]
    kind = "cpu" if cluster.device.kind == "cpu" else "cuda"
    if formats and checkpoint.quantization:
        raise ConfigError(
            f"--formats is given, and the checkpoint is quantized already ({checkpoint.quantization}): leave it out.",
            param="formats",
        )
    if formats:
        served = weight_formats(kind, cluster.device)
        names += [name for name in (served if formats == "all" else formats.split(",")) if name not in names]
        for name in names[1:]:
            if name not in served:
                raise ConfigError(
                    f"--formats {name!r} is not served on {cluster.device.name}: use {', '.join(served[:8])} or all.",
                    param="formats",
                )
    specs = [served_spec(checkpoint, replace(model, quantization=name)) for name in names]
    if not engine.calibration:
        return [Variant(spec, cost_model(cluster.device, spec)) for spec in specs]
    measured = calibrated_cost(Path(engine.calibration), specs[0], cluster.device)
    return [
        Variant(specs[0], measured),
        *(Variant(spec, cost_model(cluster.device, spec)) for spec in specs[1:]),
    ]


def _sizes(args: Arguments) -> Callable[[Layout], bool]:
    """Whether a layout has the sizes that options fix."""
    options = vars(args.options)
    fixed = {name: options[f"{name}_parallel_size"] for name in PLANNED if f"{name}_parallel_size" in options}
    flags = {name: args.flags.get(f"{name}_parallel_size") for name in SERVED}
    fixed |= {name: int(size) for name, size in flags.items() if size is not None}
    return lambda layout: all(getattr(layout, name) == size for name, size in fixed.items())


def _command(entry: Ranked, place: tuple[Cluster, Demand], model: ModelConfig, engine: EngineConfig) -> str:
    """The command that starts the layout; "" where Ridgeline cannot yet."""
    row, length = place[0].device, place[1].length
    layout = entry.layout
    on_cpu = row.kind == "cpu"
    if not row.serves or (layout.replica > 1 and not on_cpu):
        return ""
    kind = "cpu" if on_cpu else "cuda"
    sizes = {f"{name}_parallel_size": getattr(layout, name) for name in SERVED}
    options = replace(engine, device=kind, **sizes)
    served = replace(model, quantization=entry.variant.spec.quantization or model.quantization)
    deployment = Deployment(entry.variant.spec, options, Memory(kind, row.memory_bytes), served)
    planner = deployment.planner(deployment.spec, {})
    if planner.fits():
        return command(deployment, {})
    context = planner.largest_context()  # the engine refuses a context that its cache cannot hold
    return command(deployment, {"max_model_len": context}) if context and context >= length else ""


def _show(console: Console, place: tuple[Cluster, Demand], ranked: Sequence[Ranked], commands: Sequence[str]) -> None:
    """Print the ranking, its reasons, and which of the layouts start today."""
    cluster, demand = place
    wide, say = Console(width=max(console.width, 200)), partial(console.print, soft_wrap=True, highlight=False)
    load = f"{demand.rate:g} requests/s" if demand.rate else "as many requests as fit"
    slo = f", {demand.slo}" if demand.slo else ""
    say(f"[bold]{cluster}[/bold], {load} of {demand.input:,} + {demand.output:,} tokens{slo}")
    if not ranked:
        return
    calibrated = ranked[0].variant.cost.calibrated
    say("predicted, " + ("calibrated\n" if calibrated else "uncalibrated: `ridgeline calibrate` measures a device\n"))
    wide.print(_table(ranked))
    say("")
    for better, worse in pairwise(ranked):
        say(escape(why(better, worse)))
    say("\n[bold]what starts today[/bold]")
    for entry, words in zip(ranked, commands, strict=True):
        each = (
            f"  ({entry.layout.data} times, each with its device and --port, behind a router)"
            if entry.layout.data > 1
            else ""
        )
        if words:
            say(f"{entry.layout}: {escape(words)}{each}")
    if not any(commands):
        say("None of these: Ridgeline serves on one GPU, and divides a model over processes on CPUs only.")


def _split_facts(split: Sequence[Goodput]) -> list[dict[str, Any]]:
    return [
        {
            "ratio": str(result.ratio), "requests_s": result.rate, "requests_s_device": result.per_device,
            "ttft_p50_s": result.figures.ttft_s if result.rate else None,
            "tpot_p50_s": result.figures.tpot_s if result.rate else None,
        }
        for result in split
    ]  # fmt: skip


def _show_split(console: Console, split: Sequence[Goodput]) -> None:
    """Print the goodput of each ratio, the best per device first."""
    console.print(f"\n[bold]prefill : decode[/bold], simulated: the highest rate at which {ATTAIN:.0%} meet --slo")
    table = Table("engines", "requests/s", "per device", "TTFT", "TPOT", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for result in split:
        times = [seconds_text(each) if result.rate else "" for each in (result.figures.ttft_s, result.figures.tpot_s)]
        table.add_row(str(result.ratio), f"{result.rate:.3g}", f"{result.per_device:.3g}", *times)
    console.print(table)


def _say_rest(console: Console, refused: Sequence[Refused], notes: Sequence[str]) -> None:
    """Print the layouts that cannot be, by reason, and what was assumed."""
    say = partial(console.print, soft_wrap=True, highlight=False)
    if refused:
        say("\n[bold]what cannot be[/bold]")
    for reason, entries in reasons(refused):
        names = ", ".join(str(entry.layout) for entry in entries[:4]) + (" ..." if len(entries) > 4 else "")
        say(f"{counted(len(entries), 'layout')} ({names}): {escape(reason)}")
    if notes:
        say("")
    for note in notes:
        say(escape(note))


def _table(ranked: Sequence[Ranked]) -> Table:
    head = (
        "",
        "layout",
        "weights",
        "workspace",
        "cache",
        "requests",
        "prefill",
        "TTFT",
        "TPOT",
        "tokens/s/device",
        "$/1M tokens",
    )
    table = Table(*head, "binds", "objectives", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    several = len({entry.variant.name for entry in ranked}) > 1
    for place, entry in enumerate(ranked, 1):
        memory = entry.memory
        price = f"{entry.usd_million:.3g}" if math.isfinite(entry.usd_million) else "unknown"
        table.add_row(
            str(place),
            f"{entry.layout} ({entry.variant.name})" if several else str(entry.layout),
            *(bytes_text(size) for size in (memory.weight_bytes, memory.workspace_bytes, memory.cache_bytes)),
            f"{entry.batch:,} of {memory.requests:,}",
            seconds_text(entry.prefill_s),
            seconds_text(entry.ttft_s),
            seconds_text(entry.tpot_s),
            f"{entry.tokens_s_device:,.4g}",
            price,
            f"{NAMES[entry.binds]} {entry.share(entry.binds):.0%}",
            entry.verdict or "met",
        )
    return table


def _facts(
    cluster: Cluster, demand: Demand, ranked: Sequence[Ranked], refused: Sequence[Refused], notes: Sequence[str]
) -> dict[str, Any]:
    """The plan for JSON, in bytes, seconds and dollars."""
    return {
        "devices": {"name": cluster.device.name, "count": cluster.count, "per_host": cluster.per_host},
        "demand": {"input": demand.input, "output": demand.output, "rate": demand.rate, "slo": str(demand.slo)},
        "calibrated": bool(ranked) and ranked[0].variant.cost.calibrated,
        "notes": list(notes),
        "ranking": [
            {
                **asdict(entry.layout), "format": entry.variant.name, "memory": asdict(entry.memory), "batch": entry.batch,
                "prefill_s": entry.prefill_s, "ttft_s": entry.ttft_s, "tpot_s": entry.tpot_s, "e2e_s": entry.e2e_s,
                "requests_s": entry.requests_s, "capacity_requests_s": entry.capacity, "tokens_s": entry.tokens_s,
                "tokens_s_device": entry.tokens_s_device, "device_s_per_request": asdict(entry.parts),
                "binds": NAMES[entry.binds], "missed": entry.verdict,
                "usd_million_tokens": entry.usd_million if math.isfinite(entry.usd_million) else None,
            }
            for entry in ranked
        ],
        "why": [why(better, worse) for better, worse in pairwise(ranked)],
        "refused": [{**asdict(entry.layout), "format": entry.variant.name, "reason": entry.reason} for entry in refused],
    }  # fmt: skip
