"""Every field of the table, over HTTP: its good examples are answered, its bad ones are a 400 that names it."""

from __future__ import annotations

import inspect

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from ridgeline.service.fields import TABLE, Field, read_fields
from ridgeline.service.readers import Refused

from .conftest import THINKING
from .live import Live, Reply, behaviour, counts, ids, live

CASES = [(route, field) for field in TABLE for route in field.routes]
_TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
_EXTRAS = (
    "top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "allowed_token_ids bad_words prompt_logprobs chat_template chat_template_kwargs add_generation_prompt "
    "continue_final_message structured_outputs priority cache_salt request_id session_id thinking_token_budget "
    "include_reasoning guided_json guided_regex guided_choice guided_grammar"
).split()
CONTROLLED = "{% if reasoning_effort %}{% endif %}{% if verbosity %}{% endif %}"
"""Makes a template that reads these fields."""


@pytest.fixture(scope="module")
def server():
    with live(
        behaviour(counts), chat_template="{% if tools %}<tool_call>{% endif %}" + CONTROLLED + THINKING
    ) as running:
        yield running


def body_of(route: str, field: Field, value: object) -> dict:
    needed = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "hi"}}[route]
    return {**needed, "max_tokens": 3, field.name: value}


def answer_to(server: Live, route: str, field: Field, value: object) -> Reply:
    body = body_of(route, field, value)
    if field.name == "max_completion_tokens":
        del body["max_tokens"]
    return server.send("POST", "/v1/chat/completions" if route == "chat" else "/v1/completions", body)


@pytest.mark.parametrize(("route", "field"), CASES, ids=[f"{route}-{field.name}" for route, field in CASES])
def test_table(server: Live, route: str, field: Field):
    for value in field.good:
        answer = answer_to(server, route, field, value)
        assert answer.status == 200, (value, answer.data)
        ignored = field.ignored(value)
        assert answer.headers.get("x-ridgeline-ignored-fields") == (field.name if ignored else None), value
    for value in field.bad:
        answer = answer_to(server, route, field, value)
        assert answer.status == 400, (value, answer.data)
        assert answer.error["param"].startswith(field.name), value
        assert field.name in answer.error["message"], value
        assert answer.error["type"] == "invalid_request_error", value


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_null_is_not_given(server: Live, route: str):
    required = {"messages", "prompt"}
    for field in TABLE:
        if route in field.routes and field.name not in required:
            read_fields(route, {**body_of(route, field, None)})


@pytest.mark.parametrize(("resource", "route"), [(ChatCompletions, "chat"), (Completions, "completions")])
def test_the_table_knows_every_parameter_of_the_official_client(resource, route):
    wanted = set(inspect.signature(resource.create).parameters) - _TRANSPORT
    known = {field.name for field in TABLE if route in field.routes}
    assert wanted - known == set()


def test_the_table_knows_the_usual_extras():
    assert set(_EXTRAS) - {field.name for field in TABLE} == set()


def test_fields_nobody_knows_are_accepted_and_named(server: Live):
    answer = server.chat(max_tokens=1, temprature=1, **{"x y\n": 1, "a.b": 2})
    assert answer.status == 200
    assert answer.headers["x-ridgeline-ignored-fields"] == "temprature, a.b"


def test_members_of_messages_that_nobody_reads_are_named_too(server: Live):
    messages = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "a", "refusal": None},
    ]
    asked = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True, "x": 1}}
    header = "x-ridgeline-ignored-fields"
    for stream in (True, False):
        answer = server.chat(max_tokens=1, temprature=1, stream=stream, **asked)
        assert answer.status == 200
        assert answer.headers[header] == "temprature, messages.name, chat_template_kwargs.x"
    counted = server.send("POST", "/tokenize", {**asked, "temprature": 1})
    assert counted.headers[header] == "temprature, messages.name, chat_template_kwargs.x"
    answer = server.chat(messages=[{**messages[0], "function_call": {"name": "f"}}])
    assert (answer.status, answer.error["param"]) == (400, "messages[0].function_call")


