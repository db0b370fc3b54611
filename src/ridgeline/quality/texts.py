"""The fixed sequences that models are compared on: texts of a file, cut into windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """A run of token ids. Tokens from `first` (at least 1) on are scored; those before are context alone.

    document: the place of its text in the file; tokens of one document are not independent of each other.
    """

    ids: tuple[int, ...]
    first: int
    document: int

    @property
    def tokens(self) -> int:
        """How many of its tokens are scored."""
        return len(self.ids) - self.first


def read_texts(path: Path) -> list[str]:
    """The documents of a file: the member "text" of each line of *.jsonl, otherwise the whole file as one.
    Lines end at line feeds alone: JSON may hold the other separators of Unicode as they are.

    Raises ConfigError naming the line.
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


def windows(texts: Iterable[str], encode: Callable[[str], Sequence[int]], longest: int, overlap: int) -> list[Window]:
    """Every token of every text but each text's first, scored once.

    A text longer than `longest` tokens continues in a window that repeats the last `overlap` tokens as context. More
    overlap gives tokens more past and costs more computation; 0 is the disjoint windows of most published tables.
    """
    if not 0 <= overlap < longest - 1:
        raise ConfigError(
            f"--overlap is {overlap}: give 0 to {longest - 2}, or raise --window (now {longest}).", param="overlap"
        )
    return [one for place, text in enumerate(texts) for one in _cut(tuple(encode(text)), longest, overlap, place)]


def _cut(ids: tuple[int, ...], longest: int, overlap: int, document: int) -> Iterator[Window]:
    done, start = 1, 0
    while done < len(ids):
        end = min(len(ids), start + longest)
        yield Window(ids[start:end], done - start, document)
        # The last token of a window is what the next one's first token follows.
        done, start = end, end - max(1, overlap)
