"""Content hash of a model: equal for copies in different folders, different for different content."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from ridgeline.gguf.file import read_file
from ridgeline.gguf.folder import SUFFIX
from ridgeline.models.weights import checkpoint_files

SAMPLE = 2048
"""Bytes read in the middle and at the end of each tensor."""


def content_hash(folder: Path, *, weights: bool = True) -> bytes:
    """SHA-256 of config.json and, of each tensor file, the header (names, shapes, dtypes, offsets) and samples of each tensor.

    Reads a few MiB of a model of any size. A change is not detected if the sampled bytes of every tensor stay equal, for example an
    edit of single rows of a matrix. Training, merging and quantization change almost all weights, and added tokens change the end
    of an embedding.

    weights: False for dummy weights, which depend only on config.json.
    """
    digest = sha256((folder / "config.json").read_bytes())
    for path in checkpoint_files(folder) if weights else ():
        header, spans = _layout(path)
        digest.update(header)
        with path.open("rb", buffering=0) as file:
            for begin, end in spans:
                for last in ((begin + end) // 2, end):
                    first = max(begin, last - SAMPLE)
                    file.seek(first)
                    digest.update(file.read(last - first))
    return digest.digest()


def _layout(path: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """(header of a tensor file, first byte of each tensor and the byte after it)."""
    with path.open("rb", buffering=0) as file:
        if path.suffix == SUFFIX:
            gguf = read_file(path)
            return file.read(gguf.data), sorted((each.start, each.start + each.size) for each in gguf.tensors.values())
        header = file.read(int.from_bytes(file.read(8), "little"))
    tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    data = 8 + len(header)
    return header, sorted(
        (data + begin, data + end) for begin, end in (each["data_offsets"] for each in tensors.values())
    )
