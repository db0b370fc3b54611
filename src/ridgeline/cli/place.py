"""Place replicas of several models on GPUs of several kinds: the GPUs that cost least for a load, or the most load on given GPUs.

FILE names GPUs, models and their loads. Reads only config.json of the models, and computes: nothing runs. The exit status is 1 if
no placement serves the load.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.flags import Arguments, Parser, check_output_paths, finite_number, parser_for
from ridgeline.cli.place_file import Plan, read_plan
from ridgeline.core.errors import ConfigError, DoesNotFit
from ridgeline.core.plural import counted
from ridgeline.planner.packing import available
from ridgeline.planner.place import SECONDS, place
from ridgeline.planner.placement import Placement, Replica, split_device
from ridgeline.planner.placement_page import GPU_HEAD, gpu_rows, placement_page


def parser() -> Parser:
    parser = parser_for("place", __doc__ or "", (), model=False)
    parser.add_argument("file", metavar="FILE", help="TOML, JSON or YAML file with tables [[gpu]] and [[model]]")
    parser.add_argument(
        "--previous", metavar="FILE", help="what runs now: the output of --json; moves then cost something"
    )
    parser.add_argument("--first-fit", action="store_true", help="place by first fit, without HiGHS")
    parser.add_argument(
        "--seconds",
        type=finite_number,
        metavar="X",
        help=f"processor time to look for better placements (default: {SECONDS:g})",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a self-contained page: cost, what binds, sensitivity to each assumption"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(args: Arguments) -> int:
    """Returns 1 if no placement serves the load."""
    options = vars(args.options)
    if (seconds := options.get("seconds", SECONDS)) <= 0:
        raise ConfigError(f"--seconds is {seconds:g}: give a number above 0.", param="seconds")
    check_output_paths(options, "html")
    plan = read_plan(Path(options["file"]), Path(options["previous"]) if "previous" in options else None)
    solver = available() and "first_fit" not in options
    try:
        placement = place(plan.fleet, seconds=seconds, solver=solver)
    except DoesNotFit as refusal:
        Console(stderr=True).print(escape(refusal.message), soft_wrap=True, highlight=False)
        return 1
    if "html" in options:
        text = placement_page(placement, plan.notes, seconds, solver)
        Path(options["html"]).write_text(text, encoding="utf-8")
    if "json" in options:
        print(json.dumps(facts(placement, plan), indent=2))
    else:
        _show(Console(), placement, plan)
    return 0 if placement.replicas else 1


def _show(console: Console, placement: Placement, plan: Plan) -> None:
    fleet, say = placement.fleet, partial(console.print, soft_wrap=True, highlight=False)
    unit = "$ per hour" if fleet.goal == "cheapest" else "weighted load"
    moves = " with moves" if fleet.previous else ""
    bound = f"bound {placement.bound:,.4g}, gap {placement.gap:.2%} ({placement.method})"
    say(f"[bold]{placement.objective:,.4g} {unit}[/bold]{moves}; {bound}\n")
    Console(width=max(console.width, 160)).print(_gpus(placement))
    say("")
    console.print(_models(placement))
    in_use = counted(sum(placement.used.values()), "GPU")
    say(f"\n{in_use} in use, ${placement.usd_hour:,.2f} per hour, {placement.watts:,.0f} W of design power")
    if idle := _idle(placement):
        say("idle: " + ", ".join(f"{count} x {name}" for name, count in idle.items()))
    for model, devices in placement.moves if fleet.previous else ():
        say(f"move: {escape(model)} starts on {', '.join(devices)}")
    for replica in _ended(placement):
        say(f"ends: {escape(replica.model)} on {', '.join(replica.devices)}")
    if fleet.previous and not placement.moves:
        say("moves: none")
    if not available():
        say("HiGHS is not installed: `pip install 'ridgeline[plan]'` finds better placements and bounds.")
    for note in plan.notes:
        say(escape(note[0].upper() + note[1:]))


def _gpus(placement: Placement) -> Table:
    table = Table(*GPU_HEAD, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for cells in gpu_rows(placement):
        table.add_row(*map(escape, cells))
    return table


def _models(placement: Placement) -> Table:
    table = Table("model", "replicas", "served", "wanted", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    counts = Counter(replica.model for replica in placement.replicas)
    for model in placement.fleet.models:
        served = placement.served[model.name]
        table.add_row(escape(model.name), str(counts[model.name]), f"{served:,.4g}", f"{model.load:,.4g}")
    return table


def _idle(placement: Placement) -> dict[str, int]:
    """GPUs that are there and not in use, by kind."""
    spare = {gpu.name: gpu.count - placement.used[gpu.name] for gpu in placement.fleet.gpus if gpu.count is not None}
    return {name: count for name, count in spare.items() if count}


def _ended(placement: Placement) -> list[Replica]:
    """Replicas that run now, and not in the placement."""
    after = Counter((replica.model, tuple(sorted(replica.devices))) for replica in placement.replicas)
    ended = list[Replica]()
    for replica in placement.fleet.previous:
        key = replica.model, tuple(sorted(replica.devices))
        if after[key]:
            after[key] -= 1
        else:
            ended.append(replica)
    return ended


def facts(placement: Placement, plan: Plan) -> dict[str, Any]:
    """The placement for JSON, in bytes, shares, watts and dollars. `replicas` is what --previous reads."""
    fleet = placement.fleet
    return {
        "goal": fleet.goal, "objective": placement.objective, "bound": placement.bound, "gap": placement.gap,
        "method": placement.method, "usd_hour": placement.usd_hour, "watts": placement.watts,
        "gpus": [_gpu_facts(placement, device) for device in placement.devices],
        "idle": _idle(placement),
        "models": [
            {"model": model.name, "wanted": model.load, "served": placement.served[model.name]} for model in fleet.models
        ],
        "replicas": [_replica_facts(replica) for replica in placement.replicas],
        "moves": [{"model": model, "gpus": devices} for model, devices in placement.moves] if fleet.previous else [],
        "ended": [{"model": replica.model, "gpus": replica.devices} for replica in _ended(placement)],
        "notes": list(plan.notes),
    }  # fmt: skip


def _gpu_facts(placement: Placement, device: str) -> dict[str, Any]:
    gpu, (taken, share) = placement.fleet.by_name[split_device(device)[0]], placement.usage(device)
    models: Sequence[str] = [replica.model for replica in placement.devices[device]]
    return {
        "gpu": device, "models": models, "used_bytes": taken, "memory_bytes": gpu.memory_bytes, "time_share": share,
        "usd_hour": gpu.usd_hour, "watts": gpu.watts,
    }  # fmt: skip


def _replica_facts(replica: Replica) -> dict[str, Any]:
    foot = replica.footprint
    assert foot is not None
    return {
        "model": replica.model,
        "gpus": replica.devices,
        "bytes": foot.bytes,
        "time_share": foot.share,
        "serves": foot.rate,
    }
