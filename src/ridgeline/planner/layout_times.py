"""Times of a replica: a prompt, a decode step, and where the time goes.

`CostModel` gives the time of each stage's step on its rank. Collectives come on top and do not overlap with it. Context-parallel
ranks do what ops.striped does. With S stages, S micro-batches are in flight. Prompts and decode steps run one after the other:
chunked prefill, which lets them share the reading of the weights, is somewhat faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from ridgeline.core.cost import CostModel, StepWork
from ridgeline.core.sizing import GATHERED_SLOTS
from ridgeline.core.spec import DTYPE_BYTES, LayerSpec
from ridgeline.planner.expert_times import ExpertTimes
from ridgeline.planner.layouts import Replica, Stage


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a device by what they wait for. bubbles: other stages, or a share of work that does not divide evenly."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    bubbles: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.links + self.bubbles + self.overhead

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        return Parts(*(getattr(self, part.name) + times * getattr(other, part.name) for part in fields(Parts)))


def stage_parts(cost: CostModel, work: StepWork) -> Parts:
    """The predicted seconds of a step, divided by what binds its products and its attention."""
    empty = StepWork(work.tokens, 0, 0, 0, 0, work.logits, expert_layers=work.expert_layers)
    products = empty._replace(
        flops=work.flops - work.attention_flops, bytes=work.bytes - work.kv_bytes, chunked=work.chunked
    )
    attention = empty._replace(
        flops=work.attention_flops,
        bytes=work.kv_bytes,
        attention_flops=work.attention_flops,
        kv_bytes=work.kv_bytes,
    )
    extra = cost.step_s(empty)
    compute = memory = 0.0
    for part in (products, attention):
        seconds = cost.step_s(part) - extra
        arithmetic = part._replace(bytes=0, kv_bytes=0)
        if cost.step_s(arithmetic) >= cost.step_s(part._replace(flops=0, attention_flops=0)):
            compute += seconds
        else:
            memory += seconds
    return Parts(compute, memory, overhead=extra)


class ContextBytes(NamedTuple):
    """Bytes of a token that context-parallel ranks pass on in a layer.

    Queries travel: inputs, queries, keys and values; results, outputs of attention with their log-sum-exp, in float32. Keys travel:
    written, of a token of the step, keys, values and as many query heads as keys; keys, keys and values of a token that attention
    reads.
    """

    inputs: int
    results: int
    written: int
    keys: int


def context_bytes(layer: LayerSpec, width: int) -> ContextBytes:
    """width: bytes of an element of the model's dtype."""
    vector, written = layer.head_dim * width, layer.written_heads
    inputs, results = (layer.n_heads + 2 * written) * vector, layer.n_heads * (layer.head_dim + 1) * 4
    return ContextBytes(inputs, results, 3 * written * vector, 2 * layer.n_kv_heads * vector)


def _share(work: StepWork, ranks: int) -> StepWork:
    """The work of a context-parallel rank that runs all tokens: all products, and attention to its part of the keys."""
    attention, cache = work.attention_flops // ranks, work.kv_bytes // ranks
    return work._replace(
        flops=work.flops - work.attention_flops + attention,
        bytes=work.bytes - work.kv_bytes + cache,
        attention_flops=attention,
        kv_bytes=cache,
    )


