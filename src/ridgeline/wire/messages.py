"""What crosses the border. One msgspec frame per send, each `length (uint32, little endian) + msgpack`.

Up (service to engine): Submit, Cancel, Finish, Control. Down (engine to service): Ready, Deltas, Reply, Failed.
A request is named by the service's id; its choices are numbered 0 .. n-1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ridgeline.core.events import LateWork
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Start a request. `tokens`: prompt ids, at least one. `arrival`: time.time() seconds when the service got it.

    priority: lower runs first. salt: prefixes are shared only among equal salts. cache: False neither reads nor writes
    the prefix cache.
    """

    id: str
    tokens: list[int]
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    salt: str = ""
    cache: bool = True


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """The client has gone: end all choices of the request. Unknown or ended ids are fine."""

    id: str
    reason: str = "cancelled"


class Finish(msgspec.Struct, tag="finish", array_like=True):
    """The service ended a choice itself (a stop string): `kept` output tokens count, later ones are dropped."""

    id: str
    choice: int
    reason: str
    kept: int


class Control(msgspec.Struct, tag="control", array_like=True):
    """An order with a Reply: "stats" (numbers of the engine, `free`, `used` and `total` pages among them), "reset_prefix_cache",
    "drain" (admit nothing new), "stop"."""

    id: str
    order: str


Up = Submit | Cancel | Finish | Control


class Delta(msgspec.Struct, array_like=True):
    """News of one choice: tokens it gained and, when it ended, why.

    finish: "" while it runs, else "stop", "length", "cancelled", "refused" (the caller's fault) or "error" (ours).
    stop_id: the stop token that ended it (it is also the last of `tokens`), else -1. error: a sentence when it was
    refused or failed. cached: prompt tokens taken from the prefix cache (sent with the first delta, else -1).
    logprobs: one per token when asked for. prompt_logprobs: sent once, for prompt tokens 1.. (the first has none), when
    asked for.
    times: sent with the first tokens and with the finish: seconds (queued, prefill, decode), preemption count, and what
    more metrics.records.Spent has, in its order.
    """

    id: str
    choice: int
    tokens: list[int] = []
    finish: str = ""
    stop_id: int = -1
    cached: int = -1
    error: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: tuple[float, ...] | None = None


class StepStats(msgspec.Struct, array_like=True):
    """One step's record. Times in seconds, counts in tokens, requests and blocks.

    host_s: the scheduler's own time: plan_s, commit_s and reply_s, which is that of the record before. device_s: the step
    on the device. waste_inside: slots leased but not holding a token; waste_between: share of leasable bytes that group
    padding loses. steps: 1, or 0 when only the number of requests has changed (then the times are those of the last step).
    failed: steps that failed. dropped: tokens drawn for choices that had ended (behind a stop string, or after a cancel).
    flops, bytes: what the step had to compute and move by the model's formula (weights once as they are stored, keys and
    values read and written). predicted_s: what the cost model expected of device_s. idle_s: how long the device waited
    for this step although there was work. joules: energy since the last record that had some, up to a reading a quarter of a
    second before. drafts: how many were verified; accepted_at: of the accepted draft tokens, how many stood first in their
    draft, second, and so on. saved_s: seconds that drafts saved. late: kernels compiled and graphs captured while requests
    waited.
    """

    step: int
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    preempted: int
    prefix_queries: int
    prefix_hits: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    waste_inside: float
    waste_between: float
    host_s: float
    device_s: float
    steps: int = 1
    failed: int = 0
    plan_s: float = 0.0
    commit_s: float = 0.0
    reply_s: float = 0.0
    dropped: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    predicted_s: float = 0.0
    idle_s: float = 0.0
    joules: float = 0.0
    drafts: int = 0
    accepted_at: list[int] = []
    saved_s: float = 0.0
    late: list[LateWork] = []


class Deltas(msgspec.Struct, tag="deltas", array_like=True):
    """All news of one step. `sequence` counts frames, so that a gap is seen. Choices that gained one token and nothing else
    stand in three parallel lists, request id, choice and token; `deltas` has the others."""

    sequence: int
    deltas: list[Delta]
    stats: StepStats | None = None
    ids: list[str] = []
    choices: list[int] = []
    tokens: list[int] = []

    def each(self) -> Iterator[Delta]:
        """One delta per choice."""
        for request, choice, token in zip(self.ids, self.choices, self.tokens, strict=True):
            yield Delta(request, choice, [token])
        yield from self.deltas


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine serves. `facts`: what it resolved (see engine.facts): max_len, page_tokens, blocks, spec summary,
    stage times of the start-up in seconds."""

    facts: dict[str, Any]


class Loading(msgspec.Struct, tag="loading", array_like=True):
    """Progress while starting: stage name, part done, of how many."""

    stage: str
    done: int
    total: int


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """A sign of life, from a thread beside the heart. `turn`: how often the heart has turned and moved something, or rightly
    waited (for a batch to open). `busy`: requests wait or run."""

    turn: int
    busy: bool


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """Answer to a Control."""

    id: str
    facts: dict[str, Any]


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot start or go on; `message` says why and what helps. `kind`: error class name."""

    message: str
    kind: str = "EngineFailed"


Down = Deltas | Ready | Loading | Beat | Reply | Failed
