"""Plan a service: which devices, number formats, parallel sizes, chunks, batches and replicas serve a workload within its
objectives, and what each choice costs in dollars, joules and CO2.

Arithmetic over all layouts comes first (--arithmetic stops there), then the best ones serve a sample of the workload in virtual
time, with the real scheduler and router. Reads only config.json: nothing runs on a device. Predictions without a calibration are
marked uncalibrated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.bench.record import Run
from ridgeline.cli.flags import Arguments, Parser, check_output_paths, parser_for, whole_number
from ridgeline.cli.plan_layouts import layout_facts, say_rest, show_layouts
from ridgeline.cli.plan_measured import measured_facts, read_measured, show_measured, workload_of_run
from ridgeline.cli.plan_options import (
    DIVIDING,
    REPLICAS,
    add_options,
    check_calibration,
    check_device,
    check_formats,
    check_numbers,
    owned_cluster,
    read_demand,
    read_limits,
    read_offers,
    read_sizes,
    read_variants,
    unpredicted_notes,
)
from ridgeline.cli.plan_proposals import proposal_facts, show_proposals
from ridgeline.cli.plan_start import layout_command, start
from ridgeline.cli.progress import Lines
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import announcer
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved
from ridgeline.core.slo import Slo
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.expert_times import NOTE
from ridgeline.planner.layouts import with_context
from ridgeline.planner.plan_page import plan_page
from ridgeline.planner.proposals import MOST, Offer, Task
from ridgeline.planner.ranking import Variant, expanded_notes, has_experts, rank
from ridgeline.planner.search import FINALISTS, Scope, SearchResult, search

SIMULATED = (
    "split", "candidates", "html", "measured", "usd_hour", "most_usd_hour", "most_watts", "pue", "carbon_g_kwh", "finalists",
    "sample",
)  # fmt: skip
"""Options that the arithmetic does not read."""


def parser() -> Parser:
    parser = parser_for("plan", __doc__ or "", (ModelConfig, EngineConfig))
    add_options(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--arithmetic", action="store_true", help="only the arithmetic of means: all layouts of --gpus, in a second"
    )
    group.add_argument(
        "--finalists", type=whole_number, metavar="N", help=f"layouts to simulate (default: {FINALISTS})"
    )
    group.add_argument(
        "--sample", type=whole_number, metavar="N", help=f"requests of a simulation at most (default: {MOST})"
    )
    group.add_argument(
        "--split", action="store_true", help="also simulate engines for prompts apart from engines for the other tokens"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=whole_number, metavar="N", default=10, help="layouts to print (default: 10)")
    group.add_argument(
        "--html",
        metavar="FILE",
        help="write a self-contained page: Pareto charts, what binds, sensitivity to each assumption",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(args: Arguments) -> int:
    """Returns 1 if no layout fits, or none meets the objectives and limits."""
    options, resolved = vars(args.options), resolve_arguments(args)
    check_numbers(options)
    check_output_paths(options, "html")
    return _arithmetic(args, resolved) if "arithmetic" in options else _plan(args, resolved)


# --- simulated -----------------------------------------------------------------------------------------------------------


def _plan(args: Arguments, resolved: Resolved) -> int:
    options, offers = vars(args.options), read_offers(vars(args.options))
    run = read_measured(options)
    recorded = workload_of_run(run) if run is not None else None
    demand, workload = read_demand(options, Slo.parse(resolved.service.slo), recorded)
    checkpoint, _ = read_model(resolve_model(replace(resolved.model, load_format="dummy")))
    rows = [offer.cluster.device for offer in offers]
    check_calibration(resolved.engine.calibration, checkpoint, rows)
    check_formats(checkpoint, options.get("formats", ""), rows)
    check_device(resolved.engine.device, rows)
    notes = [f"{offer.cluster.device.name}: {note}" for offer in offers for note in offer.cluster.notes]
    longest = max(request.input + request.output for request in workload.requests)
    if longest > checkpoint.max_len:
        notes.append(_context_note(longest, checkpoint.max_len))
    if has_experts(checkpoint):
        notes.append(NOTE)

    def variants(offer: Offer) -> list[Variant]:
        made = read_variants(checkpoint, resolved.model, offer.cluster.device, resolved.engine, options)
        return [replace(variant, spec=with_context(variant.spec, longest)) for variant in made]

    layouts, most = read_sizes(args, DIVIDING), options.get("finalists", FINALISTS)
    task = Task(demand, workload, _one_rank(resolved.engine), *read_limits(args), options.get("sample", MOST))
    with Lines(announcer("text"), lambda: "ranking layouts") as lines:
        result = search(task, offers, Scope(variants, layouts, "split" in options, most, lines.show))
    notes += unpredicted_notes(resolved)
    notes += expanded_notes([proposal.unit.coarse for proposal in result.proposals[: options["top"]]])
    _print(result, task, notes, resolved, (options, run))
    return 0 if any(not proposal.verdict for proposal in result.proposals) else 1


def _print(
    result: SearchResult, task: Task, notes: list[str], resolved: Resolved, asked: tuple[Mapping[str, Any], Run | None]
) -> None:
    """asked: options of the command, and the run of --measured."""
    options, run = asked
    if "html" in options and result.proposals:
        shown = result.proposals[: options["top"]]
        starts = [start(proposal, resolved.model).text for proposal in shown]
        Path(options["html"]).write_text(plan_page(task, shown, starts, notes), encoding="utf-8")
    if "json" in options:
        facts = proposal_facts(result, task, notes, resolved.model)
        if run is not None and result.proposals:
            facts["measured"] = measured_facts(result.proposals[0], run)
        print(json.dumps(facts, indent=2))
        return
    show_proposals(Console(), task, result.proposals[: options["top"]], resolved.model)
    if run is not None and result.proposals:
        show_measured(Console(), result.proposals[0], run)
    say_rest(Console(), result.refused, notes)


def _context_note(length: int, most: int) -> str:
    remedy = "a model of the same shape with a longer context is planned."
    return f"Requests have {length:,} tokens, more than the model's context of {most:,}: {remedy}"


def _one_rank(engine: EngineConfig) -> EngineConfig:
    sizes = {f"{name}_parallel_size": 1 for name in (*DIVIDING, REPLICAS)}
    return replace(engine, **sizes)  # type: ignore[arg-type]


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def _arithmetic(args: Arguments, resolved: Resolved) -> int:
    options, cluster = vars(args.options), owned_cluster(vars(args.options))
    for name in SIMULATED:
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')} needs simulations: leave out --arithmetic.", param=name)
    demand, _ = read_demand(options, Slo.parse(resolved.service.slo))
    checkpoint, _ = read_model(resolve_model(replace(resolved.model, load_format="dummy")))
    check_calibration(resolved.engine.calibration, checkpoint, [cluster.device])
    check_formats(checkpoint, options.get("formats", ""), [cluster.device])
    check_device(resolved.engine.device, [cluster.device])
    variants = read_variants(checkpoint, resolved.model, cluster.device, resolved.engine, options)
    notes = [*cluster.notes]
    if demand.length > checkpoint.max_len:
        notes.append(_context_note(demand.length, checkpoint.max_len))
        variants = [replace(variant, spec=with_context(variant.spec, demand.length)) for variant in variants]
    if demand.slo.of_windows:
        notes.append("Percentiles and shares of --slo are compared with predicted means.")
    if has_experts(checkpoint) and cluster.count > 1:
        notes.append(NOTE)
    ranked, refused = rank(variants, cluster, demand, _one_rank(resolved.engine), read_sizes(args))
    if not ranked and not refused:
        raise ConfigError(
            f"No layout of {cluster.count} devices has the given parallel sizes: give divisors of {cluster.count}."
        )
    notes += unpredicted_notes(resolved, "batching", "kv_retention")
    notes += expanded_notes(ranked[: options["top"]])
    if "json" in options:
        print(json.dumps(layout_facts(cluster, demand, ranked, refused, notes), indent=2))
    else:
        shown = ranked[: options["top"]]
        commands = [
            layout_command(entry, cluster.device, demand.length, resolved.model, resolved.engine) for entry in shown
        ]
        show_layouts(Console(), (cluster, demand), shown, commands)
        say_rest(Console(), refused, notes)
    return 0 if ranked else 1
