"""Traces of requests: the interface, whose default records nothing, and the choice of the one that exports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.metrics import RequestRecord

INSTALL = "pip install 'ridgeline[otel]'"
_NO_HEADERS: Mapping[str, str] = {}


class Trace:
    """The trace of one request. This one records nothing.

    headers: the context that a router sends on, as W3C Trace Context has it (traceparent, tracestate).
    """

    headers: Mapping[str, str] = _NO_HEADERS

    def answered(self, record: RequestRecord, sampling: SamplingParams, model: str) -> None:
        """The engine's work for the request is over. model: as the API names it."""

    def sent(self, replica: str) -> None:
        """A router sends the request to a replica; again after a failed attempt."""

    def end(self, request_id: str, status: int) -> None:
        """The request is over. status: of the answer; 499 if the client left before it."""


NO_TRACE = Trace()


class Tracing:
    """Begins a trace for each request. This one records nothing."""

    def begin(self, request: web.Request) -> Trace:
        return NO_TRACE

    def close(self) -> None:
        """Export what is recorded. Waits for the network, at most some seconds: call it in a thread."""


NO_TRACING = Tracing()


def endpoint_url(text: str) -> str:
    """The address to which traces are sent; without a path it is that of OTLP. Raises ConfigError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint is {text!r}: give the address of a collector that takes OTLP over HTTP, as in "
            "http://localhost:4318 (gRPC, usually port 4317, is not supported).",
            param="otlp_traces_endpoint",
        )
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/v1/traces"


def make_tracing(config: ServiceConfig, load: Callable[[str], Any] = import_module) -> Tracing:
    """As --otlp-traces-endpoint says. load: imports a module. Raises ConfigError if OpenTelemetry is not installed."""
    if not config.otlp_traces_endpoint:
        return NO_TRACING
    url = endpoint_url(config.otlp_traces_endpoint)
    try:
        module = load("ridgeline.service.otlp")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({error}): {INSTALL}.",
            param="otlp_traces_endpoint",
        ) from error
    tracing: Tracing = module.OtlpTracing(url)
    return tracing
