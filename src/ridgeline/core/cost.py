"""How long a step takes: the roofline of its work, stretched by factors fitted on the machine, plus what every step costs.

max(bytes / bandwidth, FLOPs / peak) + overhead (Williams et al. 2009, Roofline). Scheduler, planner, adaptive drafting
and the prediction behind a 429 read this one value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.core.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step must do at least. flops: multiply-adds count 2. bytes: read and written, weights once."""

    tokens: int
    flops: int
    bytes: int


def step_work(spec: ModelSpec, shares: Iterable[tuple[int, int]], logits: int | None = None) -> StepWork:
    """Work of a step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares.

    logits: query tokens that need logits; None: one per row.
    """
    tokens = rows = attention = kv = 0
    for start, count in shares:
        rows += 1
        tokens += count
        attention += spec.attention_flops(start, count)
        kv += spec.kv_read_bytes(start, count)
    written = tokens * spec.kv_bytes_per_token()
    linear = spec.linear_flops(tokens, rows if logits is None else logits)
    weights = spec.step_weight_bytes if tokens else 0
    return StepWork(tokens, linear + attention, weights + kv + written)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted seconds per step on one kind of hardware.

    flops_per_s, bytes_per_s: the hardware's figures at the model's precision. compute_share, memory_share: shares of
    them that steps reach. overhead_s: what an empty step costs. calibrated: the shares were fitted on this machine; else
    they are a guess, and whatever is derived from them must say so.
    """

    spec: ModelSpec
    flops_per_s: float
    bytes_per_s: float
    compute_share: float = 0.6
    memory_share: float = 0.75
    overhead_s: float = 0.0005
    calibrated: bool = False

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step with this work."""
        compute = work.flops / (self.flops_per_s * self.compute_share)
        memory = work.bytes / (self.bytes_per_s * self.memory_share)
        return max(compute, memory) + self.overhead_s

    def bound(self, work: StepWork) -> str:
        """ "compute" or "memory": which side of the ridge the step stands on."""
        compute = work.flops / (self.flops_per_s * self.compute_share)
        return "compute" if compute > work.bytes / (self.bytes_per_s * self.memory_share) else "memory"

    def prefill_s(self, prompt: int, chunk: int, cached: int = 0) -> float:
        """Seconds to compute `prompt` tokens of one request alone, `cached` of them known, in steps of `chunk` tokens."""
        total = 0.0
        for start in range(cached, prompt, chunk):
            total += self.step_s(step_work(self.spec, [(start, min(chunk, prompt - start))]))
        return total

    def decode_s(self, lengths: Iterable[int]) -> float:
        """Seconds of a step that gives each row one token, rows holding `lengths` tokens."""
        return self.step_s(step_work(self.spec, [(length, 1) for length in lengths]))
