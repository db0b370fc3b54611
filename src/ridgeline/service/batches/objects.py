"""Files and batches as the API shows them, and the states that a batch passes through. No clock, no files.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │   │           │  └──────▶ expired
        │   │           └─────────▶ cancelling ──▶ cancelled
        │   └─────────────────────▶ cancelling
        └─▶ failed

`failed` means that the input file is not valid, or that the disk is full. A crash changes no state: work goes on after a restart.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ridgeline.core.errors import RequestError, RidgelineError

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    "validating": frozenset({"failed", "in_progress", "cancelling"}),
    "in_progress": frozenset({"failed", "finalizing", "expired", "cancelling"}),
    "finalizing": frozenset({"failed", "completed"}),
    "cancelling": frozenset({"failed", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
ENDED = frozenset(status for status, later in TRANSITIONS.items() if not later)
CANCELLABLE = frozenset(status for status, later in TRANSITIONS.items() if "cancelling" in later)

PRICE_FACTOR = 0.5
"""Price of a row relative to the same online request."""


class Conflict(RequestError):
    """The object is in a state that does not allow the request."""

    status = 409
    code = "conflict"


class StorageFull(RidgelineError):
    """The disk, or the space that --batch-max-gb allows, is full."""

    status = 507
    code = "storage_full"


def new_id(prefix: str) -> str:
    """A new identifier, as in file-... and batch_... ."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


class StoredFile(msgspec.Struct, frozen=True):
    """A file. Times are unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    owner: str = ""
    """Name of the API key that has it."""

    def body(self) -> dict[str, Any]:
        """The API's object."""
        fields = msgspec.to_builtins(self)
        del fields["owner"]
        return {"object": "file", "status": "processed", "status_details": None, **fields}


class Problem(msgspec.Struct, frozen=True):
    """Why a line, or the whole input file, is not valid. line: counted from 1; None: the file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Problems(msgspec.Struct, frozen=True):
    """A list object of problems."""

    data: list[Problem]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all finished rows."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)
    total_tokens: int = 0

    def add(self, usage: Mapping[str, Any]) -> None:
        """Add the usage object of a row's answer: of a chat completion or completion, of a response, or of embeddings."""
        read, cached = _part(usage, ("prompt_tokens", "input_tokens"), "cached_tokens")
        written, reasoning = _part(usage, ("completion_tokens", "output_tokens"), "reasoning_tokens")
        self.input_tokens += read
        self.input_tokens_details.cached_tokens += cached
        self.output_tokens += written
        self.output_tokens_details.reasoning_tokens += reasoning
        self.total_tokens += usage["total_tokens"]


def _part(usage: Mapping[str, Any], names: Sequence[str], detail: str) -> tuple[int, int]:
    """The tokens under the first of `names` that a usage object has, and those of them that are `detail`; 0 if it has none."""
    name = next((name for name in names if name in usage), names[0])
    return usage.get(name, 0), usage.get(f"{name}_details", {}).get(detail, 0)


class Batch(msgspec.Struct, kw_only=True):
    """A batch, with the API's 22 fields. Times are unix seconds, None until they are reached."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    model: str | None = None
    errors: Problems | None = None
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def move(self, status: Status, now: float) -> None:
        """Enter a state at `now`, unix seconds. Raises Conflict if the state does not follow the present one."""
        if status not in TRANSITIONS[self.status]:
            raise Conflict(f"Batch {self.id} is {self.status}: it cannot become {status}.", param="status")
        self.status = status
        setattr(self, f"{status}_at", int(now))

    def fail(self, problems: list[Problem], now: float) -> None:
        """End because of the input file, or because results cannot be stored."""
        self.errors = Problems(problems)
        self.move("failed", now)
