"""Prefixes that are computed and pinned before the server answers requests (--warm-prefix FILE): at its start, and after a restart
of the engine.

A line of FILE is a JSON object with the members of a request that make its prompt, and `ttl`: the lifetime of the pin. Without
`ttl` the pin has no end. The prefix ends after the last message or the prompt, or where the line has `cache_control`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core.errors import ConfigError, EngineFailed, RequestError
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Call
from ridgeline.service.fields import TTLS, Fields, Route, read_fields
from ridgeline.service.json_values import decode_json
from ridgeline.service.read_call import read_call
from ridgeline.service.state import Service

MEMBERS = (
    "messages", "tools", "prompt", "cache_salt", "cache_control", "chat_template_kwargs", "add_special_tokens", "ttl",
)  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """One line. where: its file and number. ttl: "" for a pin without end. placed: it has breakpoints of its own."""

    where: str
    route: Route
    fields: Fields
    ttl: str
    placed: bool


def read_prefixes(path: Path) -> list[WarmPrefix]:
    """The lines of a file; empty lines are skipped. Raises ConfigError that names the line and the remedy."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read --warm-prefix {path}: {error.strerror}.", param="warm_prefix") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--warm-prefix {path} is not UTF-8 text ({error}).", param="warm_prefix") from None
    return [
        _prefix(line, f"--warm-prefix {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]


def _prefix(line: str, where: str) -> WarmPrefix:
    try:
        body: Any = decode_json(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}.", param="warm_prefix") from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        reason = f"{where} must be an object with either messages or prompt."
        raise ConfigError(reason, param="warm_prefix")
    for name in body:
        if name not in MEMBERS:
            raise ConfigError(f"{where} has the member {name[:40]!r}: use {', '.join(MEMBERS)}.", param="warm_prefix")
    if (ttl := body.pop("ttl", None)) not in (None, *TTLS):
        raise ConfigError(
            f"{where}: ttl is {ttl!r}: give {' or '.join(TTLS)}, or leave it out for a pin without end.",
            param="warm_prefix",
        )
    placed = '"cache_control"' in line
    if not placed:
        body["cache_control"] = {"type": "ephemeral"}
    route: Route = "chat" if "messages" in body else "completions"
    try:
        fields = read_fields(route, {**body, "max_tokens": 1, "temperature": 0})
    except RequestError as error:
        raise ConfigError(f"{where}: {error.message}", param="warm_prefix") from None
    return WarmPrefix(where, route, fields, ttl or "", placed)


async def warm(service: Service, prefixes: Sequence[WarmPrefix]) -> None:
    """Compute and pin the prefixes, one after the other. A pin that the budget refuses, and a prefix whose step fails, are reported
    in the log.

    Raises ConfigError for a line that this model cannot take, EngineFailed if the engine is lost.
    """
    for prefix in prefixes:
        try:
            call, _, _ = await read_call(service, prefix.route, prefix.fields, time.time())
        except RequestError as error:
            raise ConfigError(f"{prefix.where}: {error.message}", param="warm_prefix") from None
        if not prefix.placed:
            call = replace(call, breakpoints=tuple(Breakpoint(point.tokens, prefix.ttl) for point in call.breakpoints))
        await _compute(service, call, prefix.where)


async def _compute(service: Service, call: Call, where: str) -> None:
    subscription = service.client.submit(*call.submits())
    try:
        while not subscription.over:
            for delta in await subscription.take():
                if delta.finish not in ("", "stop", "length"):
                    if service.client.failure is not None:
                        raise EngineFailed(f"{where} was not computed: {service.client.failure}")
                    log.error("%s was not computed: %s", where, delta.error or delta.finish)
                for pin in delta.pins or ():
                    if pin.state == "refused":
                        log.warning("%s: %d tokens are computed, but not pinned (%s)", where, pin.tokens, pin.reason)
                    else:
                        log.info("%s: %d tokens are pinned", where, pin.tokens)
    finally:
        subscription.close()
