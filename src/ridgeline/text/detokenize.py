"""Incremental detokenization: returns only text that no later token can change."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from ridgeline.text.tokenizer import Tokenizer

_CONTEXT = 64
"""Tokens of context that are decoded. A character has at most four bytes, so its start is among them."""


class Detokenizer:
    """Incremental decoding of one output, O(1) per token.

    The joined results of all `push` and `finish` calls equal `tokenizer.decode` of all pushed ids. With a `context` (the prompt)
    the text continues it: no leading space is stripped after a text, and a character whose first bytes end the context is
    returned whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.pieces
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._strip = self._pieces.strip
        if context:
            self._begin(context)

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` made final."""
        pieces, hidden = self._pieces, self._hidden
        if pieces.byte_level:
            return self._utf8.decode(b"".join([pieces.bytes_of(index) for index in ids if index not in hidden]))
        parts = []
        for index in ids:
            if index in hidden or not 0 <= index < len(pieces.table):
                continue
            if index in pieces.fallback:
                self._run += pieces.bytes_of(index)
            else:
                parts.append(self._end_run() + pieces.bytes_of(index).decode())
        return self._stripped("".join(parts))

    def finish(self) -> str:
        """The text held back, at the end of the output."""
        return self._utf8.decode(b"", final=True) if self._pieces.byte_level else self._stripped(self._end_run())

    def _begin(self, context: Sequence[int]) -> None:
        text = self.push(context[-_CONTEXT:])
        if not self._pieces.byte_level:
            text += self._utf8.decode(bytes(self._run))
            self._run = bytearray(self._utf8.getstate()[0])
        if text or len(context) > _CONTEXT:
            self._strip = 0

    def _end_run(self) -> str:
        """Text of a run of byte tokens. It is decoded at its end, because a later byte can make the whole run invalid."""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text
