"""Reasoning in an answer: splits its text into visible and hidden text, and counts the hidden tokens."""

from __future__ import annotations

from ridgeline.core.errors import RequestError
from ridgeline.service.piece import Piece
from ridgeline.service.state import Service
from ridgeline.text.harmony import make_splitter
from ridgeline.text.reasoning import Tags, starts_inside

_TAIL = 32
"""Tokens at the end of a prompt in which an opening tag is looked for."""


class ReasoningReader:
    """Splits the text of one choice.

    A piece's tokens count as hidden if the piece has hidden text, or no text at all while the model is reasoning.
    """

    def __init__(self, tags: Tags | None, *, inside: bool, channel: str = "") -> None:
        """tags: None if everything is visible. inside: the prompt ends inside of reasoning. channel: see make_splitter."""
        self._splitter = make_splitter(tags, inside=inside, channel=channel)
        self._reasoning = inside
        self.tokens = 0
        """Hidden tokens."""

    def read(self, piece: Piece) -> tuple[str, str]:
        """(visible, hidden) text of the answer's next piece."""
        visible, hidden = self._splitter.push(piece.text)
        if piece.finish:
            more, last = self._splitter.finish()
            visible, hidden = visible + more, hidden + last
        if hidden or (self._reasoning and not visible):
            self.tokens += piece.count
        self._reasoning = (self._reasoning or bool(hidden)) and not visible
        return visible, hidden


def reasoning_after(service: Service, prompt: list[int]) -> ReasoningReader:
    """A reader for an answer that continues `prompt`, with the tags of the model's chat template."""
    try:
        tags = service.templates.choose(tools=False).tags
    except RequestError:  # a model without a template
        tags = None
    if tags is None or tags.channels:  # a completion's text does not contain the headers of channels
        return ReasoningReader(None, inside=False)
    text = service.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
    return ReasoningReader(tags, inside=starts_inside(tags, text))
