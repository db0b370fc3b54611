"""Hidden thoughts of an answer: its text split into what a user sees and what not, and the tokens spent on the latter."""

from __future__ import annotations

from ridgeline.core.errors import RequestError
from ridgeline.service.state import Service
from ridgeline.service.stream import Piece
from ridgeline.text.reasoning import ReasoningSplitter, Tags, detect_tags, starts_inside

_LAST = 32
"""Tokens at a prompt's end that can hold an opening tag and the white space behind it."""


class Thoughts:
    """One choice while it grows. A piece's tokens count as hidden when it brings hidden text, or none of either kind while
    the model thinks."""

    def __init__(self, tags: Tags | None, *, inside: bool) -> None:
        """tags None: everything is visible. inside: the prompt has opened a thought."""
        self._splitter = ReasoningSplitter(tags, inside=inside)
        self._thinking = inside
        self.tokens = 0
        """Spent on thoughts."""

    def read(self, piece: Piece) -> tuple[str, str]:
        """(visible, hidden) text of the answer's next piece."""
        visible, hidden = self._splitter.push(piece.text)
        if piece.finish:
            more, last = self._splitter.finish()
            visible, hidden = visible + more, hidden + last
        if hidden or (self._thinking and not visible):
            self.tokens += piece.count
        self._thinking = (self._thinking or bool(hidden)) and not visible
        return visible, hidden


def thoughts_behind(service: Service, prompt: list[int]) -> Thoughts:
    """For an answer that goes on behind a prompt of the caller's own, by the tags of the model's chat template."""
    try:
        tags = detect_tags(service.templates.choose(tools=False).template.source)
    except RequestError:  # a model without a template
        tags = None
    if tags is None:
        return Thoughts(None, inside=False)
    text = service.tokenizer.decode(prompt[-_LAST:], skip_special_tokens=False)
    return Thoughts(tags, inside=starts_inside(tags, text))
