"""What a request's body asks of a replica, read without a tokenizer: an estimate of its tokens, and hashes of its prompt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ridgeline.service.apis.response_items import PREVIOUS, as_items
from ridgeline.service.fields import TIERS
from ridgeline.service.prefix_index import chunk_hashes
from ridgeline.service.routing import Demand

BYTES_PER_TOKEN = 4
"""Of text, about; and of a token id as it is hashed."""
CHUNK_TOKENS = 128


class Reading(NamedTuple):
    """demand: for the router. request_id: the member of that name of the body."""

    demand: Demand
    request_id: str | None


def read_demand(headers: Mapping[str, str], body: Any) -> Reading:
    """Read what matters for routing. Members with wrong types are left to the replica, which refuses them."""
    if not isinstance(body, dict):
        return Reading(Demand(1), None)
    text = prompt_bytes(body)
    salt = f"{body.get('model')}\0{body.get('cache_salt')}".encode("utf-8", "surrogatepass")
    session = headers.get("x-session-id") or body.get("session_id") or body.get("prompt_cache_key") or ""
    demand = Demand(
        tokens=max(1, len(text) // BYTES_PER_TOKEN),
        chunks=chunk_hashes(text, CHUNK_TOKENS * BYTES_PER_TOKEN, salt),
        tenant=tenant_of(headers),
        priority=_priority(body),
        session=session if isinstance(session, str) else "",
    )
    request_id = body.get("request_id")
    return Reading(demand, request_id if isinstance(request_id, str) else None)


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """The prompt as bytes that begin with those of every prompt that it continues: tools, then messages; or texts; or ids."""
    if PREVIOUS in body:
        given: Any = body.get("input")
        given = as_items(given) if isinstance(given, str) else given
        valid = all(
            isinstance(part, list) and all(isinstance(item, dict) for item in part) for part in (body[PREVIOUS], given)
        )
        items = [*body[PREVIOUS], *given] if valid else []
        return b"".join(msgspec.json.encode({**item, "id": None}) for item in items)
    if "messages" in body:
        messages = body["messages"] if isinstance(body["messages"], list) else [body["messages"]]
        parts = [body["tools"], *messages] if body.get("tools") else messages
        return b"".join(msgspec.json.encode(part) for part in parts)
    prompts = next((body[name] for name in ("prompt", "input", "documents", "text_2") if name in body), None)
    if isinstance(prompts, list) and not all(isinstance(item, int) for item in prompts):
        return b"".join(map(_prompt_bytes, prompts))
    return _prompt_bytes(prompts)


def _prompt_bytes(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    try:
        return array("i", prompt).tobytes()
    except (TypeError, ValueError, OverflowError):
        return b""


def tenant_of(headers: Mapping[str, str]) -> str:
    """A name for the caller, by its key. The key itself is not kept."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest() if key else ""


def _priority(body: Mapping[str, Any]) -> int:
    """As `service/sampling.py` reads it: `priority`, otherwise that of `service_tier`."""
    priority = body.get("priority")
    if isinstance(priority, int):
        return int(priority)
    tier = body.get("service_tier")
    return TIERS.get(tier, 0) if isinstance(tier, str) else 0
