"""Stop strings in streamed text: what may be shown now, and where the output ends."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.errors import RequestError


class StopStrings:
    """Finds the first stop string that is complete, across the borders of tokens and pushes.

    Of several that end at the same character the longest counts. Text is held back only while it may be the start of a
    stop string. Cost: O(stop strings) per character (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> None:
        """include_stop: the stop string is part of the text. min_tokens: a stop string complete before so many tokens
        is ordinary text. Raises RequestError for an empty stop string."""
        if not all(stops):
            raise RequestError("stop holds an empty string: remove it.", param="stop")
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._include = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.tokens = 0
        """Output tokens pushed; at a hit, with one token per push, how many to keep (the last completes the stop)."""

    def push(self, text: str, *, tokens: int = 1) -> tuple[str, str | None]:
        """The text of the next `tokens` tokens in; out: the text that may be shown, and the stop string that was hit.

        After a hit nothing may be pushed. Push token by token where `tokens` at the hit must be exact.
        """
        self.tokens += tokens
        if not self._stops:
            return text, None
        pending, start = self._held + text, len(self._held)
        for end in range(start, len(pending)):
            hit = self._step(pending[end])
            if hit is not None and self.tokens >= self._min_tokens:
                self._held = ""
                return pending[: end + 1 if self._include else end + 1 - len(hit)], hit
        keep = max(self._matched)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def finish(self) -> str:
        """The text held back; the output ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> str | None:
        """Advance every automaton by one character; the longest stop string that it completes."""
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
    """For each prefix the length of the longest shorter prefix that is also its suffix."""
    table = [0]
    for letter in stop[1:]:
        length = table[-1]
        while length and stop[length] != letter:
            length = table[length - 1]
        table.append(length + (stop[length] == letter))
    return table
