"""`cache_control`: where cached prefixes of a prompt end, how long they stay, and what became of them.

The shape is Anthropic's: `{"type": "ephemeral", "ttl": "5m" | "1h"}` on a tool, a message or a part of its content. At the top of a
body it means the end of the messages or of the prompt; completions may say there how many tokens or characters it covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ridgeline.core.errors import RequestError, UnsupportedField
from ridgeline.service.fields import TTLS, Fields, read_cache_control
from ridgeline.text.breakpoints import Place, tokens_before

DEFAULT_TTL = "5m"
MAX_BREAKPOINTS = 4


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a cached prefix. tokens: of the prefix. ttl: name of its lifetime, "" for one without end."""

    tokens: int
    ttl: str

    @property
    def ttl_s(self) -> float:
        return TTLS.get(self.ttl, float("inf"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The breakpoints of a conversation: their places, lifetimes and fields."""

    places: tuple[Place, ...] = ()
    ttls: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def breakpoints(self, marks: Sequence[int]) -> tuple[Breakpoint, ...]:
        """In the order of the prompt. marks: tokens before each place. Raises RequestError for an hour after five minutes."""
        controls = sorted(zip(marks, self.ttls, self.fields, strict=True))
        for (_, before, _), (_, ttl, field) in pairwise(controls):
            if TTLS[before] < TTLS[ttl]:
                raise RequestError(
                    f"{field}.ttl is {ttl}, but the lifetime of a breakpoint before it is {before}: a prefix cannot outlive its "
                    "beginning. Put longer lifetimes first.",
                    param=f"{field}.ttl",
                )
        return tuple(Breakpoint(tokens, ttl) for tokens, ttl, _ in controls)


def read_wanted(fields: Fields) -> Wanted:
    """The breakpoints of a chat completion. Raises RequestError for a wrong shape and for more than four."""
    controls = list(_controls(fields))
    if len(controls) > MAX_BREAKPOINTS:
        field = controls[MAX_BREAKPOINTS][1]
        raise RequestError(
            f"{field} is breakpoint {len(controls)} of this request: send at most {MAX_BREAKPOINTS}.", param=field
        )
    ttls = [read_cache_control(field, value).get("ttl", DEFAULT_TTL) for _, field, value in controls]
    return Wanted(tuple(place for place, _, _ in controls), tuple(ttls), tuple(field for _, field, _ in controls))


def _controls(fields: Fields) -> Iterator[tuple[Place, str, Any]]:
    """Place, field and value of every cache_control of a conversation."""
    for index, tool in enumerate(fields.get("tools") or ()):
        if tool.get("cache_control") is not None:
            yield Place(tools=index + 1), f"tools[{index}].cache_control", tool["cache_control"]
    messages = fields.get("messages")
    for index, message in enumerate(messages):
        content = message.get("content")
        for part, item in enumerate(content if isinstance(content, list) else ()):
            if isinstance(item, Mapping) and item.get("cache_control") is not None:
                place = Place(messages=index + 1, parts=part + 1)
                yield place, f"messages[{index}].content[{part}].cache_control", item["cache_control"]
        if message.get("cache_control") is not None:
            yield Place(messages=index + 1), f"messages[{index}].cache_control", message["cache_control"]
    if fields.get("cache_control") is not None:
        yield Place(messages=len(messages)), "cache_control", fields.get("cache_control")


def without_controls(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """The tools as a template may show them."""
    if tools is None:
        return None
    return [{name: value for name, value in tool.items() if name != "cache_control"} for tool in tools]


def prompt_breakpoint(control: Mapping[str, Any], tokens: int, offsets: Sequence[tuple[int, int]]) -> Breakpoint:
    """The breakpoint of a completion. tokens: of its prompt. offsets: places of the tokens in its text, () without a text."""
    count, characters = control.get("tokens"), control.get("characters")
    if count is not None and characters is not None:
        raise RequestError("cache_control has tokens and characters: send one of them.", param="cache_control")
    if characters is not None:
        if not offsets:
            reason = "cache_control.characters needs a prompt that is a text: send cache_control.tokens instead."
            raise RequestError(reason, param="cache_control.characters")
        count = tokens_before(offsets, characters)
    elif count is not None and count > tokens:
        raise RequestError(
            f"cache_control.tokens is {count}, but the prompt has {tokens} tokens: send at most {tokens}.",
            param="cache_control.tokens",
        )
    return Breakpoint(tokens if count is None else count, control.get("ttl", DEFAULT_TTL))


def check_cached(facts: Mapping[str, Any], field: str) -> None:
    """Raises UnsupportedField for a breakpoint if the engine with these facts has no prefix cache."""
    if not (facts.get("options") or {}).get("enable_prefix_caching", True):
        raise UnsupportedField(
            f"{field} is not supported: this server runs without a prefix cache (--no-enable-prefix-caching). Leave it out.",
            param=field,
        )
