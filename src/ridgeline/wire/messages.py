"""Messages between service and engine. Each is one frame: `length (uint32, little endian) + msgpack`.

Up (service to engine): Submit, Offer, Cancel, Finish, Control.
Down (engine to service): Loading, Ready, Heartbeat, Deltas, Reply, Failed.
The service assigns request ids. The choices of a request are numbered 0 .. n-1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ridgeline.core.events import LateWork, PinOutcome
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_DEADLINE, Deadline
from ridgeline.core.ticket import Ticket


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Start a request."""

    id: str
    tokens: list[int]
    """Prompt token ids, at least one."""
    sampling: SamplingParams
    arrival: float
    """Monotonic seconds (of this machine) when the service received the request."""
    priority: int = 0
    """Lower values run first."""
    salt: str = ""
    """Requests share cached prefixes only if their salts are equal."""
    cache: bool = True
    """False: the request neither reads nor writes the prefix cache."""
    has_reader: bool = False
    """A person reads the answer while it is generated: --reader-pace applies."""
    breakpoints: list[tuple[int, float]] = []
    """Prefixes of the prompt to be pinned, in its order: tokens, and seconds of their lifetime."""
    client: str = ""
    """Who sent it, "" without API keys: clients share the service when requests wait."""
    drawn: dict[int, list[int]] = {}
    """Choice -> the output tokens that another engine has drawn; choices without an entry do not run. Empty: all choices start."""
    ticket: Ticket | None = None
    """The pages of the prompt that another engine keeps."""
    hand_over: bool = False
    """Draw one token of each choice, and keep the pages of the prompt for another engine until Cancel or a deadline. Their ticket
    comes with the finish "length"."""
    adapter: str = ""
    """Name of the LoRA adapter, "" for the model itself."""
    deadline: Deadline = NO_DEADLINE
    """The engine orders prompts and sizes steps by it."""


class Offer(msgspec.Struct, tag="offer", array_like=True):
    """Another engine computes the prompt of a request that may follow, and keeps these pages of it: they may travel now."""

    id: str
    ticket: Ticket


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """End all choices of a request, because its client has gone. Pages that are kept for it are released. Unknown and ended ids are
    ignored."""

    id: str
    reason: str = "cancelled"


class Finish(msgspec.Struct, tag="finish", array_like=True):
    """The service has ended a choice, because a stop string matched."""

    id: str
    choice: int
    reason: str
    kept: int
    """Output tokens that count. Later ones are dropped."""


class Control(msgspec.Struct, tag="control", array_like=True):
    """An order that the engine answers with a Reply."""

    id: str
    order: str
    """One of "stats" (engine counters, including `free`, `used` and `total` pages), "reset_prefix_cache", "drain" (admit no new
    request), "stop", "sleep", "wake_up", "update_weights", "profile_start", "profile_stop", "load_adapter" and
    "unload_adapter"."""
    argument: str = ""
    """The level of "sleep" (1 or 2), the model folder of "update_weights", the file that "profile_stop" writes, NAME=FOLDER of
    "load_adapter", NAME of "unload_adapter"."""


Up = Submit | Offer | Cancel | Finish | Control


class Delta(msgspec.Struct, array_like=True):
    """New tokens of one choice and, if it has ended, the reason."""

    id: str
    choice: int
    tokens: list[int] = []
    finish: str = ""
    """Empty while the choice runs, else "stop", "length", "cancelled", "refused" (invalid request), "unavailable" (valid at
    another time) or "error" (engine failure)."""
    stop_id: int = -1
    """The stop token that ended the choice, which is also the last of `tokens`; else -1."""
    cached: int = -1
    """Prompt tokens taken from the prefix cache, in the first delta; else -1."""
    error: str = ""
    """A sentence if the choice was refused or failed."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, if requested, for prompt tokens 1, 2, ...; the first token has none."""
    times: tuple[float, ...] | None = None
    """The fields of metrics.records.Spent in order. Sent with the first tokens and with the finish."""
    pins: list[PinOutcome] | None = None
    """What became of each of the request's breakpoints. In the first delta of choice 0."""
    pooled: list[bytes] | None = None
    """With the finish "length" of a request with `pooling`: sums of the hidden states of its pooled tokens, each of some of them,
    float64 [d_model]."""
    ticket: Ticket | None = None
    """With the finish "length" of a choice of a request with `hand_over`. Without a finish or tokens: the pages of its prompt that
    were computed since the last such delta."""


