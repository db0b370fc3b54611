"""The router's metrics as Prometheus text."""

from __future__ import annotations

from ridgeline.metrics.exposition import gauge, head, labelled, sample
from ridgeline.metrics.metrics import PREFIX
from ridgeline.service.fleet.balancer import Balancer

_STATES = {"up": 1.0, "stalled": 0.5, "starting": 0.0, "down": 0.0}


def render(balancer: Balancer) -> str:
    """All series of the router."""
    router, counts = balancer.router, balancer.counts
    replicas = {labelled({"replica": name}): replica for name, replica in router.replicas.items()}
    totals = router.totals
    parts = [
        gauge(
            _name("replica_up"),
            "1 if the replica is up, 0.5 if it is stalled, 0 if it is down or its engine starts.",
            ((labels, _STATES[replica.state.value]) for labels, replica in replicas.items()),
        ),
        gauge(
            _name("replica_running"),
            "Requests in flight at the replica.",
            ((labels, replica.running) for labels, replica in replicas.items()),
        ),
        gauge(
            _name("replica_backlog_tokens"),
            "Prompt tokens that wait for their first token at the replica, by the router's estimate.",
            ((labels, replica.backlog) for labels, replica in replicas.items()),
        ),
        gauge(_name("requests_waiting"), "Requests that wait in the router.", [("", len(router.queue))]),
        gauge(
            _name("late_seconds"),
            "Mean lateness of the router's event loop because of its own work; above 0.5 it refuses requests.",
            [("", balancer.late_s)],
        ),
        gauge(_name("index_bytes"), "Upper bound of the memory of the prefix index.", [("", router.index.used_bytes)]),
        _counter("requests", "Requests that arrived.", totals.requests),
        _counter("queued", "Requests that waited in the router.", totals.queued),
        _counter("refused", "Requests that the router refused: no place, no replica, or late.", totals.refused),
        _counter("retries", "Requests that were sent again before any byte of an answer.", totals.retried),
        _counter("prompt_tokens", "Prompt tokens of requests that were sent, by estimate.", totals.prompt_tokens),
        _counter(
            "prefix_hit_tokens",
            "Those that the index expected in the cache of the replica that was chosen.",
            totals.cached_tokens,
        ),
        head(_name("answers_total"), "counter", "Answers by replica and result."),
        *(
            sample(_name("answers_total"), labelled({"replica": replica, "result": result}), count)
            for (replica, result), count in sorted(counts.answers.items())
        ),
        head(_name("queue_seconds"), "histogram", "Time that requests waited in the router."),
        counts.queue_seconds.render_samples(_name("queue_seconds"), labelled({"router": "0"})),
        counts.lane.render(),
    ]
    return "".join(parts)


def _name(stem: str) -> str:
    return f"{PREFIX}:router_{stem}"


def _counter(stem: str, text: str, value: float) -> str:
    name = _name(f"{stem}_total")
    return head(name, "counter", text) + sample(name, "", value)
