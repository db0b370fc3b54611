"""How long a step takes: the roofline of its work, stretched by factors fitted on the machine, plus what every step costs.

Matrix products take the larger of bytes / bandwidth and FLOPs / peak (Williams et al. 2009, Roofline), attention over the
cache the same by itself, since the two run one after the other. Scheduler, planner, adaptive drafting and the prediction
behind a 429 read this one value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.spec import ModelSpec, causal_pairs, few


class StepWork(NamedTuple):
    """What a step must do at least; a tuple, because one is made in every step.

    flops: multiply-adds count 2. bytes: read and written, weights once.

    Of these totals, attention_flops and kv_bytes are attention's and the cache's; the rest are those of the matrices.
    logits: query tokens whose logits are computed. chunked: some row runs more than one query token.
    """

    tokens: int
    flops: int
    bytes: int
    attention_flops: int = 0
    kv_bytes: int = 0
    logits: int = 0
    chunked: bool = False


def step_work(spec: ModelSpec, shares: Iterable[tuple[int, int]], logits: int | None = None) -> StepWork:
    """Work of a step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares.

    logits: query tokens that need logits; None: one per row.
    """
    rows = tuple(shares)
    tokens, longest = sum(count for _, count in rows), max((count for _, count in rows), default=0)
    wanted = len(rows) if logits is None else logits
    attention, kv = spec.attention(rows, wanted)
    kv += tokens * spec.kv_bytes_per_token()
    linear = spec.linear_flops(tokens, wanted)
    weights = spec.step_weight_bytes if tokens else 0
    return StepWork(tokens, linear + attention, weights + kv, attention, kv, wanted, longest > 1)


class WorkMeter:
    """`step_work` for every step of a running engine: what layers have in common is added up once."""

    __slots__ = ("_before", "_head", "_kinds", "_last", "_linear", "_written", "_weights")

    def __init__(self, spec: ModelSpec) -> None:
        self._linear, self._head = spec.linear_flops(1, 0), spec.linear_flops(0, 1)
        self._weights, self._written = spec.step_weight_bytes, spec.kv_bytes_per_token()
        kinds: dict[int | None, tuple[int, int]] = {}
        for layer in spec.layers:
            self._before = list(kinds.items())
            flops, read = kinds.get(layer.window, (0, 0))
            pair, key = layer.attention_flops(0, 1), layer.slot_bytes(spec.kv)
            kinds[layer.window] = flops + pair, read + key
            self._last = layer.window, pair, key
        self._kinds = list(kinds.items())

    def work(self, ends: Sequence[int], counts: Sequence[int], logits: int) -> StepWork:
        """Of a step after which rows hold `ends` tokens, `counts` of them new; logits: query tokens that need logits."""
        tokens, rows = sum(counts), len(counts)
        if not tokens:
            return StepWork(0, 0, 0)
        # Rows of one query token, by far the most, in sums alone; chunks one by one.
        ones = sum(ends)
        chunks: list[tuple[int, int]] = []
        if tokens != rows:
            for end, count in zip(ends, counts, strict=True):
                if count != 1:
                    chunks.append((end, count))
                    ones -= end
        attention = kv = 0
        alone = few(logits, tokens)
        for window, (flops, read) in self._before if alone else self._kinds:
            seen = ones
            if window is not None:
                seen = sum(min(end, window) for end, count in zip(ends, counts, strict=True) if count == 1)
            attention += flops * seen
            kv += read * seen
            for end, count in chunks:
                attention += flops * causal_pairs(end - count, count, window)
                kv += read * (end if window is None else min(end, window - 1 + count))
        if alone:
            window, flops, read = self._last
            seen = logits * (sum(ends) if window is None else sum(min(end, window) for end in ends)) // rows
            attention, kv = attention + flops * seen, kv + read * seen
        kv += tokens * self._written
        linear = tokens * self._linear + logits * self._head
        return StepWork(tokens, linear + attention, self._weights + kv, attention, kv, logits, tokens != rows)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted seconds per step on one kind of hardware.

    flops_per_s, bytes_per_s: the hardware's figures at the model's precision. compute_share, memory_share: shares of
    them that the matrices reach; attention_share, kv_share: those that attention reaches (None: as the matrices do).
    overhead_s: what an empty step costs. row_s, token_s: seconds of each row that draws (sampling), of each query token
    (activations). launch_s: seconds the host needs to launch a step with chunks, while the device works. ramp_tokens:
    tokens that a step's arithmetic is short of full tiles. overlap: how far arithmetic hides memory traffic, from 1 (one
    after the other) to infinity (the larger of the two); both are joined by that norm.
    calibrated: the factors were fitted on this machine (`planner.calibrate`); else they are a guess, and whatever is
    derived from them must say so.
    """

    spec: ModelSpec
    flops_per_s: float
    bytes_per_s: float
    compute_share: float = 0.6
    memory_share: float = 0.75
    overhead_s: float = 0.0005
    calibrated: bool = False
    attention_share: float | None = None
    kv_share: float | None = None
    row_s: float = 0.0
    token_s: float = 0.0
    launch_s: float = 0.0
    ramp_tokens: float = 0.0
    overlap: float = math.inf

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step with this work."""
        tokens, flops, moved, attention_flops, kv_bytes, logits, chunked = work
        ramp = 1 + self.ramp_tokens / tokens if tokens else 1.0
        linear = (flops - attention_flops) / (self.flops_per_s * self.compute_share) * ramp
        weights = (moved - kv_bytes) / (self.bytes_per_s * self.memory_share)
        attention = attention_flops / (self.flops_per_s * (self.attention_share or self.compute_share))
        cache = kv_bytes / (self.bytes_per_s * (self.kv_share or self.memory_share))
        products = joined(self.overlap, linear, weights, self.launch_s if chunked else 0.0)
        extra = self.overhead_s + logits * self.row_s + tokens * self.token_s
        return products + joined(self.overlap, attention, cache) + extra

    def decode_s(self, lengths: Iterable[int]) -> float:
        """Seconds of a step that gives each row one token, rows holding `lengths` tokens."""
        return self.step_s(step_work(self.spec, [(length, 1) for length in lengths]))


def joined(overlap: float, *seconds: float) -> float:
    """The norm of order `overlap` of seconds of work that shares a device: their sum at 1, their maximum at infinity."""
    longest = max(seconds)
    if longest == 0 or overlap == math.inf:
        return longest
    total = 0.0
    for one in seconds:
        total += (one / longest) ** overlap
    return float(longest * total ** (1 / overlap))
