"""Checks of a running server for `ridgeline doctor`, over HTTP."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

import ridgeline
from ridgeline.cli.doctor_machine import Check
from ridgeline.core.reach import reason

_TIMEOUT_S = 10.0
_SLOW_S = 1.0
_CLOCK_S = 2.0
"""Difference of clocks beyond which times of traces and logs mislead. The header Date has whole seconds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """status: 0 if there is none, and `text` is the reason. sent, received: unix seconds."""

    status: int
    text: str
    date: str = ""
    sent: float = 0.0
    received: float = 0.0


def check_server(url: str, key: str = "") -> list[Check]:
    """Health, version, clock, models and metrics. A server that does not answer has one check."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    health = _get(base + "/health")
    checks = [check_health(health, base)]
    if not health.status:
        return checks
    checks += [check_clock(health), check_version(_get(base + "/version", key))]
    checks.append(check_models(_get(base + "/v1/models", key)))
    return [*checks, *check_metrics(_get(base + "/metrics", key))]


def check_health(answer: Answer, url: str) -> Check:
    if not answer.status:
        return Check("server", "fail", f"{url}: {answer.text}", "start it, or give the address of a server that runs.")
    seconds = answer.received - answer.sent
    if answer.status != 200:
        return Check(
            "server", "fail", f"/health answers {answer.status}: {_message(answer.text)}", "read the server's log."
        )
    detail = f"healthy; /health took {1000 * seconds:.0f} ms"
    if seconds > _SLOW_S:
        return Check("server", "warn", detail, "`ridgeline diagnose` says what keeps its event loop busy.")
    return Check("server", "ok", detail)


def check_clock(answer: Answer) -> Check:
    try:
        server = parsedate_to_datetime(answer.date).timestamp()
    except (TypeError, ValueError):
        return Check("clock", "warn", "the server sends no date", "check the proxy in front of it.")
    # The date is cut to whole seconds: the server's clock was between `server` and a second later.
    late, early = answer.sent - (server + 1.0), server - answer.received
    off = max(late, early, 0.0)
    if off > _CLOCK_S:
        return Check(
            "clock", "warn", f"the clocks differ by {off:.0f} s", "synchronize them (chrony, systemd-timesyncd)."
        )
    return Check("clock", "ok", "the server's clock agrees with this one")


def check_version(answer: Answer) -> Check:
    number = _json(answer).get("version")
    if not isinstance(number, str):
        return Check("version", "warn", "the server does not say its version", "it may be another kind of server.")
    if number != ridgeline.__version__:
        return Check(
            "version", "warn", f"server {number}, this command {ridgeline.__version__}", "use the same version."
        )
    return Check("version", "ok", number)


def check_models(answer: Answer) -> Check:
    if answer.status in (401, 403):
        return Check("models", "fail", f"the key is refused ({answer.status})", "give --api-key, or RIDGELINE_API_KEY.")
    cards = _json(answer).get("data")
    if answer.status != 200 or not cards:
        return Check(
            "models", "fail", f"/v1/models answers {answer.status}: {_message(answer.text)}", "read the server's log."
        )
    return Check("models", "ok", ", ".join(str(card["id"]) for card in cards[:5]))


def check_metrics(answer: Answer) -> list[Check]:
    """Whether Prometheus can read them, and what they say."""
    if answer.status in (401, 403):
        return [
            Check(
                "metrics",
                "warn",
                f"the key is refused ({answer.status})",
                "give Prometheus a key of its own (docs/keys.md).",
            )
        ]
    try:
        values = read_metrics(answer.text)
    except ValueError as error:
        return [Check("metrics", "fail", f"not in the format of Prometheus: {error}", "check the address.")]
    wrong = sorted(
        name
        for name, samples in values.items()
        if (name.endswith(_COUNTS) and min(samples) < 0) or (name.endswith("_perc") and not 0 <= max(samples) <= 1)
    )
    if not values or wrong:
        return [
            Check(
                "metrics",
                "fail",
                f"implausible: {', '.join(wrong[:3]) or 'there are none'}",
                "report it with the output.",
            )
        ]
    checks = [Check("metrics", "ok", f"{len(values)} names")]
    for name, remedy in _SIGNS.items():
        if (count := sum(values.get(f"ridgeline:{name}_total", ()))) > 0:
            checks.append(Check(name.replace("_", " "), "warn", f"{count:.0f} since the start", remedy))
    return checks


_COUNTS = ("_tokens_total", "_requests_total", "_success_total", "_running", "_waiting", "_bucket", "_count")
"""Ends of names of metrics that are never below 0."""
_SIGNS = {
    "failed_steps": "the server's log has the reason of each.",
    "engine_restarts": "the server's log has the reason of each.",
    "late_compiles": "the server's log names them, and GET /requests/{id}/why those that a request waited for.",
}
"""Counters that are 0 in a server without trouble, with the remedy."""


def read_metrics(text: str) -> dict[str, list[float]]:
    """The samples of each metric that are finite. Raises ValueError for a line that is not valid."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        try:
            value = float(rest.rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            raise ValueError(line[:80]) from None
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
    return values


def _get(url: str, key: str = "") -> Answer:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    sent = time.time()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            body, status, headers = reply.read(), reply.status, reply.headers
    except urllib.error.HTTPError as error:
        body, status, headers = error.read(), error.code, error.headers
    except (OSError, HTTPException, ValueError) as error:
        return Answer(0, reason(error))
    return Answer(status, body.decode(errors="replace"), headers.get("date") or "", sent, time.time())


def _json(answer: Answer) -> dict[str, Any]:
    try:
        value = json.loads(answer.text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:100]
