"""Fits the factors of the cost model to measured steps, and estimates the error on unseen steps (leave-one-out).

The model is `core.cost.CostModel.step_s`. It is homogeneous of degree one in the inverse factors. Therefore each Gauss-Newton
iteration is a non-negative least-squares problem on the gradients alone. Errors are relative. Iterative reweighting reduces the
influence of outliers (Huber loss), because the objective is the median error.
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

MIN_STEPS = 10
"""Minimum number of measured steps; equals the number of factors."""
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 6.0)
RAMPS = (0.0, 16.0, 64.0)
_FIT_ROUNDS, _LEAVE_ONE_OUT_ROUNDS = 24, 8
_ROBUST_THRESHOLD = 0.03
"""Relative error above which the loss is linear instead of quadratic (threshold of the Huber loss)."""
_PRIOR_WEIGHT = 1e-2
"""Weight of the uncalibrated shares: regularizes factors that the measured steps do not determine."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Composition and measured time of one step."""

    decode: tuple[int, ...]
    """Cached tokens of each row with one query token."""
    chunks: tuple[tuple[int, int], ...]
    """(cached, new) tokens of each other row."""
    logits: int
    """Number of rows that sampled a token."""
    seconds: float
    """Time on the device."""

    def work(self, spec: ModelSpec) -> StepWork:
        return step_work(spec, [*((cached, 1) for cached in self.decode), *self.chunks], self.logits)

    @property
    def label(self) -> str:
        """ "decode 8 x 1024", "prefill 0+512", "mixed 8 x 1024, 0+512"."""
        decode = f"{len(self.decode)} x {statistics.median_high(self.decode)}" if self.decode else ""
        chunks = " ".join(f"{start}+{count}" for start, count in self.chunks)
        kind = "mixed" if decode and chunks else "decode" if decode else "prefill"
        return f"{kind} {', '.join(filter(None, (decode, chunks)))}"


