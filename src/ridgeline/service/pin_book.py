"""What the service remembers of pinned prefixes, so that the loss of an engine process is judged as the reason of a lost pin."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from ridgeline.core.events import PinOutcome
from ridgeline.service.call import Call

MAX_PINS = 4096


class PinBook:
    """Pins that engines have reported. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._lost: set[bytes] = set()

    def restarted(self, now: float) -> None:
        """The engine was lost, and all pins with it."""
        self._lost = {key for key, until in self._until.items() if until > now}
        self._until.clear()

    def reset(self) -> None:
        """The prefix cache is reset. The engine tells this reason."""
        self._until.clear()

    def read(self, call: Call, outcomes: Sequence[PinOutcome], now: float) -> list[PinOutcome]:
        """The outcomes of a call, with the reason of a pin that was lost with an engine."""
        (prompt,) = call.prompts
        judged = []
        for point, outcome in zip(call.breakpoints, outcomes, strict=True):
            digest = hashlib.sha256(
                f"{call.adapter}\0{call.salt}\0".encode() + array("i", prompt[: outcome.tokens]).tobytes()
            ).digest()
            if digest in self._lost:
                self._lost.discard(digest)
                outcome = outcome._replace(lost="restart")
            if outcome.state != "refused":
                self._until[digest] = max(self._until.pop(digest, 0.0), now + point.ttl_s)
            judged.append(outcome)
        while len(self._until) > MAX_PINS:
            self._until.popitem(last=False)
        return judged
