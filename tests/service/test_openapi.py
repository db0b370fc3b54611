"""The API's description: valid OpenAPI 3.1, complete, and true of requests and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator

from ridgeline.service.app import make_app
from ridgeline.service.fields import TABLE, Field, Route
from ridgeline.service.readers import Refused
from ridgeline.service.schemas import body_schema, field_schema, reader_schema

from .live import Live, behaviour, live, says

OFFICIAL = json.loads((Path(__file__).parents[1] / "data" / "openapi-3.1.json").read_text())
"""The JSON schema of OpenAPI 3.1 documents by the OpenAPI Initiative (Apache-2.0)."""
CASES = [(route, field) for field in TABLE for route in field.routes]
NEEDS_MORE_THAN_A_SCHEMA = [
    ("best_of", 7),  # is compared with n
    ("guided_json", "{"),  # is JSON in a string
    ("grammar", 'start: "a"'),
    ("dry_sequence_breakers", "["),
    ("dry_sequence_breakers", '{"a": 1}'),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),  # one of several members that may each be null
]
"""Bad values that only the reader can tell."""


@pytest.fixture(scope="module")
def api(polite: Live) -> dict[str, Any]:
    return polite.get("/openapi.json").json


def check(api: dict[str, Any], name: str, value: Any) -> None:
    """Hold a value against one of the document's schemas."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": api["components"]}
    jsonschema.validate(value, schema, Draft202012Validator)


def test_the_document_is_valid(api: dict[str, Any]) -> None:
    jsonschema.validate(api, OFFICIAL, Draft202012Validator)
    for schema in api["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for methods in api["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere(api: dict[str, Any]) -> None:
    text = json.dumps(api)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in api["components"]["schemas"]


def test_every_route_is_described(polite: Live, api: dict[str, Any]) -> None:
    app = make_app(polite.server.front)
    for route in app.router.routes():
        if route.method == "HEAD":
            continue
        operation = api["paths"][route.resource.canonical][route.method.lower()]
        assert operation["summary"].endswith("."), route
        assert operation["responses"]["200"].get("content"), route
    assert sum(map(len, api["paths"].values())) == sum(route.method != "HEAD" for route in app.router.routes())


def test_which_routes_need_a_key() -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        api = server.get("/openapi.json").json
        for path, methods in api["paths"].items():
            for method, operation in methods.items():
                place = path.replace("{name}", "style.css").replace("{id}", "x")
                refused = server.send(method.upper(), place).status == 401
                assert refused == (operation.get("security") != []), (method, path)
                assert refused == ("401" in operation["responses"]), (method, path)


@pytest.mark.parametrize(("route", "field"), CASES, ids=[f"{route}-{field.name}" for route, field in CASES])
def test_examples_of_the_table(route: Route, field: Field) -> None:
    validator = Draft202012Validator(field_schema(field, route))
    for value in field.good:
        validator.validate(value)
    assert validator.is_valid(None) == (field.name not in ("messages", "prompt")), "null counts as not given"
    passed = [value for value in field.bad if validator.is_valid(value)]
    assert passed == [value for name, value in NEEDS_MORE_THAN_A_SCHEMA if name == field.name]


def test_what_a_field_does_and_why_it_is_refused_is_in_its_schema() -> None:
    for route in ("chat", "completions"):
        for name, schema in body_schema(route)["properties"].items():
            assert schema["description"], name
    refused = {field.name for field in TABLE if isinstance(field.reader, Refused)}
    properties = body_schema("chat")["properties"] | body_schema("completions")["properties"]
    assert {name for name, schema in properties.items() if "x-ridgeline-refused" in schema} == refused


def test_a_reader_of_a_new_kind_is_described_by_its_words() -> None:
    class Strange:
        expects = "a colour"

        def read(self, name: str, value: Any) -> Any:
            return value

    assert reader_schema(Strange()) == {"description": "Expected a colour."}


def test_real_answers_are_as_described(polite: Live, api: dict[str, Any]) -> None:
    chat = polite.chat(logprobs=True)
    check(api, "ChatCompletion", chat.json)
    check(api, "Usage", chat.json["usage"])
    for event in polite.chat(stream=True, stream_options={"include_usage": True}).events:
        check(api, "ChatCompletionChunk", event)
    check(api, "Completion", polite.complete(logprobs=1).json)
    for event in polite.complete(stream=True).events:
        check(api, "Completion", event)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    check(api, "ChatCompletion", polite.chat(tools=tools).json)
    check(api, "Error", polite.chat(temperature=7).json)
    check(api, "Models", polite.get("/v1/models").json)
    check(api, "Health", polite.get("/health").json)
    check(api, "Version", polite.get("/version").json)
    check(api, "Home", polite.get("/").json)
    check(api, "Tokens", polite.send("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}).json)
    check(api, "Text", polite.send("POST", "/detokenize", {"tokens": [1]}).json)
    name = chat.json["id"]
    polite.until(lambda: polite.server.front.metrics.live.find(name) is not None)
    check(api, "Ledger", polite.get("/requests").json)
    check(api, "LedgerRow", polite.get(f"/requests/{name}").json)
    polite.chat({"x-run-id": "described"})
    check(api, "AgentRun", polite.get("/runs/described").json)
    check(api, "Why", polite.get(f"/requests/{name}/why").json)


def test_the_examples_of_the_routes_are_answered(polite: Live, api: dict[str, Any]) -> None:
    tried = 0
    for path, methods in api["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            # The example of batches names a file of somebody else; profiles need a key, which this server has not.
            status = {"/v1/batches": 404, "/debug/profile": 403}.get(path, 200)
            assert polite.send("POST", path, body["example"]).status == status, path
            tried += 1
    assert tried == 23
