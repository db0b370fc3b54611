"""The bytes that each token adds to a text, for the two kinds of decoder that language models use.

Byte-level BPE (GPT-2, Llama 3, Qwen): a token is a run of bytes, written with one printable character per byte; the
text is their concatenation decoded as UTF-8. Sentencepiece style (Llama 2, Mistral, Gemma): a token is text with U+2581
for a space, or one byte written <0x41>. A run of byte tokens is decoded as a unit: if it is not UTF-8, each of its bytes
becomes one U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UnsupportedModel

_SENTENCEPIECE = re.compile(r"(Replace )*(ByteFallback )?Fuse( Strip)?")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Pieces:
    """table[id]: the token's bytes, None for an id without a token. fallback: ids of byte tokens.

    byte_level: the text is one run of bytes. strip: number of leading spaces that are removed from the start of a text.
    """

    table: tuple[bytes | None, ...]
    fallback: frozenset[int]
    byte_level: bool
    strip: int

    def bytes_of(self, index: int) -> bytes:
        known = 0 <= index < len(self.table)
        return (self.table[index] or b"") if known else b""


def read_pieces(decoder: dict[str, Any] | None, vocab: Mapping[str, int]) -> Pieces:
    """Pieces for the decoder section of a tokenizer.json. Raises UnsupportedModel naming an unknown decoder."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        pieces = {index: _byte_level(token, letters) for token, index in vocab.items()}
        return Pieces(_table(pieces), frozenset(), True, 0)
    if not _SENTENCEPIECE.fullmatch(" ".join(kinds)):
        raise UnsupportedModel(
            f"tokenizer.json decodes with {kinds or 'nothing'}: only byte-level BPE and sentencepiece-style decoders "
            "(Replace, ByteFallback, Fuse, Strip) are supported."
        )
    strip = 0
    table = {index: token for token, index in vocab.items()}
    fallback: frozenset[int] = frozenset()
    for step in steps:
        if step["type"] == "Replace":
            old, new = _replacement(step)
            table = {index: token.replace(old, new) for index, token in table.items()}
        elif step["type"] == "ByteFallback":
            fallback = frozenset(index for index, token in table.items() if _BYTE_TOKEN.fullmatch(token))
        elif step["type"] == "Strip":
            strip = _stripped(step)
    pieces = {i: bytes([int(t[3:5], 16)]) if i in fallback else t.encode() for i, t in table.items()}
    return Pieces(_table(pieces), fallback, False, strip)


def byte_letters() -> list[str]:
    """The printable character for each byte in a byte-level vocabulary (GPT-2; Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_level(token: str, letters: Mapping[str, int]) -> bytes:
    """A token's bytes. A token with other characters (an added token with a space) is ordinary text."""
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    old = step["pattern"].get("String")
    if not old:
        raise UnsupportedModel(
            "tokenizer.json decodes by replacing a regular expression: only plain text is supported."
        )
    return old, step["content"]


def _stripped(step: dict[str, Any]) -> int:
    if step["content"] != " " or step["stop"]:
        raise UnsupportedModel(
            "tokenizer.json strips characters other than leading spaces: only leading spaces are supported."
        )
    return int(step["start"])


def _table(pieces: Mapping[int, bytes]) -> tuple[bytes | None, ...]:
    return tuple(pieces.get(index) for index in range(max(pieces, default=-1) + 1))
