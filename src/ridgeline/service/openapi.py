"""The API description, OpenAPI 3.1, from the application's routes, the table of fields and the readers of bodies.

A route's summary is its handler's docstring. Parameters, bodies and answers of routes are listed in `DETAILS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

import ridgeline
from ridgeline.service.adapter_routes import LOAD, UNLOAD
from ridgeline.service.answers import ANSWERS
from ridgeline.service.apis.schemas import API_ANSWERS, API_DETAILS
from ridgeline.service.batches.routes import BATCH_BODY, BATCH_PAGE, FILE_PAGE, MAX_BATCH_PAGE, MAX_FILE_PAGE
from ridgeline.service.batches.schemas import BATCH_ANSWERS
from ridgeline.service.debug import PROFILE
from ridgeline.service.declared import HEADERS, RUN_ID, RUN_ID_LENGTH
from ridgeline.service.guard import FRONT
from ridgeline.service.keys.routes import DAYS, STEPS
from ridgeline.service.routes import DETOKENIZE, TOKENIZE
from ridgeline.service.schemas import GENERATES, READS_BODY, Details, Schema, body_schema, record_schema
from ridgeline.service.sleep import WAIT_S
from ridgeline.service.sleep_routes import LEVELS, MODES, UPDATE

ROUTES = web.RouteTableDef()
VERSION = "3.1.0"
DOCUMENT = web.AppKey("document", bytes)
"""The API description as JSON."""

OPEN = frozenset({"/", "/health", "/dashboard", "/chat", "/docs", "/openapi.json", "/dashboard/{name}"})
"""Paths that need no key."""
TAGS = {
    "inference": "Routes of the OpenAI API, and the tokenizer.",
    "operation": "Health, metrics, ended requests, the prefix cache.",
    "pages": "Pages for browsers, and the description of this API.",
}
_SECURITY = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "The key of --api-key, or one of --api-keys. A server without these options requires none.",
    },
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key in another header."},
}
_TEMPLATE = re.compile(r"{(\w+)}")
_TOKENIZE_DESCRIPTIONS = {
    "model": "Name of the served model. Status 404 for another name.",
    "prompt": "Text to tokenize. Give either prompt or messages.",
    "messages": "A conversation, rendered with the model's chat template.",
    "tools": "Functions that the chat template shows to the model.",
    "add_special_tokens": "Add the tokens that the tokenizer puts around text (default: true for prompt, false for messages).",
    "add_generation_prompt": "Open the assistant's turn (default true).",
    "continue_final_message": "Leave the last message open; needs add_generation_prompt false.",
    "chat_template_kwargs": "Variables of the template.",
    "return_token_strs": "Also return the text of each token.",
    "tokens": "Token ids.",
}

_PROFILE_DESCRIPTIONS = {
    "model": "A model of this server (default: the only one, or the one used last).",
    "seconds": "How long to record (default 2).",
    "steps": "Record this many steps of the engine instead, and at most 60 seconds.",
    "with_stack": "Also record calls of Python functions, which slows the engine (default false).",
}

ERRORS = {
    400: "The request is not valid. The error's param names the field.",
    401: "The API key is missing or wrong.",
    403: "The API key does not allow it.",
    404: "There is no such model, request, file, batch or page.",
    408: "The body did not arrive in time.",
    409: "The state of the file, batch or engine does not allow it.",
    413: "The body is too large.",
    429: "The queue is full, or a limit of the API key is reached: the header retry-after says when to try again. Or the budget of "
    "the API key is spent.",
    500: "The engine failed.",
    507: "The disk, or the space for files, is full.",
    503: "The server is loading or shutting down, or the engine is not healthy.",
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_DECLARED: Mapping[str, Schema] = {
    name: {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": f"Limit of this request's {limit.upper()} in milliseconds.",
    }
    for name, limit in HEADERS.items()
}
_IDS: Mapping[str, Schema] = {
    "x-request-id": {"type": "string", "description": "Your id for the request. /requests/{id} accepts it."},
    RUN_ID: {
        "type": "string",
        "maxLength": RUN_ID_LENGTH,
        "description": "Your id for the agent run that the request belongs to. /runs/{id} accepts it.",
    },
}
_SINCE = {
    "type": "number",
    "minimum": 0,
    "description": "Unix seconds: also return newer readings of the last hour.",
}
_ORDER = {
    "enum": ["recent", "slowest", "batch"],
    "default": "recent",
    "description": "The latest or the slowest online requests first, or the latest rows of batches.",
}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20, "description": "Number of requests."}
_MODEL = {"type": "string", "description": "Name of the model. Needed only if the server serves several."}
_SLEEP: Mapping[str, Schema] = {
    "level": {
        "enum": list(LEVELS),
        "default": LEVELS[0],
        "description": "1: weights move to host memory. 2: they are read from the model folder again.",
    },
    "mode": {
        "enum": list(MODES),
        "default": MODES[0],
        "description": "wait: running requests end by themselves. abort: they end with an error.",
    },
    "timeout_s": {
        "type": "number",
        "default": WAIT_S,
        "description": "Seconds in which running requests may end. With mode abort they are ended at once.",
    },
    "model": _MODEL,
}
_UPDATE_DESCRIPTIONS = {
    "model_path": "Folder of a model of the same architecture.",
    "model": str(_MODEL["description"]),
    "abort_all_requests": "End the running requests, instead of waiting for them.",
    "timeout_s": str(_SLEEP["timeout_s"]["description"]),
}
_LORA_DESCRIPTIONS = {
    "lora_name": "Name by which requests choose the adapter, as their model.",
    "lora_path": "Folder of the adapter on the server, as PEFT saves it.",
}
_PURPOSE = {"type": "string", "description": "Only files with this purpose: batch or batch_output."}
_FILE_ORDER = {"enum": ["asc", "desc"], "default": "desc", "description": "The oldest or the latest files first."}
_STEP = {"enum": list(STEPS), "default": "day", "description": "The step of the sums, in UTC."}
_TIME = {
    "type": "string",
    "description": f"Unix seconds, or a time in ISO 8601. Without since, {DAYS} days; without until, now.",
}
_KEY_NAME = {"type": "string", "description": "Only this API key."}
_AFTER = {"type": "string", "description": "The id after which the page begins."}


def _page_limit(default: int, most: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default, "description": "Objects in a page."}


_UPLOAD: Schema = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary", "description": "One request per line."},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_BATCH_DESCRIPTIONS = {
    "input_file_id": "The uploaded file with one request per line.",
    "endpoint": "The endpoint of all requests: /v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings.",
    "completion_window": "Time after which rows that have not run expire: 24h, or another number of m, h or d.",
    "metadata": "Up to 16 pairs of strings.",
    "output_expires_after": "When the result files are deleted: {anchor: created_at, seconds} (default: 30 days).",
}
_JSON, _HTML, _EVENTS, _TEXT = "application/json", "text/html", "text/event-stream", "text/plain"
_MESSAGES = [{"role": "user", "content": "Hello!"}]

DETAILS: Mapping[str, Details] = {
    "post /v1/chat/completions": Details(
        headers={**_IDS, **_DECLARED},
        body=_ref("ChatRequest"),
        example={"messages": _MESSAGES, "max_tokens": 64, "stream": True},
        answers={_JSON: _ref("ChatCompletion"), _EVENTS: _ref("ChatCompletionChunk")},
        errors=GENERATES,
    ),
    "post /v1/completions": Details(
        headers={**_IDS, **_DECLARED},
        body=_ref("CompletionRequest"),
        example={"prompt": "Once upon a time", "max_tokens": 64},
        answers={_JSON: _ref("Completion"), _EVENTS: _ref("Completion")},
        errors=GENERATES,
    ),
    **API_DETAILS,
    "post /v1/files": Details(
        body=_UPLOAD, body_type="multipart/form-data", answers={_JSON: _ref("File")}, errors=(400, 404, 408, 413, 507)
    ),
    "get /v1/files": Details(
        {"purpose": _PURPOSE, "order": _FILE_ORDER, "limit": _page_limit(FILE_PAGE, MAX_FILE_PAGE), "after": _AFTER},
        answers={_JSON: _ref("Files")},
        errors=(400, 404),
    ),
    "get /v1/files/{id}": Details(answers={_JSON: _ref("File")}, errors=(404,)),
    "get /v1/files/{id}/content": Details(answers={"application/octet-stream": {"type": "string"}}, errors=(404,)),
    "delete /v1/files/{id}": Details(answers={_JSON: _ref("DeletedFile")}, errors=(404, 409)),
    "post /v1/batches": Details(
        body=record_schema(BATCH_BODY, _BATCH_DESCRIPTIONS, ("input_file_id", "endpoint", "completion_window")),
        example={"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        answers={_JSON: _ref("Batch")},
        errors=(400, 404, 408, 413, 507),
    ),
    "get /v1/batches": Details(
        {"limit": _page_limit(BATCH_PAGE, MAX_BATCH_PAGE), "after": _AFTER},
        answers={_JSON: _ref("Batches")},
        errors=(400, 404),
    ),
    "get /v1/batches/{id}": Details(answers={_JSON: _ref("Batch")}, errors=(404,)),
    "post /v1/batches/{id}/cancel": Details(answers={_JSON: _ref("Batch")}, errors=(404, 409, 507)),
    "get /v1/models": Details(answers={_JSON: _ref("Models")}, errors=(503,)),
    "get /v1/models/{name}": Details(answers={_JSON: _ref("Model")}, errors=(404, 503)),
    "post /tokenize": Details(
        body=record_schema(TOKENIZE, _TOKENIZE_DESCRIPTIONS),
        example={"prompt": "Hello!", "return_token_strs": True},
        answers={_JSON: _ref("Tokens")},
        errors=READS_BODY,
    ),
    "post /detokenize": Details(
        body=record_schema(DETOKENIZE, _TOKENIZE_DESCRIPTIONS, ("tokens",)),
        example={"tokens": [1, 2, 3]},
        answers={_JSON: _ref("Text")},
        errors=READS_BODY,
    ),
    "get /v1/usage": Details(
        {"by": _STEP, "since": _TIME, "until": _TIME, "key": _KEY_NAME},
        answers={_JSON: _ref("KeyUsage")},
        errors=(400, 404),
    ),
    "get /admin/prompts": Details(
        {"after": {"type": "string", "description": "Id of the last event that the caller has."}},
        answers={_EVENTS: {"type": "string"}},
        errors=(403, 404),
    ),
    "post /reset_prefix_cache": Details(answers={_JSON: {"type": "object"}}, errors=(403, 503)),
    "post /sleep": Details(
        _SLEEP,
        answers={_JSON: {"type": "object"}},
        errors=(400, 403, 404, 503),
    ),
    "post /wake_up": Details({"model": _MODEL}, answers={_JSON: {"type": "object"}}, errors=(403, 404, 503)),
    "get /is_sleeping": Details({"model": _MODEL}, answers={_JSON: {"type": "object"}}, errors=(403, 404, 503)),
    "post /v1/load_lora_adapter": Details(
        body=record_schema(LOAD, _LORA_DESCRIPTIONS, tuple(LOAD)),
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
        answers={_JSON: {"type": "object"}},
        errors=(*READS_BODY, 403),
    ),
    "post /v1/unload_lora_adapter": Details(
        body=record_schema(UNLOAD, _LORA_DESCRIPTIONS, tuple(UNLOAD)),
        example={"lora_name": "sql"},
        answers={_JSON: {"type": "object"}},
        errors=(*READS_BODY, 403),
    ),
    "post /debug/profile": Details(
        body=record_schema(PROFILE, _PROFILE_DESCRIPTIONS),
        example={"seconds": 2},
        answers={"application/gzip": {"type": "string", "format": "binary"}},
        errors=(400, 403, 404, 409, 503),
    ),
    "post /update_weights_from_disk": Details(
        body=record_schema(UPDATE, _UPDATE_DESCRIPTIONS, ("model_path",)),
        example={"model_path": "/models/step-200"},
        answers={_JSON: {"type": "object"}},
        errors=(*READS_BODY, 403),
    ),
    "get /admin/stats": Details(answers={_JSON: {"type": "object"}}, errors=(403, 503)),
    "get /health": Details(answers={_JSON: _ref("Health")}, errors=(503,)),
    "get /version": Details(answers={_JSON: _ref("Version")}),
    "get /metrics": Details(answers={_TEXT: {"type": "string"}}),
    "get /requests": Details({"order": _ORDER, "limit": _LIMIT}, answers={_JSON: _ref("Ledger")}, errors=(400, 403)),
    "get /requests/{id}": Details(answers={_JSON: _ref("LedgerRow")}, errors=(403, 404)),
    "get /requests/{id}/why": Details(answers={_JSON: _ref("Why")}, errors=(403, 404)),
    "get /runs/{id}": Details(answers={_JSON: _ref("AgentRun")}, errors=(403, 404)),
    "get /dashboard/data": Details({"since": _SINCE}, answers={_JSON: {"type": "object"}}, errors=(400, 403)),
    "get /": Details(answers={_JSON: _ref("Home"), _HTML: {"type": "string"}}),
    "get /openapi.json": Details(answers={_JSON: {"type": "object"}}),
    "get /dashboard": Details(answers={_HTML: {"type": "string"}}),
    "get /chat": Details(answers={_HTML: {"type": "string"}}),
    "get /docs": Details(answers={_HTML: {"type": "string"}}),
    "get /dashboard/{name}": Details(answers={"*/*": {"type": "string"}}, errors=(404,)),
}
"""By method and path. A route without an entry is described by its docstring and path."""
_PATH_DESCRIPTIONS = {
    "id": "The id of the answer's body, or of its header x-request-id; of an agent run, that of the header x-run-id; of a file or "
    "batch, the id of its object.",
    "name": "Name of the model as /v1/models lists it, or of a file under /dashboard/.",
}


@ROUTES.get("/openapi.json")
async def openapi(request: web.Request) -> web.Response:
    """This description, OpenAPI 3.1."""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


def add_document(app: web.Application) -> None:
    """Store the description of the application's current routes."""
    app[DOCUMENT] = msgspec.json.encode(document(app))


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        assert route.resource is not None
        if route.method != "HEAD":  # aiohttp adds HEAD to every GET route
            path, method = route.resource.canonical, route.method.lower()
            paths.setdefault(path, {})[method] = _operation(method, path, route.handler)
    return {
        "openapi": VERSION,
        "info": {
            "title": f"Ridgeline: {app[FRONT].metrics.model_name}",
            "version": ridgeline.__version__,
            "description": "An LLM inference server with the OpenAI API. A field that is null counts as not given. Unknown "
            "fields are accepted and named in the answer's header x-ridgeline-ignored-fields.",
        },
        "servers": [{"url": app[FRONT].prefix or "/"}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "security": [{name: []} for name in _SECURITY],
        "paths": dict(sorted(paths.items(), key=lambda entry: list(TAGS).index(_tag(entry[0])))),
        "components": {
            "schemas": {
                "ChatRequest": body_schema("chat"),
                "CompletionRequest": body_schema("completions"),
                **ANSWERS,
                **BATCH_ANSWERS,
                **API_ANSWERS,
            },
            "securitySchemes": _SECURITY,
        },
    }


def _operation(method: str, path: str, handler: Any) -> dict[str, Any]:
    details = DETAILS.get(f"{method} {path}", Details())
    summary, _, description = (inspect.getdoc(handler) or f"{method.upper()} {path}").partition("\n\n")
    errors = sorted({*details.errors, *(() if path in OPEN else (401,))})
    operation: dict[str, Any] = {
        "operationId": "_".join([method, *re.findall(r"\w+", path)]),
        "tags": [_tag(path)],
        "summary": " ".join(summary.split()),
        "responses": {"200": _answer(details), **{str(status): _error(status) for status in errors}},
    }
    if description:
        operation["description"] = " ".join(description.split())
    if path in OPEN:
        operation["security"] = []
    if parameters := _parameters(path, details):
        operation["parameters"] = parameters
    if details.body is not None:
        content = {"schema": details.body, **({} if details.example is None else {"example": details.example})}
        operation["requestBody"] = {"required": True, "content": {details.body_type: content}}
    return operation


def _parameters(path: str, details: Details) -> list[dict[str, Any]]:
    parameters: list[tuple[str, str, Schema]] = [
        ("path", name, {"type": "string", "description": _PATH_DESCRIPTIONS.get(name, name)})
        for name in _TEMPLATE.findall(path)
    ]
    parameters += [("query", name, schema) for name, schema in details.query.items()]
    parameters += [("header", name, schema) for name, schema in details.headers.items()]
    return [
        {
            "name": name,
            "in": location,
            "required": location == "path",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for location, name, schema in parameters
    ]


def _answer(details: Details) -> dict[str, Any]:
    description = (
        "The answer. Server-sent events if the body has stream true." if _EVENTS in details.answers else "The answer."
    )
    headers = {"x-request-id": {"description": "The request's id.", "schema": {"type": "string"}}}
    content = {kind: {"schema": schema} for kind, schema in details.answers.items()}
    return {"description": description, "headers": headers, **({"content": content} if content else {})}


def _error(status: int) -> dict[str, Any]:
    return {"description": ERRORS[status], "content": {_JSON: {"schema": _ref("Error")}}}


def _tag(path: str) -> str:
    if path.startswith(("/v1/", "/v2/")) or path in ("/tokenize", "/detokenize", "/rerank", "/score"):
        return "inference"
    return "pages" if path in OPEN and path != "/health" else "operation"
