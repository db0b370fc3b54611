"""How the served model makes a vector of a prompt, and calls that only do that.

A pooled prompt is a request like any other: it waits in the same queue, shares steps with answers that are generated, and draws no
token. The engine sums the hidden states of the pooled tokens (`SamplingParams.pooling`); the mean and the norm are taken here.
"""

from __future__ import annotations

import json
import math
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError, ContextTooLong, RequestError
from ridgeline.core.sampling import Pooling, SamplingParams
from ridgeline.service.call import Call, Usage
from ridgeline.service.fields import Fields
from ridgeline.service.piece import Piece
from ridgeline.service.sampling import tokenize_texts
from ridgeline.service.state import Embedder, Service
from ridgeline.service.yes_no import YesNo, read_yes_no
from ridgeline.text.tokenizer import Tokenizer

_MODES: dict[str, Pooling] = {
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
    "cls": "cls",
    "pooling_mode_cls_token": "cls",
}
"""Modes of a sentence-transformers Pooling module that are supported, as `pooling_mode` or as flags."""


_MODULES, _SCORE = "modules.json", "LogitScore"
YES_NO = "yes-no"
"""Value of --pooling for models that answer yes or no."""


def read_embedder(option: str, folder: Path) -> Embedder:
    """The pooling of --pooling. For "auto", of the modules that the model's sentence-transformers files list: modules.json, and
    config.json of its Pooling module. A model without them takes the last token, normalised.

    Raises ConfigError for modules whose result the server cannot compute.
    """
    kinds = _modules(folder)
    normalize = not kinds or "Normalize" in kinds
    if option != "auto":
        return Embedder("last" if option == YES_NO else option, normalize)  # type: ignore[arg-type]
    others = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize", _SCORE})
    if others:
        raise ConfigError(
            f"{folder / _MODULES} has the modules {', '.join(others)}, which are not computed here: serve another model, or give "
            "--pooling to embed without them.",
            param="pooling",
        )
    return Embedder(_mode(kinds["Pooling"] / "config.json") if "Pooling" in kinds else "last", normalize)


def read_judge(option: str, folder: Path, tokenizer: Tokenizer) -> YesNo | None:
    """What answers yes or no to a pair of texts: with --pooling yes-no, or for "auto" if sentence-transformers' files have a
    LogitScore, which names the two tokens. Raises ConfigError for a model that cannot be asked."""
    if option == YES_NO:
        return read_yes_no(folder, tokenizer)
    path = _modules(folder).get(_SCORE) if option == "auto" else None
    if path is None:
        return None
    config = _read(path / "config.json")
    return read_yes_no(folder, tokenizer, (config.get("true_token_id"), config.get("false_token_id")))


def _modules(folder: Path) -> dict[str, Path]:
    """The folder of each module that modules.json lists, by its kind; {} without the file."""
    path = folder / _MODULES
    if not path.is_file():
        return {}
    try:
        return {module["type"].rpartition(".")[2]: folder / module["path"] for module in _read(path)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a list of modules ({error!r}): download the model again.") from None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): download the model again, or give --pooling.") from None


def _mode(path: Path) -> Pooling:
    config = _read(path)
    named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    chosen = [str(config["pooling_mode"])] if "pooling_mode" in config else named
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ConfigError(
            f"{path} pools by {' and '.join(chosen) or 'nothing'}, which is not supported: give --pooling last, mean or cls.",
            param="pooling",
        )
    return _MODES[chosen[0]]


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of the engine's sums. dimensions: numbers of the vector that are kept; None: all."""

    pooling: Pooling
    normalize: bool
    dimensions: int | None = None

    def vector(self, sums: Sequence[bytes], tokens: int) -> array[float]:
        """The vector of a prompt, float32. sums: as in wire.messages.Delta.pooled. tokens: of the prompt.

        Leading numbers are kept, and normalised after that (Kusupati et al. 2022, arXiv:2205.13147, section 3).
        """
        total = array("d", sums[0])
        for part in sums[1:]:
            total = array("d", map(add, total, array("d", part)))
        total = total[: self.dimensions]
        scale = 1.0 / tokens if self.pooling == "mean" else 1.0
        if self.normalize:
            scale = 1.0 / (math.hypot(*total) or 1.0)
        return array("f", [value * scale for value in total])


def read_finish(service: Service, fields: Fields) -> Finish:
    """What `dimensions` and `normalize` ask for. Raises RequestError."""
    width, dimensions = service.client.facts.get("d_model"), fields.get("dimensions")
    if dimensions is not None and width is not None and dimensions > width:
        raise RequestError(
            f"dimensions is {dimensions}, and the vectors of this model have {width} numbers: ask for at most {width}.",
            param="dimensions",
        )
    return Finish(
        service.embedder.pooling, bool(fields.get("normalize", service.embedder.normalize)), fields.get("dimensions")
    )


async def read_texts(
    service: Service, items: Sequence[tuple[str, str | list[int]]], *, special: bool = True, truncate: bool = False
) -> list[list[int]]:
    """Token ids of texts that are to be pooled. items: the name of the field of each, and its text or ids.

    special: add the tokens that the model's tokenizer adds to a text. truncate: cut a text that is too long, instead of refusing
    it. Raises RequestError that names the field.
    """
    most = service.limits.request_tokens - 1
    texts = [(name, item) for name, item in items if isinstance(item, str)]
    encoded = iter(await tokenize_texts(service, texts, add_special_tokens=special))
    prompts = []
    for name, item in items:
        ids = next(encoded) if isinstance(item, str) else item
        service.limits.check_ids(ids, name)
        if len(ids) > most and not truncate:
            raise ContextTooLong(f"{name} has {len(ids)} tokens: send at most {most}.", param=name)
        prompts.append(ids[:most])
    return prompts


def pooled_call(service: Service, prompts: Sequence[list[int]], fields: Fields, prefix: str, arrival: float) -> Call:
    """A call that pools prompts. prefix: of its id."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, pooling=service.embedder.pooling)
    return Call(
        f"{prefix}-{uuid.uuid4().hex}",
        arrival,
        tuple(prompts),
        sampling,
        0,
        priority=fields.get("priority", 0),
        salt=fields.get("cache_salt", ""),
        adapter=service.card.adapter,
    )


class Vectors:
    """Collects the vectors of a call's prompts. The part of answer.Shape that routes with vectors share."""

    def __init__(self, call: Call, finish: Finish) -> None:
        self.usage = Usage()
        self.call = call
        self._finish = finish
        self._vectors: dict[int, array[float]] = {}

    def events(self, streaming: object) -> Any:
        raise RequestError("Vectors are not streamed: leave stream out.", param="stream")

    def add(self, piece: Piece) -> None:
        if piece.pooled is not None:
            self._vectors[piece.index] = self._finish.vector(piece.pooled, len(self.call.prompts[piece.index]))

    def vectors(self) -> list[array[float]]:
        """The vectors in the order of the prompts."""
        return [self._vectors[index] for index in range(len(self.call.prompts))]

    def tokens(self) -> dict[str, int]:
        """OpenAI's usage object of a request without an answer."""
        return {"prompt_tokens": self.usage.prompt, "total_tokens": self.usage.prompt}
