"""Calculators: KV cache of a model (kv), LoRA adapters (lora), cost of tokens and requests (cost), energy (energy), renting or
buying (breakeven), cost of a training and when it pays (training), region and hours for batch work (schedule).

Names of options and the output contain the units. `ridgeline calc kv --help` lists the options of one calculator.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench import economics
from ridgeline.bench.record import read_run
from ridgeline.cli.calc_kv import OPTIONS as KV_OPTIONS
from ridgeline.cli.calc_kv import kv
from ridgeline.cli.calc_lines import Line, Option, flag, number, rent, usd
from ridgeline.cli.calc_lora import OPTIONS as LORA_OPTIONS
from ridgeline.cli.calc_lora import lora
from ridgeline.cli.calc_schedule import OPTIONS as SCHEDULE_OPTIONS
from ridgeline.cli.calc_schedule import schedule
from ridgeline.cli.calc_training import OPTIONS as TRAINING_OPTIONS
from ridgeline.cli.calc_training import training
from ridgeline.cli.flags import Arguments, Parser, finite_number, parser_for, whole_number
from ridgeline.core.errors import ConfigError
from ridgeline.hardware.probe import resolve_accelerator
from ridgeline.planner.breakeven import BreakEven
from ridgeline.planner.cost import Owned, Service
from ridgeline.planner.energy import Energy, yearly_kwh
from ridgeline.planner.prices import prices

_OWNED = ("years", "residual", "upkeep", "watts", "pue", "usd_kwh")


def parser() -> Parser:
    parser = parser_for("calc", __doc__ or "", (), model=False)
    kinds = parser.add_subparsers(dest="kind", metavar=f"{{{','.join(KINDS)}}}", required=True)
    for kind, (text, options, _) in KINDS.items():
        subparser = kinds.add_parser(
            kind, help=text, description=text, argument_default=argparse.SUPPRESS, allow_abbrev=False
        )
        if kind in _OF_MODELS:
            subparser.add_argument(
                "given_model", nargs="?", metavar="MODEL", help=f"model folder or hub name{_OF_MODELS[kind]}"
            )
        for name, (value_type, help_text) in options.items():
            subparser.add_argument(
                f"--{name.replace('_', '-')}", dest=name, type=value_type, metavar=_metavar(value_type), help=help_text
            )
        subparser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args: Arguments) -> int:
    options = vars(args.options)
    lines = KINDS[options["kind"]][2](args, options)
    if "json" in options:
        print(json.dumps({line.name: line.value if math.isfinite(line.value) else None for line in lines}, indent=2))
        return 0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for line in lines:
        if line.label:
            table.add_row(line.label, line.text)
    Console().print(table, highlight=False)
    return 0


def _metavar(kind: Callable[[str], Any]) -> str:
    return "N" if kind is whole_number else "X" if kind is finite_number else "NAME"


# --- money and energy ---------------------------------------------------------------------------------------------------


def cost(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Cost of tokens and requests on rented hardware, or on owned hardware (--price). With --run: prices from a measured load."""
    if "price" in options and "usd_hour" in options:
        raise ConfigError(
            "--usd-hour is for rented hardware and --price for owned hardware: give one of them.", param="usd_hour"
        )
    if "price" not in options and (unused := [name for name in (*_OWNED, "utilization") if name in options]):
        raise ConfigError(f"{flag(unused[0])} applies to owned hardware: give --price too.", param=unused[0])
    if "run" in options:
        return _prices(options)
    if "paid_share" in options:
        raise ConfigError("--paid-share applies to the bill of a measured load: give --run too.", param="paid_share")
    usd_hour = _usd_hour(options)
    tokens_s = number(options, "tokens_s", None)
    service = Service(usd_hour, tokens_s, number(options, "prefills_min", 0.0), number(options, "output_tokens", 1.0))
    lines = [
        usd("usd_hour", "one hour of the hardware", service.usd_hour),
        usd("usd_million_output_tokens", "1M output tokens", service.usd_million_tokens),
    ]
    if "output_tokens" in options:
        answers = f"answers of 1K requests, {service.output_tokens:g} tokens each"
        lines.append(usd("usd_thousand_answers", answers, service.decode_usd_thousand))
    if "prefills_min" in options:
        lines.append(usd("usd_thousand_prefills", "prompts of 1K requests", service.prefill_usd_thousand))
    if "output_tokens" in options:
        lines.append(usd("usd_thousand_requests", "1K requests, prompts and answers", service.usd_thousand_requests))
    return lines


