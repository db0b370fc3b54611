"""Prompts of a wanted length: the same seed gives the same ones, and equal block ids give equal tokens.

As token ids, drawn from ids that the server's own tokenizer produced; as text, from words whose tokens the server counted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from ridgeline.bench.workload import Ask

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back parent "
    "face others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education foot boy age policy music sense nation plan college interest death experience "
    "effect use class control field development role effort rate heart drug show leader light voice wife police mind "
    "price report decision son view relationship town road arm difference value building action season society tax "
    "director position player record paper space ground form event matter center couple project activity star table need "
    "court oil situation cost industry figure street image phone data picture practice piece land product doctor wall "
    "patient worker news test movie north love support technology step baby computer type attention film tree source "
    "organization hair look window culture chance brother energy period course summer plant opportunity term letter"
).split()
"""Common English words; most are one token each in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of. ids: token ids to draw from, empty when prompts are text.

    tokens_per_word: tokens of one more word of text; overhead: tokens of a prompt without any (a template, a BOS).
    """

    ids: tuple[int, ...] = ()
    tokens_per_word: float = 1.0
    overhead: float = 0.0


class Prompts:
    """Makes the prompts of one run."""

    def __init__(self, vocabulary: Vocabulary, seed: int | str) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._blocks: dict[tuple[int, int], list[bytes]] = {}
        self._pieces = (
            [str(index).encode() for index in vocabulary.ids] if vocabulary.ids else [word.encode() for word in WORDS]
        )

    def make(self, ask: Ask, index: int) -> str | tuple[str, ...] | msgspec.Raw:
        """The prompt of the `index`-th request: a JSON list of ids, text, or the turns of a conversation (user and assistant
        in turn, the user last)."""
        if ask.history:
            return *ask.history, ask.text
        if ask.text:
            return ask.text
        if self._vocabulary.ids:
            return msgspec.Raw(b"[" + b",".join(self._draw(ask, ask.input, ask.block, index)) + b"]")
        each = self._vocabulary.tokens_per_word
        words = max(1, round((ask.input - self._vocabulary.overhead) / each))
        return b" ".join(self._draw(ask, words, max(1, round(ask.block / each)), index)).decode()

    def _draw(self, ask: Ask, count: int, block: int, index: int) -> list[bytes]:
        """`count` pieces: those of the ask's blocks, then the request's own."""
        found: list[bytes] = []
        for name in ask.blocks[: -(-count // block)]:
            found += self._block(name, block)
        del found[count:]
        if len(found) < count:
            found += self._pieces_of(f"own {index}", count - len(found))
        return found

    def _block(self, name: int, size: int) -> list[bytes]:
        held = self._blocks.get((name, size))
        if held is None:
            held = self._blocks[name, size] = self._pieces_of(f"block {name}", size)
            if len(self._blocks) > 4096:  # made again when it is needed again
                del self._blocks[next(iter(self._blocks))]
        return held

    def _pieces_of(self, name: str, count: int) -> list[bytes]:
        """Pieces that depend on seed and name alone."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        source = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
        pieces = self._pieces
        return [pieces[at] for at in source.integers(0, len(pieces), count).tolist()]
