"""Runs rows of batches in the engine of this server: those of its own batches, and those that a router sends.

`LaneAdmission` says how many choices may be in flight. One task looks every `_LOOK_S` while rows run, and at once when an online
request goes to the engine; it withdraws the youngest rows above that number. A row is an ordinary call, read and checked like an
online request, that the engine runs with the lowest priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from ridgeline.core.errors import RequestError, RidgelineError, Unavailable
from ridgeline.metrics.live import Live
from ridgeline.service.answer import make_body
from ridgeline.service.apis.response_items import endpoint
from ridgeline.service.apis.response_store import ResponseStore
from ridgeline.service.batches.admission import LaneAdmission, Load
from ridgeline.service.batches.rows import ENDPOINTS, PRIORITY, NoRoom, RowAnswer, RowRequest, choices_of
from ridgeline.service.choices import usage_dict
from ridgeline.service.embeddings import EMBEDDINGS
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.front import Front
from ridgeline.service.guard import FRONT, HOLDER, REQUEST_ID, read_json
from ridgeline.service.keys.keyring import Holder
from ridgeline.service.read_call import CHAT, COMPLETIONS
from ridgeline.service.state import Service

_LOOK_S = 0.05
_RESPONSES = endpoint(ResponseStore(0), "")  # rows go on from nothing, and only the result file keeps them
_READERS: Mapping[str, Endpoint] = dict(zip(ENDPOINTS, (CHAT, COMPLETIONS, _RESPONSES, EMBEDDINGS), strict=True))


log = logging.getLogger(__name__)


class EngineRows:
    """See `Rows`. front: that of the engine; None while it is not awake. live: its figures."""

    def __init__(self, front: Callable[[], Front | None], live: Live, admission: LaneAdmission) -> None:
        self._front, self._live, self._admission = front, live, admission
        self._taken = 0
        self._scopes: dict[asyncio.Timeout, int] = {}
        """Rows that run, the oldest first, and their choices. A scope whose time is set to now withdraws its row."""
        self._changed = asyncio.Event()
        self._totals, self._gaps, self._verdicts = live.totals, live.token_gaps, live.verdicts

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        allowed = self.look()
        if not allowed or (self._taken and self._taken + choices > allowed):
            return False
        self.take_anyway(choices)
        return True

    def take_anyway(self, choices: int) -> None:
        """Take places without asking for room, for a row that ends at once with an error."""
        if not self._taken:
            self._changed.set()
        self._taken += choices

    def give_back(self, choices: int, model: str | None = None) -> None:
        self._taken -= choices

    def may_pass(self, model: str | None) -> bool:
        """No: all rows run in the same engine."""
        return False

    def wait(self, count: int) -> None:
        """Nothing: an engine that sleeps is not woken by rows."""

    def wake(self) -> None:
        """An online request goes to the engine: look now, so that rows give way before the next step."""
        if self._scopes:
            self._changed.set()

    async def watch(self) -> None:
        """Withdraw rows when online requests need their places, until cancelled."""
        while True:
            self._changed.clear()
            try:
                self.look()
            except Exception:
                log.exception("rows of batches go on after an error")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self._taken else None):
                    await self._changed.wait()

    def look(self) -> int:
        """Choices of rows that may be in flight now. Withdraws those above."""
        service = self._service()
        if service is None:
            self._withdraw(0)
            return 0
        now = time.monotonic()
        self._learn(now)
        online = service.client.open_choices - service.gate.batch_choices
        allowed = self._admission.allowed(Load(now, online, self._taken, service.gate.rows))
        if self._taken - allowed > allowed // 4:  # a smaller excess goes by itself: withdrawn rows lose their tokens
            self._withdraw(allowed)
        return allowed

    def _service(self) -> Service | None:
        """The service, if rows may run now."""
        front = self._front()
        try:
            return None if front is None else front.service()
        except RidgelineError:
            return None

    def _learn(self, now: float) -> None:
        """Tell the admission what has happened since the last look."""
        live = self._live
        totals, verdicts, gaps = live.totals, live.verdicts, live.token_gaps
        work, count = totals.since(self._totals), gaps[0] - self._gaps[0]
        if work.device_s and count:
            self._admission.on_steps(work.row_s / work.device_s, (gaps[1] - self._gaps[1]) / count, count)
        good, missed = (after - before for after, before in zip(verdicts, self._verdicts, strict=True))
        self._admission.on_requests(now, good, missed)
        self._totals, self._verdicts, self._gaps = totals, verdicts, gaps

    def _withdraw(self, allowed: int) -> None:
        """Withdraw the youngest rows above so many choices. A row that has more choices than that runs alone."""
        choices = 0
        for scope, count in self._scopes.items():
            first = not choices
            choices += count
            if choices > allowed and not (first and allowed) and not scope.expired():
                scope.reschedule(0.0)

    async def run(self, row: RowRequest) -> RowAnswer:
        fields = await asyncio.to_thread(_READERS[row.endpoint].fields, row.body)
        front = self._front()
        if front is None:
            raise Unavailable("The model sleeps: rows of batches wait.")
        service = front.service().named(fields.get("model"))
        row.holder.check_model(*service.card.names(fields.get("model")))
        row.holder.check_budget()
        try:
            async with front.sleep.awake(), asyncio.timeout(None) as scope:
                self._scopes[scope] = row.choices
                try:
                    return await self._answer(service, row, fields)
                finally:
                    del self._scopes[scope]
        except TimeoutError:
            if scope.expired():
                raise NoRoom from None
            raise

    async def _answer(self, service: Service, row: RowRequest, fields: Any) -> RowAnswer:
        call, shape, streaming = await _READERS[row.endpoint].call(service, fields, time.time())
        if streaming is not None:
            raise RequestError("stream is true: rows of a batch cannot be streamed. Leave it out.", param="stream")
        call, _ = row.holder.bind(call)
        priority = PRIORITY + call.priority
        call = replace(call, request_id=row.request_id, priority=priority, batch=True, has_reader=False)
        service.gate.batch_choices += call.engine_choices
        try:
            body = await make_body(service, call, shape)
        finally:
            service.gate.batch_choices -= call.engine_choices
        return RowAnswer(200, body, usage_dict(shape.usage))


ROWS = web.AppKey("rows", EngineRows)
"""Missing in a server with several models, which runs no rows of a router."""


async def answer_row(request: web.Request, rows: EngineRows) -> web.Response:
    """Answer a row of a router's batch, or refuse it if there is no room."""
    log = request.app[FRONT].prompts
    body, chunks = await read_json(request, lambda body: (body, log.read(request.headers, body)))
    choices = choices_of(body)
    if not rows.take(choices, None, request[HOLDER]):
        raise NoRoom
    log.add(chunks)
    try:
        answer = await rows.run(RowRequest(request.path, body, choices, request[HOLDER], request[REQUEST_ID]))
    finally:
        rows.give_back(choices)
    return web.Response(body=answer.body, content_type="application/json")
