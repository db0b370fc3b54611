"""Spans of requests by OpenTelemetry, exported over OTLP/HTTP in a thread of the SDK.

A request has one span of kind SERVER. Below it are the spans of the engine, made at its end from the times that its record carries:
engine.queue, engine.prefill and engine.decode, of the choice that took longest. Names of attributes: the semantic conventions of
OpenTelemetry for HTTP and for generative AI; others begin with `ridgeline.`. Prompts and answers are not recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import ridgeline
from ridgeline.core.sampling import SamplingParams
from ridgeline.metrics import RequestRecord
from ridgeline.service.trace import NO_TRACE, Trace, Tracing

_EXPORT_S = 3.0
"""Seconds in which the collector must take a batch of spans."""
_COMPLETIONS = frozenset({"/v1/completions", "/api/generate"})
"""Routes that continue a text; the others answer a conversation."""
_SERVER_ERROR = 500
_ERROR = 400
_W3C = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Traces every POST. The sampler and attributes of the resource are those of OpenTelemetry's environment variables."""

    def __init__(self, url: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "ridgeline")
        resource = Resource.create({"service.name": name, "service.version": ridgeline.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)))
        self._tracer = self._provider.get_tracer("ridgeline", ridgeline.__version__)

    def begin(self, request: web.Request) -> Trace:
        if request.method != "POST":
            return NO_TRACE
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        attributes = {"http.request.method": request.method, "http.route": route, "url.path": request.path[:200]}
        return OtlpTrace(self._tracer, route, attributes, _W3C.extract(request.headers, Context()))

    def close(self) -> None:
        self._provider.shutdown()


class OtlpTrace(Trace):
    """The span of one request, and those below it. context: of the caller's span."""

    def __init__(self, tracer: Tracer, route: str, attributes: Mapping[str, str], context: Context) -> None:
        self._tracer, self._route = tracer, route
        self._span: Span = tracer.start_span(
            f"POST {route}".rstrip(), context, kind=SpanKind.SERVER, attributes=attributes, start_time=time.time_ns()
        )
        self._context = set_span_in_context(self._span, Context())
        self._attempts = 0
        self._cut = ""
        """Why the answer broke off, if it did."""

    @property
    def headers(self) -> Mapping[str, str]:  # type: ignore[override]
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier

    def answered(self, record: RequestRecord, sampling: SamplingParams, model: str) -> None:
        if not self._span.is_recording():
            return
        operation = "text_completion" if self._route in _COMPLETIONS else "chat"
        if sampling.pooling is not None:
            operation = "embeddings"
        self._span.update_name(f"{operation} {model}")
        self._span.set_attributes({"gen_ai.operation.name": operation, **request_attributes(record, sampling, model)})
        self._cut = record.cut
        if record.cut:
            self._span.set_status(StatusCode.ERROR, record.cut_reason or record.cut)
        spent, at = record.spent, record.arrived_at
        shares = {"ridgeline.device_s": spent.device_s, "ridgeline.preemptions": spent.preempted}
        drafts = {"ridgeline.draft_tokens": spent.drafted, "ridgeline.draft_tokens_accepted": spent.accepted}
        prompt = {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "ridgeline.device_s": spent.prompt_device_s,
        }
        answer = {"gen_ai.usage.output_tokens": record.output_tokens, **shares, **drafts}
        parts: tuple[tuple[str, float, Mapping[str, Any]], ...] = (
            ("engine.queue", spent.queue_s, {"ridgeline.requests_waiting": record.arrival.waiting}),
            ("engine.prefill", spent.prefill_s, prompt),
            ("engine.decode", spent.decode_s, answer),
        )
        for name, seconds, attributes in parts:
            if not seconds and name != "engine.queue":
                continue
            span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=_ns(at))
            at += seconds
            span.end(_ns(at))

    def sent(self, replica: str) -> None:
        self._attempts += 1
        self._span.add_event("ridgeline.attempt", {"ridgeline.replica": replica})
        self._span.set_attributes({"ridgeline.replica": replica, "ridgeline.attempts": self._attempts})

    def end(self, request_id: str, status: int) -> None:
        self._span.set_attributes({"http.response.status_code": status, "ridgeline.request_id": request_id})
        if self._cut or status >= _ERROR:
            self._span.set_attribute("error.type", self._cut or str(status))
        if status >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end(time.time_ns())


def request_attributes(record: RequestRecord, sampling: SamplingParams, model: str) -> dict[str, Any]:
    """Attributes of the semantic conventions for generative AI. Limits and penalties that were not set are left out."""
    optional = {
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
    }
    return {
        "gen_ai.provider.name": "ridgeline",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.response.id": record.id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": list(record.finish_reasons),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.reasoning.output_tokens": record.hidden_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _ns(seconds: float) -> int:
    """Unix seconds as nanoseconds, which spans have."""
    return int(seconds * 1e9)
