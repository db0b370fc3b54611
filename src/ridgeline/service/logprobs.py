"""Log-probabilities in the API's formats: chat's list of tokens, completions' parallel lists, vLLM's prompt list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.core.plan import TokenLogprobs
from ridgeline.service.piece import Scored
from ridgeline.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot represent."""


def chat_logprobs(tokenizer: Tokenizer, scored: Iterable[Scored]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: per token its text, bytes and alternatives."""
    return [
        {
            **_chat_token(tokenizer, entry.logprobs.token, entry.logprobs.logprob),
            "top_logprobs": [
                _chat_token(tokenizer, token, logprob)
                for token, logprob in zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
            ],
        }
        for entry in scored
    ]


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(data)}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token in the completions format: its text, or `bytes:\\x..` if it is not a sequence of whole characters."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """`choices[].logprobs` of a completion: tokens, token_logprobs, top_logprobs, text_offset, one entry per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.value: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def first(self, token: int) -> None:
        """Add the prompt's first token. Nothing precedes it, so it has no probability."""
        self._add(token_name(self._tokenizer, token), None, None, 0)

    def add(self, entry: TokenLogprobs, offset: int) -> None:
        """Add a token. The alternatives include the token itself, so there may be one more than requested."""
        name = token_name(self._tokenizer, entry.token)
        top: dict[str, float] = {}
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            top.setdefault(token_name(self._tokenizer, token), max(logprob, _MIN_LOGPROB))
        top.setdefault(name, max(entry.logprob, _MIN_LOGPROB))
        self._add(name, max(entry.logprob, _MIN_LOGPROB), top, offset)

    def extend(self, later: CompletionLogprobs) -> None:
        for key, items in later.value.items():
            self.value[key] += items

    def _add(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        for key, item in zip(self.value, (name, logprob, top, offset), strict=True):
            self.value[key].append(item)


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The extra `prompt_logprobs`: per prompt token, token id -> logprob, rank and text; None for the first token."""
    return [None, *(_prompt_token(tokenizer, entry) for entry in entries)]


def _prompt_token(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ids = [entry.token, *entry.top_ids]
    scores = zip(ids, [entry.logprob, *entry.top_logprobs], [entry.rank, *range(1, len(ids))], strict=True)
    return {
        str(token): {"logprob": max(logprob, _MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, logprob, rank in scores
    }