def _usd_hour(options: Mapping[str, Any]) -> float:
    """Price of an hour of owned hardware if its price is given, else of rented hardware."""
    return _owned(options).usd_hour(number(options, "utilization", 1.0)) if "price" in options else rent(options)


def _prices(options: Mapping[str, Any]) -> list[Line]:
    """Prices of input, cached and output tokens that add up to the bill of a recorded run."""
    if unused := [name for name in ("tokens_s", "prefills_min", "output_tokens") if name in options]:
        raise ConfigError(f"--run has measured what {flag(unused[0])} states: leave one of them out.", param=unused[0])
    recorded = economics.measured_load(read_run(Path(options["run"])))
    given = {"usd_hour", "price", "on"} & options.keys()
    usd_hour = recorded.usd_hour if recorded.usd_hour and not given else _usd_hour(options)
    hours, share = recorded.seconds / 3600, number(options, "paid_share", 1.0)
    bill, tokens = usd_hour * hours * share, recorded.tokens
    shares = prices(bill, tokens, recorded.costs)
    paid = f"{share:.0%} of " if share < 1 else ""
    lines = [
        Line("bill_usd", f"bill: {paid}{hours:.4g} hours at ${usd_hour:g} an hour", bill, _dollars(bill)),
        Line(
            "busy_share",
            "share of the time in which the device ran steps",
            recorded.busy_share,
            f"{recorded.busy_share:.1%}",
        ),
    ]
    for name in ("input", "cached", "output"):
        price, n_tokens = getattr(shares, name), getattr(tokens, name)
        part = f"x {n_tokens:,} tokens = {_dollars(price * n_tokens / 1e6)}"
        lines.append(Line(f"usd_million_{name}", f"1M {name} tokens", price, f"{_dollars(price)}   {part}"))
    output, cached = shares.output / shares.input, shares.cached / shares.input
    lines += [
        Line("output_to_input", "output / input", output, f"{output:.3g}"),
        Line("cached_to_input", "cached / input", cached, f"{cached:.3g}"),
    ]
    return lines


def _dollars(value: float) -> str:
    return economics.amount(value, "$")