CONTROLS = "{{ messages[0].content }} effort {{ reasoning_effort }} verbosity {{ verbosity }}"
PLAIN = "{{ messages[0].content }}"
THINKS = "{{ messages[0].content }}{% if enable_thinking %} thinks{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "prompt", "ignored"),
    [
        (CONTROLS, {"reasoning_effort": "low", "verbosity": "high"}, "hi effort low verbosity high", None),
        (CONTROLS, {"verbosity": "low", "chat_template_kwargs": {"verbosity": "v"}}, "hi effort  verbosity v", None),
        (CONTROLS, {"store": False, "metadata": {}}, "hi effort  verbosity ", None),
        (CONTROLS, {"store": True, "metadata": {"a": "b"}, "x": 1}, "hi effort  verbosity ", "store, metadata, x"),
        (THINKS, {"reasoning_effort": "low"}, "hi thinks", None),
        (THINKS, {"reasoning_effort": "none", "verbosity": "low"}, "hi", "verbosity"),
        (
            "{{ messages[0].content }}",
            {"reasoning_effort": "low", "verbosity": "low", "x": 1},
            "hi",
            "x, reasoning_effort, verbosity",
        ),
    ],
)
def test_fields_that_clients_always_send(template: str, fields: dict, prompt: str, ignored: str | None):
    with live(behaviour(counts), chat_template=template) as running:
        for stream in (False, True):
            answer = running.chat(max_tokens=1, stream=stream, **fields)
            assert answer.status == 200, answer.data
            assert answer.headers.get("x-ridgeline-ignored-fields") == ignored
            assert running.engine.submits[-1].tokens == ids(prompt)


def test_every_entry_says_what_it_does():
    for field in TABLE:
        assert field.use or isinstance(field.reader, Refused), field.name
        assert field.bad, field.name


SAMPLED = [
    ({"temperature": 0.5}, "temperature", 0.5),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"top_p": 0}, "top_k", 1),
    ({"top_k": -1}, "top_k", 0),
    ({"top_k": 7}, "top_k", 7),
    ({"min_p": 0.1}, "min_p", 0.1),
    ({"presence_penalty": 1}, "presence_penalty", 1.0),
    ({"frequency_penalty": -1}, "frequency_penalty", -1.0),
    ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
    ({"logit_bias": {"7": 2}}, "logit_bias", ((7, 2.0),)),
    ({"allowed_token_ids": [7, 8]}, "allowed_token_ids", (7, 8)),
    ({"seed": 5}, "seed", 5),
    ({"n": 2}, "n", 2),
    ({"min_tokens": 2}, "min_tokens", 2),
    ({"ignore_eos": True}, "ignore_eos", True),
    ({"stop": "zz"}, "stop", ("zz",)),
    ({"stop_token_ids": [9]}, "stop_token_ids", (9,)),
    ({"include_stop_str_in_output": True}, "include_stop", True),
    ({"skip_special_tokens": False}, "skip_special_tokens", False),
    ({"prompt_logprobs": 1}, "prompt_logprobs", 1),
    ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
    ({"logprobs": True}, "logprobs", 0),
    ({"max_completion_tokens": 4, "max_tokens": None}, "max_tokens", 4),
]


@pytest.mark.parametrize(("fields", "name", "value"), SAMPLED, ids=[f"{fields}" for fields, _, _ in SAMPLED])
def test_what_is_asked_reaches_the_engine(server: Live, fields: dict, name: str, value: object):
    assert server.chat(**{"max_tokens": 3, **fields}).status == 200
    assert getattr(server.engine.submits[-1].sampling, name) == value


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, None),
        ({"priority": -3}, -3, None),
        ({"service_tier": "flex"}, 10, "flex"),
        ({"service_tier": "auto"}, 0, "default"),
    ],
)
def test_priority_and_tier(server: Live, fields: dict, priority: int, tier: str | None):
    answer = server.complete(max_tokens=1, cache_salt="tenant", **fields)
    submit = server.engine.submits[-1]
    assert (submit.priority, submit.salt) == (priority, "tenant")
    assert answer.json.get("service_tier") == tier


PAIRS = [
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop_token_ids": list(range(16))}, "stop_token_ids"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "("}, "guided_regex"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
        "response_format",
    ),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "param"), PAIRS, ids=[f"{fields}"[:60] for fields, _ in PAIRS])
def test_fields_that_do_not_go_together(server: Live, fields: dict, param: str):
    answer = server.chat(**fields)
    assert answer.status == 400, answer.data
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"prompt": [9999999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 128}, "n"),
    ],
)
def test_completion_fields_that_do_not_go_together(server: Live, fields: dict, param: str):
    answer = server.complete(**fields)
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize("missing", ["messages", "prompt"])
def test_required_fields(server: Live, missing: str):
    path = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}[missing]
    for body in ({}, {missing: None}):
        answer = server.send("POST", path, body)
        assert answer.status == 400 and answer.error["param"] == missing
