"""Reads what `ridgeline plan` is asked for: devices with their prices, the workload, number formats and limits. Errors name the
option and the remedy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ridgeline.bench.traces import read_trace
from ridgeline.cli.flags import Arguments, Parser, finite_number, whole_number
from ridgeline.cli.place_file import Table
from ridgeline.core.calibration import identity, read_calibration
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved, read_file
from ridgeline.core.slo import Slo
from ridgeline.core.spec import KV_FORMATS, ModelSpec
from ridgeline.core.workload import Workload, arrivals, synthetic
from ridgeline.hardware.serving import calibrated_cost, cost_model, kind_on, transferred_cost, weight_formats
from ridgeline.hardware.table import Accelerator, find
from ridgeline.models.build import served_spec
from ridgeline.planner.cluster import Cluster, LinkRates, read_cluster
from ridgeline.planner.layouts import Layout
from ridgeline.planner.proposals import MOST, Limits, Offer, Site
from ridgeline.planner.ranking import Demand, Variant

DIVIDING, REPLICAS = ("tensor", "pipeline", "context"), "data"
"""Dimensions of a layout whose size an option of the engine may fix. In a plan --data-parallel-size is the number of replicas."""
RENTED = 1024
"""Devices of a kind that can be rented, if a candidate has no count."""
CANDIDATE = ("kind", "count", "usd_hour", "date")
ABOVE_ZERO = (
    "link_gb_s",
    "network_gb_s",
    "gpus_per_host",
    "top",
    "usd_hour",
    "most_usd_hour",
    "most_watts",
    "finalists",
)


def add_options(parser: Parser) -> None:
    """Add the options of devices, workload and limits."""
    _add_devices(parser)
    default, group = Demand(), parser.add_argument_group("workload")
    for name in ("input", "output"):
        group.add_argument(
            f"--{name}-len",
            type=whole_number,
            metavar="N",
            help=f"tokens of {name} (default: {getattr(default, name)})",
        )
    group.add_argument("--trace", metavar="FILE", help="take lengths, shared prefixes and times from a trace")
    group.add_argument(
        "--measured",
        metavar="RUN",
        help="plan for the requests of a run, and show what it measured beside the best proposal",
    )
    group.add_argument(
        "--rate",
        type=finite_number,
        metavar="X",
        help="requests per second (default: the trace's, or as many as possible)",
    )
    group.add_argument(
        "--slo", metavar="TEXT", help="objectives: ttft=500ms,tpot=50ms or p99(ttft)<=500ms,attain>=0.95"
    )
    group = parser.add_argument_group("limits and assumptions")
    group.add_argument(
        "--most-usd-hour", type=finite_number, metavar="X", help="dollars per hour of all devices at most"
    )
    group.add_argument("--most-watts", type=finite_number, metavar="X", help="design power of all devices at most")
    group.add_argument(
        "--usd-hour", type=finite_number, metavar="X", help="price of a device-hour instead of the table's"
    )
    group.add_argument(
        "--pue", type=finite_number, metavar="X", help="power of the site / of its machines (default: 1.2)"
    )
    group.add_argument("--carbon-g-kwh", type=finite_number, metavar="X", help="grams of CO2 per kWh (default: 450)")


def _add_devices(parser: Parser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--gpus", metavar="TEXT", help="devices that one has, as in 8xh100; kinds are those of the hardware table"
    )
    group.add_argument(
        "--candidates",
        metavar="LIST|FILE",
        help="kinds that can be rented, as in h100,l40s, or a file with tables [[gpu]] (kind, count, usd_hour, date)",
    )
    group.add_argument(
        "--gpus-per-host", type=whole_number, metavar="N", help="devices of one host (default: the table's)"
    )
    link = "GB/s of one device in one direction (default: the table's)"
    group.add_argument("--link-gb-s", type=finite_number, metavar="X", help=f"rate between devices of a host: {link}")
    group.add_argument("--network-gb-s", type=finite_number, metavar="X", help=f"rate between hosts: {link}")
    group.add_argument("--formats", metavar="LIST", help="also rank these number formats of weights: fp8,int4 or all")
    group.add_argument("--kv-formats", metavar="LIST", help="also rank these formats of the KV cache: fp8,int8")


def check_numbers(options: Mapping[str, Any]) -> None:
    for name in ABOVE_ZERO:
        if name in options and options[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {options[name]:g}: give a number above 0.", param=name)
    if options.get("sample", MOST) < 20:
        raise ConfigError(f"--sample is {options['sample']}: give 20 requests or more.", param="sample")
    if options.get("pue", 1.0) < 1:
        raise ConfigError(f"--pue is {options['pue']:g}: give 1 or more.", param="pue")
    if options.get("carbon_g_kwh", 0.0) < 0:
        raise ConfigError(f"--carbon-g-kwh is {options['carbon_g_kwh']:g}: give 0 or more.", param="carbon_g_kwh")


# --- devices -------------------------------------------------------------------------------------------------------------


def owned_cluster(options: Mapping[str, Any]) -> Cluster:
    """The devices of --gpus."""
    if "gpus" not in options:
        raise ConfigError("--gpus is missing: give number and kind of the devices, as in --gpus 8xh100.", param="gpus")
    return read_cluster(options["gpus"], _rates(options))


def _rates(options: Mapping[str, Any]) -> LinkRates:
    within, between = (options.get(name, 0.0) * 1e9 for name in ("link_gb_s", "network_gb_s"))
    return LinkRates(within, between, options.get("gpus_per_host", 0))


def read_offers(options: Mapping[str, Any]) -> list[Offer]:
    """The devices of --gpus and --candidates with their prices."""
    if "candidates" not in options:
        cluster = owned_cluster(options)
        return [_offer(cluster, options.get("usd_hour"), "", owned=True)]
    text, offers = options["candidates"], list[Offer]()
    if Path(text).suffix in (".toml", ".json", ".yaml", ".yml"):
        tables = Table(text, read_file(Path(text)), ("gpu",)).items("gpu")
        if not tables:
            raise ConfigError(f"{text} has no table [[gpu]]: write one for each kind.", param="candidates")
        for number, values in enumerate(tables, 1):
            offers.append(_candidate(Table(f"{text}: gpu {number}", values, CANDIDATE), options))
    else:
        rates = _rates(options)
        clusters = [_kind(name, RENTED, rates) for name in text.split(",")]
        offers += [_offer(cluster, options.get("usd_hour"), "") for cluster in clusters]
    if "gpus" in options:
        offers.insert(0, _offer(owned_cluster(options), options.get("usd_hour"), "", owned=True))
    names = [offer.cluster.device.name for offer in offers]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(
            f"{repeated} is given twice: name each kind once in --gpus and --candidates.", param="candidates"
        )
    return offers


def _kind(name: str, count: int, rates: LinkRates) -> Cluster:
    try:
        return read_cluster(f"{count}x{name.strip()}", rates)
    except ConfigError as error:
        given = error.message.replace(f"--gpus '{count}x", "--candidates '", 1)  # the count may not be the user's
        raise ConfigError(given, param="candidates") from None


def _candidate(table: Table, options: Mapping[str, Any]) -> Offer:
    name = table.text("kind")
    if not name:
        raise table.bad("kind", "name a device of the hardware table, as in h100.")
    usd = table.positive("usd_hour", 1.0) if table.has("usd_hour") else None
    return _offer(_kind(name, table.whole("count", RENTED), _rates(options)), usd, table.text("date"))


def _offer(cluster: Cluster, usd_hour: float | None, date: str, *, owned: bool = False) -> Offer:
    rent = cluster.device.rent
    if usd_hour is not None:
        return Offer(cluster, usd_hour, date or "given", owned)
    return Offer(cluster, rent.usd if rent else math.nan, rent.date if rent else "unknown", owned)


# --- workload ------------------------------------------------------------------------------------------------------------


def read_demand(options: Mapping[str, Any], slo: Slo, recorded: Workload | None = None) -> tuple[Demand, Workload]:
    """Means for the arithmetic, and requests for the simulation. recorded: the requests of a run. Raises ConfigError that names the
    option."""
    for name in ("input_len", "output_len"):
        if options.get(name, 1) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {options[name]}: give 1 token or more.", param=name)
    if options.get("rate", 1.0) <= 0:
        raise ConfigError(f"--rate is {options['rate']:g}: give requests per second above 0.", param="rate")
    demand = Demand(slo=slo)
    if "trace" not in options and recorded is None:
        lengths = options.get("input_len", demand.input), options.get("output_len", demand.output)
        demand = Demand(*lengths, options.get("rate"), slo)
        made = synthetic(MOST, (str(demand.input), str(demand.output)), 0, 0)
        return demand, made.at(arrivals(MOST, 1.0, 1.0, 0))
    workload = recorded or read_trace(Path(options["trace"]))
    fixed = {name: options[f"{name}_len"] for name in ("input", "output") if f"{name}_len" in options}
    workload = replace(workload, requests=tuple(replace(request, **fixed) for request in workload.requests))
    columns = zip(*((request.input, request.output) for request in workload.requests), strict=True)
    prompt, answer = (max(1, round(statistics.fmean(column))) for column in columns)
    timed = workload.timed and math.isfinite(workload.rate)
    rate = options.get("rate", workload.rate if timed else None)
    if not timed:
        workload = workload.at(arrivals(len(workload.requests), 1.0, 1.0, 0))
    return Demand(prompt, answer, rate, slo), repeated(workload)


def repeated(workload: Workload) -> Workload:
    """The workload, one time after the other until a trial has enough requests. Repeated prompts share no prefix with the first
    ones."""
    requests = list(workload.requests)
    apart, offset = (
        workload.span_s + 1 / workload.rate if workload.span_s else 1.0,
        1 + max((block for request in requests for block in request.blocks), default=0),
    )
    for time in range(1, 1 + MOST // max(1, len(requests))):
        for request in workload.requests:
            blocks = tuple(block + time * offset for block in request.blocks)
            requests.append(replace(request, at_s=request.at_s + time * apart, blocks=blocks))
    return replace(workload, requests=tuple(requests[:MOST]))


def read_limits(args: Arguments) -> tuple[Limits, Site]:
    options, copies = vars(args.options), args.flags.get(f"{REPLICAS}_parallel_size")
    most = options.get("most_usd_hour", math.inf), options.get("most_watts", math.inf)
    limits = Limits(*most, None if copies is None else int(copies))
    default = Site()
    return limits, Site(options.get("pue", default.pue), options.get("carbon_g_kwh", default.carbon_g_kwh))


def read_sizes(args: Arguments, names: Sequence[str] = (*DIVIDING, REPLICAS)) -> Callable[[Layout], bool]:
    """Whether a layout has the sizes that options fix."""
    flags = {name: args.flags.get(f"{name}_parallel_size") for name in names}
    fixed = {name: int(size) for name, size in flags.items() if size is not None}
    whole = bool(args.flags.get("expert_parallel"))
    return lambda layout: (
        all(getattr(layout, name) == size for name, size in fixed.items()) and (layout.experts > 1 or not whole)
    )


UNPREDICTED = (
    "speculate", "deterministic", "enforce_eager", "reader_pace", "kv_offload_gb", "kv_disk", "enable_lora", "lora_modules",
    "threads",
)  # fmt: skip
"""Options that change step times or what the cache holds, and that predictions do not read."""


def check_device(device: str, rows: Sequence[Accelerator]) -> None:
    """Raises ConfigError for --device that contradicts the planned devices."""
    for row in rows:
        if device != "auto" and device != row.kind:
            raise ConfigError(
                f"--device is {device}, and {row.name} is planned: --gpus and --candidates name devices. Leave --device out.",
                param="device",
            )


def unpredicted_notes(resolved: Resolved, *more: str) -> list[str]:
    """Which of the given options the predictions leave out."""
    given = [
        f"--{entry.name.replace('_', '-')}"
        for config in (resolved.model, resolved.engine)
        for entry in fields(config)
        if entry.name in (*UNPREDICTED, *more) and getattr(config, entry.name) != entry.default
    ]
    return [f"Not in the predictions, only in the commands: {', '.join(given)}."] if given else []


# --- number formats ------------------------------------------------------------------------------------------------------


def read_variants(
    checkpoint: ModelSpec, model: ModelConfig, row: Accelerator, engine: EngineConfig, options: Mapping[str, Any]
) -> list[Variant]:
    """The model as asked for on a device, and in the formats of --formats and --kv-formats."""
    if model.cpu_offload_gb:
        raise ConfigError(
            "`ridgeline plan` divides models between devices and leaves no weights in host memory: leave --cpu-offload-gb out.",
            param="cpu_offload_gb",
        )
    configs = [
        replace(model, quantization=weights, kv_cache_dtype=cache)
        for weights in _weight_names(checkpoint, model, row, options.get("formats", ""))
        for cache in _cache_names(model, options.get("kv_formats", ""))
    ]
    kind = kind_on(row.name, "cpu" if row.kind == "cpu" else "cuda")
    return [_variant(served_spec(checkpoint, config, kind), row, engine.calibration) for config in configs]


def check_formats(checkpoint: ModelSpec, formats: str, rows: Sequence[Accelerator]) -> None:
    """Raises ConfigError for a format of --formats that none of the devices serves."""
    if formats and checkpoint.quantization:
        raise ConfigError(
            f"--formats is given, and the checkpoint is quantized already ({checkpoint.quantization}): leave it out.",
            param="formats",
        )
    served = [name for row in rows for name in _served(row, checkpoint)]
    for name in formats.split(",") if formats not in ("", "all") else ():
        if name not in served:
            names = ", ".join(row.name for row in rows)
            raise ConfigError(
                f"--formats {name!r} is not served on {names}{' for models with experts' if checkpoint.has_experts else ''}: use "
                f"{', '.join(served[:8])} or all.",
                param="formats",
            )


def _served(row: Accelerator, checkpoint: ModelSpec) -> Sequence[str]:
    return weight_formats("cpu" if row.kind == "cpu" else "cuda", row, checkpoint.has_experts)


def _weight_names(checkpoint: ModelSpec, model: ModelConfig, row: Accelerator, formats: str) -> Iterator[str]:
    """The model's own format, and those of --formats that the device serves."""
    yield model.quantization
    wanted = formats.split(",") if formats else ()
    for name in _served(row, checkpoint) if formats else ():
        if name != model.quantization and (formats == "all" or name in wanted):
            yield name