class StepStats(msgspec.Struct, array_like=True):
    """The record of one step. Times in seconds, counts in tokens, requests and blocks."""

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
    """Leased slots that hold no token, as a share of leased slots."""
    waste_between: float
    """Share of the cache's bytes lost to padding of layer groups."""
    host_s: float
    """Scheduler time: plan_s + commit_s + reply_s."""
    device_s: float
    steps: int = 1
    """0 if only the number of requests has changed. Then the times are those of the last step."""
    failed: int = 0
    plan_s: float = 0.0
    commit_s: float = 0.0
    reply_s: float = 0.0
    """Of the previous record."""
    dropped: int = 0
    """Tokens sampled for choices that had already ended, by a stop string or a cancellation."""
    flops: float = 0.0
    """Operations of the step's query tokens by the model's formula."""
    bytes: float = 0.0
    """Bytes that the step must move: stored weights once, keys and values read and written."""
    predicted_s: float = 0.0
    """device_s as predicted by the cost model."""
    idle_s: float = 0.0
    """Seconds that the device waited for this step although there was work."""
    joules: float = 0.0
    """Energy since the last record with joules above 0. The meter is read every quarter of a second."""
    drafts: int = 0
    """Verified drafts."""
    accepted_at: list[int] = []
    """Accepted draft tokens by their position in the draft."""
    saved_s: float = 0.0
    """Seconds saved by drafts."""
    late: list[LateWork] = []
    """Kernels compiled and graphs captured while requests waited."""
    useful_flops: float = 0.0
    """The part of `flops` for tokens that were committed and had not been computed before a preemption."""
    draft_flops: float = 0.0
    draft_bytes: float = 0.0
    """Operations and bytes moved of the drafter on the device."""
    prompt_joules: float = 0.0
    output_joules: float = 0.0
    """Energy of the steps since the last reading, by their query tokens. The remainder of `joules` is idle power."""
    metered_s: float = 0.0
    """Device seconds of the steps that prompt_joules and output_joules belong to."""
    expert_tokens: list[list[int]] = []
    """Tokens of each expert, by layer with experts, since the last record that has them. Empty in most records."""
    tiers: list[tuple[str, int, int, int]] = []
    """Tiers below the KV cache: name; blocks stored, loaded and dropped since the engine's start. Empty in most records."""
    pins: list[tuple[str, str, int]] = []
    """kv.pins.Pins.readings. Empty in most records."""
    rank_tokens: list[list[int]] = []
    """The part of expert_tokens that each rank computes, by layer, with --expert-parallel."""


class Deltas(msgspec.Struct, tag="deltas", array_like=True):
    """All deltas of one step.

    Choices that gained one token and nothing else are encoded in three parallel lists: ids, choices and tokens.
    """

    sequence: int
    """Number of the frame. A gap means that a frame was lost."""
    deltas: list[Delta]
    """Deltas of all other choices."""
    stats: StepStats | None = None
    ids: list[str] = []
    choices: list[int] = []
    tokens: list[int] = []

    def each(self) -> Iterator[Delta]:
        """Iterate over the deltas, one per choice."""
        for request, choice, token in zip(self.ids, self.choices, self.tokens, strict=True):
            yield Delta(request, choice, [token])
        yield from self.deltas


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine serves."""

    facts: dict[str, Any]
    """The resolved configuration (see engine.facts): max_len, page_tokens, blocks, model summary, start-up times in seconds."""


class Loading(msgspec.Struct, tag="loading", array_like=True):
    """Progress of the start-up: `done` of `total` parts of a stage."""

    stage: str
    done: int
    total: int


class Heartbeat(msgspec.Struct, tag="beat", array_like=True):
    """A heartbeat, sent from a thread beside the engine loop."""

    turn: int
    """Iterations of the engine loop that made progress or waited for a batch to open."""
    busy: bool
    """Requests wait or run."""


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """Answer to a Control."""

    id: str
    facts: dict[str, Any]


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot start or go on."""

    message: str
    """The reason and the remedy."""
    kind: str = "EngineFailed"
    """Name of the error class."""


Down = Deltas | Ready | Loading | Heartbeat | Reply | Failed
