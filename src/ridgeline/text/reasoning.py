"""Reasoning in an output: the tags that enclose it as data, and splitters of streamed text into visible and hidden text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ridgeline.core.errors import ConfigError
from ridgeline.text.tool_formats import AUTO, NONE


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around reasoning.

    answer: tags around the visible answer, which are not part of it. implied: reasoning is open from the start of an output unless
    the prompt has closed it. channels: the output consists of messages with headers (text.harmony). in_content: templates look
    for the tags in the text of earlier answers.
    """

    open: str
    close: str
    answer: tuple[str, str] | None = None
    implied: bool = False
    channels: bool = False
    in_content: bool = True

    @property
    def all(self) -> str:
        """All tags, in one string."""
        return "".join((self.open, self.close, *(self.answer or ())))


_THINK = Tags("<think>", "</think>")
_RESPONSE = ("<response>", "</response>")
_HARMONY = Tags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", channels=True, in_content=False)
_MISTRAL = Tags("[THINK]", "[/THINK]")
_COHERE = Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), in_content=False)

REASONING_FORMATS: Mapping[str, Tags] = MappingProxyType(
    {
        "openai_gptoss": _HARMONY,
        "cohere2": _COHERE,
        "granite_response": Tags("<think>", "</think>", _RESPONSE),
        "qwen3": _THINK,
        "mistral": _MISTRAL,
        "thinking": Tags("<thinking>", "</thinking>"),
        "granite": Tags("Here is my thought process:", "Here is my response:"),
        "deepseek_r1": Tags("<think>", "</think>", implied=True),
        "deepseek_v3": _THINK,
        "glm45": _THINK,
        "gpt-oss": _HARMONY,
    }
)
"""By the names of --reasoning-parser, which are those of vLLM where it has the format. Templates are tried in this order."""


def detect_tags(template: str) -> Tags | None:
    """The reasoning tags that a chat template uses; None for a model without reasoning."""
    return next((tags for tags in REASONING_FORMATS.values() if _uses(tags, template)), None)


def choose_tags(name: str, template: str) -> Tags | None:
    """The tags of the option --reasoning-parser. Raises ConfigError for an unknown name."""
    if name in (AUTO, NONE):
        return detect_tags(template) if name == AUTO else None
    if name not in REASONING_FORMATS:
        known = ", ".join((AUTO, NONE, *REASONING_FORMATS))
        raise ConfigError(f"reasoning_parser is {name!r}: use one of {known}.")
    return REASONING_FORMATS[name]


def _uses(tags: Tags, template: str) -> bool:
    if tags.channels:
        return "<|channel|>" in template and "analysis" in template
    return tags.close in template and (tags.answer is None or tags.answer[0] in template)


def starts_inside(tags: Tags, prompt: str) -> bool:
    """Whether the prompt ends with the opening tag, as some templates write it, or leaves a reasoning open that is implied."""
    end = prompt.rstrip()
    return end.endswith(tags.open) or (tags.implied and not end.endswith(tags.close))


class Splitter(Protocol):
    """Splits one output into (visible, hidden) text."""

    def push(self, text: str) -> tuple[str, str]:
        """New (visible, hidden) text."""

    def finish(self) -> tuple[str, str]:
        """The text held back, as (visible, hidden), at the end of the output."""


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
        self._answer = _Answer(None if tags is None else tags.answer)

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
            return self._answer.push(self._trimmed(pending)), hidden
        return "", hidden

    def finish(self) -> tuple[str, str]:
        """The text held back, as (visible, hidden), at the end of the output."""
        text, self._held_back = self._held_back, ""
        if self._state == "hidden":
            return "", text.rstrip()
        return self._answer.push(text) + self._answer.finish(), ""

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


class _Answer:
    """Removes the tags around an answer: the first one at its start, the second one once."""

    def __init__(self, tags: tuple[str, str] | None) -> None:
        self._tags = tags
        self._begun = tags is None
        self._held_back = ""

    def push(self, text: str) -> str:
        if self._tags is None:
            return text
        pending, self._held_back = self._held_back + text, ""
        opening, closing = self._tags
        if not self._begun:
            start = pending.lstrip()
            if opening.startswith(start) and start != opening:
                self._held_back = pending
                return ""
            self._begun = True
            if not start.startswith(opening):  # without the first tag the text is not enclosed
                self._tags = None
                return pending
            pending = start[len(opening) :]
        end = pending.find(closing)
        if end >= 0:
            self._tags = None
            return pending[:end] + pending[end + len(closing) :]
        keep = len(pending) - partial_tag_length(pending, closing)
        self._held_back = pending[keep:]
        return pending[:keep]

    def finish(self) -> str:
        text, self._held_back = self._held_back, ""
        return text


def partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