def energy(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Energy of a device per year and per token. PUE (cooling) and carbon intensity are inputs."""
    factors = {
        name: number(options, name, None) for name in ("tokens_s", "pue", "carbon_g_kwh", "usd_kwh") if name in options
    }
    figures = Energy(_watts(options), **factors)
    low, high = figures.peak_watts
    chip = yearly_kwh(figures.watts)
    lines = [
        Line("watts", "power", figures.watts, f"{figures.watts:,.0f} W, peaks of {low:,.0f} to {high:,.0f} W"),
        Line("chip_kwh_year", "one year, device only", chip, f"{chip:,.0f} kWh"),
        Line("site_kwh_year", f"with cooling (PUE {figures.pue:g})", figures.site_kwh_year, f"{figures.site_kwh_year:,.0f} kWh"),
        Line("carbon_kg_year", f"CO2 at {figures.carbon_g_kwh:g} g/kWh", figures.carbon_kg_year,
             f"{figures.carbon_kg_year:,.0f} kg"),
    ]  # fmt: skip
    if figures.tokens_s:
        joules, kwh = figures.joules_per_token, figures.kwh_million_tokens
        lines += [
            Line("joules_per_token", "one output token, device only", joules, f"{joules:.3g} J"),
            Line("kwh_million_tokens", "1M output tokens, with cooling", kwh, f"{kwh:.3g} kWh"),
            usd(
                "usd_million_tokens",
                f"electricity of 1M output tokens at ${figures.usd_kwh:g}/kWh",
                figures.usd_million_tokens,
            ),
        ]
    return lines


def breakeven(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Utilization above which buying a device is cheaper than renting it, and the payback time."""
    owned, rented, utilization = _owned(options), rent(options), number(options, "utilization", 1.0)
    comparison = BreakEven(owned, rented)
    months, saved = comparison.payback_months(utilization), comparison.saved_usd(utilization)
    return [
        usd("rented_usd_hour", "rented, one hour of use", rented),
        usd("owned_usd_hour", f"owned, one hour of use at {utilization:.0%} utilization", owned.usd_hour(utilization)),
        Line(
            "breakeven_utilization",
            "owning is cheaper above a utilization of",
            comparison.utilization,
            f"{comparison.utilization:.1%}"
            if math.isfinite(comparison.utilization)
            else "never: its energy costs more than the rent",
        ),
        Line(
            "payback_months",
            f"payback time at {utilization:.0%} utilization",
            months,
            f"{months:,.1f} months" if math.isfinite(months) else "never",
        ),
        usd("saved_usd", f"saved in {owned.years:g} years", saved),
    ]


def _owned(options: Mapping[str, Any]) -> Owned:
    accelerator = resolve_accelerator(options["on"]) if "on" in options else None
    price = options.get(
        "price", accelerator.buy.usd if accelerator is not None and accelerator.buy is not None else None
    )
    if price is None:
        raise ConfigError("The price of the device is unknown: give --price.", param="price")
    fields = {name: number(options, name, None) for name in _OWNED if name in options}
    if accelerator is not None and accelerator.watts and "watts" not in fields:
        fields["watts"] = accelerator.watts
    return Owned(number(options, "price", price), **fields)


def _watts(options: Mapping[str, Any]) -> float:
    accelerator = resolve_accelerator(options["on"]) if "on" in options else None
    return number(options, "watts", accelerator.watts or None if accelerator is not None else None)


# --- the command line ----------------------------------------------------------------------------------------------------


_ON: dict[str, Option] = {
    "on": (str, "accelerator of the hardware table; supplies price, power and memory that are not given")
}
_LIFE: dict[str, Option] = {
    "price": (finite_number, "price of the device with its share of the server, in dollars"),
    "years": (finite_number, "years of use (default: 4)"),
    "residual": (finite_number, "resale value after these years, as a share of the price (default: 0)"),
    "upkeep": (finite_number, "yearly cost of repair, space and staff, as a share of the price (default: 0.05)"),
    "watts": (finite_number, "power in use, with its share of the server"),
    "pue": (finite_number, "PUE: power of the site divided by power of its machines (default: 1.2)"),
    "usd_kwh": (finite_number, "price of electricity in dollars per kWh (default: 0.12)"),
    "utilization": (finite_number, "share of all hours in which the device is used (default: 1)"),
}
KINDS: dict[str, tuple[str, dict[str, Option], Callable[[Arguments, Mapping[str, Any]], list[Line]]]] = {
    "kv": (
        "size of the KV cache of a model or a shape",
        {**KV_OPTIONS, **_ON},
        kv,
    ),
    "cost": (
        "cost per token and per request on rented or owned hardware",
        {
            "usd_hour": (finite_number, "price of one hour of the hardware, in dollars"),
            "tokens_s": (finite_number, "output tokens per second"),
            "prefills_min": (finite_number, "prompts processed per minute; adds the cost of prompts"),
            "output_tokens": (finite_number, "mean tokens per answer"),
            "run": (
                str,
                "folder of `ridgeline bench run` against a Ridgeline server: prices of input, cached and output tokens",
            ),
            "paid_share": (
                finite_number,
                "share of the run's hours that this load pays for (default: 1, idle time too)",
            ),
            **_LIFE,
            **_ON,
        },
        cost,
    ),
    "lora": ("memory of the slots of LoRA adapters", LORA_OPTIONS, lora),
    "energy": (
        "energy per token, energy and CO2 per year",
        {
            "watts": (finite_number, "power of the device, in watts"),
            "tokens_s": (finite_number, "output tokens per second"),
            "pue": _LIFE["pue"],
            "carbon_g_kwh": (finite_number, "grams of CO2 per kWh (default: 450)"),
            "usd_kwh": _LIFE["usd_kwh"],
            **_ON,
        },
        energy,
    ),
    "breakeven": (
        "utilization above which buying is cheaper than renting",
        {"usd_hour": (finite_number, "price of one rented hour, in dollars"), **_LIFE, **_ON},
        breakeven,
    ),
    "training": ("FLOPs and cost of a training, and when it pays: T <= p x N", {**TRAINING_OPTIONS, **_ON}, training),
    "schedule": ("region and hours for batch work, by price, carbon and latency", SCHEDULE_OPTIONS, schedule),
}
"""Calculator -> help, options (name -> type, help), function."""
_OF_MODELS = {"kv": " (or give --layers, --heads and --head-dim)", "lora": "", "training": " (or give --params)"}
"""Calculators that take a model -> help about the options that replace it."""
