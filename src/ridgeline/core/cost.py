"""Predicted step time: the roofline of the step's work, scaled by factors fitted on the machine, plus a fixed cost per step.

Matrix products take the larger of bytes / bandwidth and FLOPs / peak (Williams et al. 2009, Roofline). So does attention over
the cache, separately, because the two run one after the other. Scheduler, planner, adaptive drafting and the retry-after of
a 429 read these predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.experts import idle_bytes
from ridgeline.core.gpu_blocks import Reads, wide_reads
from ridgeline.core.host_weights import NO_HOST_WEIGHTS, HostTimes
from ridgeline.core.spec import ModelSpec, causal_pairs, restricts_last_layer


class StepWork(NamedTuple):
    """The minimum work of a step. A tuple, because one is made in every step.

    flops: a multiply-add counts 2. bytes: read and written, weights once. attention_flops and kv_bytes: the parts of these totals
    for attention and the KV cache; the remainder belongs to the matrix products. logits: query tokens whose logits are computed.
    chunked: some row runs more than one query token. expert_layers: layers with experts.
    """

    tokens: int
    flops: int
    bytes: int
    attention_flops: int = 0
    kv_bytes: int = 0
    logits: int = 0
    chunked: bool = False
    expert_layers: int = 0


def expert_layers(spec: ModelSpec) -> int:
    """The number of layers with experts."""
    return sum(layer.experts is not None for layer in spec.layers)


def step_work(spec: ModelSpec, shares: Iterable[tuple[int, int]], logits: int | None = None) -> StepWork:
    """Work of a step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares.

    logits: query tokens that need logits; None: one per row.
    """
    rows = tuple(shares)
    tokens, longest = sum(count for _, count in rows), max((count for _, count in rows), default=0)
    needed = len(rows) if logits is None else logits
    attention, kv = spec.attention(rows, needed)
    kv += tokens * spec.kv_bytes_per_token()
    linear = spec.linear_flops(tokens, needed)
    weights = spec.step_weight_bytes - spec.idle_bytes(tokens, needed) if tokens else 0
    read = weights + more_bytes(wide_reads(spec), tokens, needed) + kv
    layers = expert_layers(spec) if tokens else 0
    return StepWork(tokens, linear + attention, read, attention, kv, needed, longest > 1, layers)


def more_bytes(reads: tuple[Reads, Reads], tokens: int, logits: int) -> int:
    """Bytes of weights that a step of so many tokens reads in addition; see gpu_blocks.wide_reads."""
    return sum(
        size for extra, rows in zip(reads, (tokens, logits), strict=True) for most, size in extra.items() if rows > most
    )


class WorkMeter:
    """`step_work` for every step of a running engine. Sums over layers are computed once."""

    __slots__ = (
        "_by_window",
        "_by_window_but_last",
        "_expert_layers",
        "_experts",
        "_kv_written",
        "_last_experts",
        "_last_layer",
        "_logit_flops",
        "_token_flops",
        "_weights",
        "_wide",
    )

    def __init__(self, spec: ModelSpec) -> None:
        self._token_flops, self._logit_flops = spec.linear_flops(1, 0), spec.linear_flops(0, 1)
        self._weights, self._kv_written = spec.step_weight_bytes, spec.kv_bytes_per_token()
        self._wide, self._expert_layers = wide_reads(spec), expert_layers(spec)
        self._experts, self._last_experts = spec.experts(spec.layers[:-1]), spec.experts(spec.layers[-1:])
        by_window: dict[int | None, tuple[int, int]] = {}
        for layer in spec.layers:
            self._by_window_but_last = list(by_window.items())
            flops, read = by_window.get(layer.window, (0, 0))
            pair, key = layer.attention_flops(0, 1), layer.slot_bytes(spec.kv)
            by_window[layer.window] = flops + pair, read + key
            self._last_layer = layer.window, pair, key
        self._by_window = list(by_window.items())

    def work(self, ends: Sequence[int], counts: Sequence[int], logits: int) -> StepWork:
        """Work of one step.

        ends: tokens that each row holds after the step. counts: new tokens of each row. logits: query tokens that need logits.
        """
        tokens, rows = sum(counts), len(counts)
        if not tokens:
            return StepWork(0, 0, 0)
        # Rows of one query token are the common case: they are summed. Chunks are added one by one.
        single_slots = sum(ends)
        chunks: list[tuple[int, int]] = []
        if tokens != rows:
            for end, count in zip(ends, counts, strict=True):
                if count != 1:
                    chunks.append((end, count))
                    single_slots -= end
        attention = kv = 0
        restricted = restricts_last_layer(logits, tokens)
        for window, (flops, read) in self._by_window_but_last if restricted else self._by_window:
            seen = single_slots
            if window is not None:
                seen = sum(min(end, window) for end, count in zip(ends, counts, strict=True) if count == 1)
            attention += flops * seen
            kv += read * seen
            for end, count in chunks:
                attention += flops * causal_pairs(end - count, count, window)
                kv += read * (end if window is None else min(end, window - 1 + count))
        if restricted:
            window, flops, read = self._last_layer
            seen = logits * (sum(ends) if window is None else sum(min(end, window) for end in ends)) // rows
            attention, kv = attention + flops * seen, kv + read * seen
        kv += tokens * self._kv_written
        linear = tokens * self._token_flops + logits * self._logit_flops
        weights = self._weights + more_bytes(self._wide, tokens, logits)
        weights -= idle_bytes(self._experts, tokens) + idle_bytes(self._last_experts, logits)
        layers = self._expert_layers
        return StepWork(tokens, linear + attention, weights + kv, attention, kv, logits, tokens != rows, layers)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts seconds per step on one kind of hardware.

    flops_per_s, bytes_per_s: the hardware's peaks at the model's precision. compute_share, memory_share: shares of the peaks that
    matrix products reach. attention_share, kv_share: those that attention reaches (None: the same as matrix products).
    overhead_s: time of an empty step. expert_s: seconds of a layer with experts that bytes do not explain, which no calibration
    fits. row_s, token_s: seconds per row that draws (sampling) and per query token (activations). launch_s: seconds the host
    needs to launch a step with chunks, while the device works. ramp_tokens: tokens by which a step's arithmetic falls short of full
    tiles. overlap: how far arithmetic hides memory traffic, from 1 (one after the other) to infinity (the larger of the two); see
    `joined`. calibrated: the factors were fitted on this machine (`planner.calibrate`).
    Otherwise they are defaults, and every figure derived from them must say so. host: of weights in host memory. wide: the model of
    steps of more than wide_rows tokens if linears are in both forms (spec.both_forms): they read the model's dtype.
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
    host: HostTimes = NO_HOST_WEIGHTS
    wide: CostModel | None = None
    wide_rows: int = 0
    expert_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        """Predicted seconds of a step with this work."""
        tokens, flops, bytes_moved, attention_flops, kv_bytes, logits, chunked, layers = work
        if self.wide is not None and tokens > self.wide_rows and self.spec.both_forms:
            return self.wide.step_s(work)
        ramp = 1 + self.ramp_tokens / tokens if tokens else 1.0
        linear = (flops - attention_flops) / (self.flops_per_s * self.compute_share) * ramp
        weights = (bytes_moved - kv_bytes) / (self.bytes_per_s * self.memory_share)
        attention = attention_flops / (self.flops_per_s * (self.attention_share or self.compute_share))
        cache = kv_bytes / (self.bytes_per_s * (self.kv_share or self.memory_share))
        products = joined(self.overlap, linear, weights, self.launch_s if chunked else 0.0)
        extra = self.overhead_s + layers * self.expert_s + logits * self.row_s + tokens * self.token_s
        return self.host.step_s(products + joined(self.overlap, attention, cache) + extra, tokens)

    def decode_s(self, lengths: Iterable[int]) -> float:
        """Predicted seconds of a step that gives each row one token. lengths: tokens that each row holds."""
        return self.step_s(step_work(self.spec, [(length, 1) for length in lengths]))


def joined(overlap: float, *seconds: float) -> float:
    """Seconds of parts that share a device, as their p-norm with p = `overlap`: the sum at 1, the maximum at infinity."""
    longest = max(seconds)
    if longest == 0 or overlap == math.inf:
        return longest
    total = 0.0
    for part in seconds:
        total += (part / longest) ** overlap
    return float(longest * total ** (1 / overlap))
