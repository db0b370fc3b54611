"""Places in a conversation at which a cached prefix ends, and the number of tokens before them.

A chat template decides where the text of a message stands in the prompt. So the conversation is rendered once more for each place,
without what comes after it, and the common beginning of both texts is the prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]
_OTHER = "\ue001"
"""A text that no message contains: a private-use character."""


class Place(NamedTuple):
    """The end of a prefix: after the first `tools` functions, or (tools 0) after the first `messages` messages, the last of them
    only up to its first `parts` parts if that is above 0."""

    tools: int = 0
    messages: int = 0
    parts: int = 0


def shortened(place: Place, messages: Messages, tools: Sequence[Any] | None) -> Iterator[tuple[Messages, Any]]:
    """Conversations that are equal to this one up to the place and differ after it: messages and tools. A template may refuse
    the first, because it ends early; the second has all messages, with another text after the place."""
    if place.tools:
        first = next((i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer")), 0)
        yield [*messages[:first], *map(_changed, messages[first:])], (tools or ())[: place.tools]
        return
    kept = list(messages[: place.messages])
    if place.parts and isinstance(content := kept[-1].get("content"), list):
        kept[-1] = {**kept[-1], "content": content[: place.parts]}
    yield kept, tools
    yield [*kept, *map(_changed, messages[place.messages :])], tools


def _changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with another text. Tool calls stay, because templates match results to them."""
    return {**message, "content": _OTHER}


def common_length(first: str, second: str) -> int:
    """Characters of the common beginning of two texts."""
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return bisect_right(range(1, limit + 1), 0, key=lambda length: int(first[:length] != second[:length]))


def tokens_before(offsets: Sequence[tuple[int, int]], position: int) -> int:
    """Leading tokens that end at or before a position of the text. offsets: start and end of each token."""
    return next((index for index, (_, end) in enumerate(offsets) if end > position), len(offsets))
