"""Hidden thoughts in an output: which tags enclose them, and streamed text split into what is shown and what is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    open: str
    close: str


KNOWN_TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"), Tags("<thinking>", "</thinking>"))


def detect_tags(template: str) -> Tags | None:
    """The tags a chat template deals with; None for a model that does not think aloud."""
    return next((tags for tags in KNOWN_TAGS if tags.close in template), None)


def starts_inside(tags: Tags, prompt: str) -> bool:
    """Whether the prompt already opened the span, as some templates do for the model."""
    return prompt.rstrip().endswith(tags.open)


class ReasoningSplitter:
    """Splits one output at its tags.

    A span is hidden only at the very start of an output (white space aside) and only once, so an answer may speak of
    the tags. White space next to the tags belongs to neither part. An output that ends inside the span is all hidden.
    """

    def __init__(self, tags: Tags | None, *, inside: bool = False) -> None:
        """tags None: everything is visible. inside: the span is open already (see `starts_inside`)."""
        self._tags = tags
        self._state = "after" if tags is None else "hidden" if inside else "before"
        self._held = ""
        self._trim = tags is not None and inside

    def push(self, text: str) -> tuple[str, str]:
        """New (visible, hidden) text."""
        if self._tags is None:
            return text, ""
        pending, hidden = self._held + text, ""
        self._held = ""
        if self._state == "before":
            pending = self._open(pending, self._tags.open)
        if self._state == "hidden":
            hidden, pending = self._hide(pending, self._tags.close)
        if self._state == "after":
            return self._trimmed(pending), hidden
        return "", hidden

    def finish(self) -> tuple[str, str]:
        """What was held back, as (visible, hidden); the output is over."""
        held, self._held = self._held, ""
        return ("", held.rstrip()) if self._state == "hidden" else (held, "")

    def _open(self, pending: str, tag: str) -> str:
        """Look for the opening tag; returns the text behind it, or all of it once it cannot come any more."""
        start = pending.lstrip()
        if start.startswith(tag):
            self._state, self._trim = "hidden", True
            return start[len(tag) :]
        if tag.startswith(start):
            self._held = pending
        else:
            self._state = "after"
        return pending

    def _hide(self, pending: str, tag: str) -> tuple[str, str]:
        """(hidden text, text after the closing tag), holding back white space and what may be the start of the tag."""
        pending = self._trimmed(pending)
        end = pending.find(tag)
        if end >= 0:
            self._state, self._trim = "after", True
            return pending[:end].rstrip(), pending[end + len(tag) :]
        keep = len(pending) - held_prefix(pending, tag)
        keep = len(pending[:keep].rstrip())
        self._held = pending[keep:]
        return pending[:keep], ""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def held_prefix(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` starts with (less than the whole tag)."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
