"""The routes /v1/files and /v1/batches. A handler's docstring is the route's text in the API description."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import structs

from ridgeline.core.errors import BodyTooLarge, BodyTooSlow, NotFound, RequestError, UnsupportedField, shown
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.service.batches.input import MAX_BYTES
from ridgeline.service.batches.lane import Lane
from ridgeline.service.batches.objects import Batch, StorageFull, StoredFile, new_id
from ridgeline.service.batches.rows import ENDPOINTS
from ridgeline.service.batches.store import Store, StoredBatch
from ridgeline.service.guard import HOLDER, IGNORED, read_json
from ridgeline.service.keys.keyring import Holder
from ridgeline.service.readers import Reader, Record, Text, wrong
from ridgeline.service.routes import json_response

ROUTES = web.RouteTableDef()
LANE = web.AppKey("lane", Lane)
"""Runs batches. Missing in a server that has none."""

MAX_FILE_BYTES = 512 << 20
FILE_EXPIRY_S = 30 * 24 * 3600
"""Seconds until a file is deleted, unless the client says otherwise."""
EXPIRY_RANGE_S = (3600, 2_592_000)
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Limits of metadata."""
FILE_PAGE, MAX_FILE_PAGE = 10_000, 10_000
BATCH_PAGE, MAX_BATCH_PAGE = 20, 100
_STALL_S = 60.0
"""Seconds in which the next part of an upload must arrive."""
_PART = 1 << 18
_STEP = 1 << 22
"""Bytes that an upload reserves at a time. A client that only announces a large file takes no space from others."""
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD = 4096
"""Bytes of one of these fields."""
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])")
_WINDOW_S = {"m": 60, "h": 3600, "d": 86_400}
_ANCHOR = "created_at"
_OTHER_ENDPOINTS = (
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/videos",
)
_CONTENT = {"content-type": "application/octet-stream", "x-content-type-options": "nosniff"}
"""Headers of a file's bytes: a browser must not show what somebody has uploaded as a page of this server."""
_OBJECT = Record({}, open=True)
BATCH_BODY: dict[str, Reader] = {
    "input_file_id": Text(128),
    "endpoint": Text(128),
    "completion_window": Text(32),
    "metadata": _OBJECT,
    "output_expires_after": _OBJECT,
}


def _owner(request: web.Request) -> str | None:
    """The owner whose objects the client may see; None: those of all."""
    holder = request[HOLDER]
    return None if holder.admin else holder.name


def _lane(request: web.Request) -> Lane:
    lane = request.app.get(LANE)
    if lane is None:
        raise NotFound("This server has no files and batches: start it with --batch-dir FOLDER.")
    return lane


# --- files --------------------------------------------------------------------------------------------------------------


@ROUTES.post("/v1/files")
async def upload(request: web.Request) -> web.Response:
    """Store a file of requests for a batch. The body is multipart/form-data with the fields purpose and file."""
    store = _lane(request).store
    if not request.content_type.startswith("multipart/form-data") or "boundary" not in request.headers["content-type"]:
        raise RequestError("The body is not multipart/form-data: send the fields purpose and file.", param="file")
    file_id = new_id("file-")
    try:
        file = await _stored(request, store, file_id)
    finally:
        await asyncio.shield(asyncio.to_thread(store.release, file_id))
    return json_response(file.body())


async def _stored(request: web.Request, store: Store, file_id: str) -> StoredFile:
    """Store the file of a form. Its bytes are deleted if that fails."""
    path = store.path(file_id)
    try:
        fields, filename, size = await _receive(request, store, file_id)
        file = structs.replace(_checked_file(file_id, fields, filename, size), owner=request[HOLDER].name)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageFull(f"The file cannot be stored ({error.strerror}): free space on the disk.") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    await asyncio.shield(asyncio.to_thread(store.add_file, file))  # also for a client that leaves now
    return file


