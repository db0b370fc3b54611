"""Evaluation texts: read from a file and cut into windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence of token ids, part of one document."""

    ids: tuple[int, ...]
    first: int
    """Index of the first scored token, at least 1. The tokens before it are context."""
    document: int
    """Index of the document in the file. Tokens of one document are not statistically independent."""

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.ids) - self.first


def read_texts(path: Path) -> list[str]:
    """Read the documents of a file: the key "text" of each line of *.jsonl, otherwise the whole file as one document.

    Lines end at line feeds only, because JSON may contain other Unicode line separators. Raises ConfigError that names the line.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Cannot read the text {path}: {getattr(error, 'strerror', None) or error}.", param="text"
        ) from None
    if path.suffix != ".jsonl":
        texts = [content]
    else:
        texts = [_text(path, number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not any(text.strip() for text in texts):
        raise ConfigError(f"{path} contains no text.", param="text")
    return texts


def _text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{path}, line {number}: the line must be a JSON object with the key "text".', param="text")
    return text


def windows(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], max_tokens: int, overlap: int
) -> list[Window]:
    """Cut texts into windows. Every token but the first of a text is scored exactly once.

    A text longer than `max_tokens` continues in a window that repeats the last `overlap` tokens as context. A larger overlap
    gives tokens more context and costs more computation. With 0 windows are disjoint, as in most published tables.
    """
    if not 0 <= overlap < max_tokens - 1:
        raise ConfigError(
            f"--overlap is {overlap}: give 0 to {max_tokens - 2}, or raise --window (now {max_tokens}).",
            param="overlap",
        )
    return [
        window
        for document, text in enumerate(texts)
        for window in _cut(tuple(encode(text)), max_tokens, overlap, document)
    ]


def _cut(ids: tuple[int, ...], max_tokens: int, overlap: int, document: int) -> Iterator[Window]:
    scored_to, start = 1, 0
    while scored_to < len(ids):
        end = min(len(ids), start + max_tokens)
        yield Window(ids[start:end], scored_to - start, document)
        # The last token of a window is always context of the next, so that the next token can be scored.
        scored_to, start = end, end - max(1, overlap)
