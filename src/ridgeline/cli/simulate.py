"""Simulate a fleet in virtual time: replicas with the real scheduler behind the real router, and the autoscaler if asked for.

With --recorded it replays the requests of a server with other options instead: what would the percentiles have been? Reads
config.json and a trace; nothing runs. Step times come from the cost model: without a --calibration they are uncalibrated.
docs/planning.md says what is not simulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.bench.traces import read_trace
from ridgeline.cli.flags import Arguments, Parser, finite_number, parser_for, whole_number
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.simulate_recorded import add_replay, replay_recorded
from ridgeline.core.compatibility import Choice, check_together
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Deployment, size
from ridgeline.core.sizing import Memory
from ridgeline.core.slo import Slo
from ridgeline.core.workload import Workload, arrivals, synthetic
from ridgeline.hardware.serving import calibrated_cost, cost_model, kind_on
from ridgeline.hardware.table import Accelerator, lookup
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.fleet import Fleet, FleetFigures, Loss, simulate_fleet
from ridgeline.planner.ranking import seconds_text
from ridgeline.planner.servers import planned_server
from ridgeline.planner.simulate import Server, quantile
from ridgeline.service.autoscale import Scaling
from ridgeline.service.routing import POLICIES


def parser() -> Parser:
    parser = parser_for("simulate", __doc__ or "", (ModelConfig, EngineConfig))
    group = parser.add_argument_group("fleet")
    group.add_argument("--gpu", metavar="NAME", help="kind of the devices, of the hardware table: one for each replica")
    group.add_argument("--replicas", type=whole_number, metavar="N", help="replicas, at the start (default: 1)")
    group.add_argument("--route", metavar="NAME", help=f"policy of the router: {', '.join(POLICIES)} (default: prefix)")
    group.add_argument(
        "--limit", type=whole_number, metavar="N", help="most requests in flight at a replica (default: as it holds)"
    )
    group.add_argument("--autoscale", metavar="MIN:MAX", help="let the autoscaler choose the number of replicas")
    group.add_argument("--cold-start-s", type=finite_number, metavar="X", help="seconds of a start (default: 60)")
    group.add_argument(
        "--lose",
        metavar="AT[:DOWN]",
        action="append",
        help="a replica is lost after AT seconds, for DOWN (default: 60)",
    )
    group.add_argument(
        "--surrogate",
        action="store_true",
        help="pass over steps in which nothing begins or ends, for fleets of hundreds",
    )
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", metavar="FILE", help="requests and their times; any format of `ridgeline bench run`")
    group.add_argument(
        "--requests", type=whole_number, metavar="N", help="requests (default: all of the trace, or 1000)"
    )
    group.add_argument("--rate", type=finite_number, metavar="X", help="requests per second (default: the trace's)")
    group.add_argument("--input-len", metavar="N", help="without a trace: prompt tokens, or a range (default: 512)")
    group.add_argument("--output-len", metavar="N", help="without a trace: tokens of an answer (default: 128)")
    group.add_argument(
        "--prefix-len", type=whole_number, metavar="N", help="without a trace: prompt tokens that all share"
    )
    group.add_argument("--slo", metavar="TEXT", help="objectives: ttft=500ms,tpot=50ms,e2e=10s")
    group.add_argument("--keep-slo", action="store_true", help="order prompts and size steps by them")
    add_replay(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: Arguments) -> int:
    options, resolved = vars(args.options), resolve_arguments(args)
    if "recorded" in options:
        return replay_recorded(args, resolved)
    if "gpu" not in options:
        raise ConfigError("--gpu is missing: name a device of the hardware table, as in --gpu h100.", param="gpu")
    row, slo = _device(options["gpu"]), Slo.parse(resolved.service.slo)
    server = server_of(resolved.model, resolved.engine, row)
    server = replace(server, slo=slo) if "keep_slo" in options else server
    workload = _workload(options).within(server.limits.max_len)
    if not workload.requests:
        raise ConfigError("No request of the workload fits the context: raise --max-model-len.", param="trace")
    fleet = _fleet(options, server, slo)
    figures = simulate_fleet(fleet, workload)
    if "json" in options:
        print(json.dumps(_facts(figures, slo, row, server.cost), indent=2))
    else:
        _show(Console(), figures, fleet, workload, slo, row)
    return 0


def _device(name: str) -> Accelerator:
    try:
        return lookup(name)
    except ConfigError as error:
        raise ConfigError(f"--gpu {name!r}: {error.message}", param="gpu") from None


def server_of(model: ModelConfig, engine: EngineConfig, row: Accelerator) -> Server:
    """A replica on one device of the table, with the options that `ridgeline serve` would choose there. Raises DoesNotFit."""
    checkpoint, _ = read_model(resolve_model(replace(model, load_format="dummy")))
    kind = "cpu" if row.kind == "cpu" else "cuda"
    spec = served_spec(checkpoint, model, kind_on(row.name, kind))
    check_together(Choice(model, engine, spec.layers, kind, gated=spec.gated))
    calibration = engine.calibration
    cost = calibrated_cost(Path(calibration), spec, row) if calibration else cost_model(row, spec)
    plan = size(Deployment(spec, replace(engine, device=kind), Memory(kind, row.memory_bytes), model))
    return planned_server(replace(cost, spec=replace(spec, both_forms=plan.expanded_bytes > 0)), plan, engine)


def _workload(options: Mapping[str, Any]) -> Workload:
    rate, count = options.get("rate"), options.get("requests")
    for name in ("rate", "requests"):
        if name in options and options[name] <= 0:
            raise ConfigError(f"--{name} is {options[name]:g}: give a number above 0.", param=name)
    if "trace" in options:
        workload = read_trace(Path(options["trace"])).first(count)
        if not workload.timed and rate is None:
            raise ConfigError("The trace has no times: give --rate, requests per second.", param="rate")
        return workload if rate is None else _at_rate(workload, rate)
    if rate is None:
        raise ConfigError("--rate is missing: give requests per second, or a --trace with times.", param="rate")
    lengths = options.get("input_len", "512"), options.get("output_len", "128")
    return _at_rate(synthetic(count or 1000, lengths, options.get("prefix_len", 0), 0), rate)


def _at_rate(workload: Workload, rate: float) -> Workload:
    """The workload at this rate: its times stretched, or random ones (Poisson) if it has none."""
    return workload.at_rate(rate) if workload.timed else workload.at(arrivals(len(workload.requests), rate, 1.0, 0))


def _fleet(options: Mapping[str, Any], server: Server, slo: Slo) -> Fleet:
    replicas, rows = options.get("replicas", 1), server.limits.rows
    if replicas < 1:
        raise ConfigError(f"--replicas is {replicas}: give 1 or more.", param="replicas")
    fleet = Fleet(server, replicas, options.get("route", "prefix"), options.get("limit", rows))
    losses = sorted((_loss(text) for text in options.get("lose", [])), key=lambda loss: loss.at_s)
    scaling = None
    if "autoscale" in options:
        least, most = _range(options["autoscale"])
        capacity, limits = fleet.capacity, slo.limits()
        scaling = Scaling(
            least,
            most,
            prefill_tokens_s=capacity.prefill_tokens_s,
            limit=capacity.limit,
            cold_start_s=options.get("cold_start_s", 60.0),
        )
        if limits["ttft"] is not None:
            scaling = replace(scaling, ttft_s=limits["ttft"])
        fleet = replace(fleet, replicas=min(max(replicas, least), most))
    return replace(fleet, scaling=scaling, losses=losses, surrogate="surrogate" in options)


def _loss(text: str) -> Loss:
    try:
        at, _, down = text.partition(":")
        return Loss(float(at), down_s=float(down)) if down else Loss(float(at))
    except ValueError:
        raise ConfigError(f"--lose is {text!r}: give seconds, as in 300 or 300:60.", param="lose") from None


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal()) or int(least) > int(most) or int(most) < 1:
        raise ConfigError(f"--autoscale is {text!r}: give fewest and most replicas, as in 1:8.", param="autoscale")
    return int(least), int(most)


def _facts(figures: FleetFigures, slo: Slo, row: Accelerator, cost: CostModel) -> dict[str, Any]:
    """The figures for JSON: seconds, tokens, dollars."""
    counts = ("requests", "refused", "failed", "retried", "seconds", "busy_s", "replica_s", "most")
    rent = row.rent.usd if row.rent else None
    tokens = sum(outcome.output for outcome in figures.outcomes.values())
    facts: dict[str, Any] = {name: getattr(figures, name) for name in counts}
    facts |= {name: value if math.isfinite(value) else None for name, value in asdict(figures.figures).items()}
    facts |= {"answered": len(figures.outcomes), "hit_rate": figures.hit_rate, "calibrated": cost.calibrated}
    if slo:
        facts["attainment"] = figures.attainment(slo)
    if rent is not None:
        usd = rent * figures.replica_s / 3600
        facts |= {"usd": usd, "usd_per_million_tokens": usd / tokens * 1e6 if tokens else None}
    facts["decisions"] = [{"at_s": at, **asdict(decision)} for at, decision in figures.decisions]
    return facts


def _show(
    console: Console, figures: FleetFigures, fleet: Fleet, workload: Workload, slo: Slo, row: Accelerator
) -> None:
    facts, result = _facts(figures, slo, row, fleet.server.cost), figures.figures
    kind = "calibrated" if facts["calibrated"] else "uncalibrated"
    console.print(
        f"[bold]{workload.name}[/bold]: {figures.requests:,} requests in {figures.seconds:,.0f} s, simulated ({kind})",
        highlight=False,
        soft_wrap=True,
    )
    tpot = sorted(outcome.tpot_s for outcome in figures.outcomes.values() if outcome.tpot_s == outcome.tpot_s)
    busy = figures.busy_s / figures.replica_s if figures.replica_s else 0.0
    rows = [
        ("replicas", f"{fleet.replicas} at the start, {figures.most} at most, routed by {fleet.policy}"),
        ("answered", f"{facts['answered']:,}"),
        ("refused", f"{figures.refused:,}; cut by a loss {figures.failed:,}, sent again {figures.retried:,}"),
        ("TTFT", f"p50 {seconds_text(result.ttft_s)}, p99 {seconds_text(result.slow_ttft_s)}"),
        ("TPOT", f"p50 {seconds_text(result.tpot_s)}, p99 {seconds_text(quantile(tpot, 0.99))}"),
        ("longest wait", f"p99 {seconds_text(result.stall_s)} between two tokens"),
        *([("within the SLO", f"{facts['attainment']:.1%} of all requests ({slo})")] if slo else []),
        ("throughput", f"{result.tokens_s:,.0f} output tokens/s, devices busy {busy:.0%}"),
        ("prefix cache", f"{figures.hit_rate:.1%} of prompt tokens"),
    ]
    if facts.get("usd_per_million_tokens") is not None:
        hours, price = figures.replica_s / 3600, facts["usd_per_million_tokens"]
        rows.append(
            ("cost", f"${facts['usd']:,.2f} for {hours:,.2f} replica-hours, ${price:,.2f} per 1M output tokens")
        )
    rows += [
        (f"at {at:,.0f} s", f"{decision.wanted} replicas: {decision.reason}") for at, decision in figures.decisions
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    for cells in rows:
        table.add_row(*map(escape, cells))
    console.print(table)