class Times:
    """Predicted times of a replica. cost: of the model on one device."""

    def __init__(self, replica: Replica, cost: CostModel) -> None:
        self.replica, self._cost = replica, replace(cost, spec=replica.spec)  # in the forms for which there is memory
        layout, fabric = replica.layout, replica.cluster.fabric
        self._context_links = fabric.strided(layout.tensor)
        self._width = DTYPE_BYTES[replica.spec.dtype]
        self._experts = ExpertTimes(layout, fabric, self._width)
        self._stride = layout.stage
        self.decode = lru_cache(self._decode)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def prefill(self, length: int) -> tuple[float, Parts]:
        """(Seconds until the first token of a prompt that runs alone, seconds of a device that the prompt takes).

        Stages work on different chunks at the same time. The parts are the mean over devices; what the busiest one takes more is
        bubbles, because in steady state all wait for it. Each group of the layout runs a prompt of its own at the same time.
        """
        replica, stages = self.replica, self.replica.stages
        totals = {stage: Parts() for stage in stages}
        done = [0.0] * len(stages)  # when each stage ended its last chunk
        for start in range(0, length, replica.chunk):
            count = min(replica.chunk, length - start)
            parts = {stage: self._chunk(stage, start, count, start + count == length) for stage in totals}
            sends = self.sends(-(-count // replica.layout.context))
            ready = 0.0
            for index, stage in enumerate(stages):
                done[index] = ready = max(ready, done[index]) + parts[stage].total
                ready += sends[index]
            totals = {stage: totals[stage].plus(parts[stage]) for stage in totals}
        return done[-1], Parts().plus(_mean([totals[stage] for stage in stages]), 1 / replica.layout.groups)

    def _chunk(self, stage: Stage, start: int, count: int, ends: bool) -> Parts:
        """A chunk of `count` tokens after `start` ones in a stage. ends: the prompt ends with it, and its logits are needed."""
        ranks = self.replica.layout.context
        held = -(-count // ranks)
        logits = (1 if ends else 0) if stage.last else count
        work = stage.meter.work([start + count], [count], logits)
        if ranks > 1:  # each rank multiplies its tokens, and runs its part of attention
            work = _share(work, ranks)._replace(tokens=held, flops=work.flops // ranks)
        work = self._experts.busiest(stage, work, held)
        parts = stage_parts(self._cost, work._replace(logits=logits if stage.last else 0))
        return parts.plus(Parts(links=self.chunk_links(stage, count, 1 if ends else 0, start + count)))

    # --- decode steps -----------------------------------------------------------------------------------------------

    def _decode(self, batch: int, context: int) -> Parts:
        """Seconds of a device between two tokens of each of `batch` requests that hold `context` tokens; the total is the time."""
        stages = self.replica.stages
        flying = min(len(stages), batch)
        rows = -(-batch // flying // self.replica.layout.groups)
        parts = {stage: self._rows(stage, rows, context) for stage in dict.fromkeys(stages)}
        sends = self.sends(rows)
        # A token passes all stages before the next one starts, and the slowest stage serves all micro-batches.
        through = sum(parts[stage].total for stage in stages) + sum(sends)
        busiest = flying * max(parts[stage].total for stage in stages)
        period = max(through, busiest)
        mean = Parts()
        for stage in stages:
            mean = mean.plus(parts[stage], flying / len(stages))
        sending = min(period - mean.total, sum(sends) * flying / len(stages)) if through >= busiest else 0.0
        return mean.plus(Parts(links=sending, bubbles=period - mean.total - sending))

    def step_s(self, batch: int, context: int) -> float:
        """Seconds of the slowest stage's decode step, for which a new prompt waits."""
        stages = self.replica.stages
        rows = -(-batch // min(len(stages), batch) // self.replica.layout.groups)
        return max(self._rows(stage, rows, context).total for stage in set(stages))

    def _rows(self, stage: Stage, rows: int, context: int) -> Parts:
        """A decode step of a stage, with so many rows of each group. Context-parallel ranks each multiply all rows, and share their
        keys."""
        ranks = self.replica.layout.context
        work = stage.meter.work([context + 1] * rows, [1] * rows, rows)
        work = self._experts.busiest(stage, _share(work, ranks), rows)
        return stage_parts(self._cost, work._replace(logits=rows if stage.last else 0)).plus(
            Parts(links=self.row_links(stage, rows))
        )

    # --- links ------------------------------------------------------------------------------------------------------

    def chunk_links(self, stage: Stage, tokens: int, logits: int, slots: int = 0) -> float:
        """Seconds of a stage's collectives in a step that computes `tokens` tokens of prompts, whose requests hold `slots` tokens
        with them (0: `tokens`). Keys travel as ops.gathered decides."""
        ranks, links = self.replica.layout.context, self._context_links
        seconds = self._reduces(stage, -(-tokens // ranks), logits if stage.last else 0)
        seconds += self._experts.links(stage, tokens)
        if ranks > 1:
            seconds += links.all_gather(ranks, tokens * stage.spec.d_model * self._width)
            for layer, layers in Counter(stage.spec.layers).items():
                sent, read = context_bytes(layer, self._width), max(slots, tokens)
                if read <= GATHERED_SLOTS:
                    seconds += layers * links.all_gather(ranks, tokens * sent.written)
                    seconds += layers * links.all_gather(ranks, read * sent.keys)
                else:
                    seconds += layers * links.all_gather(ranks, tokens * sent.inputs)
                    seconds += layers * links.all_to_all(ranks, tokens * sent.results)
        return seconds

    def row_links(self, stage: Stage, rows: int) -> float:
        """Seconds of a stage's collectives in a decode step."""
        ranks = self.replica.layout.context
        seconds = self._reduces(stage, rows, rows if stage.last else 0) + self._experts.links(stage, rows)
        if ranks > 1:
            for layer, layers in Counter(stage.spec.layers).items():
                results = ranks * rows * context_bytes(layer, self._width).results
                seconds += layers * self._context_links.all_gather(ranks, results)
        return seconds

    def _reduces(self, stage: Stage, tokens: int, logits: int) -> float:
        """Seconds of tensor-parallel collectives: two sums per layer, one of the embedding, maximum and sum of the draw, and in
        each layer the mean squares of a norm of all heads."""
        ranks, fabric = self.replica.layout.tensor, self.replica.cluster.fabric
        if ranks == 1:
            return 0.0
        size = tokens * stage.spec.d_model * self._width
        sums = 2 * len(stage.spec.layers) + (1 if stage.first else 0)
        draw = fabric.all_gather(ranks, logits * ranks * 8.0) if logits else 0.0
        squares = (
            len(stage.spec.layers) * fabric.all_reduce(ranks, 8.0 * tokens) if stage.spec.qk_norm == "all" else 0.0
        )
        return sums * fabric.all_reduce(ranks, size) + draw + squares

    def sends(self, tokens: int) -> Sequence[float]:
        """Seconds after each stage until the next one has its output; 0 after the last one."""
        size = tokens * self.replica.spec.d_model * self._width
        count, stride = len(self.replica.stages), self._stride
        fabric = self.replica.cluster.fabric
        return [fabric.send(index * stride, (index + 1) * stride, size) for index in range(count - 1)] + [0.0]


def _mean(parts: Sequence[Parts]) -> Parts:
    """Mean over stages; what the busiest stage takes more is bubbles."""
    mean = Parts()
    for part in parts:
        mean = mean.plus(part, 1 / len(parts))
    return mean.plus(Parts(bubbles=max(part.total for part in parts) - mean.total))
