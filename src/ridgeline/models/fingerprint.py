"""Content hash of a model: equal for copies in different folders, different for different content."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

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
        with path.open("rb", buffering=0) as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            data = 8 + len(header)
            tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
            for begin, end in sorted(entry["data_offsets"] for entry in tensors.values()):
                for last in ((begin + end) // 2, end):
                    first = max(begin, last - SAMPLE)
                    file.seek(data + first)
                    digest.update(file.read(last - first))
    return digest.digest()
