"""Fits the cost model's factors to measured steps, and says how wrong it then is about steps it has not seen.

The model is `core.cost.CostModel.step_s`. It is homogeneous of degree one in the inverse factors, so that each step of
Gauss and Newton is a least-squares problem on the gradients alone, with coefficients that may not be negative. Errors
are relative and large ones weigh less than their square (iteratively reweighted), because medians are what is promised.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.calibration import Calibration, Errors
from ridgeline.core.cost import CostModel, StepWork, joined, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import ModelSpec
from ridgeline.planner.nnls import Array, nnls

FEWEST = 10
"""Steps below which no fit is tried: as many as there are factors."""
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 6.0)
RAMPS = (0.0, 16.0, 64.0)
_ROUNDS, _LOOSE_ROUNDS = 24, 8
_KNEE = 0.03
"""Relative error from which on errors count by their size and no longer by its square."""
_PRIOR = 1e-2
"""Weight of the uncalibrated shares: enough to settle what the measured steps cannot tell apart, and no more."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One step as it ran. decode: tokens cached of each row that ran one. chunks: (cached, new) tokens of each other row.
    logits: rows that drew a token. seconds: on the device."""

    decode: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    logits: int
    seconds: float

    def work(self, spec: ModelSpec) -> StepWork:
        return step_work(spec, [*((held, 1) for held in self.decode), *self.chunks], self.logits)

    @property
    def label(self) -> str:
        """ "decode 8 x 1024", "prefill 0+512", "mixed 8 x 1024, 0+512"."""
        decode = f"{len(self.decode)} x {statistics.median_high(self.decode)}" if self.decode else ""
        chunks = " ".join(f"{start}+{count}" for start, count in self.chunks)
        word = "mixed" if decode and chunks else "decode" if decode else "prefill"
        return f"{word} {', '.join(filter(None, (decode, chunks)))}"


def calibrate(guess: CostModel, steps: Sequence[Measured], device: str, date: str) -> Calibration:
    """Fit the factors of `guess` (its spec and its hardware's figures are kept) to `steps`.

    Raises ConfigError for fewer than FEWEST steps.
    """
    if len(steps) < FEWEST:
        raise ConfigError(
            f"Only {counted(len(steps), 'step')} could be measured, and a fit needs {FEWEST}: raise --most-tokens."
        )
    problem = _Problem(guess, steps)
    cost = problem.fit(_ROUNDS)
    fitted = Errors.of(errors(cost, steps))
    missed = []
    for index, left_out in enumerate(steps):
        others = _Problem(guess, [*steps[:index], *steps[index + 1 :]])
        missed += errors(others.settle(cost, _LOOSE_ROUNDS), [left_out])
    return Calibration(cost, device, date, len(steps), fitted, Errors.of(missed))


def errors(cost: CostModel, steps: Iterable[Measured]) -> list[float]:
    """(predicted - measured) / measured of each step."""
    return [cost.step_s(one.work(cost.spec)) / one.seconds - 1 for one in steps]


class _Problem:
    """Measured steps as features: seconds that each kind of work would take at the hardware's figures, per step."""

    def __init__(self, guess: CostModel, steps: Sequence[Measured]) -> None:
        self._guess = guess
        works = [one.work(guess.spec) for one in steps]
        flops, width = guess.flops_per_s, guess.bytes_per_s
        self._linear = [(one.flops - one.attention_flops) / flops for one in works]
        self._weights = [(one.bytes - one.kv_bytes) / width for one in works]
        self._attention = [one.attention_flops / flops for one in works]
        self._cache = [one.kv_bytes / width for one in works]
        self._works = works
        self._seconds = np.array([one.seconds for one in steps])

    def fit(self, rounds: int) -> CostModel:
        """The best over all overlaps and ramps."""
        tried = [replace(self._start(), overlap=overlap, ramp_tokens=ramp) for overlap in OVERLAPS for ramp in RAMPS]
        settled = [self.settle(one, rounds) for one in tried]
        return min(settled, key=lambda one: float(np.abs(self._misses(one)).mean()))

    def settle(self, cost: CostModel, rounds: int) -> CostModel:
        """The factors that fit best at this overlap and ramp, from those of `cost` on."""
        factors = _inverse(cost)
        target = np.ones(len(self._seconds))
        for _ in range(rounds):
            features = self._gradients(cost, factors) / self._seconds[:, None]
            miss = np.abs(features @ factors - 1)
            loose = np.sqrt(_KNEE / np.maximum(miss, _KNEE))
            prior, wanted = self._prior(features)
            rows = np.concatenate([features * loose[:, None], prior])
            scale = np.abs(rows).max(axis=0)
            scale[scale == 0] = 1.0
            best = nnls(rows / scale, np.concatenate([target * loose, wanted])) / scale
            factors = (factors + best) / 2  # half way, so that what is needed later is never lost for good
        return _with(cost, factors)

    def _start(self) -> CostModel:
        """The guess, with room for what it leaves at zero."""
        quickest = float(self._seconds.min())
        return replace(self._guess, overhead_s=quickest / 4, launch_s=quickest / 2, calibrated=True)

    def _prior(self, features: Array) -> tuple[Array, Array]:
        """Rows that draw each share to the guess's, as strongly as the steps that depend on it most, times _PRIOR."""
        usual = _inverse(self._guess)
        rows = np.zeros((len(_SHARES), features.shape[1]))
        for number, column in enumerate(_SHARES):
            rows[number, column] = _PRIOR * np.abs(features[:, column]).sum()
        return rows, rows @ usual

    def _misses(self, cost: CostModel) -> Array:
        predicted = np.array([cost.step_s(work) for work in self._works])
        return predicted / self._seconds - 1

    def _gradients(self, cost: CostModel, factors: Array) -> Array:
        """Derivatives of each step's seconds by _inverse's factors [steps, 8]; their sum over factors is the seconds."""
        rows = []
        for index, work in enumerate(self._works):
            ramp = 1 + cost.ramp_tokens / max(1, work.tokens)
            products = (self._linear[index] * ramp, self._weights[index], 1.0 if work.chunked else 0.0)
            linear, weights, launch = _slopes(cost.overlap, products, factors[[0, 1, 2]])
            attention, cache = _slopes(cost.overlap, (self._attention[index], self._cache[index]), factors[[3, 4]])
            rows.append([linear, weights, launch, attention, cache, 1.0, work.logits, work.tokens])
        return np.array(rows, dtype=np.float64)


_SHARES = (0, 1, 3, 4)
"""Columns that are the inverse of a share."""


def _inverse(cost: CostModel) -> Array:
    """The factors a step's seconds are linear in, together: 1/share of products' arithmetic and memory, launch seconds,
    1/share of attention's arithmetic and memory, seconds of a step, of a row, of a token."""
    attention, cache = cost.attention_share or cost.compute_share, cost.kv_share or cost.memory_share
    inverse = (1 / cost.compute_share, 1 / cost.memory_share, cost.launch_s, 1 / attention, 1 / cache)
    return np.array([*inverse, cost.overhead_s, cost.row_s, cost.token_s])


def _with(cost: CostModel, factors: Array) -> CostModel:
    """`cost` with the factors that `_inverse` names."""
    compute, memory, launch, attention, cache, overhead, row, token = (float(one) for one in np.maximum(factors, 1e-12))
    return replace(
        cost, compute_share=1 / compute, memory_share=1 / memory, launch_s=launch, attention_share=1 / attention,
        kv_share=1 / cache, overhead_s=overhead, row_s=row, token_s=token, calibrated=True,
    )  # fmt: skip


def _slopes(overlap: float, work: Sequence[float], factors: Array) -> list[float]:
    """Derivatives of joined(overlap, work x factors) by each factor."""
    parts = [one * float(factor) for one, factor in zip(work, factors, strict=True)]
    whole = joined(overlap, *parts)
    if whole == 0:
        return [0.0] * len(parts)
    return [one * (part / whole) ** (overlap - 1) for one, part in zip(work, parts, strict=True)]
