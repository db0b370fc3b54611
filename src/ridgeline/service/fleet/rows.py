"""Runs rows of batches at the replicas of a router. Each replica says in its health checks how many it has room for, and withdraws
rows when its online requests need the place."""

from __future__ import annotations

import asyncio

import msgspec

from ridgeline.core.errors import EngineFailed, RidgelineError, Unavailable
from ridgeline.service.batches.rows import ROW, NoRoom, RowAnswer, RowRequest
from ridgeline.service.errors import BUSY, ENGINE
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.demand import read_demand
from ridgeline.service.fleet.proxy import NOT_READY
from ridgeline.service.fleet.upstream import NOT_JSON, ReplicaLost, error_message
from ridgeline.service.keys.keyring import Holder
from ridgeline.service.routing import Demand, Ticket


class ReplicaRows:
    """See `Rows`. api_key: that of the replicas."""

    def __init__(self, balancer: Balancer, api_key: str | None) -> None:
        self._balancer = balancer
        self._headers = [("content-type", "application/json"), ("accept-encoding", "identity"), (ROW, "1")]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._taken = 0

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        limit = self._balancer.row_limit
        if not limit or (self._taken and self._taken + choices > limit):
            return False
        self._taken += choices
        return True

    def give_back(self, choices: int, model: str | None) -> None:
        self._taken -= choices

    def may_pass(self, model: str | None) -> bool:
        """No: rows of all models share the replicas' room."""
        return False

    def wait(self, count: int) -> None:
        self._balancer.router.rows_waiting = count

    async def run(self, row: RowRequest) -> RowAnswer:
        demand, body = await asyncio.to_thread(_read, row)
        ticket = self._balancer.place_row(demand, row.choices)
        assert ticket.replica is not None
        name, failed, result = ticket.replica.name, None, "client_left"
        try:
            answer = await self._send(ticket, row, body)
            failed, result = False, "refused" if answer.usage is None else "ok"
            return answer
        except ReplicaLost as error:
            self._balancer.limit_rows(ticket, lost=True)
            failed, result = True, "failed"
            message = f"The replica failed before it answered ({error})."
            raise EngineFailed(message) if error.reached else Unavailable(message) from error
        except NoRoom:
            self._balancer.limit_rows(ticket, lost=False)
            result = "refused"
            raise
        except RidgelineError:
            result = "failed"
            raise
        finally:
            self._balancer.count(name, result)
            self._balancer.finish(ticket, failed=failed)

    async def _send(self, ticket: Ticket, row: RowRequest, body: bytes) -> RowAnswer:
        """The answer of a replica. Raises ReplicaLost, NoRoom, Unavailable and EngineFailed."""
        assert ticket.replica is not None
        upstream = self._balancer.upstreams[ticket.replica.name]
        headers = [*self._headers, ("x-request-id", row.request_id)]
        async with upstream.exchange("POST", row.endpoint, headers, body) as (_, reply):
            data = await reply.read()
            upstream.received += 1
        if reply.status == 429 and BUSY in reply.headers:
            raise NoRoom
        if reply.status in NOT_READY:
            if reply.status == 503:
                self._balancer.down(ticket, "it answers 503", starting=ENGINE in reply.headers)
            raise Unavailable(error_message(data) or f"The replica answers {reply.status}.")
        if reply.status >= 500:
            raise EngineFailed(error_message(data) or f"The replica answers {reply.status}.")
        if reply.status != 200:
            return RowAnswer(reply.status, data, None)
        try:
            return RowAnswer(200, data, msgspec.json.decode(data)["usage"])
        except (*NOT_JSON, KeyError, TypeError) as error:
            raise ReplicaLost("its answer has no usage") from error


def _read(row: RowRequest) -> tuple[Demand, bytes]:
    return read_demand({}, row.body).demand, msgspec.json.encode(row.body)
