"""JSON schemas of answers, for the API description. Tests validate real answers against them."""

from __future__ import annotations

from typing import Any

from ridgeline.metrics.agent_runs import SILENCE_S

_STRING = {"type": "string"}
_TEXT = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "minimum": 0}
_SHARES = {
    "joules": _SECONDS,
    "prompt_joules": _SECONDS | {"description": "Energy of its part of steps up to the first token."},
    "output_joules": _SECONDS | {"description": "Energy of its part of steps after the first token."},
    "cost": _SECONDS,
}
_MAYBE_SECONDS = {"type": ["number", "null"], "minimum": 0}
_LOGPROBS = {"type": ["object", "null"], "description": "Log-probabilities, if requested."}
_WITHDRAWAL = {
    "description": "The whole choice is withdrawn, also what was sent of it; `replacement` is its text now.",
    "type": "object",
    "required": ["reason", "replacement"],
    "properties": {"reason": {"enum": ["flagged", "unjudged"]}, "replacement": _STRING},
}
_STOP_REASON = {
    "type": ["string", "integer", "null"],
    "description": "The stop string or token id that ended the choice.",
}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _finish(*reasons: str | None) -> dict[str, Any]:
    return {"enum": list(reasons), "description": "Why the choice ended; null while it runs."}


_BILLED = {
    "description": "Tokens at the full price of an input and an output token that cost as much; US dollars, null without prices.",
    **_object({"input_tokens": _SECONDS, "output_tokens": _SECONDS, "usd": {"type": ["number", "null"], "minimum": 0}}),
}
_CALL = _object(
    {"function": _object({}, {"name": _STRING, "arguments": _STRING})},
    {"id": _STRING, "type": {"const": "function"}, "index": _COUNT},
)
_MESSAGE = {
    "role": {"const": "assistant"},
    "content": _TEXT,
    "reasoning_content": {"type": "string", "description": "The model's reasoning, separate from its answer."},
    "tool_calls": _list(_CALL),
    "refusal": {"type": "null"},
}
_HEAD = {"id": _STRING, "created": _COUNT, "model": _STRING, "system_fingerprint": _STRING}
_TIER = {"service_tier": _STRING}