def calibrate(guess: CostModel, steps: Sequence[Measured], device: str, date: str) -> Calibration:
    """Fit the factors of `guess` to `steps`. Spec and hardware figures of `guess` stay unchanged.

    Raises ConfigError for fewer than MIN_STEPS steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"Only {counted(len(steps), 'step')} could be measured, and a fit needs {MIN_STEPS}: raise --most-tokens."
        )
    problem = _FitProblem(guess, steps)
    cost = problem.fit(_FIT_ROUNDS)
    fitted = Errors.of(errors(cost, steps))
    unseen_errors = []
    for index, left_out in enumerate(steps):
        others = _FitProblem(guess, [*steps[:index], *steps[index + 1 :]])
        unseen_errors += errors(others.refine(cost, _LEAVE_ONE_OUT_ROUNDS), [left_out])
    return Calibration(cost, device, date, len(steps), fitted, Errors.of(unseen_errors))


def errors(cost: CostModel, steps: Iterable[Measured]) -> list[float]:
    """Relative error of each step: (predicted - measured) / measured."""
    return [cost.step_s(step.work(cost.spec)) / step.seconds - 1 for step in steps]


class _FitProblem:
    """The least-squares problem. Features are the seconds that each kind of work takes at the peak rates of the hardware."""

    def __init__(self, guess: CostModel, steps: Sequence[Measured]) -> None:
        self._guess = guess
        works = [step.work(guess.spec) for step in steps]
        flops, bandwidth = guess.flops_per_s, guess.bytes_per_s
        self._linear = [(work.flops - work.attention_flops) / flops for work in works]
        self._weights = [(work.bytes - work.kv_bytes) / bandwidth for work in works]
        self._attention = [work.attention_flops / flops for work in works]
        self._cache = [work.kv_bytes / bandwidth for work in works]
        self._works = works
        self._seconds = np.array([step.seconds for step in steps])

    def fit(self, rounds: int) -> CostModel:
        """Best fit over all values of overlap and ramp."""
        starts = [replace(self._start(), overlap=overlap, ramp_tokens=ramp) for overlap in OVERLAPS for ramp in RAMPS]
        candidates = [self.refine(start, rounds) for start in starts]
        return min(candidates, key=lambda candidate: float(np.abs(self._errors(candidate)).mean()))

    def refine(self, cost: CostModel, rounds: int) -> CostModel:
        """Fit the factors for the overlap and ramp of `cost`, starting from its factors."""
        factors = _linear_factors(cost)
        target = np.ones(len(self._seconds))
        for _ in range(rounds):
            features = self._gradients(cost, factors) / self._seconds[:, None]
            error = np.abs(features @ factors - 1)
            weights = np.sqrt(_ROBUST_THRESHOLD / np.maximum(error, _ROBUST_THRESHOLD))
            prior, prior_target = self._prior(features)
            rows = np.concatenate([features * weights[:, None], prior])
            scale = np.abs(rows).max(axis=0)
            scale[scale == 0] = 1.0
            best = nnls(rows / scale, np.concatenate([target * weights, prior_target])) / scale
            factors = (factors + best) / 2  # half a step, so that no factor becomes exactly zero
        return _with_factors(cost, factors)

    def _start(self) -> CostModel:
        """Starting point: the guess, with overheads above zero."""
        shortest = float(self._seconds.min())
        return replace(self._guess, overhead_s=shortest / 4, launch_s=shortest / 2, calibrated=True)

    def _prior(self, features: Array) -> tuple[Array, Array]:
        """Rows that pull each share towards its guess, weighted by _PRIOR_WEIGHT and the sum of its feature."""
        guess_factors = _linear_factors(self._guess)
        rows = np.zeros((len(_SHARES), features.shape[1]))
        for index, column in enumerate(_SHARES):
            rows[index, column] = _PRIOR_WEIGHT * np.abs(features[:, column]).sum()
        return rows, rows @ guess_factors

    def _errors(self, cost: CostModel) -> Array:
        predicted = np.array([cost.step_s(work) for work in self._works])
        return predicted / self._seconds - 1

    def _gradients(self, cost: CostModel, factors: Array) -> Array:
        """Derivatives of the step times by the factors of `_linear_factors`: [steps, 8]."""
        rows = []
        for index, work in enumerate(self._works):
            ramp = 1 + cost.ramp_tokens / max(1, work.tokens)
            linear_work = (self._linear[index] * ramp, self._weights[index], 1.0 if work.chunked else 0.0)
            linear, weights, launch = _joined_gradient(cost.overlap, linear_work, factors[[0, 1, 2]])
            attention, cache = _joined_gradient(
                cost.overlap, (self._attention[index], self._cache[index]), factors[[3, 4]]
            )
            rows.append([linear, weights, launch, attention, cache, 1.0, work.logits, work.tokens])
        return np.array(rows, dtype=np.float64)


_SHARES = (0, 1, 3, 4)
"""Columns whose factor is the inverse of a share."""


def _linear_factors(cost: CostModel) -> Array:
    """Factors in which the step time is homogeneous of degree one.

    Returns: [8] 1/share of compute and of memory in matrix products, launch seconds, 1/share of compute and of memory in
    attention, seconds per step, per row, per token.
    """
    attention, cache = cost.attention_share or cost.compute_share, cost.kv_share or cost.memory_share
    inverse = (1 / cost.compute_share, 1 / cost.memory_share, cost.launch_s, 1 / attention, 1 / cache)
    return np.array([*inverse, cost.overhead_s, cost.row_s, cost.token_s])


def _with_factors(cost: CostModel, factors: Array) -> CostModel:
    """Copy of `cost` with `factors`, in the order of `_linear_factors`."""
    compute, memory, launch, attention, cache, overhead, row, token = (
        float(factor) for factor in np.maximum(factors, 1e-12)
    )
    return replace(
        cost, compute_share=1 / compute, memory_share=1 / memory, launch_s=launch, attention_share=1 / attention,
        kv_share=1 / cache, overhead_s=overhead, row_s=row, token_s=token, calibrated=True,
    )  # fmt: skip


def _joined_gradient(overlap: float, work: Sequence[float], factors: Array) -> list[float]:
    """Derivative of joined(overlap, work * factors) by each factor."""
    parts = [seconds * float(factor) for seconds, factor in zip(work, factors, strict=True)]
    total = joined(overlap, *parts)
    if total == 0:
        return [0.0] * len(parts)
    return [seconds * (part / total) ** (overlap - 1) for seconds, part in zip(work, parts, strict=True)]
