"""`ridgeline calc training`: FLOPs and cost of a training, and from how many requests on it pays (T <= p x N)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.bench.economics import amount, economics
from ridgeline.bench.record import read_run
from ridgeline.cli.calc_lines import Line, Option, flag, number, rent
from ridgeline.cli.flags import Arguments, finite_number
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import resolve_arguments
from ridgeline.core.errors import ConfigError
from ridgeline.hardware.probe import resolve_accelerator
from ridgeline.planner.training import MFU, Payback, Training

OPTIONS: dict[str, Option] = {
    "params": (finite_number, "parameters of the trained model, as in 8e9 (or give MODEL)"),
    "train_tokens": (finite_number, "tokens of the training, as in 15e12"),
    "mfu": (finite_number, f"share of the device's peak that the training reaches (default: {MFU:g})"),
    "usd_hour": (finite_number, "price of one hour of one device, in dollars"),
    "training_usd": (finite_number, "cost T of the training in dollars, instead of that of its FLOPs"),
    "saved_usd": (finite_number, "saving p of each request in dollars"),
    "before": (str, "folder of `ridgeline bench run` with the old model: with --after, the saving is measured"),
    "after": (str, "folder of `ridgeline bench run` with the trained model"),
    "requests": (finite_number, "number N of requests over which the training must pay"),
}


def training(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """FLOPs and cost of a training, and from how many requests on it pays: T <= p x N."""
    work, lines = _work(args, options), []
    if work is not None:
        lines += _work_lines(work)
    cost, cost_lines = _cost(work, options)
    saved = _saved(options)
    lines += cost_lines
    if cost is not None and saved is not None:
        lines += _payback(Payback(cost, saved), options)
    elif "requests" in options or saved is not None:
        missing = "cost of the training: give --training-usd, or --on" if cost is None else "saving: give --saved-usd"
        raise ConfigError(f"T <= p x N lacks the {missing}.", param="training_usd" if cost is None else "saved_usd")
    return lines


def _work(args: Arguments, options: Mapping[str, Any]) -> Training | None:
    """The training that the options describe. None if they state only its cost."""
    has_model = "model" in args.flags
    if has_model and "params" in options:
        raise ConfigError("MODEL and --params are given: leave one of them out.", param="params")
    if not has_model and not {"params", "train_tokens"} & options.keys() and "training_usd" in options:
        return None
    params = read_spec(resolve_arguments(args).model).params if has_model else number(options, "params", None)
    return Training(params, number(options, "train_tokens", None))


def _work_lines(work: Training) -> list[Line]:
    return [
        Line("training_flops", f"FLOPs: 6 x {work.params:.4g} parameters x {work.tokens:.4g} tokens", work.flops,
             f"{work.flops:.3g}"),
        Line("tokens_per_param", "training tokens per parameter (20: least loss for these FLOPs)", work.tokens_per_param,
             f"{work.tokens_per_param:,.1f}"),
        Line("served_tokens", "tokens served with as many FLOPs (2 per parameter)", work.served_tokens,
             f"{work.served_tokens:.3g}"),
    ]  # fmt: skip


def _cost(work: Training | None, options: Mapping[str, Any]) -> tuple[float | None, list[Line]]:
    """T in dollars and its lines. None: no device is named, and no cost."""
    if "training_usd" in options:
        for name in ("mfu", "usd_hour", "on"):
            if name in options:
                raise ConfigError(f"--training-usd replaces {flag(name)}: leave one of them out.", param=name)
        cost = number(options, "training_usd", None)
        return cost, [Line("training_usd", "T, cost of the training", cost, amount(cost, "$"))]
    if work is None or "on" not in options:
        if unused := [name for name in ("mfu", "usd_hour") if name in options]:
            raise ConfigError(f"{flag(unused[0])} needs the device of the training: give --on.", param="on")
        return None, []
    device, mfu, price = resolve_accelerator(options["on"]), number(options, "mfu", MFU), rent(options)
    hours = work.device_hours(device.peak("bfloat16"), mfu)
    cost = hours * price
    return cost, [
        Line("device_hours", f"hours of one {device.name} at {mfu:.0%} MFU in bfloat16", hours, f"{hours:,.4g}"),
        Line("training_usd", f"T, cost of the training at ${price:g} an hour", cost, amount(cost, "$")),
    ]


def _saved(options: Mapping[str, Any]) -> float | None:
    """p in dollars: given, or the difference of two recorded runs."""
    folders = [name for name in ("before", "after") if name in options]
    if not folders:
        return number(options, "saved_usd", None) if "saved_usd" in options else None
    if "saved_usd" in options:
        raise ConfigError("--saved-usd and recorded runs are given: leave one of them out.", param="saved_usd")
    if len(folders) == 1:
        raise ConfigError("The saving is that of two runs: give --before and --after.", param=folders[0])
    before, after = (_request_usd(options[name], name) for name in folders)
    return before - after


def _request_usd(folder: str, name: str) -> float:
    figures = economics(read_run(Path(folder)))
    if figures.usd_per_request is None:
        remedy = "record it again with `ridgeline bench run --usd-hour X`"
        raise ConfigError(f"The run {folder} has no cost per request: {remedy}.", param=name)
    return figures.usd_per_request


def _payback(rule: Payback, options: Mapping[str, Any]) -> list[Line]:
    """Lines of T <= p x N."""
    shown = f"{rule.requests:,.0f}" if math.isfinite(rule.requests) else "never: requests do not become cheaper"
    lines = [
        Line("saved_usd", "p, saving of one request", rule.saved_usd, f"${rule.saved_usd:.4g}"),
        Line("payback_requests", "T / p, requests from which on the training pays", rule.requests, shown),
    ]
    if "requests" in options:
        requests = number(options, "requests", None)
        pays, total = rule.pays(requests), rule.saved_usd * requests
        sign = "<=" if pays else ">"
        text = f"{'yes' if pays else 'no'}: {amount(rule.training_usd, '$')} {sign} {amount(total, '$')}"
        lines.append(Line("pays", f"T <= p x N for {requests:,.0f} requests", float(pays), text))
    return lines
