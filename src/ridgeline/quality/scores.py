"""What a model says of given tokens, and who can be asked: an engine in this process, a server, or a file of an earlier
run. Full logits never cross: per token there are its log-probability and the most probable alternatives.
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
"""(stage, tokens done, tokens in all)."""
NOBODY = -1
"""An id that stands for no token: an alternative that was not told."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's log-probabilities of the scored tokens of one window, in nats.

    token int32 [n]: what was scored. logprob float32 [n]: of these tokens. top_ids int32 [n, k], top_logprobs float32
    [n, k]: the most probable tokens, best first; NOBODY where fewer were told.
    """

    token: NDArray[np.int32]
    logprob: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class Scorer(Protocol):
    """A model that can be asked."""

    @property
    def name(self) -> str: ...

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        """Scores of each window, with up to `top` alternatives per token."""
        ...


def gather(records: Sequence[TokenLogprobs], window: Window, top: int) -> Scores:
    """Scores of a window from the records of its tokens 1.. ."""
    wanted = records[window.first - 1 :]
    if len(records) != len(window.ids) - 1 or tuple(one.token for one in wanted) != window.ids[window.first :]:
        raise EngineFailed(
            "The returned scores do not match the tokens that were sent: check that both sides use the same tokenizer."
        )
    ids = np.full((len(wanted), top), NOBODY, np.int32)
    values = np.full((len(wanted), top), -np.inf, np.float32)
    for place, one in enumerate(wanted):
        count = min(top, len(one.top_ids))
        ids[place, :count], values[place, :count] = one.top_ids[:count], one.top_logprobs[:count]
    token = np.array(window.ids[window.first :], np.int32)
    return Scores(token, np.array([one.logprob for one in wanted], np.float32), ids, values)


class EngineScorer:
    """A model in this process, through the engine that would serve it."""

    def __init__(self, name: str, engine: LocalEngine) -> None:
        self.name = name
        self._engine = engine

    def score(self, windows: Sequence[Window], top: int, progress: Progress) -> list[Scores]:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top)
        found: list[Scores | None] = [None] * len(windows)
        done, total = 0, sum(len(one.ids) for one in windows)
        for place, window in enumerate(windows):
            self._engine.submit(Submit(str(place), list(window.ids), sampling, time.time(), cache=False))
        for delta in self._engine.news():
            if delta.error:
                raise EngineFailed(f"{self.name}: {delta.error}")
            if delta.prompt_logprobs is not None:
                place = int(delta.id)
                found[place] = gather(delta.prompt_logprobs, windows[place], top)
                done += len(windows[place].ids)
                progress(self.name, done, total)
        missing = [place for place, one in enumerate(found) if one is None]
        if missing:
            raise EngineFailed(f"{self.name}: no scores were returned for {len(missing)} of {len(windows)} windows.")
        return [one for one in found if one is not None]


# --- a stored reference -----------------------------------------------------------------------------------------------


class StoredScorer:
    """The scores of an earlier run, for the same windows."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that `store` did not write."""
        self._path, self._rows = path, list(_rows(path))
        try:
            head = self._rows.pop(0)
            self.name, self.top = str(head["model"]), int(head["top"])
            self._windows = [Window(tuple(row["ids"]), row["first"], row["document"]) for row in self._rows]
            for window, row in zip(self._windows, self._rows, strict=True):
                self._scores(window, row, self.top)
            whole = head["kind"] == "ridgeline-scores" and bool(self._rows)
        except (IndexError, KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ConfigError(
                f"{path} does not contain complete scores: write them with `ridgeline compare ... --save-reference FILE`."
            )

    def windows(self) -> list[Window]:
        """The windows it has scores of."""
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
        values = np.array([-np.inf if one is None else one for one in row["top_logprobs"]], np.float32)
        ids = np.array(row["top_ids"], np.int32)
        shape = (window.tokens, self.top)
        return Scores(
            np.array(window.ids[window.first :], np.int32),
            np.array(row["logprobs"], np.float32).reshape(window.tokens),
            ids.reshape(shape)[:, :top],
            values.reshape(shape)[:, :top],
        )


def store(path: Path, name: str, windows: Sequence[Window], scores: Sequence[Scores]) -> None:
    """Write scores so that StoredScorer can bring them back; an earlier file is replaced when the new one is whole."""
    draft = path.with_name(path.name + ".part")
    with draft.open("w", encoding="utf-8") as file:
        head = {"kind": "ridgeline-scores", "model": name, "top": scores[0].top_ids.shape[1] if scores else 0}
        file.write(json.dumps(head) + "\n")
        for window, one in zip(windows, scores, strict=True):
            flat = [round(float(value), 5) if np.isfinite(value) else None for value in one.top_logprobs.flatten()]
            row = {
                "document": window.document,
                "first": window.first,
                "ids": window.ids,
                "logprobs": [round(float(value), 5) for value in one.logprob],
                "top_ids": one.top_ids.flatten().tolist(),
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
