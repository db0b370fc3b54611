"""The account of one call: when its tokens came and how its choices ended, for the metrics."""

from __future__ import annotations

import time

from ridgeline.metrics import Metrics, RequestRecord
from ridgeline.service.call import Call, Usage
from ridgeline.wire.messages import Delta

_NO_TIMES = (0.0, 0.0, 0.0)


class Ledger:
    """arrival: time.time() seconds when the request came."""

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._first: float | None = None
        self._reasons: list[str] = []
        self._known: dict[tuple[str, int], tuple[float, tuple[float, float, float]]] = {}
        """Per choice: what the engine last said of its times, and when."""
        self._times = _NO_TIMES
        self.cut = "cancelled"
        """Why it was cut off, if it was."""

    def news(self, delta: Delta) -> None:
        if self._first is None and delta.tokens:
            self._first = time.time()
        if delta.times is not None:
            self._known[delta.id, delta.choice] = time.time(), delta.times[:3]

    def ended(self, reason: str, delta: Delta) -> None:
        """A choice came to its end with `delta`; the times of the slowest count. A choice that the service ended itself
        (a stop string) has decoded since its first tokens."""
        now = time.time()
        at, (queued, prefill, decode) = self._known.get((delta.id, delta.choice), (now, _NO_TIMES))
        decode += 0.0 if delta.finish else now - at
        self._reasons.append(reason)
        self._times = max(self._times, (queued, prefill, decode), key=sum)

    def close(self, metrics: Metrics, call: Call, usage: Usage) -> None:
        """The call is over; a call with choices that have not ended was cut off."""
        if len(self._reasons) < call.choices:
            metrics.aborted(self.cut)
            return
        queued, prefill, decode = self._times
        metrics.on_request(
            RequestRecord(
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                output_tokens=usage.completion,
                finish_reasons=tuple(self._reasons),
                e2e_s=time.time() - self._arrival,
                ttft_s=None if self._first is None else self._first - self._arrival,
                queue_s=queued,
                prefill_s=prefill,
                decode_s=decode,
                max_tokens=call.max_tokens,
            )
        )
