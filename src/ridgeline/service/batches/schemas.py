"""JSON schemas of files and batches, for the API description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ridgeline.service.batches.objects import Status

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_MAYBE_TEXT = {"type": ["string", "null"]}
_MAYBE_TIME = {"type": ["integer", "null"], "description": "Unix seconds; null until it is reached."}
_TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _page(name: str) -> dict[str, Any]:
    items = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    return _object(
        {
            "object": {"const": "list"},
            "data": items,
            "first_id": _MAYBE_TEXT,
            "last_id": _MAYBE_TEXT,
            "has_more": {"type": "boolean"},
        }
    )


_PROBLEM = _object(
    {"code": _STRING, "message": _STRING, "param": _MAYBE_TEXT, "line": {"type": ["integer", "null"], "minimum": 1}}
)
_USAGE = _object(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": _object({"cached_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)

BATCH_ANSWERS: dict[str, dict[str, Any]] = {
    "File": _object(
        {
            "id": _STRING,
            "object": {"const": "file"},
            "bytes": _COUNT,
            "created_at": _COUNT,
            "filename": _STRING,
            "purpose": {"enum": ["batch", "batch_output"]},
            "status": {"const": "processed"},
            "status_details": {"type": "null"},
            "expires_at": _MAYBE_TIME,
        }
    ),
    "Files": _page("File"),
    "DeletedFile": _object({"id": _STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": _object(
        {
            "id": _STRING,
            "object": {"const": "batch"},
            "endpoint": _STRING,
            "model": {"type": ["string", "null"], "description": "The model that the rows name, if it is the same."},
            "errors": {
                "anyOf": [
                    _object({"object": {"const": "list"}, "data": {"type": "array", "items": _PROBLEM}}),
                    {"type": "null"},
                ],
                "description": "Why the batch failed. Errors of single rows are in the error file.",
            },
            "input_file_id": _STRING,
            "completion_window": _STRING,
            "status": {"enum": list(get_args(Status))},
            "output_file_id": _MAYBE_TEXT,
            "error_file_id": _MAYBE_TEXT,
            "created_at": _COUNT,
            **{f"{name}_at": _MAYBE_TIME for name in _TIMES},
            "request_counts": _object({"total": _COUNT, "completed": _COUNT, "failed": _COUNT}),
            "usage": _USAGE,
            "metadata": {"type": ["object", "null"], "additionalProperties": _STRING},
        }
    ),
    "Batches": _page("Batch"),
}
