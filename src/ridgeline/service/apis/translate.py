"""Bodies of other vendors' APIs as chat completions: what they ask for is read, checked and computed as those are.

Errors of the chat completion are told in the words of the original body.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import RequestError
from ridgeline.service.answer import Streaming
from ridgeline.service.call import Call
from ridgeline.service.chat import ChatShape, read_chat
from ridgeline.service.fields import Fields, read_fields
from ridgeline.service.readers import Reader, wrong
from ridgeline.service.state import Service

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where parts of a chat completion come from. messages: the name of each message in the original body. fields: names of fields
    that have another one there."""

    messages: Sequence[str]
    fields: Mapping[str, str]

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors in this context name what the client sent."""
        try:
            yield
        except RequestError as error:
            error.message = self.original(error.message)
            error.param = None if error.param is None else self.original(error.param)
            raise

    def original(self, text: str) -> str:
        """A text about the chat completion, about the original."""
        text = _MESSAGE.sub(lambda match: self.messages[int(match[1])], text)
        for name, given in self.fields.items():
            text = re.sub(rf"(?<![\w.]){name}\b", given, text)
        return text


@dataclass(frozen=True, slots=True)
class Translated(Fields):
    """The fields of a chat completion that was another body."""

    origin: Origin


def translated(body: dict[str, Any], origin: Origin, ignored: Sequence[str] = ()) -> Translated:
    """body: of a chat completion. ignored: fields of the original without effect. Raises RequestError in its words."""
    with origin.errors():
        fields = read_fields("chat", body)
    return Translated(fields.values, (*map(origin.original, fields.ignored), *ignored), origin)


async def read_translated(
    service: Service, fields: Translated, prefix: str, arrival: float
) -> tuple[Call, ChatShape, Streaming | None]:
    """As read_chat. prefix: of the answer's id."""
    with fields.origin.errors():
        return await read_chat(service, fields, f"{prefix}_{uuid.uuid4().hex}", arrival)


def read_members(
    body: Any, known: Mapping[str, Reader], required: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The members of a body that are given, checked by `known`; and the names of others. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError(f"The body is not a JSON object: send an object with {', '.join(required)}.")
    given = {name: value for name, value in body.items() if value is not None}
    values = {name: known[name].read(name, value) for name, value in given.items() if name in known}
    for name in required:
        if name not in values:
            raise RequestError(f"{name} is missing: send {known[name].expects}.", param=name)
    return values, tuple(name for name in given if name not in known)


def texts(value: Any, where: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of a content of these kinds as text parts, which keep their cache_control. value: a text, or a list of parts."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong(where, value, "a text or a list of parts")
    return [text_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(value)]


def text_part(part: Any, where: str, kinds: Sequence[str]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in kinds:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise wrong(f"{where}.type", kind, f"{' or '.join(kinds)}, because this model reads text only")
    if not isinstance(part.get("text"), str):
        raise wrong(f"{where}.text", part.get("text"), "a text")
    kept = {"cache_control": part["cache_control"]} if part.get("cache_control") is not None else {}
    return {"type": "text", "text": part["text"], **kept}
