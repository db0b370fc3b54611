"""Traces: from the client through the router and a server to the engine's work, exported to a collector."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv.attributes import http_attributes, url_attributes

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.trace import NO_TRACING, endpoint_url, make_tracing

from .collector import collecting
from .live import behaviour, counts, live, says
from .replicas import drops, routed, streams

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


def traceparent(sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{CALLER}-0{int(sampled)}", "x-request-id": "mine"}


async def test_one_trace_from_client_to_engine() -> None:
    """The router's span is a child of the client's, the server's one of the router's, and the engine's of the server's."""
    began = time.time()
    with collecting() as collector:
        traced = {"otlp_traces_endpoint": collector.url}
        with live(behaviour(says("Hello")), **traced) as server:
            server.engine.queued, server.engine.prefill_s, server.engine.decode_s = 0.25, 0.5, 1.0
            async with routed(service=traced) as fleet:
                fleet.balancer.add("replica-0", f"http://127.0.0.1:{server.port}")
                await fleet.balancer.until_up("replica-0")
                answer = await fleet.chat(headers=traceparent(), max_tokens=40, temperature=0.5, model=None)
                assert answer.status == 200
                await asyncio.to_thread(server.get, "/health")  # reads have no trace
    assert collector.paths == {"/v1/traces"}
    served, routed_span = collector.named("chat tiny-test"), collector.named("POST /v1/chat/completions")
    assert routed_span.parent == CALLER and served.parent == routed_span.id
    assert {span.trace for span in collector.spans} == {TRACE_ID}
    assert routed_span.events == ["ridgeline.attempt"]
    assert routed_span.attributes["ridgeline.replica"] == "replica-0" and routed_span.service == "ridgeline"
    for span in (served, routed_span):
        assert span.attributes["ridgeline.request_id"] == "mine"
        assert span.attributes["http.response.status_code"] == 200 and not span.is_error
    facts = served.attributes
    assert facts["gen_ai.operation.name"] == "chat" and facts["gen_ai.provider.name"] == "ridgeline"
    assert facts["gen_ai.request.max_tokens"] == 40 and facts["gen_ai.request.temperature"] == 0.5
    assert facts["gen_ai.response.finish_reasons"] == ["stop"] and facts["gen_ai.response.id"].startswith("chatcmpl-")
    assert facts["gen_ai.usage.output_tokens"] == 5 and facts["gen_ai.usage.input_tokens"] > 0
    parts = [collector.named(f"engine.{part}") for part in ("queue", "prefill", "decode")]
    assert all(part.parent == served.id for part in parts)
    assert began <= routed_span.start <= served.start <= parts[0].start + 1e-3 and served.end <= routed_span.end
    assert parts[0].end == pytest.approx(parts[1].start) and parts[1].end == pytest.approx(parts[2].start)
    assert [part.end - part.start for part in parts] == pytest.approx([0.25, 0.5, 1.0], abs=1e-4)
    assert parts[2].attributes["gen_ai.usage.output_tokens"] == 5


async def test_names_of_attributes() -> None:
    """Each is of the semantic conventions, or says that it is ours."""
    with collecting() as collector, live(behaviour(says("Hello")), otlp_traces_endpoint=collector.url) as server:
        server.complete(stop=["x"], seed=3, n=2, frequency_penalty=0.1, presence_penalty=0.1)
        assert server.send("POST", "/v1/embeddings", {"input": "hello"}).status == 200
    names = {name for span in collector.spans for name in span.attributes}
    assert {name for name in names if not name.startswith("ridgeline.")} <= CONVENTIONS
    assert collector.named("embeddings tiny-test").attributes["gen_ai.operation.name"] == "embeddings"
    completion = collector.named("text_completion tiny-test").attributes
    assert completion["gen_ai.request.choice.count"] == 2 and completion["gen_ai.request.stop_sequences"] == ["x"]


def test_errors_and_unsampled_requests() -> None:
    with (
        collecting() as collector,
        live(behaviour(says("Hello")), otlp_traces_endpoint=collector.url, api_key="key") as server,
    ):
        assert server.chat(headers=traceparent()).status == 401
        assert server.chat(headers=traceparent(sampled=False) | {"authorization": "Bearer key"}).status == 200
    (span,) = collector.spans
    assert span.attributes["error.type"] == "401" and span.attributes["ridgeline.request_id"] == "mine"
    assert not span.is_error  # an error of the caller, by the conventions of servers


def test_answers_that_break_off_say_why() -> None:
    with (
        collecting() as collector,
        live(behaviour(counts, fail_after=300), otlp_traces_endpoint=collector.url) as server,
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            body = json.dumps({"prompt": "hi", "max_tokens": 1000, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            leaving.sendall(f"{head}content-type: application/json\r\nx-request-id: leaves\r\n\r\n".encode() + body)
            assert leaving.recv(100)
        server.until(lambda: not server.server.front.active)
        server.complete(headers={"x-request-id": "fails"}, max_tokens=1000, stream=True)
    spans = {span.attributes.get("ridgeline.request_id"): span for span in collector.spans}
    assert spans["leaves"].attributes["error.type"] == "cancelled" and spans["leaves"].is_error
    assert spans["fails"].attributes["http.response.status_code"] == 200 and spans["fails"].is_error
    assert spans["fails"].attributes["error.type"] == "error"


async def test_router_without_a_replica_that_answers() -> None:
    with collecting() as collector:
        async with routed(drops, service={"otlp_traces_endpoint": collector.url}) as fleet:
            assert (await fleet.chat()).status == 500
    (span,) = collector.spans
    assert span.events == ["ridgeline.attempt"] * 3 and span.attributes["ridgeline.attempts"] == 3
    assert span.is_error and span.attributes["error.type"] == "500"


async def test_contexts_pass_a_router_without_traces() -> None:
    async with routed(streams) as fleet:
        await fleet.chat(headers=traceparent())
        assert fleet.replicas[0].headers[0]["traceparent"] == traceparent()["traceparent"]


def test_a_collector_that_is_down_delays_nothing() -> None:
    with live(behaviour(says("Hello")), otlp_traces_endpoint="http://127.0.0.1:9") as server:
        assert server.chat().status == 200
        began = time.monotonic()
    assert time.monotonic() - began < 6


def test_options() -> None:
    assert make_tracing(ServiceConfig()) is NO_TRACING
    assert endpoint_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert endpoint_url("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"
    with pytest.raises(ConfigError, match="grpc://collector:4317.*OTLP over HTTP"):
        make_tracing(ServiceConfig(otlp_traces_endpoint="grpc://collector:4317"))

    def missing(name: str) -> None:
        raise ImportError("No module named 'opentelemetry'")

    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[otel\]'"):
        make_tracing(ServiceConfig(otlp_traces_endpoint="http://collector:4318"), missing)