async def _receive(request: web.Request, store: Store, file_id: str) -> tuple[dict[str, str], str | None, int]:
    """The form's text fields, and the name and size of its file, whose bytes are stored as they arrive."""
    fields: dict[str, str] = {}
    filename, size = None, 0
    try:
        reader = await request.multipart()
        while (part := await _in_time(reader.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise RequestError(
                    "A part of the form is itself a form: send the fields purpose and file.", param="file"
                )
            if part.name == "file":
                if filename is not None:
                    raise RequestError("file is given twice: send one file.", param="file")
                filename, size = _checked_name(part.filename), await _save(part, store, file_id, request.content_length)
            else:
                await _read_field(part, fields)
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
        raise RequestError(
            f"The form cannot be read ({str(error)[:100]}): send multipart/form-data.", param="file"
        ) from error
    return fields, filename, size


async def _in_time(work: Any) -> Any:
    try:
        async with LoopTimeout(_STALL_S):
            return await work
    except TimeoutError as error:
        raise BodyTooSlow(f"No data arrived for {_STALL_S:g} seconds: send the file faster.") from error


async def _read_field(part: BodyPartReader, fields: dict[str, str]) -> None:
    """Add a text of the form to the fields. It may arrive in pieces of a few bytes."""
    name, data = part.name or "", bytearray()
    while chunk := await _in_time(part.read_chunk(_MAX_FIELD)):
        if name in _FIELDS:
            data += chunk
        if len(data) > _MAX_FIELD:
            raise RequestError(f"{name} has more than {_MAX_FIELD} bytes: shorten it.", param=name)
    if name in _FIELDS:
        fields[name] = data.decode("utf-8", "replace")


def _checked_name(filename: str | None) -> str:
    """The last part of a file's name. Raises RequestError for one that is not UTF-8, which no answer could show."""
    name = Path(filename or "").name[:255] or "upload.jsonl"
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RequestError("The name of the file is not UTF-8: send another filename.", param="file") from None
    return name


async def _save(part: BodyPartReader, store: Store, file_id: str, length: int | None) -> int:
    """Write a part's bytes in space that is reserved step by step, and wait for the disk; returns their number."""
    size, reserved = 0, await asyncio.to_thread(store.reserve, file_id, min(_STEP, length or _STEP))
    with store.path(file_id).open("xb") as file:
        while chunk := await _in_time(part.read_chunk(_PART)):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise BodyTooLarge(f"The file has more than {MAX_FILE_BYTES >> 20} MiB: split it.", param="file")
            if size > reserved:
                with contextlib.suppress(StorageFull):
                    reserved = await asyncio.to_thread(store.reserve, file_id, _STEP)
            if size > reserved:
                raise BodyTooLarge(
                    f"The file has more than {reserved} bytes, the space that is left for files.", param="file"
                )
            await asyncio.to_thread(file.write, chunk)
        await asyncio.to_thread(_sync, file)
    return size


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _checked_file(file_id: str, fields: Mapping[str, str], filename: str | None, size: int) -> StoredFile:
    """The object of an upload. Raises RequestError for a field that is missing or wrong."""
    if filename is None:
        raise RequestError("file is missing: send the file as a part of the form.", param="file")
    purpose = fields.get("purpose")
    if purpose is None:
        raise RequestError('purpose is missing: send "batch".', param="purpose")
    if purpose != "batch":
        raise UnsupportedField(f'purpose {shown(purpose)} is not supported: send "batch".', param="purpose")
    seconds = fields.get("expires_after[seconds]")
    anchor = fields.get("expires_after[anchor]")
    lifetime = FILE_EXPIRY_S
    if seconds is not None or anchor is not None:
        number = int(seconds) if seconds is not None and seconds.isdecimal() and len(seconds) < 12 else seconds
        lifetime = _lifetime("expires_after", {"anchor": anchor, "seconds": number})
    now = int(time.time())
    return StoredFile(file_id, size, now, filename, purpose, now + lifetime)


def _lifetime(name: str, value: Mapping[str, Any]) -> int:
    """The seconds of an expiry policy {anchor, seconds}."""
    if value.get("anchor") != _ANCHOR:
        raise wrong(f"{name}.anchor", value.get("anchor"), f'"{_ANCHOR}"')
    seconds = value.get("seconds")
    low, high = EXPIRY_RANGE_S
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not low <= seconds <= high:
        raise wrong(f"{name}.seconds", seconds, f"a whole number from {low} to {high}")
    return seconds


@ROUTES.get("/v1/files")
async def files(request: web.Request) -> web.Response:
    """The stored files, the latest first."""
    store = _lane(request).store
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", order, '"asc" or "desc"')
    limit = _limit(request, FILE_PAGE, MAX_FILE_PAGE)
    query = request.query.get("purpose"), request.query.get("after"), limit
    page, more = await asyncio.to_thread(partial(store.files, *query, ascending=order == "asc", owner=_owner(request)))
    return _page([file.body() for file in page], more)


@ROUTES.get("/v1/files/{id}")
async def file(request: web.Request) -> web.Response:
    """One stored file."""
    return json_response((await _file(request)).body())


@ROUTES.get("/v1/files/{id}/content")
async def content(request: web.Request) -> web.StreamResponse:
    """The bytes of a file."""
    stored = await _file(request)
    path = _lane(request).store.path(stored.id)
    return web.FileResponse(path, headers=_CONTENT)


@ROUTES.delete("/v1/files/{id}")
async def delete(request: web.Request) -> web.Response:
    """Delete a file. Status 409 while a batch reads it."""
    await asyncio.to_thread(_lane(request).store.delete_file, (await _file(request)).id)
    return json_response({"id": request.match_info["id"], "object": "file", "deleted": True})


async def _file(request: web.Request) -> StoredFile:
    """Raises NotFound for a file of another key, as for one that does not exist."""
    return await asyncio.to_thread(_lane(request).store.file, request.match_info["id"], owner=_owner(request))


async def _batch(request: web.Request) -> StoredBatch:
    """Raises NotFound for a batch of another key, as for one that does not exist."""
    return await asyncio.to_thread(_lane(request).store.batch, request.match_info["id"], _owner(request))


# --- batches ------------------------------------------------------------------------------------------------------------


@ROUTES.post("/v1/batches")
async def create(request: web.Request) -> web.Response:
    """Run the requests of an uploaded file while online requests leave room."""
    lane = _lane(request)
    values, ignored = await read_json(request, _read_batch)
    if ignored:
        request[IGNORED] = ignored
    holder = request[HOLDER]
    holder.check_budget()
    stored = await asyncio.to_thread(_new_batch, lane.store, values, holder)
    body = msgspec.json.encode(stored.batch)
    await asyncio.shield(lane.submit(stored))  # also for a client that leaves now
    return web.Response(body=body, content_type="application/json")


@ROUTES.get("/v1/batches")
async def batches(request: web.Request) -> web.Response:
    """The batches, the latest first."""
    lane = _lane(request)
    limit = _limit(request, BATCH_PAGE, MAX_BATCH_PAGE)
    page, more = await asyncio.to_thread(lane.store.batches, request.query.get("after"), limit, _owner(request))
    return _page([msgspec.to_builtins(lane.current(stored).batch) for stored in page], more)


@ROUTES.get("/v1/batches/{id}")
async def batch(request: web.Request) -> web.Response:
    """One batch with its progress."""
    return json_response(_lane(request).current(await _batch(request)).batch)


@ROUTES.post("/v1/batches/{id}/cancel")
async def cancel(request: web.Request) -> web.Response:
    """Cancel a batch. Rows that have ended keep their results. Status 409 for a batch that has ended."""
    return json_response((await _lane(request).cancel((await _batch(request)).batch.id)).batch)


def _read_batch(body: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The members of a body. Raises RequestError for one that is missing or wrong."""
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object: send an object.")
    values = {
        name: BATCH_BODY[name].read(name, value)
        for name, value in body.items()
        if name in BATCH_BODY and value is not None
    }
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in values:
            raise RequestError(f"{name} is missing: send {BATCH_BODY[name].expects}.", param=name)
    if (endpoint := values["endpoint"]) not in ENDPOINTS:
        known = " or ".join(ENDPOINTS)
        reason = "this server does not have it yet" if endpoint in _OTHER_ENDPOINTS else "it is unknown"
        raise UnsupportedField(
            f"endpoint {shown(endpoint)} is not supported, {reason}: send {known}.", param="endpoint"
        )
    if not _WINDOW.fullmatch(values["completion_window"]):
        raise wrong("completion_window", values["completion_window"], "24h, or another number of m, h or d")
    _check_metadata(values.get("metadata") or {})
    return values, tuple(name for name in body if name not in BATCH_BODY)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise RequestError(f"metadata has {len(metadata)} pairs: send at most {MAX_PAIRS}.", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY:
            raise RequestError(
                f"The metadata key {shown(key)} is too long: use at most {MAX_KEY} characters.", param="metadata"
            )
        if not isinstance(value, str) or len(value) > MAX_VALUE:
            raise wrong(f"metadata.{key}", value, f"a string of at most {MAX_VALUE} characters")


def _new_batch(store: Store, values: Mapping[str, Any], holder: Holder) -> StoredBatch:
    """A batch in its first state. Raises NotFound or RequestError for an unsuitable input file."""
    file = store.file(values["input_file_id"], "input_file_id", None if holder.admin else holder.name)
    if file.purpose != "batch":
        raise RequestError(
            f'File {file.id} has the purpose "{file.purpose}": upload the input with purpose "batch".',
            param="input_file_id",
        )
    if file.bytes > MAX_BYTES:
        raise RequestError(
            f"File {file.id} has {file.bytes >> 20} MiB: the input of a batch may have {MAX_BYTES >> 20}. Split it.",
            param="input_file_id",
        )
    lifetime = FILE_EXPIRY_S
    if (policy := values.get("output_expires_after")) is not None:
        lifetime = _lifetime("output_expires_after", policy)
    match = _WINDOW.fullmatch(values["completion_window"])
    assert match is not None
    now = int(time.time())
    new = Batch(
        id=new_id("batch_"),
        endpoint=values["endpoint"],
        input_file_id=file.id,
        completion_window=values["completion_window"],
        created_at=now,
        expires_at=now + int(match[1]) * _WINDOW_S[match[2]],
        metadata=values.get("metadata"),
    )
    return StoredBatch(new, new_id("file-"), new_id("file-"), lifetime, holder.name)


# --- lists --------------------------------------------------------------------------------------------------------------


def _limit(request: web.Request, default: int, most: int) -> int:
    text = request.query.get("limit", str(default))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise wrong("limit", text, f"a whole number from 1 to {most}")
    return int(text)


def _page(data: list[dict[str, Any]], more: bool) -> web.Response:
    """A list object."""
    ids = [item["id"] for item in data]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return json_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})
