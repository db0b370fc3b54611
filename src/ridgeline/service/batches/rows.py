"""How a batch has its rows run: the interface, which an engine of the same server has, and a router with replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ridgeline.core.errors import Overloaded
from ridgeline.metrics.exposition import gauge, head, labelled, sample
from ridgeline.metrics.metrics import PREFIX
from ridgeline.service.fields import MAX_CHOICES
from ridgeline.service.keys.keyring import Holder

ROW = "x-ridgeline-batch-row"
"""Header of a request that is a row of a batch: a router sends it to a replica."""
PRIORITY = 1 << 32
"""Added to the priority of a row: above every number that a request may name, so that every online request is more urgent."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints whose requests a batch may contain."""


class NoRoom(Overloaded):
    """Online requests need the place of a row. It runs again later."""

    def __init__(self) -> None:
        super().__init__("Online requests leave no room for this row of a batch: send it again.", retry_after_s=1.0)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request of one row. body: as the file has it. holder: the client that pays for it."""

    endpoint: str
    body: Any
    choices: int
    holder: Holder
    request_id: str


class RowAnswer(NamedTuple):
    """body: JSON. usage: that of the body; None: the body is an error."""

    status: int
    body: bytes
    usage: Mapping[str, Any] | None


class Rows(Protocol):
    """Runs rows in the place that online requests leave. Places are counted in choices."""

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        """Take places for a row of a client, which `give_back` returns. model: that it names. False: there is no room now."""

    def give_back(self, choices: int, model: str | None) -> None: ...

    def may_pass(self, model: str | None) -> bool:
        """Whether rows of other models may start although a row of this one has no room, and take nothing from it."""

    def wait(self, count: int) -> None:
        """So many rows wait for a place."""

    async def run(self, row: RowRequest) -> RowAnswer:
        """Answer a row whose places were taken. Raises RidgelineError: Overloaded and Unavailable say nothing about the row."""


class WatchedRows(Rows, Protocol):
    """Rows that engines of this server run."""

    async def watch(self) -> None:
        """Withdraw rows when online requests need their places, until cancelled."""


@dataclass(slots=True)
class LaneCounts:
    """See `LaneMetrics`. The first three count what is now, the others what has ended."""

    queued: int = 0
    running: int = 0
    batches: int = 0
    completed: int = 0
    failed: int = 0

    def batch_lane(self, queued: int, running: int, batches: int) -> None:
        self.queued, self.running, self.batches = queued, running, batches

    def batch_rows(self, completed: int, failed: int) -> None:
        self.completed += completed
        self.failed += failed

    def render(self) -> str:
        """The series as Prometheus text."""
        ended = f"{PREFIX}:batch_rows_total"
        return "".join(
            [
                gauge(
                    f"{PREFIX}:batch_rows_queued", "Rows of batches that wait for the batch lane.", [("", self.queued)]
                ),
                gauge(f"{PREFIX}:batch_rows_running", "Rows of batches in flight.", [("", self.running)]),
                gauge(f"{PREFIX}:batches_open", "Batches that have not ended.", [("", self.batches)]),
                head(ended, "counter", "Rows of batches that have ended, by result."),
                sample(ended, labelled({"result": "completed"}), self.completed),
                sample(ended, labelled({"result": "failed"}), self.failed),
            ]
        )


class LaneMetrics(Protocol):
    """Where a lane reports its rows."""

    def batch_lane(self, queued: int, running: int, batches: int) -> None: ...

    def batch_rows(self, completed: int, failed: int) -> None: ...


def choices_of(body: Any) -> int:
    """Choices that a body asks for, n or best_of for each prompt; 1 if it is not valid, which is found when the row runs."""
    if not isinstance(body, dict):
        return 1
    prompt = body.get("prompt", body.get("input"))
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    most = max(count if isinstance(count, int) else 1 for count in (1, body.get("n"), body.get("best_of")))
    return min(MAX_CHOICES, prompts * most)
