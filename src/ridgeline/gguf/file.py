"""Reads the header of a GGUF file: metadata, and where each tensor is. Fail closed.

Source: the specification of GGUF (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter by the number of a value's type."""
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor: `elements` neighbours of a row are stored in `size` bytes."""

    name: str
    elements: int
    size: int


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""Types that are read, by ggml's number."""
_OTHERS = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip
"""Names of types that are refused."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file. shape: as in PyTorch, the last dimension is contiguous. start, size: its bytes in the file."""

    shape: tuple[int, ...]
    kind: BlockType
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file. data: the first byte of the tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    data: int

    def refused(self, problem: str, remedy: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {problem}: {remedy}.")


def read_file(path: Path) -> GgufFile:
    """Read the header. Raises ConfigError for a file that is damaged or not GGUF, UnsupportedModel for a type that is not read."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file (it does not start with GGUF): download it again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).header()
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened ({error}): check the path and the right to read it.") from None


class _Reader:
    """Reads values one after the other."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._place = path, content, len(MAGIC)

    def header(self) -> GgufFile:
        version = self._number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise UnsupportedModel(
                f"{self._path} has version {version} of GGUF: versions {known}, little endian, are read. Convert it again."
            )
        count, entries = self._number("Q"), self._number("Q")
        metadata = {self._text(): self._value(self._number("I")) for _ in range(entries)}
        found_tensors = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        data = -(-self._place // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found_tensors:
            size = prod(shape) // kind.elements * kind.size
            if data + offset + size > len(self._content):
                raise self._damaged(f"the tensor {name} ends after the file's last byte")
            tensors[name] = Stored(shape, kind, data + offset, size)
        return GgufFile(self._path, metadata, tensors, data)

    def _damaged(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path} is not a complete GGUF file ({problem}): download it again.")

    def _bytes(self, size: int) -> bytes:
        end = self._place + size
        if end > len(self._content):
            raise self._damaged("its header ends after the file's last byte")
        taken = self._content[self._place : end]
        self._place = end
        return taken

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))[0]

    def _text(self) -> str:
        # Vocabularies may contain pieces that are not UTF-8.
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"its metadata has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(form, self._bytes(count * struct.calcsize(_SCALARS[inner]))))
        if inner != _TEXT:
            raise self._damaged(f"its metadata has an array of type {inner}")
        return [self._text() for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise UnsupportedModel(
                f"{self._path}: the tensor {name} has type {_OTHERS.get(number, number)}, which is not read. Use a file with "
                f"{known} (for example Q4_K_M or Q8_0)."
            )
        if shape[-1] % TYPES[number].elements:
            raise self._damaged(f"rows of the tensor {name} are no multiple of a block of {TYPES[number].name}")
        return name, shape, TYPES[number], offset
