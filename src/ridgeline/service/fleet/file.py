"""The fleet file of `ridgeline up`: how many replicas, their options, those of the router, and when to scale."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ridgeline.core.config import ServiceConfig, option
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import CONFIGS, read_file, resolve, split_options
from ridgeline.core.slo import Slo
from ridgeline.service.autoscale import Scaling
from ridgeline.service.batches.settings import OFF, DayWindow
from ridgeline.service.fleet.options import SHARED, RouterConfig, check_shared
from ridgeline.service.fleet.rank_places import check_ranks

SECTIONS = ("serve", "router", "autoscale")
LAUNCHERS = ("local", "ray")
BOUNDS: Mapping[str, tuple[float, float]] = {
    "replicas": (0, 10_000),
    "ready_s": (0.1, 1e6),
    "replica_cpus": (0.0, 1e4),
    "replica_gpus": (0, 1024),
    "least": (0, 10_000),
    "most": (0, 10_000),
    "off_peak_least": (0, 10_000),
    "off_peak_most": (0, 10_000),
    "every_s": (0.05, 3600.0),
    "cold_start_s": (0.1, 1e6),
    "calm_s": (0.0, 1e6),
    "idle_s": (0.1, 1e6),
}
_QUANTILE = 0.95
_OF_BOTH = ("max_queue", "max_body_mb", "drain_s", "otlp_traces_endpoint", "log_level")
"""Options of SHARED that replicas have for themselves."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The replicas."""

    replicas: int = option(1, "replicas at the start")
    launcher: str = option("local", "where replicas run: local (processes of this machine) or ray (a Ray cluster)")
    ready_s: float = option(900.0, "seconds in which a replica must be ready after its start")
    ray_address: str = option("auto", "launcher ray: address of the cluster; auto: that of this machine")
    replica_cpus: float = option(1.0, "launcher ray: CPUs that a replica takes, an equal part for each rank")
    replica_gpus: int = option(0, "launcher ray: GPUs that a replica takes, on one node if one has so many")


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """When replicas are added and removed. Without this section their number stays."""

    least: int = option(1, "fewest replicas; 0: none after idle_s without a request")
    most: int = option(1, "most replicas")
    slo: str = option("ttft=1s", "limit on the first token, as in ttft=500ms or p99(ttft)<=2s")
    every_s: float = option(5.0, "seconds between decisions")
    cold_start_s: float = option(
        60.0, "seconds until a new replica is ready, as a first guess; the last start replaces it"
    )
    calm_s: float = option(300.0, "seconds in which the load must need fewer replicas before some are stopped")
    idle_s: float = option(600.0, "seconds without a request after which only the fewest replicas stay")
    off_peak: str = option("", "hours of the day, local time, with other limits, as in 22:00-06:00")
    off_peak_least: int | None = option(None, "fewest replicas in these hours (default: least)")
    off_peak_most: int | None = option(None, "most replicas in these hours (default: most)")


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A checked fleet file.

    serve: options of each replica. gpus: the GPUs of each place for a replica, as CUDA_VISIBLE_DEVICES has them; empty: not
    assigned. scaling: None without the section autoscale.
    """

    fleet: FleetConfig
    serve: Mapping[str, Any]
    service: ServiceConfig
    router: RouterConfig
    gpus: tuple[str, ...]
    autoscale: AutoscaleConfig
    scaling: Scaling | None
    off_peak: DayWindow | None


def read_fleet(path: Path, environ: Mapping[str, str]) -> FleetFile:
    """Raises ConfigError that names key, value and remedy. environ: RIDGELINE_API_KEY and others, as for `ridgeline serve`."""
    content = read_file(path)
    sections = {name: _section(content.pop(name, None), name, path) for name in SECTIONS}
    gpus = _gpus(content.pop("gpus", []), path)
    known = [field.name for field in fields(FleetConfig)]
    for key in content:
        if key not in known:
            _refuse_key(key, (*known, "gpus", *SECTIONS), path.name)
    fleet = FleetConfig(**_read(content, FleetConfig, origin=path.name)[0])
    if fleet.launcher not in LAUNCHERS:
        raise _bad(f"launcher ({path.name})", fleet.launcher, f"one of {', '.join(LAUNCHERS)}")
    _check_bounds(fleet, path.name)
    if gpus and fleet.launcher == "ray":
        raise ConfigError(f"gpus ({path.name}): Ray assigns GPUs, give their number as replica_gpus.", param="gpus")
    service, router = _router(sections["router"], f"router in {path.name}", environ)
    if "api_keys" in sections["serve"] and (service.admin_api_key is None or service.api_key is not None):
        remedy = "give admin_api_key in the section router, and no api_key"
        raise ConfigError(f"api_keys (serve in {path.name}) are checked by the replicas: {remedy}.", param="api_keys")
    if sections["serve"].get("remote_engines") and (fleet.replicas > 1 or sections["autoscale"]):
        remedy = "give replicas: 1 and no section autoscale"
        raise ConfigError(f"remote_engines (serve in {path.name}) has one address: {remedy}.", param="remote_engines")
    autoscale, scaling = _autoscale(sections["autoscale"], f"autoscale in {path.name}", service, router)
    if gpus and max(fleet.replicas, scaling.most if scaling else 0) > len(gpus):
        most = max(fleet.replicas, scaling.most if scaling else 0)
        raise ConfigError(
            f"gpus ({path.name}) has {len(gpus)} entries for up to {most} replicas: give one for each.", param="gpus"
        )
    serve = _serve(sections["serve"], f"serve in {path.name}")
    if fleet.launcher == "ray":
        check_ranks(serve, fleet.replica_gpus, path.name)
    return FleetFile(
        fleet=fleet,
        serve=serve,
        service=service,
        router=router,
        gpus=gpus,
        autoscale=autoscale,
        scaling=scaling if sections.get("autoscale") else None,
        off_peak=DayWindow.parse(autoscale.off_peak, f"off_peak (autoscale in {path.name})")
        if autoscale.off_peak
        else None,
    )


def _section(value: Any, name: str, path: Path) -> dict[str, Any]:
    """A section with underscores in its keys."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _bad(f"{name} ({path.name})", value, "a mapping of options")
    return {key.replace("-", "_"): item for key, item in value.items()}