def _cache_names(model: ModelConfig, formats: str) -> Iterator[str]:
    yield model.kv_cache_dtype
    for name in formats.split(",") if formats else ():
        if name not in KV_FORMATS:
            raise ConfigError(f"--kv-formats {name!r} is unknown: use {', '.join(KV_FORMATS)}.", param="kv_formats")
        if name != model.kv_cache_dtype:
            yield name


def _variant(spec: ModelSpec, row: Accelerator, calibration: str) -> Variant:
    """The variant with the best step times that are known: measured with it, measured with another model or format on the same
    device, or those of the data sheet."""
    if calibration:
        path = Path(calibration)
        measured, properties = read_calibration(path, spec)
        if find(measured.device) == row and properties == identity(spec):
            return Variant(spec, calibrated_cost(path, spec, row))
        if (cost := transferred_cost(path, spec, row)) is not None:
            return Variant(spec, cost, transferred=True)
    return Variant(spec, cost_model(row, spec))


def check_calibration(calibration: str, checkpoint: ModelSpec, rows: Sequence[Accelerator]) -> None:
    """Raises ConfigError if a calibration is for none of the devices."""
    if not calibration:
        return
    measured, _ = read_calibration(Path(calibration), checkpoint)
    if find(measured.device) not in rows:
        names = ", ".join(row.name for row in rows)
        raise ConfigError(
            f"--calibration {calibration} was measured on {measured.device}, and this is for {names}: use a file of one of these "
            "devices, or leave it out.",
            param="calibration",
        )
