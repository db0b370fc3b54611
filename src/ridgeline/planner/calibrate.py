"""Fits the factors of the cost model to measured steps, with an interval for each factor and the error on unseen steps.

The fit is the maximum of a posterior: relative errors with a Huber loss, and a prior around the defaults of the cost model.
Inverse shares make the model `core.cost.CostModel.step_s` almost linear, so each Gauss-Newton round is a least-squares problem
with lower bounds. A factor that the steps do not determine keeps its default and is not fitted:

1. Prior: log-normal for shares, normal for the others (`_LOG_SD`, `_TIME_SHARES`, `_RAMP_SD`, `_INVERSE_OVERLAP_SD`). The shares of
   attention are expected to equal those of the matrix products.
2. The contraction of a factor is 1 - posterior variance / prior variance (Betancourt 2018, "Towards a principled Bayesian
   workflow"). It is 0 where the steps add nothing to the prior, also because other factors explain the same seconds.
3. While some contraction is below `_CONTRACTION`, the factor whose default the steps contradict least (likelihood ratio) keeps
   its default, and the others are fitted again. This ends when every remaining default is contradicted. No more factors are
   fitted than half of the distinct steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.core.calibration import FACTORS, Calibration, Errors
from ridgeline.core.cost import CostModel, StepWork, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import ModelSpec
from ridgeline.planner.nnls import Array, nnls

MIN_STEPS = 10
"""Minimum number of distinct steps. Half as many factors can be fitted."""
MAX_SHARE = 1.2
"""Largest share of a peak: measured peaks vary by this much. A larger share means that the peak is wrong."""
NEEDS = {
    "compute_share": "prompts so long that their arithmetic takes longer than reading the weights",
    "memory_share": "few query tokens beside many, so that reading the weights takes most of some steps",
    "overhead_s": "less work, down to 1 row with a short context",
    "attention_share": "prompts so long that attention takes a visible part of the step",
    "kv_share": "many rows with long contexts beside rows with short ones",
    "row_s": "many rows beside steps of 1 row",
    "token_s": "prompts of very different lengths",
    "launch_s": "prompts of few tokens, which the device computes before the host has launched them",
    "ramp_tokens": "prompts of tens of tokens beside prompts of thousands",
    "overlap": "equal times of arithmetic and memory traffic (prompts of a few hundred tokens)",
}
"""Steps that determine each factor."""
_STARTS = tuple((overlap, ramp) for overlap in (1.0, 1.5, 2.5, 6.0) for ramp in (0.0, 32.0))
_START_ROUNDS, _ROUNDS, _LEAVE_ONE_OUT_ROUNDS = 16, 8, 4
_CONTRACTION = 8 / 9
"""Smallest contraction of a fitted factor: the steps reduce its standard deviation to a third."""
_CONTRADICTION = 3.84
"""Increase of the loss by which the steps contradict the default of a factor: 95 % quantile of chi-squared with 1 degree."""
_LOG_SD = math.log(3)
"""Prior standard deviation of the logarithm of a share: a factor of 3."""
_TIME_SHARES = {"overhead_s": 0.5, "launch_s": 0.5, "row_s": 0.1, "token_s": 0.1}
"""Prior standard deviation of a time, as a share of the steps that contain it."""
_RAMP_SD, _INVERSE_OVERLAP_SD = 64.0, 0.5
_MIN_INVERSE_OVERLAP = 1e-3
"""Inverse overlaps below it count as 0: the larger of the parts."""
_START_NOISE = 0.03
"""Noise that the starting points assume. With the large errors of the defaults as noise, the fit would stay at the defaults."""
_MIN_NOISE = 0.01
"""Smallest standard deviation of a measured time, relative. It keeps a fit with few steps from trusting them too much."""
_HUBER = 1.345
"""Standard deviations above which the loss is linear (Huber 1964): 95 % efficient for normal errors."""
_HUBER_VARIANCE = 0.7102
"""Mean square of a standard normal variable that is clipped at _HUBER."""
_NOISE_ROUNDS = 8
_Z90 = 1.645
"""Quantile of the normal distribution for a 90 % interval."""


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

    Raises ConfigError for fewer than MIN_STEPS distinct steps.
    """
    works = [step.work(guess.spec) for step in steps]
    distinct = len(set(works))
    if distinct < MIN_STEPS:
        raise ConfigError(
            f"Only {counted(distinct, 'distinct step')} could be measured, and a fit needs {MIN_STEPS}: raise --most-tokens, "
            "--max-num-seqs or --max-model-len."
        )
    problem = _Problem(guess, works, [step.seconds for step in steps])
    values, fitted = problem.fit(distinct // 2)
    cost = problem.model(values)
    unseen = []
    for index, step in enumerate(steps):
        others = problem.without(index)
        refined = others.model(others.refine(values, fitted, _LEAVE_ONE_OUT_ROUNDS))
        unseen += errors(refined, [step])
    intervals = problem.intervals(values, fitted)
    return Calibration(cost, device, date, len(steps), Errors.of(errors(cost, steps)), Errors.of(unseen), intervals)


def errors(cost: CostModel, steps: Iterable[Measured]) -> list[float]:
    """Relative error of each step: (predicted - measured) / measured."""
    return [cost.step_s(step.work(cost.spec)) / step.seconds - 1 for step in steps]


_SHARES = tuple(FACTORS.index(name) for name in ("compute_share", "memory_share", "attention_share", "kv_share"))
_RAMP, _OVERLAP = FACTORS.index("ramp_tokens"), FACTORS.index("overlap")
_SAME_AS = {
    FACTORS.index("attention_share"): FACTORS.index("compute_share"),
    FACTORS.index("kv_share"): FACTORS.index("memory_share"),
}
"""Factors whose default is the value of another factor."""


class _Problem:
    """The fit as a problem of arrays.

    Values are those of FACTORS, with shares and overlap inverted: [10]. `fitted` holds the indices of the fitted factors; the
    others have their defaults.
    """

    def __init__(self, guess: CostModel, works: Sequence[StepWork], seconds: Sequence[float]) -> None:
        self._guess, self._works = guess, list(works)
        self._seconds = np.array(seconds, dtype=np.float64)
        tokens, flops, moved, attention_flops, kv_bytes, logits, chunked, layers = np.array(works, dtype=np.float64).T
        self._tokens, self._logits, self._chunked = tokens, logits, chunked
        self._linear = (flops - attention_flops) / guess.flops_per_s
        self._attention = attention_flops / guess.flops_per_s
        self._weights, self._cache = (moved - kv_bytes) / guess.bytes_per_s, kv_bytes / guess.bytes_per_s
        self._experts = layers * guess.expert_s
        self._default = _values(guess)
        self._lower = np.zeros(len(FACTORS))
        self._lower[list(_SHARES)] = 1 / MAX_SHARE
        self._upper = np.full(len(FACTORS), np.inf)
        self._upper[_OVERLAP] = 1.0
        self._sd = self._prior_sd()

    def without(self, index: int) -> _Problem:
        """The problem without one step."""
        keep = [place for place in range(len(self._works)) if place != index]
        return _Problem(self._guess, [self._works[place] for place in keep], self._seconds[keep].tolist())

    def fit(self, most: int) -> tuple[Array, list[int]]:
        """Find the factors that the steps determine, at most `most`, and their values.

        The first loop fixes factors at their defaults. The second one fits a factor again if the steps determine it beside the
        others: its default is near the truth.
        """
        fitted = list(range(len(FACTORS)))
        starts = [self.refine(start, fitted, _START_ROUNDS, _START_NOISE) for start in self._starts()]
        candidates = [self.refine(start, fitted, _ROUNDS) for start in starts]
        values = min(candidates, key=lambda candidate: self._loss(candidate, fitted))
        while fitted and (len(fitted) > most or self._weak(values, fitted)):
            noise = self._noise(values, len(fitted))
            fewer = [[index for index in fitted if index != dropped] for dropped in fitted]
            without = [self.refine(values, rest, _ROUNDS, noise) for rest in fewer]
            losses = [self._loss(candidate, (), noise) for candidate in without]  # of the steps, without the prior
            best = int(np.argmin(losses))
            if len(fitted) <= most and losses[best] > self._loss(values, (), noise) + _CONTRADICTION:
                break
            values, fitted = without[best], fewer[best]
        for index in range(len(FACTORS)):
            more = sorted({*fitted, index})
            if len(fitted) < len(more) <= most:
                refined = self.refine(values, more, _ROUNDS)
                if not self._weak(refined, more):
                    values, fitted = refined, more
        return self.refine(values, fitted, _START_ROUNDS), fitted

    def refine(self, values: Array, fitted: list[int], rounds: int, assumed_noise: float = 0.0) -> Array:
        """Fit the factors `fitted` by Gauss-Newton rounds that start from `values`. assumed_noise 0: estimate it."""
        basis = self._basis(fitted)
        values = self._defaults_except(values, fitted)
        lower = self._lower[fitted]
        for _ in range(rounds if fitted else 0):
            noise = assumed_noise or self._noise(values, len(fitted))
            loss = self._loss(values, fitted, noise)
            rows, target = self._rows(values, fitted, noise)
            matrix = rows @ basis
            scale = np.abs(matrix).max(axis=0)
            scale[scale == 0] = 1.0
            target = target + matrix @ (values[fitted] - lower)
            best = lower + nnls(matrix / scale, target) / scale
            for length in (0.5, 0.25, 0.1, 0.02):  # at most half of a step, so that no factor becomes exactly zero
                moved = values.copy()
                moved[fitted] += length * (best - values[fitted])
                moved = np.minimum(moved, self._upper)
                moved = self._defaults_except(moved, fitted)
                if self._loss(moved, fitted, noise) < loss:
                    values = moved
                    break
            else:
                break
        return values

    def model(self, values: Array) -> CostModel:
        """The cost model with `values`."""
        factors: dict[str, Any] = {name: _factor(name, value) for name, value in zip(FACTORS, values, strict=True)}
        return replace(self._guess, calibrated=True, **factors)

    def intervals(self, values: Array, fitted: list[int]) -> dict[str, tuple[float, float]]:
        """90 % intervals of the fitted factors, from the Hessian of the posterior of all factors.

        They contain the uncertainty of the factors that are not fitted, as their prior states it.
        """
        deviations = np.sqrt(np.diag(self._covariance(values, list(range(len(FACTORS))), len(fitted))))
        intervals = {}
        for index in fitted:
            value, width = values[index], _Z90 * deviations[index]
            if index in _SHARES:
                low, high = max(self._lower[index], value * math.exp(-width / value)), value * math.exp(width / value)
            else:
                low, high = max(0.0, value - width), min(self._upper[index], value + width)
            ends = [_factor(FACTORS[index], end) for end in (low, high)]
            intervals[FACTORS[index]] = min(ends), max(ends)
        return intervals

    def _starts(self) -> list[Array]:
        """Starting points: the defaults, with overheads above zero, for several values of overlap and ramp."""
        shortest = float(self._seconds.min())
        begin = replace(self._guess, overhead_s=shortest / 4, launch_s=shortest / 2)
        return [_values(replace(begin, overlap=overlap, ramp_tokens=ramp)) for overlap, ramp in _STARTS]

    def _predicted(self, values: Array) -> Array:
        """`CostModel.step_s` for all steps, relative to the measured times: [steps]."""
        compute, memory, overhead, attention, cache, row, token, launch, ramp, inverse_overlap = values
        linear = self._linear * compute * (1 + ramp / np.maximum(1, self._tokens))
        products = _joined(inverse_overlap, linear, self._weights * memory, self._chunked * launch)
        attended = _joined(inverse_overlap, self._attention * attention, self._cache * cache)
        seconds: Array = products + attended + overhead + self._experts + self._logits * row + self._tokens * token
        return seconds / self._seconds

    def _gradient(self, values: Array) -> Array:
        """Derivatives of `_predicted` by finite differences: [steps, 10]."""
        base, columns = self._predicted(values), []
        for index, size in enumerate(1e-4 * self._scale(values)):
            moved = values.copy()
            moved[index] += size
            columns.append((self._predicted(moved) - base) / size)
        return np.array(columns).T

    def _noise(self, values: Array, count: int) -> float:
        """Relative standard deviation of a measured time, where `count` factors were fitted.

        Factors beyond half of the steps count as none, because the prior determines them. Source: Huber 1964, proposal 2,
        started at the median absolute deviation.
        """
        errors = np.abs(self._predicted(values) - 1)
        spare = len(errors) - min(count, len(errors) // 2)
        noise = max(_MIN_NOISE, 1.4826 * float(np.median(errors)))
        for _ in range(_NOISE_ROUNDS):
            clipped = (np.minimum(errors, _HUBER * noise) ** 2).sum()
            noise = max(_MIN_NOISE, math.sqrt(float(clipped) / (_HUBER_VARIANCE * spare)))
        return noise

    def _loss(self, values: Array, fitted: Sequence[int], assumed_noise: float = 0.0) -> float:
        """Twice the negative logarithm of the posterior, except for a constant. assumed_noise 0: estimate it."""
        noise = assumed_noise or self._noise(values, len(fitted))
        errors = (self._predicted(values) - 1) / noise
        parts = np.abs(np.concatenate([errors, self._prior(values)[0][list(fitted)]]))
        huber = np.where(parts < _HUBER, parts**2, 2 * _HUBER * parts - _HUBER**2).sum()
        return float(huber + 2 * len(errors) * math.log(noise))

    def _rows(self, values: Array, fitted: list[int], noise: float) -> tuple[Array, Array]:
        """Weighted rows of the least-squares problem and the negative residuals: those of the steps, then of the prior."""
        distance, prior = self._prior(values)
        residuals = np.concatenate([(self._predicted(values) - 1) / noise, distance[fitted]])
        rows = np.concatenate([self._gradient(values) / noise, prior[fitted]])
        weights = np.sqrt(np.minimum(1, _HUBER / np.maximum(np.abs(residuals), 1e-12)))
        return rows * weights[:, None], -residuals * weights

    def _covariance(self, values: Array, free: list[int], count: int | None = None) -> Array:
        """Covariance of the posterior of the factors `free`; zero for all others: [10, 10]."""
        rows, _ = self._rows(values, free, self._noise(values, len(free) if count is None else count))
        basis = self._basis(free)
        matrix = rows @ basis
        scale = np.linalg.norm(matrix, axis=0)
        inverse = np.linalg.pinv((matrix / scale).T @ (matrix / scale), hermitian=True) / np.outer(scale, scale)
        return basis @ inverse @ basis.T

    def _weak(self, values: Array, fitted: list[int]) -> bool:
        """Whether the steps fail to determine some of the factors `fitted`.

        A factor that has another one as its default counts as the ratio of both.
        """
        covariance, rows = self._covariance(values, fitted), self._prior(values)[1][fitted]
        variances = np.einsum("fi,ij,fj->f", rows, covariance, rows)
        return bool(variances.max() > 1 - _CONTRACTION)

    def _prior(self, values: Array) -> tuple[Array, Array]:
        """Distance of each factor from its default in standard deviations of the prior [10], and derivatives [10, 10]."""
        distance = (values - self._default) / self._sd
        gradient = np.diag(1 / self._sd)
        for index in _SHARES:
            other = _SAME_AS.get(index)
            center = self._default[index] if other is None else values[other]
            distance[index] = math.log(values[index] / center) / _LOG_SD
            gradient[index, index] = 1 / (values[index] * _LOG_SD)
            if other is not None:
                gradient[index, other] = -1 / (center * _LOG_SD)
        return distance, gradient

    def _prior_sd(self) -> Array:
        """Standard deviation of each factor that is no share: [10]."""
        ones = np.ones_like(self._seconds)
        counts = {"overhead_s": ones, "launch_s": self._chunked, "row_s": self._logits, "token_s": self._tokens}
        deviations = np.ones(len(FACTORS))
        for name, share in _TIME_SHARES.items():
            relative = counts[name] / self._seconds
            deviations[FACTORS.index(name)] = share / relative[relative > 0].mean() if relative.any() else 1.0
        deviations[[_RAMP, _OVERLAP]] = _RAMP_SD, _INVERSE_OVERLAP_SD
        return deviations

    def _scale(self, values: Array) -> Array:
        """Size of a visible change of each factor: [10]."""
        return np.array([value if index in _SHARES else self._sd[index] for index, value in enumerate(values)])

    def _basis(self, fitted: list[int]) -> Array:
        """Derivatives of all values by the fitted ones: [10, fitted]. A factor that equals another one moves with it."""
        basis = np.zeros((len(FACTORS), len(fitted)))
        for column, index in enumerate(fitted):
            basis[index, column] = 1.0
        for index, other in _SAME_AS.items():
            if index not in fitted:
                basis[index] = basis[other]
        return basis

    def _defaults_except(self, values: Array, fitted: list[int]) -> Array:
        """Copy of `values` with defaults for all factors that are not fitted."""
        result = self._default.copy()
        result[fitted] = values[fitted]
        for index, other in _SAME_AS.items():
            if index not in fitted:
                result[index] = result[other]
        return result


def _values(cost: CostModel) -> Array:
    """Values of a problem for the factors of `cost`."""
    attention, cache = cost.attention_share or cost.compute_share, cost.kv_share or cost.memory_share
    filled = replace(cost, attention_share=attention, kv_share=cache)
    return np.array([_factor(name, getattr(filled, name)) for name in FACTORS])


def _factor(name: str, value: float) -> float:
    """Factor from a value of a problem, or the reverse: shares and the overlap are inverted there."""
    if not (name.endswith("_share") or name == "overlap"):
        return float(value) if value > 1e-12 else 0.0
    return math.inf if name == "overlap" and value < _MIN_INVERSE_OVERLAP else 1 / float(value)


def _joined(inverse_overlap: float, *seconds: Array) -> Array:
    """`core.cost.joined` for arrays of one shape."""
    parts = np.array(seconds)
    longest: Array = parts.max(axis=0)
    if inverse_overlap < _MIN_INVERSE_OVERLAP:
        return longest
    ratio = parts / np.maximum(longest, 1e-300)
    return longest * (ratio ** (1 / inverse_overlap)).sum(axis=0) ** inverse_overlap
