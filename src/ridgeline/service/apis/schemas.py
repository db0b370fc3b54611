"""The routes of other vendors' APIs in the API description: their bodies and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.service.apis import ollama, ollama_embed, response_items
from ridgeline.service.apis.messages import COUNTED, MESSAGES
from ridgeline.service.embeddings import BODY as EMBEDDINGS_BODY
from ridgeline.service.rerank import RERANK, SCORE
from ridgeline.service.schemas import GENERATES, READS_BODY, Details, Schema, record_schema

_JSON, _EVENTS, _LINES = "application/json", "text/event-stream", "application/x-ndjson"
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_HI = [{"role": "user", "content": "Hello!"}]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Any], optional: dict[str, Any] | None = None) -> Schema:
    return {"type": "object", "required": list(properties), "properties": {**properties, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_EMBEDDING_WORDS = {
    "input": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "encoding_format": "float, or base64 of float32 numbers, the lowest byte first.",
    "dimensions": "How many numbers of a vector are kept, from the first one.",
    "normalize": "Scale vectors to length 1 (default: as the model's files say).",
    "add_special_tokens": "Add the tokens that the tokenizer adds to a text (default: true).",
    "priority": "Requests with a lower number run first.",
    "cache_salt": "Prefixes are shared only among equal salts.",
}
_RERANK_WORDS = {
    "documents": 'Texts, or objects {"text": ...}.',
    "top_n": "How many results are returned, the most relevant first (default: all).",
    "return_documents": "Results contain the texts (default: true).",
}
_SCORE_WORDS = {
    "text_1": "A text, for all of text_2, or a list with one for each.",
    "text_2": "A text or a list of texts.",
}
_OLLAMA = {"model": _STRING, "created_at": _STRING, "done": {"type": "boolean"}}
_OLLAMA_END = {
    "done_reason": {"enum": ["stop", "length", "content_filter"]},
    "total_duration": _COUNT | {"description": "Nanoseconds."},
    "prompt_eval_count": _COUNT,
    "eval_count": _COUNT,
}
_VECTOR = _list({"type": "number"})
_POOLED_USAGE = _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT})
API_ANSWERS: dict[str, Schema] = {
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _COUNT,
                        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                    }
                )
            ),
            "model": _STRING,
            "usage": _POOLED_USAGE,
        }
    ),
    "Ranking": _object(
        {
            "id": _STRING,
            "model": _STRING,
            "results": _list(
                _object(
                    {"index": _COUNT, "relevance_score": {"type": "number"}}, {"document": _object({"text": _STRING})}
                )
            ),
            "usage": _POOLED_USAGE,
        }
    ),
    "Scores": _object(
        {
            "id": _STRING,
            "object": {"const": "list"},
            "created": _COUNT,
            "model": _STRING,
            "data": _list(_object({"index": _COUNT, "object": {"const": "score"}, "score": {"type": "number"}})),
            "usage": _POOLED_USAGE,
        }
    ),
    "OllamaEmbeddings": _object(
        {"model": _STRING, "embeddings": _list(_VECTOR), "total_duration": _COUNT, "prompt_eval_count": _COUNT}
    ),
    "Message": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": _list(_object({"type": {"enum": ["thinking", "text", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": _object(
                {
                    "input_tokens": _COUNT | {"description": "Prompt tokens that were neither cached nor written."},
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
        }
    ),
    "CountedTokens": _object({"input_tokens": _COUNT}),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _STRING,
            "output": _list(_object({"id": _STRING, "type": {"enum": ["reasoning", "message", "function_call"]}})),
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "OllamaChat": _object({**_OLLAMA, "message": _object({"role": _STRING, "content": _STRING})}, _OLLAMA_END),
    "OllamaText": _object({**_OLLAMA, "response": _STRING}, _OLLAMA_END),
    "OllamaModels": _object({"models": _list(_object({"name": _STRING, "model": _STRING, "size": _COUNT}))}),
}

_RERANK = Details(
    body=record_schema(RERANK, _RERANK_WORDS, ("query", "documents")),
    example={"query": "Who lit the lamp?", "documents": ["The keeper did.", "It rained."], "top_n": 1},
    answers={_JSON: _ref("Ranking")},
    errors=GENERATES,
)
_SCORE = Details(
    body=record_schema(SCORE, _SCORE_WORDS, ("text_1", "text_2")),
    example={"text_1": "Who lit the lamp?", "text_2": ["The keeper did.", "It rained."]},
    answers={_JSON: _ref("Scores")},
    errors=GENERATES,
)
API_DETAILS: Mapping[str, Details] = {
    **dict.fromkeys(("post /rerank", "post /v1/rerank", "post /v2/rerank"), _RERANK),
    **dict.fromkeys(("post /score", "post /v1/score"), _SCORE),
    "post /api/embed": Details(
        body=record_schema(ollama_embed.EMBED, {}, ("input",)),
        example={"input": ["Hello!"]},
        answers={_JSON: _ref("OllamaEmbeddings")},
        errors=GENERATES,
    ),
    "post /api/embeddings": Details(
        body=record_schema(ollama_embed.EMBED_PROMPT, {}, ("prompt",)),
        example={"prompt": "Hello!"},
        answers={_JSON: _object({"embedding": _VECTOR})},
        errors=GENERATES,
    ),
    "post /v1/embeddings": Details(
        body=record_schema(EMBEDDINGS_BODY, _EMBEDDING_WORDS, ("input",)),
        example={"input": ["Hello!", "Good morning!"]},
        answers={_JSON: _ref("Embeddings")},
        errors=GENERATES,
    ),
    "post /v1/messages": Details(
        body=record_schema(MESSAGES, {}, ("max_tokens", "messages")),
        example={"max_tokens": 64, "messages": _HI},
        answers={_JSON: _ref("Message"), _EVENTS: _OBJECT},
        errors=GENERATES,
    ),
    "post /v1/messages/count_tokens": Details(
        body=record_schema({name: MESSAGES[name] for name in COUNTED}, {}, ("messages",)),
        example={"messages": _HI},
        answers={_JSON: _ref("CountedTokens")},
        errors=READS_BODY,
    ),
    "post /v1/responses": Details(
        body=record_schema(response_items.BODY, {}, ("input",)),
        example={"input": "Hello!", "max_output_tokens": 64},
        answers={_JSON: _ref("Response"), _EVENTS: _OBJECT},
        errors=GENERATES,
    ),
    "get /v1/responses/{id}": Details(answers={_JSON: _ref("Response")}, errors=(404,)),
    "get /v1/responses/{id}/input_items": Details(answers={_JSON: _OBJECT}, errors=(404,)),
    "delete /v1/responses/{id}": Details(answers={_JSON: _OBJECT}, errors=(404,)),
    "post /v1/responses/{id}/cancel": Details(answers={_JSON: _OBJECT}, errors=(400, 404)),
    "post /api/chat": Details(
        body=record_schema(ollama.CHAT, {}, ("messages",)),
        example={"messages": _HI, "stream": False},
        answers={_JSON: _ref("OllamaChat"), _LINES: _ref("OllamaChat")},
        errors=GENERATES,
    ),
    "post /api/generate": Details(
        body=record_schema(ollama.GENERATE, {}, ("prompt",)),
        example={"prompt": "Hello!", "stream": False},
        answers={_JSON: _ref("OllamaText"), _LINES: _ref("OllamaText")},
        errors=GENERATES,
    ),
    "get /api/tags": Details(answers={_JSON: _ref("OllamaModels")}, errors=(503,)),
    "get /api/ps": Details(answers={_JSON: _ref("OllamaModels")}, errors=(503,)),
    "post /api/show": Details(
        body=record_schema(ollama.SHOW, {}), example={}, answers={_JSON: _OBJECT}, errors=READS_BODY
    ),
    "get /api/version": Details(answers={_JSON: _ref("Version")}),
}
