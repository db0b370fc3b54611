"""Scores from a server with the OpenAI API. Prompts are sent as token ids, and the server returns their log-probabilities.

Servers that support `prompt_logprobs` (Ridgeline, vLLM) name alternatives by id. Other servers are called with `echo` and
`logprobs` and name alternatives by text. A text that belongs to several tokens or contains partial characters is ignored.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.reach import reason
from ridgeline.quality.scores import Progress, Scores, gather
from ridgeline.quality.texts import Window
from ridgeline.text.tokenizer import Tokenizer

CONCURRENT_REQUESTS = 8
"""Requests in flight: enough to fill a batch, and within the queue limit of most servers."""
REPEATS = 3
"""Answers of each length that decode_rate measures. The shortest time counts."""
_UNKNOWN_LOGSUMEXP = float("nan")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server with the OpenAI API."""

    url: str
    """With or without /v1."""
    model: str = ""
    """Name of the model on the server. Empty: the first one that the server lists."""
    api_key: str = ""
    timeout_s: float = 600.0

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the response. Raises EngineFailed with the server's message."""
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        url = self.url.rstrip("/").removesuffix("/v1") + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise EngineFailed(
                f"{url} answered with status {error.code}: {error.read(600).decode('utf-8', 'replace')}"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EngineFailed(f"The answer of {url} is not JSON: {error}.") from None
        except (OSError, ValueError) as error:
            raise EngineFailed(f"Cannot reach {url}: {reason(error)}.") from None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists."""
        response = self.call("/v1/models")
        try:
            return str(response["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"{self.url} lists no model: give --reference-model or --candidate-model.", param="model"
            ) from None


def decode_rate(endpoint: Endpoint, prompt: Sequence[int], tokens: int) -> float:
    """Measure the decode rate of one greedy request at a time, tokens per second after the first token.

    The rate follows from the shortest of REPEATS answers of one token and of `tokens` + 1 tokens. The server's `usage` counts
    the tokens. End tokens are ignored if the server supports `ignore_eos`.
    """
    model = endpoint.model or endpoint.first_model()
    body = {"model": model, "prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}

    def run(max_tokens: int) -> tuple[float, int]:
        start = time.perf_counter()
        response = endpoint.call("/v1/completions", body | {"max_tokens": max_tokens})
        return time.perf_counter() - start, int(response["usage"]["completion_tokens"])

    run(tokens + 1)
    first_s, total_s, completion_tokens = float("inf"), float("inf"), 0
    for _ in range(REPEATS):
        first_s = min(first_s, run(1)[0])
        seconds, completion_tokens = run(tokens + 1)
        total_s = min(total_s, seconds)
    return (completion_tokens - 1) / max(total_s - first_s, 1e-9)


class ServerScorer:
    """Scores by a model behind an endpoint.

    The tokenizer must be the model's tokenizer. It maps the texts of alternatives to ids.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer) -> None:
        self._endpoint = endpoint
        self._model = endpoint.model or endpoint.first_model()
        self._id_of_text = _unique_texts(tokenizer)
        self.name = f"{self._model} at {endpoint.url}"

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        scores: dict[int, Scores] = {}
        done, total = 0, sum(len(window.ids) for window in windows)
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            futures = {pool.submit(self._score_window, window, top): index for index, window in enumerate(windows)}
            try:
                for future in as_completed(futures):
                    index = futures[future]
                    scores[index] = future.result()
                    done += len(windows[index].ids)
                    progress(self.name, done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [scores[index] for index in range(len(windows))]

    def _score_window(self, window: Window, top: int) -> Scores:
        body = {
            "model": self._model,
            "prompt": list(window.ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": top,
            "prompt_logprobs": top,
        }
        response = self._endpoint.call("/v1/completions", body)
        try:
            choice = response["choices"][0]
            if choice.get("prompt_logprobs"):
                records = [
                    _record_by_id(*pair) for pair in zip(window.ids[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
            else:
                records = list(self._records_by_text(window, choice["logprobs"]))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EngineFailed(
                f"{self._endpoint.url} does not score prompts: its /v1/completions must support prompt_logprobs, or echo with "
                "logprobs."
            ) from None
        return gather(records, window, top)

    def _records_by_text(self, window: Window, logprobs: Mapping[str, Any]) -> Iterable[TokenLogprobs]:
        """Convert the `logprobs` of a completion, for all tokens of the prompt but the first."""
        count = len(window.ids)
        values, tops = logprobs["token_logprobs"][:count], logprobs["top_logprobs"][:count]
        for token, value, top in zip(window.ids[1:], values[1:], tops[1:], strict=True):
            alternatives = [
                (self._id_of_text[text], float(logprob))
                for text, logprob in (top or {}).items()
                if text in self._id_of_text
            ]
            alternatives.sort(key=lambda pair: -pair[1])
            yield _record(token, float(value), alternatives)


def _record_by_id(token: int, entries: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    """Convert one entry of `prompt_logprobs`. The token itself may follow the requested alternatives."""
    alternatives = sorted(
        ((int(name), float(entry["logprob"])) for name, entry in entries.items()), key=lambda pair: -pair[1]
    )
    return _record(token, float(entries[str(token)]["logprob"]), alternatives)


def _record(token: int, logprob: float, alternatives: Sequence[tuple[int, float]]) -> TokenLogprobs:
    ids, values = tuple(token_id for token_id, _ in alternatives), tuple(value for _, value in alternatives)
    return TokenLogprobs(token, logprob, 0, ids, values, _UNKNOWN_LOGSUMEXP)


def _unique_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Map the text of a token to its id, for texts that belong to one token only."""
    ids: dict[str, int] = {}
    shared: set[str] = set()
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if text in ids or "\ufffd" in text:
            shared.add(text)
        ids[text] = token
    return {text: token for text, token in ids.items() if text not in shared}
