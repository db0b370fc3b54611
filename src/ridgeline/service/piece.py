"""What the text of an answer gains at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.core.plan import TokenLogprobs

CONTENT_FILTER = "content_filter"
"""`finish_reason` of a choice that was withdrawn."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probabilities. start: the character of the answer's text at which the token begins."""

    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Everything of a choice is withdrawn, also what was sent, and `replacement` is its text. reason: "flagged" by the judge, or
    "unjudged" because the judge gave no verdict."""

    reason: str
    replacement: str = ""

    def body(self) -> dict[str, str]:
        """The member `withdrawal` of a choice."""
        return {"reason": self.reason, "replacement": self.replacement}


@dataclass(slots=True)
class Piece:
    """Update of one choice. finish: "" while it runs, else "stop", "length" or CONTENT_FILTER.

    count: gained tokens (they count in usage). scored: tokens whose text is released now. ended_by: the scored stop token,
    which is not part of the text. stopped_by: the request's stop string or stop token id that ended the choice.
    prompt_logprobs: with the first piece of a prompt's first choice, if requested. withdrawal: the choice ends, and all of it is
    withdrawn. pooled: sums of the hidden states of a prompt that is pooled, as in wire.messages.Delta.
    """

    index: int
    text: str
    count: int
    finish: str = ""
    scored: list[Scored] = field(default_factory=list)
    ended_by: Scored | None = None
    stopped_by: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    withdrawal: Withdrawal | None = None
    pooled: list[bytes] | None = None
