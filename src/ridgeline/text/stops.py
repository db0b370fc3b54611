"""Stop strings in streamed text: the text that may be released, and where the output ends."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.errors import RequestError


class StopStrings:
    """Finds the first complete stop string, across token and push boundaries.

    Of several that end at the same character the longest wins. Text is held back only while it may be the start of a
    stop string. Cost: O(stop strings) per character (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> None:
        """include_stop: the stop string is part of the text. min_tokens: a stop string that is complete before so many tokens is
        ordinary text. Raises RequestError for an empty stop string.
        """
        if not all(stops):
            raise RequestError("stop holds an empty string: remove it.", param="stop")
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._include = include_stop
        self._min_tokens = min_tokens
        self._held_back = ""
        self.tokens = 0
        """Output tokens pushed. At a hit, with one token per push: the number to keep; the last one completes the stop string."""

    def push(self, text: str, *, tokens: int = 1) -> tuple[str, str | None]:
        """Add the text of the next `tokens` tokens. Returns the text that may be released, and the stop string that was hit.

        Do not push after a hit. Push single tokens if `tokens` at the hit must be exact.
        """
        self.tokens += tokens
        if not self._stops:
            return text, None
        pending, start = self._held_back + text, len(self._held_back)
        for end in range(start, len(pending)):
            hit = self._step(pending[end])
            if hit is not None and self.tokens >= self._min_tokens:
                self._held_back = ""
                return pending[: end + 1 if self._include else end + 1 - len(hit)], hit
        keep = max(self._matched)
        self._held_back = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def finish(self) -> str:
        """The text held back, if the output ended for another reason."""
        text, self._held_back = self._held_back, ""
        return text

    def _step(self, letter: str) -> str | None:
        """Advance every automaton by one character. Returns the longest stop string that it completes."""
        hit = None
        for i, stop in enumerate(self._stops):
            fallbacks, matched = self._fallbacks[i], self._matched[i]
            while matched and stop[matched] != letter:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == letter
            if matched == len(stop):
                hit = stop if hit is None or len(stop) > len(hit) else hit
                matched = fallbacks[-1]
            self._matched[i] = matched
        return hit


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0]
    for letter in stop[1:]:
        length = table[-1]
        while length and stop[length] != letter:
            length = table[length - 1]
        table.append(length + (stop[length] == letter))
    return table