ANSWERS: dict[str, dict[str, Any]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string", "description": "What is wrong, and the remedy."},
                    "type": _STRING,
                    "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                    "code": _TEXT,
                }
            )
        },
        {"request_id": {"type": "string", "description": "That of the header x-request-id."}},
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object(
                {"cached_tokens": _COUNT, "cache_write_tokens": _COUNT},
                {"cache_write_details": _object({"ephemeral_5m_tokens": _COUNT, "ephemeral_1h_tokens": _COUNT})},
            ),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        },
        {
            "answer_cached": {"const": True, "description": "The answer comes from the answer cache."},
            "billed": _BILLED,
            "prompt_cache": _list(
                _object(
                    {
                        "tokens": {**_COUNT, "description": "Tokens of the prefix, in whole blocks."},
                        "ttl": _STRING,
                        "state": {"enum": ["written", "renewed", "refused"]},
                        "reason": {**_TEXT, "description": "Why it was refused."},
                        "lost": {**_TEXT, "description": "Why an earlier pin of this prefix was lost."},
                    }
                )
            ),
        },
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object({"role": _MESSAGE["role"], "content": _TEXT}, _MESSAGE),
                        "finish_reason": _finish("stop", "length", "tool_calls", "content_filter"),
                    },
                    {"logprobs": _LOGPROBS, "withdrawal": _WITHDRAWAL, "stop_reason": _STOP_REASON},
                )
            ),
            "usage": _ref("Usage"),
        },
        _TIER,
    ),
    "ChatCompletionChunk": {
        "description": "The data of one event. The last event's data is [DONE]; an error is an event with the error object.",
        **_object(
            {
                **_HEAD,
                "object": {"const": "chat.completion.chunk"},
                "choices": _list(
                    _object(
                        {
                            "index": _COUNT,
                            "delta": _object({}, _MESSAGE),
                            "finish_reason": _finish("stop", "length", "tool_calls", "content_filter", None),
                        },
                        {"logprobs": _LOGPROBS, "withdrawal": _WITHDRAWAL, "stop_reason": _STOP_REASON},
                    )
                ),
            },
            {**_TIER, "usage": {"anyOf": [_ref("Usage"), {"type": "null"}]}},
        ),
    },
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _STRING,
                        "finish_reason": _finish("stop", "length", "content_filter", None),
                    },
                    {
                        "logprobs": _LOGPROBS,
                        "withdrawal": _WITHDRAWAL,
                        "stop_reason": _STOP_REASON,
                        "prompt_logprobs": {"type": "array"},
                    },
                )
            ),
        },
        {**_TIER, "usage": {"anyOf": [_ref("Usage"), {"type": "null"}]}},
    ),
    "Model": _object(
        {"id": _STRING, "object": {"const": "model"}, "created": _COUNT, "owned_by": _STRING},
        {
            "root": _STRING,
            "parent": {"type": "null"},
            "max_model_len": _COUNT,
            "state": {"enum": ["unloaded", "loading", "awake", "asleep", "failed"]},
            "problem": _STRING,
        },
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}, {"token_strs": _list(_STRING)}
    ),
    "Text": _object({"prompt": _STRING}),
    "Health": _object({"status": {"const": "ok"}, "step": {"type": "integer"}}),
    "Version": _object({"version": _STRING}),
    "Home": _object({"name": {"const": "ridgeline"}, "version": _STRING, "model": _STRING, "docs": _STRING}),
    "KeyUsage": _object(
        {
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {
                        "object": {"const": "usage"},
                        "start": _COUNT | {"description": "Unix seconds at which the hour, day or month begins."},
                        "key": {"type": "string", "description": "Name of the API key."},
                        "requests": _COUNT,
                        "prompt_tokens": _COUNT,
                        "cached_tokens": _COUNT,
                        "output_tokens": _COUNT,
                        "cost": _SECONDS | {"description": "USD."},
                    }
                )
            ),
        }
    ),
    "LedgerRow": _object(
        {
            "id": {"type": "string", "description": "The id of the answer's body."},
            "request_id": {"type": "string", "description": "The id of the header x-request-id."},
            "run_id": {"type": "string", "description": "The id of the header x-run-id, empty without one."},
            "arrived_at": _SECONDS,
            "prompt_tokens": _COUNT,
            "cached_tokens": _COUNT,
            "output_tokens": _COUNT,
            "finish_reasons": _list(_STRING),
            "cut": {"type": "string", "description": "Why it ended early, empty if it did not."},
            "verdict": {"type": "string", "description": "good, the first missed limit, or why it ended early."},
            "e2e_s": _SECONDS,
            "ttft_s": _MAYBE_SECONDS,
            "publish_s": _MAYBE_SECONDS,
            "tpot_s": _MAYBE_SECONDS,
            "batch": {"type": "boolean", "description": "Whether it is a row of a batch."},
            "price_factor": {
                "type": "number",
                "description": "Price relative to an online request: 0.5 for rows of batches.",
            },
            "billed": _BILLED,
            "answer_cached": {"type": "boolean", "description": "Whether its answer came from the answer cache."},
            "cache_writes": {"type": "object", "description": "Prompt tokens computed and pinned, by lifetime."},
            "cache_token_s": {"type": "number", "description": "Tokens times seconds of storage that it added."},
            **_SHARES,
        }
    ),
    "Ledger": _object({"object": {"const": "list"}, "data": _list(_ref("LedgerRow"))}),
    "AgentRun": _object(
        {
            "id": {"type": "string", "description": "The id of the header x-run-id."},
            "arrived_at": _SECONDS,
            "ended": {"type": "boolean", "description": f"Whether no request came for {SILENCE_S:g} s."},
            "open_calls": _COUNT,
            "calls": _COUNT,
            "cut_calls": _COUNT,
            "prompt_tokens": _COUNT,
            "cached_tokens": _COUNT,
            "output_tokens": _COUNT,
            "hidden_tokens": _COUNT,
            "publish_s": {
                **_MAYBE_SECONDS,
                "description": "From the arrival of the first request to the first visible content of the last one.",
            },
            "e2e_s": _SECONDS,
            "device_s": _SECONDS,
            "joules": _SECONDS,
            "prompt_joules": _SECONDS,
            "output_joules": _SECONDS,
            "cost": _SECONDS,
            "requests": _list(_STRING),
        }
    ),
    "Why": _object(
        {
            "id": _STRING,
            "request_id": _STRING,
            "summary": _STRING,
            "verdict": _STRING,
            "blame": {"enum": ["", "error", "queue", "prefill", "decode", "client"]},
            "reasons": _list(_STRING),
            "numbers": {"type": "object"},
            **_SHARES,
        }
    ),
}
