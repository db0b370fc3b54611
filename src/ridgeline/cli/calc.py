"""Calculators: KV cache of a model (kv), cost of tokens and requests (cost), energy (energy), renting or buying (breakeven).

Names of options and the output contain the units. `ridgeline calc kv --help` lists the options of one calculator.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.flags import Given, Parser, finite, parser_for, whole
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import read
from ridgeline.cli.show import bytes_text
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import KV_FORMATS, ModelSpec
from ridgeline.hardware.probe import meant
from ridgeline.planner.breakeven import BreakEven
from ridgeline.planner.cost import Owned, Service
from ridgeline.planner.energy import Energy, yearly_kwh
from ridgeline.planner.kv import kv_need, sequences, uniform

_SHAPE = ("layers", "heads", "kv_heads", "head_dim")
_LEAST = {"residual": 0, "upkeep": 0, "pue": 1, "carbon_g_kwh": 0, "usd_kwh": 0}
"""Options that may be smaller or must be larger than just above 0."""
_OWNED = ("years", "residual", "upkeep", "watts", "pue", "usd_kwh")


@dataclass(frozen=True, slots=True)
class Line:
    """One result: its name in JSON (with its unit), what it is in words, its value, and how it is shown."""

    name: str
    words: str
    value: float
    text: str


def parser() -> Parser:
    found = parser_for("calc", __doc__ or "", (), model=False)
    kinds = found.add_subparsers(dest="kind", metavar="{kv,cost,energy,breakeven}", required=True)
    for kind, (text, options, _) in KINDS.items():
        one = kinds.add_parser(
            kind, help=text, description=text, argument_default=argparse.SUPPRESS, allow_abbrev=False
        )
        if kind == "kv":
            one.add_argument(
                "given_model",
                nargs="?",
                metavar="MODEL",
                help="model folder or hub name (or give --layers, --heads and --head-dim)",
            )
        for name, (kind_of, words) in options.items():
            one.add_argument(
                f"--{name.replace('_', '-')}", dest=name, type=kind_of, metavar=_metavar(kind_of), help=words
            )
        one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return found


def run(given: Given) -> int:
    rest = vars(given.rest)
    lines = KINDS[rest["kind"]][2](given, rest)
    if "json" in rest:
        print(json.dumps({one.name: one.value if math.isfinite(one.value) else None for one in lines}, indent=2))
        return 0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for one in lines:
        table.add_row(one.words, one.text)
    Console().print(table, highlight=False)
    return 0


def _metavar(kind: Callable[[str], Any]) -> str:
    return "N" if kind is whole else "X" if kind is finite else "NAME"


# --- the cache ----------------------------------------------------------------------------------------------------------


def kv(given: Given, rest: Mapping[str, Any]) -> list[Line]:
    """The cache of a model, or of a shape, for a batch of sequences."""
    spec = _attention(given, rest)
    dtype = rest.get("cache_dtype", spec.dtype)
    if dtype not in KV_FORMATS:
        raise ConfigError(
            f"--cache-dtype {dtype!r} is unknown: use one of {', '.join(KV_FORMATS)}.", param="cache_dtype"
        )
    need = kv_need(spec, _count(rest, "batch", 1), _count(rest, "tokens", 2048), dtype)
    lines = [
        Line("token_bytes", "one token", need.token_bytes, bytes_text(need.token_bytes)),
        Line(
            "sequence_bytes",
            f"one sequence of {counted(need.tokens, 'token')}",
            need.sequence_bytes,
            _gb(need.sequence_bytes),
        ),
        Line("total_bytes", f"batch of {counted(need.batch, 'sequence')}", need.total_bytes, _gb(need.total_bytes)),
        Line(
            "common_rule_bytes",
            "rule of thumb: 2 x batch x tokens x layers x width",
            need.common_bytes,
            _gb(need.common_bytes),
        ),
        Line("times_less", "rule of thumb / batch", need.saving, f"{need.saving:.2f}"),
    ]
    if "on" in rest:
        one = meant(rest["on"])
        fit = sequences(spec, need.tokens, one.memory_bytes, dtype)
        what = "with the weights" if spec.vocab_size else "without weights"
        lines.append(Line("sequences_that_fit", f"sequences that fit on {one.name}, {what}", fit, f"{fit:,}"))
    return lines


def _attention(given: Given, rest: Mapping[str, Any]) -> ModelSpec:
    """The model that was named, or one of the shape that was given."""
    shaped = [name for name in _SHAPE if name in rest]
    if not shaped:
        return read_spec(read(given).model)
    if "model" in given.flags:
        raise ConfigError(f"MODEL and {_flag(shaped[0])} are given: leave one of them out.", param="model")
    layers, heads, head_dim = (_count(rest, name, None) for name in ("layers", "heads", "head_dim"))
    kv_heads = _count(rest, "kv_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads {kv_heads} does not divide --heads {heads}: give a divisor.", param="kv_heads")
    return uniform(layers, heads, head_dim, kv_heads=kv_heads)


# --- money and energy ---------------------------------------------------------------------------------------------------


def cost(given: Given, rest: Mapping[str, Any]) -> list[Line]:
    """What tokens and requests cost on hardware that is rented, or owned (--price)."""
    if "price" in rest and "usd_hour" in rest:
        raise ConfigError(
            "--usd-hour is for rented hardware and --price for owned hardware: give one of them.", param="usd_hour"
        )
    if "price" not in rest and (idle := [name for name in (*_OWNED, "utilization") if name in rest]):
        raise ConfigError(f"{_flag(idle[0])} applies to owned hardware: give --price too.", param=idle[0])
    usd_hour = _owned(rest).usd_hour(_number(rest, "utilization", 1.0)) if "price" in rest else _rent(rest)
    tokens_s = _number(rest, "tokens_s", None)
    found = Service(usd_hour, tokens_s, _number(rest, "prefills_min", 0.0), _number(rest, "output_tokens", 1.0))
    lines = [
        _usd("usd_hour", "one hour of the hardware", found.usd_hour),
        _usd("usd_million_output_tokens", "1M output tokens", found.usd_million_tokens),
    ]
    if "output_tokens" in rest:
        answers = f"answers of 1K requests, {found.output_tokens:g} tokens each"
        lines.append(_usd("usd_thousand_answers", answers, found.decode_usd_thousand))
    if "prefills_min" in rest:
        lines.append(_usd("usd_thousand_prefills", "prompts of 1K requests", found.prefill_usd_thousand))
    if "output_tokens" in rest:
        lines.append(_usd("usd_thousand_requests", "1K requests, prompts and answers", found.usd_thousand_requests))
    return lines


def energy(given: Given, rest: Mapping[str, Any]) -> list[Line]:
    """What a device burns, per year and per token, with cooling (PUE) and carbon as stated factors."""
    factors = {
        name: _number(rest, name, None) for name in ("tokens_s", "pue", "carbon_g_kwh", "usd_kwh") if name in rest
    }
    found = Energy(_watts(rest), **factors)
    low, high = found.peak_watts
    chip = yearly_kwh(found.watts)
    lines = [
        Line("watts", "power", found.watts, f"{found.watts:,.0f} W, peaks of {low:,.0f} to {high:,.0f} W"),
        Line("chip_kwh_year", "one year, chip alone", chip, f"{chip:,.0f} kWh"),
        Line("site_kwh_year", f"with cooling (PUE {found.pue:g})", found.site_kwh_year, f"{found.site_kwh_year:,.0f} kWh"),
        Line("carbon_kg_year", f"CO2 at {found.carbon_g_kwh:g} g/kWh", found.carbon_kg_year, f"{found.carbon_kg_year:,.0f} kg"),
    ]  # fmt: skip
    if found.tokens_s:
        joules, kwh = found.joules_per_token, found.kwh_million_tokens
        lines += [
            Line("joules_per_token", "one output token, chip alone", joules, f"{joules:.3g} J"),
            Line("kwh_million_tokens", "1M output tokens, with cooling", kwh, f"{kwh:.3g} kWh"),
            _usd(
                "usd_million_tokens",
                f"electricity of 1M output tokens at ${found.usd_kwh:g}/kWh",
                found.usd_million_tokens,
            ),
        ]
    return lines


def breakeven(given: Given, rest: Mapping[str, Any]) -> list[Line]:
    """From how many hours of use on an own device is cheaper than a rented one."""
    owned, rent, used = _owned(rest), _rent(rest), _number(rest, "utilization", 1.0)
    found = BreakEven(owned, rent)
    months, saved = found.payback_months(used), found.saved_usd(used)
    return [
        _usd("rented_usd_hour", "rented, one hour of use", rent),
        _usd("owned_usd_hour", f"owned, one hour of use at {used:.0%} utilization", owned.usd_hour(used)),
        Line(
            "breakeven_utilization",
            "owning is cheaper above a utilization of",
            found.utilization,
            f"{found.utilization:.1%}"
            if math.isfinite(found.utilization)
            else "never: its energy costs more than the rent",
        ),
        Line(
            "payback_months",
            f"payback time at {used:.0%} utilization",
            months,
            f"{months:,.1f} months" if math.isfinite(months) else "never",
        ),
        _usd("saved_usd", f"saved in {owned.years:g} years", saved),
    ]


def _owned(rest: Mapping[str, Any]) -> Owned:
    one = meant(rest["on"]) if "on" in rest else None
    price = rest.get("price", one.buy.usd if one is not None and one.buy is not None else None)
    if price is None:
        raise ConfigError("The price of the device is unknown: give --price.", param="price")
    given = {name: _number(rest, name, None) for name in _OWNED if name in rest}
    if one is not None and one.watts and "watts" not in given:
        given["watts"] = one.watts
    return Owned(_number(rest, "price", price), **given)


def _rent(rest: Mapping[str, Any]) -> float:
    if "usd_hour" in rest:
        return _number(rest, "usd_hour", None)
    one = meant(rest["on"]) if "on" in rest else None
    if one is None or one.rent is None:
        raise ConfigError("The price of an hour is unknown: give --usd-hour.", param="usd_hour")
    return one.rent.usd


def _watts(rest: Mapping[str, Any]) -> float:
    one = meant(rest["on"]) if "on" in rest else None
    return _number(rest, "watts", one.watts or None if one is not None else None)


# --- reading and showing ------------------------------------------------------------------------------------------------


def _number(rest: Mapping[str, Any], name: str, untold: float | None) -> float:
    """A number above 0, or at least what _LEAST says (or `untold`). Raises ConfigError naming the option."""
    value = rest.get(name, untold)
    if value is None:
        raise ConfigError(f"{_flag(name)} is missing: give a value.", param=name)
    if name in rest and (value < _LEAST[name] if name in _LEAST else value <= 0):
        least = f"of at least {_LEAST[name]:g}" if name in _LEAST else "above 0"
        raise ConfigError(f"{_flag(name)} is {value:g}: give a number {least}.", param=name)
    if name in ("residual", "utilization") and value > 1:
        raise ConfigError(f"{_flag(name)} is {value:g}: give a share of at most 1.", param=name)
    return value


def _count(rest: Mapping[str, Any], name: str, untold: int | None) -> int:
    return int(_number(rest, name, untold))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _gb(count: int) -> str:
    return f"{count / 1e9:,.2f} GB ({bytes_text(count)})"


def _usd(name: str, words: str, value: float) -> Line:
    return Line(name, words, value, f"${value:,.3f}" if abs(value) < 1000 else f"${value:,.0f}")


Option = tuple[Callable[[str], Any], str]
_ON: dict[str, Option] = {
    "on": (str, "accelerator of the hardware table that provides price, power and memory if not given")
}
_LIFE: dict[str, Option] = {
    "price": (finite, "price of the device with its share of the server, in dollars"),
    "years": (finite, "years of use (default: 4)"),
    "residual": (finite, "resale value after these years, as a share of the price (default: 0)"),
    "upkeep": (finite, "yearly cost of repair, room and staff, as a share of the price (default: 0.05)"),
    "watts": (finite, "power in use, with its share of the server"),
    "pue": (finite, "PUE: power of the site divided by power of its machines (default: 1.2)"),
    "usd_kwh": (finite, "price of electricity in dollars per kWh (default: 0.12)"),
    "utilization": (finite, "share of all hours in which the device is used (default: 1)"),
}
KINDS: dict[str, tuple[str, dict[str, Option], Callable[[Given, Mapping[str, Any]], list[Line]]]] = {
    "kv": (
        "size of the KV cache of a model or a shape",
        {
            "batch": (whole, "number of sequences (default: 1)"),
            "tokens": (whole, "tokens per sequence (default: 2048)"),
            "cache_dtype": (str, f"dtype of the cache: {', '.join(KV_FORMATS)} (default: the model's)"),
            "layers": (whole, "number of layers, instead of MODEL"),
            "heads": (whole, "number of query heads"),
            "kv_heads": (whole, "number of key-value heads (default: --heads)"),
            "head_dim": (whole, "dimension of a head"),
            **_ON,
        },
        kv,
    ),
    "cost": (
        "cost per token and per request on rented or owned hardware",
        {
            "usd_hour": (finite, "price of one hour of the hardware, in dollars"),
            "tokens_s": (finite, "output tokens per second"),
            "prefills_min": (finite, "prompts processed per minute; adds the cost of prompts"),
            "output_tokens": (finite, "mean tokens per answer"),
            **_LIFE,
            **_ON,
        },
        cost,
    ),
    "energy": (
        "energy per token, energy and CO2 per year",
        {
            "watts": (finite, "power of the device, in watts"),
            "tokens_s": (finite, "output tokens per second"),
            "pue": _LIFE["pue"],
            "carbon_g_kwh": (finite, "grams of CO2 per kWh (default: 450)"),
            "usd_kwh": _LIFE["usd_kwh"],
            **_ON,
        },
        energy,
    ),
    "breakeven": (
        "from which utilization buying is cheaper than renting",
        {"usd_hour": (finite, "price of one rented hour, in dollars"), **_LIFE, **_ON},
        breakeven,
    ),
}
"""Calculator -> its help, its options (name -> type, help), and its function."""