def _gpus(value: Any, path: Path) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | str) or not str(entry).replace(",", "").isdecimal():
            raise _bad(
                f"gpus ({path.name})", entry, "a list with the GPUs of each replica, as in [0, 1] or ['0,1', '2,3']"
            )
    return tuple(str(entry) for entry in entries)


def _serve(options: dict[str, Any], origin: str) -> Mapping[str, Any]:
    """Options of a replica, checked as those of `ridgeline serve`."""
    for name in options:
        if name in SHARED and name not in _OF_BOTH:
            raise ConfigError(f"{name} ({origin}) is set by the fleet: give it in the section router.", param=name)
    if "join" in options:
        raise ConfigError(
            f"join ({origin}) runs no server: give it to `ridgeline serve` on the other host.", param="join"
        )
    _read(options, *CONFIGS, origin=origin)
    return {**options, "host": "127.0.0.1", "port": 0, "batch_dir": OFF}


def _router(options: dict[str, Any], origin: str, environ: Mapping[str, str]) -> tuple[ServiceConfig, RouterConfig]:
    known = {field.name for field in fields(RouterConfig)}
    for name in options:
        if name not in known and name not in SHARED:
            _refuse_key(name, (*known, *SHARED), origin)
    shared, values = _read(options, ServiceConfig, RouterConfig, origin=origin)
    try:
        router = RouterConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}", param=error.param) from None
    return check_shared(resolve(shared, environ=environ).service), router


def _autoscale(
    options: dict[str, Any], origin: str, service: ServiceConfig, router: RouterConfig
) -> tuple[AutoscaleConfig, Scaling]:
    (values,) = _read(options, AutoscaleConfig, origin=origin)
    config = AutoscaleConfig(**values)
    _check_bounds(config, origin)
    if config.most < max(1, config.least):
        raise _bad(f"most ({origin})", config.most, f"at least {max(1, config.least)}")
    slo = Slo.parse(config.slo)
    limit = slo.limits()["ttft"]
    if limit is None:
        raise _bad(f"slo ({origin})", config.slo, "a limit on the first token, as in ttft=500ms")
    shares = [objective.share for objective in slo.objectives if objective.name == "ttft"]
    scaling = Scaling(
        least=config.least,
        most=config.most,
        prefill_tokens_s=router.prefill_rate,
        limit=router.replica_limit,
        ttft_s=limit,
        quantile=max(shares, default=_QUANTILE),
        cold_start_s=config.cold_start_s,
        calm_s=config.calm_s,
        idle_s=config.idle_s,
        off_peak_least=config.off_peak_least,
        off_peak_most=config.off_peak_most,
    )
    return config, scaling


def _read(options: dict[str, Any], *configs: type, origin: str) -> tuple[dict[str, Any], ...]:
    """`split_options`, whose errors always name the section and the file."""
    try:
        return split_options(options, *configs, origin=origin)
    except ConfigError as error:
        if origin in error.message:
            raise
        raise ConfigError(f"{origin}: {error.message}", param=error.param) from None


def _check_bounds(config: FleetConfig | AutoscaleConfig, origin: str) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        low, high = BOUNDS.get(field.name, (value, value))
        if value is not None and field.name in BOUNDS and not low <= value <= high:
            raise _bad(f"{field.name} ({origin})", value, f"{low:.15g} to {high:.15g}")


def _bad(label: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{label} is {value!r}: give {expected}.", param=label.partition(" ")[0])


def _refuse_key(key: str, known: tuple[str, ...], origin: str) -> None:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(sorted(known))}."
    raise ConfigError(f"Unknown key {key} ({origin}): {hint}", param=key)
