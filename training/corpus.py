"""Reading the training corpus: lines of `{"source", "kind", "text"}` in xz-packed files."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("prose", "docs", "code", "math", "dialogue")


@dataclass(frozen=True, slots=True)
class Document:
    source: str  # "<repository>:<path>[#part]"
    kind: str  # one of KINDS
    text: str


def read_file(path: Path) -> Iterator[Document]:
    """The documents of one `*.jsonl.xz` file, in file order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document(row["source"], row["kind"], row["text"])


def read_split(folder: Path, split: str) -> Iterator[Document]:
    """The documents of `split` ("train", "valid" or "test") in `folder`, in file order.

    Raises FileNotFoundError if the folder holds no file of that split.
    """
    paths = sorted(folder.glob(f"{split}*.jsonl.xz"))
    if not paths:
        raise FileNotFoundError(f"no {split}*.jsonl.xz in {folder}: pass the folder of the corpus with --corpus")
    for path in paths:
        yield from read_file(path)
