"""Options of the router, beside those of the service that it shares (`SHARED`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.config import ServiceConfig, option
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import split_options
from ridgeline.service.batches.settings import OFF, DayWindow
from ridgeline.service.routing import POLICIES, Capacity

SHARED = (
    "host", "port", "api_key", "admin_api_key", "allowed_origins", "allowed_hosts", "root_path", "ssl_certfile", "ssl_keyfile",
    "ssl_keyfile_password", "max_queue", "max_body_mb", "drain_s", "otlp_traces_endpoint", "log_format", "log_level",
    "batch_dir", "batch_max_gb", "batch_window", "response_store_mb",
)  # fmt: skip
"""Options of `ServiceConfig` that a router has. `max_queue` bounds the requests that wait in it."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "replica_limit": (1, 1 << 20),
    "queue_s": (0.01, 1e6),
    "index_mb": (0.01, 1 << 20),
    "stall_s": (0.05, 1e6),
    "idle_s": (0.1, 1e6),
    "prefill_rate": (1.0, 1e9),
    "cache_tokens": (1, 1 << 40),
}
_URL = re.compile(r"https?://[^\s/?#]+")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How requests are divided among replicas."""

    policy: str = option(
        "prefix",
        "prefix (lowest predicted wait, cached prefixes counted), least-work (the same without them) or round-robin",
    )
    replica_limit: int = option(256, "maximum requests in flight at one replica; further ones wait in the router")
    queue_s: float = option(60.0, "seconds that a request may wait in the router; then it gets status 429")
    index_mb: float = option(64.0, "memory for the index of prefixes in MiB")
    stall_s: float = option(
        1.0, "seconds without an answer to a health check, or without progress, after which a replica is avoided"
    )
    idle_s: float = option(300.0, "seconds without a byte after which an answer that has begun is given up")
    prefill_rate: float = option(
        10_000.0, "prompt tokens per second of a replica, as a first guess; measured first tokens correct it"
    )
    cache_tokens: int = option(
        1_000_000, "tokens that the prefix cache of a replica is assumed to hold, if it does not say"
    )

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}: give one of {', '.join(POLICIES)}.", param="policy")
        for name, (low, high) in BOUNDS.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{name} is {value}: give {low:.15g} to {high:.15g}.", param=name)

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.replica_limit, self.prefill_rate, cache_tokens=self.cache_tokens)


def read_router(options: Mapping[str, Any], origin: str) -> RouterConfig:
    """Raises ConfigError that names the option and the remedy. origin: "flag", or a file."""
    (values,) = split_options(options, RouterConfig, origin=origin)
    return RouterConfig(**values)


def check_shared(service: ServiceConfig) -> ServiceConfig:
    """The options that a router shares. Raises ConfigError for a file of API keys, which replicas read.

    A router that knows only the key of operators lets all others pass to the replicas, so it has no owners of files: no batches.
    """
    if service.api_keys:
        remedy = "give it to the replicas, and leave it out here"
        raise ConfigError(
            f"api_keys is {service.api_keys!r}, but a router counts no use of keys: {remedy}.", param="api_keys"
        )
    DayWindow.parse(service.batch_window)
    if service.api_key is not None or service.admin_api_key is None:
        return service
    if service.batch_dir not in ("", OFF):
        remedy = "give api_key, too, or leave batch_dir out"
        raise ConfigError(
            f"batch_dir is {service.batch_dir!r}, but with admin_api_key alone the router knows no client that owns files: "
            f"{remedy}.",
            param="batch_dir",
        )
    return replace(service, batch_dir=OFF)


def read_url(text: str) -> str:
    """The address of a replica. Raises ConfigError."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    if not _URL.fullmatch(url):
        raise ConfigError(f"--replica is {text!r}: give an address as in http://127.0.0.1:8001.", param="replica")
    return url
