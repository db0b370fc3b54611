"""Whole answers of deterministic requests, kept in memory and given again to identical ones (--answer-cache-mb).

A request is deterministic if its temperature is 0 or it has a seed. The key covers the prompts, all sampling parameters and the
salt, so tenants with different salts share no answers. It also covers the generation of the weights, because a request that runs
while an adapter is unloaded stores its answer afterwards. Only answers that ended normally are stored. The least recently used
ones are dropped first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

import msgspec

from ridgeline.service.call import Call
from ridgeline.service.piece import Piece

_decoder = msgspec.msgpack.Decoder(list[Piece])


def answer_key(call: Call, generation: int = 0) -> bytes | None:
    """Identifies the answer of a call; None if another call may get another answer. generation: AnswerCache.generation.

    A call with breakpoints has none: it goes to the engine, so that its prefixes stay. Nor has one with beams.
    """
    sampling = call.sampling
    if (sampling.temperature > 0 and sampling.seed is None) or call.breakpoints or call.beams:
        return None
    digest = hashlib.sha256(
        msgspec.msgpack.encode((generation, call.adapter, call.salt, call.continues, call.max_tokens == 0, sampling))
    )
    for prompt in call.prompts:
        digest.update(len(prompt).to_bytes(8) + array("i", prompt).tobytes())
    return digest.digest()


class AnswerCache:
    """At most `max_bytes` of encoded answers. 0: it keeps nothing. generation: counts changes of weights and adapters."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes, self.bytes, self.generation = max_bytes, 0, 0
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()

    def clear(self) -> None:
        """Drop all answers, also those that are still being computed: the model has other weights or adapters."""
        self.generation += 1
        self._answers.clear()
        self.bytes = 0

    def get(self, key: bytes) -> list[Piece] | None:
        """The pieces of an answer. None: it is not stored."""
        data = self._answers.get(key)
        if data is None:
            return None
        self._answers.move_to_end(key)
        return _decoder.decode(data)

    def put(self, key: bytes, pieces: list[Piece]) -> None:
        """Store the pieces of a complete answer, in place of the least recently used ones."""
        data = msgspec.msgpack.encode(pieces)
        if len(data) > self.max_bytes:
            return
        self.bytes += len(data) - len(self._answers.pop(key, b""))
        self._answers[key] = data
        while self.bytes > self.max_bytes:
            self.bytes -= len(self._answers.popitem(last=False)[1])
