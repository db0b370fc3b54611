"""Reasoning in an output: the tags that enclose it, and a splitter of streamed text into visible and hidden text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    open: str
    close: str


KNOWN_TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"), Tags("<thinking>", "</thinking>"))


def detect_tags(template: str) -> Tags | None:
    """The reasoning tags that a chat template uses; None for a model without reasoning."""
    return next((tags for tags in KNOWN_TAGS if tags.close in template), None)


def starts_inside(tags: Tags, prompt: str) -> bool:
    """Whether the prompt ends with the opening tag, as some templates write it."""
    return prompt.rstrip().endswith(tags.open)


class ReasoningSplitter:
    """Splits one output at its reasoning tags.

    A span is hidden only at the start of an output (white space aside) and only once, so an answer may mention the tags. White
    space next to the tags belongs to neither part. If an output ends inside the span, all of it is hidden.
    """

    def __init__(self, tags: Tags | None, *, inside: bool = False) -> None:
        """tags: None if everything is visible. inside: the span is already open (see `starts_inside`)."""
        self._tags = tags
        self._state = "after" if tags is None else "hidden" if inside else "before"
        self._held_back = ""
        self._trim = tags is not None and inside

    def push(self, text: str) -> tuple[str, str]:
        """New (visible, hidden) text."""
        if self._tags is None:
            return text, ""
        pending, hidden = self._held_back + text, ""
        self._held_back = ""
        if self._state == "before":
            pending = self._open(pending, self._tags.open)
        if self._state == "hidden":
            hidden, pending = self._hide(pending, self._tags.close)
        if self._state == "after":
            return self._trimmed(pending), hidden
        return "", hidden

    def finish(self) -> tuple[str, str]:
        """The text held back, as (visible, hidden), at the end of the output."""
        text, self._held_back = self._held_back, ""
        return ("", text.rstrip()) if self._state == "hidden" else (text, "")

    def _open(self, pending: str, tag: str) -> str:
        """Look for the opening tag. Returns the text after it, or all text once the tag cannot come any more."""
        start = pending.lstrip()
        if start.startswith(tag):
            self._state, self._trim = "hidden", True
            return start[len(tag) :]
        if tag.startswith(start):
            self._held_back = pending
        else:
            self._state = "after"
        return pending

    def _hide(self, pending: str, tag: str) -> tuple[str, str]:
        """(hidden text, text after the closing tag). Holds back white space and a possible start of the tag."""
        pending = self._trimmed(pending)
        end = pending.find(tag)
        if end >= 0:
            self._state, self._trim = "after", True
            return pending[:end].rstrip(), pending[end + len(tag) :]
        keep = len(pending) - partial_tag_length(pending, tag)
        keep = len(pending[:keep].rstrip())
        self._held_back = pending[keep:]
        return pending[:keep], ""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
