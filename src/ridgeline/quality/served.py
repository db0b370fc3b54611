"""Scores from a server of the OpenAI API: prompts as token ids, answered with their own log-probabilities.

Servers that know `prompt_logprobs` (ours, vLLM) name alternatives by id. Others are asked with `echo` and `logprobs`,
whose alternatives have texts for names: a text that several tokens share, or that is no whole characters, names none.
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

AT_ONCE = 8
"""Requests in flight: enough to fill a batch, few enough for any server's queue."""
REPEATS = 3
"""Answers of each length that decode_rate times; the shortest counts."""
_UNKNOWN = float("nan")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: of the server, with or without /v1. model: its name there; empty asks for the first the server has."""

    url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 600.0

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer. Raises EngineFailed with what the server said."""
        head = {"content-type": "application/json"}
        if self.api_key:
            head["authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        url = self.url.rstrip("/").removesuffix("/v1") + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=self.timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EngineFailed(
                f"{url} answered with status {error.code}: {error.read(600).decode('utf-8', 'replace')}"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EngineFailed(f"The answer of {url} is not JSON: {error}.") from None
        except (OSError, ValueError) as error:
            raise EngineFailed(f"Cannot reach {url}: {reason(error)}.") from None

    def first_model(self) -> str:
        found = self.call("/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"{self.url} lists no model: give --reference-model or --candidate-model.", param="model"
            ) from None


def decode_rate(endpoint: Endpoint, prompt: Sequence[int], tokens: int) -> float:
    """Tokens per second of one greedy request alone after its first token, from the shortest of REPEATS answers of one
    token and of all.

    prompt: token ids. End tokens are ignored where the server knows `ignore_eos`; what it wrote is counted by its `usage`.
    """
    model = endpoint.model or endpoint.first_model()
    body = {"model": model, "prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}

    def run(most: int) -> tuple[float, int]:
        begun = time.perf_counter()
        answer = endpoint.call("/v1/completions", body | {"max_tokens": most})
        return time.perf_counter() - begun, int(answer["usage"]["completion_tokens"])

    run(tokens + 1)
    first, all_of_them, written = float("inf"), float("inf"), 0
    for _ in range(REPEATS):
        first = min(first, run(1)[0])
        seconds, written = run(tokens + 1)
        all_of_them = min(all_of_them, seconds)
    return (written - 1) / max(all_of_them - first, 1e-9)


class ServerScorer:
    """A model behind an endpoint. The tokenizer must be the model's: it made the ids, and gives texts their ids back."""

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer) -> None:
        self._endpoint = endpoint
        self._model = endpoint.model or endpoint.first_model()
        self._by_text = _texts(tokenizer)
        self.name = f"{self._model} at {endpoint.url}"

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        found: dict[int, Scores] = {}
        done, total = 0, sum(len(one.ids) for one in windows)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            waiting = {pool.submit(self._one, window, top): place for place, window in enumerate(windows)}
            try:
                for one in as_completed(waiting):
                    place = waiting[one]
                    found[place] = one.result()
                    done += len(windows[place].ids)
                    progress(self.name, done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [found[place] for place in range(len(windows))]

    def _one(self, window: Window, top: int) -> Scores:
        body = {
            "model": self._model,
            "prompt": list(window.ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": top,
            "prompt_logprobs": top,
        }
        answer = self._endpoint.call("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            if choice.get("prompt_logprobs"):
                records = [_by_id(*pair) for pair in zip(window.ids[1:], choice["prompt_logprobs"][1:], strict=True)]
            else:
                records = list(self._echoed(window, choice["logprobs"]))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EngineFailed(
                f"{self._endpoint.url} does not score prompts: its /v1/completions must support prompt_logprobs, or echo with "
                "logprobs."
            ) from None
        return gather(records, window, top)

    def _echoed(self, window: Window, said: Mapping[str, Any]) -> Iterable[TokenLogprobs]:
        """The prompt's part of a completion's `logprobs`, its first token left out."""
        count = len(window.ids)
        values, tops = said["token_logprobs"][:count], said["top_logprobs"][:count]
        for token, value, top in zip(window.ids[1:], values[1:], tops[1:], strict=True):
            known = [(self._by_text[text], float(one)) for text, one in (top or {}).items() if text in self._by_text]
            known.sort(key=lambda one: -one[1])
            yield _record(token, float(value), known)


def _by_id(token: int, said: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    """One place of `prompt_logprobs`. The token itself may stand beyond the alternatives that were asked for."""
    known = sorted(((int(name), float(one["logprob"])) for name, one in said.items()), key=lambda one: -one[1])
    return _record(token, float(said[str(token)]["logprob"]), known)


def _record(token: int, logprob: float, known: Sequence[tuple[int, float]]) -> TokenLogprobs:
    ids, values = tuple(one for one, _ in known), tuple(value for _, value in known)
    return TokenLogprobs(token, logprob, 0, ids, values, _UNKNOWN)


def _texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> id of every token that alone has it."""
    found: dict[str, int] = {}
    shared: set[str] = set()
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if text in found or "\ufffd" in text:
            shared.add(text)
        found[text] = token
    return {text: token for text, token in found.items() if text not in shared}
