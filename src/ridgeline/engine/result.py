"""Builds the StepResult of a launched step: starts copies to the host at launch and waits for them only when it is collected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch

from ridgeline.core.plan import StepPlan, StepResult, TokenLogprobs
from ridgeline.decoding.logprobs import Ranked, to_records
from ridgeline.engine.batch import Batch
from ridgeline.engine.device import Outcome
from ridgeline.engine.logits_inputs import Scores
from ridgeline.ops.rows import ToHost


class Clock:
    """Measures the device seconds of a step: with events on a GPU, with the wall clock on a CPU, where steps run at launch."""

    __slots__ = ("_begin", "_end", "_started", "_stopped", "cuda")

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        if cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> None:
        """Record the end: all work of the step is enqueued."""
        if self.cuda:
            self._end.record()
        else:
            self._stopped = time.perf_counter()

    def wait(self) -> float:
        """Wait for the end of the step. Returns its seconds."""
        if not self.cuda:
            return self._stopped - self._started
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e-3

    def since(self, before: Clock) -> float:
        """Seconds from the end of an earlier step to the beginning of this one. Both must have ended."""
        if not self.cuda:
            return self._started - before._stopped
        return max(0.0, before._end.elapsed_time(self._begin) * 1e-3)


def without(plan: StepPlan, error: str | None) -> StepResult:
    """A result without tokens for any row. error: ends the requests of its rows."""
    rows = len(plan.rows)
    return StepResult(plan.step, plan.rows, plan.generations, [0] * rows, [], [0] * rows, error=error)


@dataclass(slots=True)
class Pending:
    """A launched step. Its host tensors are complete when the clock's end event has passed; `outcome` keeps them alive. lost:
    places in the step whose rows the device does not hold. fresh, transfers: see StepResult. drawn: of the last stage of a
    pipeline, the drawn tokens that other stages wait for. blocks: StepResult.blocks in host memory, int64 [n]."""

    plan: StepPlan
    batch: Batch
    outcome: Outcome
    clock: Clock
    lost: Sequence[int] = ()
    fresh: bool = False
    transfers: dict[int, bool] = field(default_factory=dict)
    drawn: torch.Tensor | None = None
    blocks: torch.Tensor | None = None

    @classmethod
    def of(
        cls, plan: StepPlan, batch: Batch, outcome: Outcome, clock: Clock, to_host: ToHost, lost: Sequence[int] = ()
    ) -> Pending:
        """Start the copies to the host (SamplerOps.to_host) and mark the end of the step."""
        if clock.cuda:
            packed, pooled = (
                None if tensor is None else to_host(tensor) for tensor in (outcome.packed, outcome.pooled)
            )
            logprobs, scores = (_ranked_to_host(ranked, to_host) for ranked in (outcome.logprobs, outcome.scores))
            outcome = Outcome(packed, logprobs, scores, outcome.worth, pooled)
        clock.stop()
        return cls(plan, batch, outcome, clock, lost)

    def keep(self) -> None:
        """Copy the outcome on a CPU, where the next step may overwrite its memory (ops.capture)."""
        if not self.clock.cuda:
            packed, worth = (
                None if tensor is None else tensor.clone() for tensor in (self.outcome.packed, self.outcome.worth)
            )
            self.outcome = replace(self.outcome, packed=packed, worth=worth)

    def result(self) -> StepResult:
        """Wait for the step and read it."""
        seconds = self.clock.wait()
        plan, shape = self.plan, self.batch.shape
        result = without(plan, None)
        result.device_s, result.lost, result.fresh = seconds, self.lost, self.fresh
        result.transfers = self.transfers
        result.blocks = () if self.blocks is None else self.blocks.tolist()
        places: Sequence[int] = range(len(plan.rows))
        if not all(plan.samples):
            places = list(compress(places, plan.samples))
        # The batch of a graph has padding rows at the end.
        packed_rows = [] if self.outcome.packed is None else self.outcome.packed.tolist()[: len(places)]
        for place, packed_row in zip(places, packed_rows, strict=False):
            result.counts[place], result.flags[place] = packed_row[0], packed_row[1]
        if shape.width > 1:
            self._read_drafts(result, places, packed_rows)
        else:
            result.tokens = list(
                compress([packed_row[2] for packed_row in packed_rows], [packed_row[0] for packed_row in packed_rows])
            )
        if self.outcome.worth is not None:
            result.worth.update(zip(places, self.outcome.worth.tolist(), strict=True))
        if self.outcome.logprobs is not None:
            self._read_logprobs(result, places, self.outcome.logprobs)
        if self.batch.scores is not None:
            self._read_scores(result, self.batch.scores)
        return result

    def _read_drafts(self, result: StepResult, places: Sequence[int], packed_rows: Sequence[list[int]]) -> None:
        """Read the gained tokens, the tokens drawn after each node, and the accepted nodes. In packed rows the last known token is
        node 0."""
        width, tree = self.batch.shape.width, self.batch.shape.tree
        for place, packed_row in zip(places, packed_rows, strict=True):
            gained, n_draft = packed_row[0], self.plan.n_draft[place]
            result.tokens += packed_row[2 : 2 + gained]
            if n_draft:
                result.drawn[place] = packed_row[2 + width * tree :][: 1 + n_draft]
                path = packed_row[2 + 2 * width :] if tree else range(gained)
                result.kept[place] = [node - 1 for node in path[1:gained]]

    def _read_logprobs(self, result: StepResult, places: Sequence[int], ranked: Ranked) -> None:
        inputs, first = self.batch.inputs, 0
        each = [top for top, nodes in zip(inputs.tops, inputs.nodes, strict=True) for _ in range(nodes)]
        records = to_records(ranked, each)
        for drawing, nodes in zip(inputs.places, inputs.nodes, strict=True):
            place = places[drawing]
            gained = records[first : first + result.counts[place]]
            if gained:
                result.logprobs[place] = gained
            first += nodes

    def _read_scores(self, result: StepResult, scores: Scores) -> None:
        tops = [scores.tops[place] for place, count in scores.counts.items() for _ in range(count)]
        records: list[TokenLogprobs] = [] if self.outcome.scores is None else to_records(self.outcome.scores, tops)
        first = 0
        for place, count in scores.counts.items():
            result.scores[place] = records[first : first + count]
            first += count
        if self.outcome.pooled is not None:
            sums = ([total.tobytes()] for total in self.outcome.pooled.numpy())
            result.pooled.update(zip(scores.pooled, sums, strict=True))


def _ranked_to_host(ranked: Ranked | None, to_host: ToHost) -> Ranked | None:
    if ranked is None:
        return None
    return Ranked(*map(to_host, (ranked.token, ranked.stats, ranked.top_ids, ranked.top_logprobs)))
