"""The record of one call: when its tokens arrived, how its choices ended, what the engine did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.workload import prefix_hashes
from ridgeline.metrics import Arrival, Metrics, RequestRecord, Spent, Totals
from ridgeline.metrics.records import DISCONNECTED
from ridgeline.service.call import Call, Usage
from ridgeline.service.piece import CONTENT_FILTER
from ridgeline.wire.messages import Delta


class Ledger:
    """Opened when the call goes to the engine, closed once when the call is over."""

    def __init__(self, call: Call, metrics: Metrics) -> None:
        self._call, self._metrics = call, metrics
        self._first: float | None = None
        self._reasons: list[str] = []
        self._running: dict[tuple[str, int], tuple[float, Spent]] = {}
        """For each running choice: when the engine last reported its times, and these times."""
        self._ended: list[Spent] = []
        self._arrived: Totals = metrics.live.totals
        self._before: Totals | None = None
        self._prompt_device_s = 0.0
        self.cut, self.cut_reason = DISCONNECTED, ""
        """Why the call ended early, if it does; see RequestRecord."""
        self._late_before = len(metrics.live.late)
        step = metrics.live.last
        self._arrival = Arrival()
        if step is not None:
            self._arrival = Arrival(step.waiting, step.running, step.blocks_used / max(1, step.blocks_total))
        metrics.live.on_call(call.run_id, call.arrival)

    def observe(self, delta: Delta, now: float) -> None:
        """A delta came at `now`, monotonic seconds."""
        if self._first is None and (delta.tokens or delta.pooled):
            self._first = now
            self._before = self._metrics.live.totals
        if delta.times is not None:
            spent, key = Spent.of(delta.times), (delta.id, delta.choice)
            if key not in self._running:  # the engine reports times with the first token, and with the last
                self._prompt_device_s += spent.device_s
            self._running[key] = now, spent

    def ended(self, reason: str, delta: Delta) -> None:
        """A choice ended with `delta`. If the service ended it (a stop string), it has been decoding since the last report."""
        now = time.monotonic()
        at, spent = self._running.pop((delta.id, delta.choice), (now, Spent()))
        self._reasons.append(reason)
        self._ended.append(spent if delta.finish else replace(spent, decode_s=spent.decode_s + now - at))

    def repeat(self, now: float, reasons: Sequence[str]) -> None:
        """The answer comes from the answer cache: all choices ended at `now`."""
        self._first = now
        self._before = self._arrived
        self._reasons += reasons

    def withdrawn(self, reason: str) -> None:
        """A choice that ended for `reason` was withdrawn."""
        self._reasons[self._reasons.index(reason)] = CONTENT_FILTER

    def close(self, usage: Usage) -> None:
        """The call is over. If some choices have not ended, it was cut off."""
        call, arrived = self._call, self._call.began
        complete, now = len(self._reasons) == call.choices, time.monotonic()
        # A choice that was cut off has decoded until now.
        cut = [replace(choice, decode_s=choice.decode_s + now - at) for at, choice in self._running.values()]
        spent = self._ended if complete else [*self._ended, *cut]
        slowest = max(spent, key=lambda choice: choice.queue_s + choice.prefill_s + choice.decode_s, default=Spent())
        published = usage.published
        if published is None and complete and not usage.reasoning:  # an empty answer hides nothing
            published = self._first
        live = self._metrics.live
        record = RequestRecord(
            id=call.id,
            arrived_at=call.arrival,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.completion,
            finish_reasons=tuple(self._reasons),
            e2e_s=now - arrived,
            ttft_s=None if self._first is None else self._first - arrived,
            spent=replace(
                slowest,
                device_s=sum(choice.device_s for choice in spent),
                prompt_device_s=self._prompt_device_s,
                drafted=sum(choice.drafted for choice in spent),
                accepted=sum(choice.accepted for choice in spent),
            ),
            max_tokens=call.max_tokens,
            hidden_tokens=usage.reasoning,
            publish_s=None if published is None else published - arrived,
            cut="" if complete else self.cut,
            cut_reason="" if complete else self.cut_reason,
            request_id=call.request_id,
            run_id=call.run_id,
            prefix_hashes=prefix_hashes(call.prompts[0]) if len(call.prompts) == 1 else (),
            batch=call.batch,
            answer_cached=usage.repeated,
            cache_writes=usage.written,
            cache_token_s=usage.token_s,
            late=tuple(live.late[self._late_before :]),
            declared=call.declared,
            arrival=self._arrival,
            prefilling=(live.totals if self._before is None else self._before).since(self._arrived),
            decoding=Totals() if self._before is None else live.totals.since(self._before),
        )
        self._metrics.on_request(record)
        call.payer.charge(record, live.cost(record))
        call.trace.answered(record, call.sampling, self._metrics.model_name)
