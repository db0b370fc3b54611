"""What one HTTP request asks of the engine, and what it used."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.wire.messages import Submit


@dataclass(frozen=True, slots=True)
class Call:
    """What one HTTP request asks of the engine: its prompts, each answered `sampling.n` times.

    arrival: time.time() seconds. tier: the service tier it is run as, "" when none was asked for.
    max_tokens: as the caller gave it, None for as many as fit; 0 asks the engine for one token that is then dropped.
    continues: the answer goes on in the prompt's last text rather than beginning one of its own.
    constrained_by: the field whose grammar the answer follows, "" without one.
    request_id: of the header x-request-id. declared: limits that the caller set for this request. ignored: what of its
    messages no template reads.
    Choice `c` of prompt `p` has the index p * n + c in the answer.
    """

    id: str
    arrival: float
    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    max_tokens: int | None
    priority: int = 0
    salt: str = ""
    tier: str = ""
    continues: bool = False
    constrained_by: str = ""
    request_id: str = ""
    declared: Slo = NO_SLO
    ignored: tuple[str, ...] = ()

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    def submits(self) -> list[Submit]:
        """One message per prompt."""
        return [
            Submit(f"{self.id}-{index}", prompt, self.sampling, self.arrival, self.priority, self.salt)
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(slots=True)
class Usage:
    """Token counts of an answer. prompt includes cached, completion includes reasoning.

    published: unix seconds at which the first text that is no hidden thought was released; None while there is none.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    published: float | None = None

    def publish(self) -> None:
        """Visible text is released; the first time counts."""
        if self.published is None:
            self.published = time.time()
