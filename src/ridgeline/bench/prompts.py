"""Generated prompts of given lengths. The same seed gives the same prompts, and equal block ids give equal tokens.

Prompts are token ids from the server's tokenizer, or texts of words whose tokens the server has counted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from ridgeline.core.workload import RequestSpec

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
"""Common English words. In most vocabularies most of them are one token."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids or words of generated prompts."""

    ids: tuple[int, ...] = ()
    """Token ids to draw from. Empty: prompts are text."""
    tokens_per_word: float = 1.0
    overhead: float = 0.0
    """Tokens of a prompt without words (chat template, BOS)."""


class Prompts:
    """Generates the prompts of one run."""

    def __init__(self, vocabulary: Vocabulary, seed: int | str) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._blocks: dict[tuple[int, int], list[bytes]] = {}
        self._pieces = (
            [str(index).encode() for index in vocabulary.ids] if vocabulary.ids else [word.encode() for word in WORDS]
        )

    def make(self, request: RequestSpec, index: int) -> str | tuple[str, ...] | msgspec.Raw:
        """Generate the prompt of the `index`-th request.

        Returns:
            A JSON list of token ids, a text, or the turns of a conversation (user and assistant alternate, the user is last).
        """
        if request.history:
            return *request.history, request.text
        if request.text:
            return request.text
        if self._vocabulary.ids:
            return msgspec.Raw(b"[" + b",".join(self._draw(request, request.input, request.block, index)) + b"]")
        tokens_per_word = self._vocabulary.tokens_per_word
        words = max(1, round((request.input - self._vocabulary.overhead) / tokens_per_word))
        return b" ".join(self._draw(request, words, max(1, round(request.block / tokens_per_word)), index)).decode()

    def _draw(self, request: RequestSpec, count: int, block: int, index: int) -> list[bytes]:
        """Draw `count` pieces: those of the request's blocks, then pieces of its own."""
        pieces: list[bytes] = []
        for name in request.blocks[: -(-count // block)]:
            pieces += self._block(name, block)
        del pieces[count:]
        if len(pieces) < count:
            pieces += self._pieces_of(f"own {index}", count - len(pieces))
        return pieces

    def _block(self, name: int, size: int) -> list[bytes]:
        pieces = self._blocks.get((name, size))
        if pieces is None:
            pieces = self._blocks[name, size] = self._pieces_of(f"block {name}", size)
            if len(self._blocks) > 4096:  # a dropped block is generated again with the same content
                del self._blocks[next(iter(self._blocks))]
        return pieces

    def _pieces_of(self, name: str, count: int) -> list[bytes]:
        """Draw pieces that depend only on the seed and the name."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        source = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
        pieces = self._pieces
        return [pieces[at] for at in source.integers(0, len(pieces), count).tolist()]
