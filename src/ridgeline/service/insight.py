"""Routes for the ledger of requests, explanations of slow requests, and the dashboard's data."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from ridgeline.core.errors import NotFound, RequestError
from ridgeline.metrics import Live, RequestRecord
from ridgeline.metrics.agent_runs import KEPT_RUNS, run_row
from ridgeline.metrics.live import KEPT_REQUESTS
from ridgeline.metrics.why import verdict
from ridgeline.service.batches.objects import PRICE_FACTOR
from ridgeline.service.front import Front
from ridgeline.service.guard import FRONT
from ridgeline.service.routes import json_response

ROUTES = web.RouteTableDef()
ORDERS = ("recent", "slowest", "batch")
MAX_ROWS = 1000
MAX_SLOWEST = 10
MAX_MINUTES = 120
FACTS = (
    "root", "architecture", "params", "dtype", "quantization", "matrix_dtype", "device", "max_len", "max_num_seqs",
    "max_num_batched_tokens", "weight_bytes", "expanded_bytes", "kv_bytes_per_token", "page_tokens", "blocks", "kv_groups",
    "model_options", "options", "steps_in_flight", "cost", "startup_s",
)  # fmt: skip


@ROUTES.get("/requests")
async def requests(request: web.Request) -> web.Response:
    """Online requests that have ended, the latest or the slowest first, or with order=batch rows of batches."""
    live = request.app[FRONT].metrics.live
    order, limit = read_order(request)
    return json_response({"object": "list", "data": [_row(live, record) for record in live.rows(order, limit)]})


def read_order(request: web.Request) -> tuple[str, int]:
    """The order of a list of requests, and how many it has. Raises RequestError."""
    order = request.query.get("order", "recent")
    if order not in ORDERS:
        raise RequestError(f"order is {order[:40]!r}: expected recent, slowest or batch.", param="order")
    limit = request.query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_ROWS:
        raise RequestError(f"limit is {limit[:40]!r}: expected 1 to {MAX_ROWS}.", param="limit")
    return order, int(limit)


@ROUTES.get("/requests/{id}")
async def ended_request(request: web.Request) -> web.Response:
    """One request that has ended, by the id of its answer's body or of its header x-request-id."""
    live, record = _find(request)
    return json_response(_row(live, record))


@ROUTES.get("/requests/{id}/why")
async def why(request: web.Request) -> web.Response:
    """An explanation of a request's latency, in words and numbers."""
    live, record = _find(request)
    return json_response(live.why(record))


@ROUTES.get("/runs/{id}")
async def agent_run(request: web.Request) -> web.Response:
    """One agent run: the sums of all requests with one header x-run-id, and the time until its answer was published."""
    run_id = request.match_info["id"]
    run = request.app[FRONT].metrics.live.agent_runs.find(run_id)
    if run is None:
        raise NotFound(
            f"No agent run has the id {run_id[:80]!r}: give the value of the header x-run-id that its requests had. The last "
            f"{KEPT_RUNS} ended runs are kept.",
            param="id",
        )
    return json_response(run_row(run))


@ROUTES.get("/dashboard/data")
async def data(request: web.Request) -> web.Response:
    """Everything that the dashboard shows.

    With `since` (unix seconds) also the readings of the last hour that are newer.
    """
    front = request.app[FRONT]
    content = snapshot(front)
    since = request.query.get("since")
    if since is not None:
        content["readings"] = [asdict(reading) for reading in front.metrics.live.history.readings_since(_since(since))]
    return json_response(content)


def _since(text: str) -> float:
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if not 0 <= since < math.inf:
        raise RequestError(f"since is {text[:40]!r}: expected unix seconds, 0 for all readings.", param="since")
    return since


def snapshot(front: Front) -> dict[str, Any]:
    """The current state of the service as plain data. Unknown figures are left out."""
    live, client = front.metrics.live, front.client
    return {
        "at": time.time(),
        "healthy": front.trouble is None,
        "trouble": front.trouble,
        "model": front.metrics.model_name,
        "facts": _facts(front),
        "slo": live.slo.limits(),
        "slo_text": str(live.slo),
        "slo_broken": live.broken(),
        "ceilings": asdict(live.ceilings),
        "now": live.now(),
        "figures": live.figures(),
        "latencies": live.latencies(),
        "user_speed": {f"p{share * 100:g}": speed for share, speed in live.speeds().items()},
        "agent_runs": live.runs(),
        "blamed": live.blamed(),
        "cut": live.cut(),
        "point": live.point(),
        "alerts": [asdict(alert) for alert in live.history.alerts()],
        "minutes": [asdict(minute) for minute in list(live.history.minutes)[-MAX_MINUTES:]],
        "slowest": [_brief(live, record) for record in live.rows("slowest", MAX_SLOWEST)],
        "late": {"count": len(live.late), "seconds": sum(work.seconds for work in live.late)},
        "last_step": client.last_step,
    }


def _facts(front: Front) -> dict[str, Any]:
    """The facts about model and device that the dashboard shows."""
    facts = front.client.facts or {}
    return {name: facts[name] for name in FACTS if name in facts}


def _row(live: Live, record: RequestRecord) -> dict[str, Any]:
    """A row of the ledger with derived values."""
    verdict_text = verdict(record, live.slo_of(record))
    factor = PRICE_FACTOR if record.batch else 1.0
    derived = {"tpot_s": record.tpot_s, "elsewhere_s": record.elsewhere_s, "verdict": verdict_text}
    bill = {"price_factor": factor, "billed": live.bill(record, factor)}
    return asdict(record) | derived | bill | live.shares(record)


def _brief(live: Live, record: RequestRecord) -> dict[str, Any]:
    explanation = live.why(record)
    return {
        "id": record.id,
        "request_id": record.request_id,
        "e2e_s": record.e2e_s,
        "ttft_s": record.ttft_s,
        "publish_s": record.publish_s,
        "tpot_s": record.tpot_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "blame": explanation["blame"],
        "summary": explanation["summary"],
        "reasons": explanation["reasons"],
    }


def _find(request: web.Request) -> tuple[Live, RequestRecord]:
    """Raises NotFound for an id that is unknown, still running, or no longer kept."""
    live = request.app[FRONT].metrics.live
    record = live.find(request.match_info["id"])
    if record is None:
        raise no_request(request.match_info["id"])
    return live, record


def no_request(request_id: str) -> NotFound:
    return NotFound(
        f"No ended request has the id {request_id[:80]!r}: give the id of the answer's body or of its header x-request-id. "
        f"The last {KEPT_REQUESTS} requests are kept.",
        param="id",
    )
