"""Scores of given tokens under a model, from an engine in this process, a server (quality.served) or a stored file.

A score is the log-probability of a token and those of the most probable alternatives. Full logits are never transferred.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.quality.texts import Window
from ridgeline.wire.messages import Submit

Progress = Callable[[str, int, int], None]
"""Called with (stage, tokens done, tokens in total)."""
NO_TOKEN = -1
"""Placeholder id for an alternative that the model did not report."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the n scored tokens of one window, in nats."""

    token: NDArray[np.int32]
    """[n], the scored tokens."""
    logprob: NDArray[np.float32]
    """[n], of the scored tokens."""
    top_ids: NDArray[np.int32]
    """[n, k], the most probable tokens, best first. NO_TOKEN where fewer were reported."""
    top_logprobs: NDArray[np.float32]
    """[n, k], of top_ids."""


class Scorer(Protocol):
    """A model that scores windows."""

    @property
    def name(self) -> str: ...

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        """Score each window, with up to `top` alternatives per token."""
        ...


def gather(records: Sequence[TokenLogprobs], window: Window, top: int) -> Scores:
    """Build the scores of a window from the records of all its tokens but the first."""
    scored = records[window.first - 1 :]
    if len(records) != len(window.ids) - 1 or tuple(record.token for record in scored) != window.ids[window.first :]:
        raise EngineFailed(
            "The returned scores do not match the tokens that were sent: check that both sides use the same tokenizer."
        )
    ids = np.full((len(scored), top), NO_TOKEN, np.int32)
    values = np.full((len(scored), top), -np.inf, np.float32)
    for index, record in enumerate(scored):
        count = min(top, len(record.top_ids))
        ids[index, :count], values[index, :count] = record.top_ids[:count], record.top_logprobs[:count]
    token = np.array(window.ids[window.first :], np.int32)
    return Scores(token, np.array([record.logprob for record in scored], np.float32), ids, values)


class EngineScorer:
    """Scores by an engine in this process."""

    def __init__(self, name: str, engine: LocalEngine) -> None:
        self.name = name
        self._engine = engine

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top)
        scores: list[Scores | None] = [None] * len(windows)
        done, total = 0, sum(len(window.ids) for window in windows)
        for index, window in enumerate(windows):
            self._engine.submit(Submit(str(index), list(window.ids), sampling, time.monotonic(), cache=False))
        for delta in self._engine.deltas():
            if delta.error:
                raise EngineFailed(f"{self.name}: {delta.error}")
            if delta.prompt_logprobs is not None:
                index = int(delta.id)
                scores[index] = gather(delta.prompt_logprobs, windows[index], top)
                done += len(windows[index].ids)
                progress(self.name, done, total)
        missing = [index for index, entry in enumerate(scores) if entry is None]
        if missing:
            raise EngineFailed(f"{self.name}: no scores were returned for {len(missing)} of {len(windows)} windows.")
        return [entry for entry in scores if entry is not None]


# --- a stored reference -----------------------------------------------------------------------------------------------


class StoredScorer:
    """Scores that `store` wrote, for the same windows."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if its content is not complete."""
        self._path, self._rows = path, list(_rows(path))
        try:
            head = self._rows.pop(0)
            self.name, self.top = str(head["model"]), int(head["top"])
            self._windows = [Window(tuple(row["ids"]), row["first"], row["document"]) for row in self._rows]
            for window, row in zip(self._windows, self._rows, strict=True):
                self._scores(window, row, self.top)
            complete = head["kind"] == "ridgeline-scores" and bool(self._rows)
        except (IndexError, KeyError, TypeError, ValueError):
            complete = False
        if not complete:
            raise ConfigError(
                f"{path} does not contain complete scores: write them with `ridgeline compare ... --save-reference FILE`."
            )

    def windows(self) -> list[Window]:
        """Return the windows that the file contains."""
        return self._windows

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        if list(windows) != self.windows():
            raise ConfigError(
                f"{self._path} contains scores of other texts or windows: leave --text out to use its texts."
            )
        if top > self.top:
            raise ConfigError(f"--top is {top}: give at most {self.top}, the number in {self._path}.", param="top")
        return [self._scores(window, row, top) for window, row in zip(windows, self._rows, strict=True)]

    def _scores(self, window: Window, row: Mapping[str, Any], top: int) -> Scores:
        values = np.array([-np.inf if value is None else value for value in row["top_logprobs"]], np.float32)
        ids = np.array(row["top_ids"], np.int32)
        shape = (window.tokens, self.top)
        return Scores(
            np.array(window.ids[window.first :], np.int32),
            np.array(row["logprobs"], np.float32).reshape(window.tokens),
            ids.reshape(shape)[:, :top],
            values.reshape(shape)[:, :top],
        )


def store(path: Path, name: str, windows: Sequence[Window], scores: Sequence[Scores]) -> None:
    """Write scores for StoredScorer. An existing file is replaced only after the new one is complete."""
    draft = path.with_name(path.name + ".part")
    with draft.open("w", encoding="utf-8") as file:
        head = {"kind": "ridgeline-scores", "model": name, "top": scores[0].top_ids.shape[1] if scores else 0}
        file.write(json.dumps(head) + "\n")
        for window, window_scores in zip(windows, scores, strict=True):
            flat = [
                round(float(value), 5) if np.isfinite(value) else None for value in window_scores.top_logprobs.flatten()
            ]
            row = {
                "document": window.document,
                "first": window.first,
                "ids": window.ids,
                "logprobs": [round(float(value), 5) for value in window_scores.logprob],
                "top_ids": window_scores.top_ids.flatten().tolist(),
                "top_logprobs": flat,
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    draft.replace(path)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the scores {path}: {getattr(error, 'strerror', None) or error}.") from None
