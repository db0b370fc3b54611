"""Values of a wrong type anywhere in a body: no error of the server, and a 400 names a field of the body."""

from __future__ import annotations

import copy
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.service.fields import TABLE
from ridgeline.service.fleet.demand import read_demand

from .live import MODEL, Live

VALUES: tuple[Any, ...] = (True, 7, 10**30, "x", [], [[]], [None], {}, {"type": []}, [{"type": "text", "text": 1}])
FUNCTION = {"name": "look", "description": "d", "strict": False, "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}]
FORMAT = {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MESSAGES = [
    {"role": "user", "name": "n", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "refusal": "no", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "t"},
]
ITEMS = [
    {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "t", "name": "look", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}],
    },
]
SCHEMA = {
    "name": "look",
    "description": "d",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
COUNTED = {
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "s"}],
    "tools": [SCHEMA],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
}
OPTIONS = {"num_predict": 2, "temperature": 1, "seed": 1, "stop": ["x"]}
ASKED = {"messages": HI, "max_tokens": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {**ASKED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    ("/v1/chat/completions", {**ASKED, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**ASKED, "response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    (
        "/v1/chat/completions",
        {**ASKED, "structured_outputs": {"choice": ["a"]}, "cache_control": {"type": "ephemeral"}},
    ),
    ("/v1/completions", {"prompt": ["hi"], "max_tokens": 2, "cache_control": {"type": "ephemeral", "tokens": 1}}),
    (
        "/v1/responses",
        {"input": ITEMS, "max_output_tokens": 2, "text": {"format": FORMAT}, "reasoning": {"effort": "low"}},
    ),
    (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "metadata": {}},
    ),
    ("/v1/messages", {"model": MODEL, "max_tokens": 2, **COUNTED, "stop_sequences": ["x"], "metadata": {}}),
    (
        "/v1/messages",
        {"max_tokens": 2, "messages": HI, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ),
    ("/v1/messages/count_tokens", COUNTED),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", [1]], "encoding_format": "float", "dimensions": 2}),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True}),
    ("/v1/score", {"text_1": ["q"], "text_2": ["a"], "priority": 1, "cache_salt": "s", "request_id": "r"}),
    (
        "/api/chat",
        {"messages": [*HI, {"role": "assistant", "thinking": "t", "tool_calls": [CALL]}], "options": OPTIONS},
    ),
    (
        "/api/chat",
        {"messages": HI, "tools": TOOLS, "format": "", "options": OPTIONS, "think": True, "keep_alive": "5m"},
    ),
    ("/api/generate", {"prompt": "hi", "system": "s", "options": OPTIONS, "format": {"type": "object"}, "raw": False}),
    ("/api/embed", {"input": ["a"], "truncate": True, "options": {}, "keep_alive": 5}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/api/show", {"model": MODEL, "verbose": True}),
    ("/tokenize", {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {}}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True}),
    ("/detokenize", {"model": MODEL, "tokens": [1]}),
    ("/update_weights_from_disk", {"model_path": "x", "abort_all_requests": True, "timeout_s": 1}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
]
REFUSED = re.compile(
    r"messages\.\d+\.(name|refusal|reasoning_content|tool_call_id|content\.\d+\.thinking)|messages\.1\.tool_calls\.0\.(id|type)"
    r"|tools\.0(\.function)?\.strict|tools\.0\.function\.description|.*format.*\.(name|strict)"
    r"|tool_choice|tool_choice\.disable_parallel_tool_use|input\.\d+\.(call_id|arguments)|input\.1\.content(\.0\.text)?"
)
"""Members that are read deep inside, and refuse a number of at least 7."""


def paths(value: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a value."""
    if start:
        yield start
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield from paths(member, (*start, name))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    place: Any = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return body


def cases(body: dict[str, Any], every: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """every: of how many values each place gets one, in turns."""
    for at, path in enumerate(paths(body)):
        for value in VALUES[at % every :: every]:
            yield ".".join(map(str, path)), value, changed(body, path, value)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("route", "body"), BODIES, ids=[f"{route}-{at}" for at, (route, _) in enumerate(BODIES)])
def test_a_wrong_type_is_a_fault_of_the_request(endless: Live, route: str, body: dict[str, Any], every: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", endless.port, timeout=30)
    for place, value, sent in cases(body, every):
        connection.request("POST", route, json.dumps(sent), {"content-type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status in (200, 400, 404), (place, value, data)
        if REFUSED.fullmatch(place) and value == 7 and not route.endswith(("tokenize", "count_tokens")):
            assert reply.status == 400, (place, value)
        if reply.status == 400 and not route.startswith("/api/"):
            named = re.split(r"[.\[]", json.loads(data)["error"]["param"] or "")[0]
            assert named in sent or named == place, (place, value, data)
    connection.close()


def test_a_router_reads_what_it_needs_of_any_body() -> None:
    for field in {field.name for field in TABLE} | {"input", "documents", "previous_items"}:
        for value in (*VALUES, None):
            for base in ({"messages": HI}, {"input": "x"}, {"input": ITEMS, "previous_items": ITEMS}):
                reading = read_demand({}, {**base, field: value})
                assert reading.request_id is None or isinstance(reading.request_id, str)
