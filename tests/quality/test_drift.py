"""Drift against the definition, its bound, its intervals, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import TokenDrift, by_document, measure, token_drift
from ridgeline.quality.scores import NO_TOKEN, Scores
from ridgeline.quality.verdict import Comparison, judge, report

VOCAB = 12


def distributions(seed: int, count: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [count, VOCAB] of a reference and of a candidate near it."""
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB, generator=chance, dtype=torch.float64) * 2
    other = logits + spread * torch.randn(count, VOCAB, generator=chance, dtype=torch.float64)
    return logits.log_softmax(-1), other.log_softmax(-1)


def scores(logprobs: torch.Tensor, token: torch.Tensor, top: int) -> Scores:
    values, ids = logprobs.topk(top)
    logprob = logprobs.gather(1, token.unsqueeze(1)).squeeze(1)
    return Scores(token.int().numpy(), logprob.float().numpy(), ids.int().numpy(), values.float().numpy())


def exact(ours: torch.Tensor, theirs: torch.Tensor) -> np.ndarray:
    return (ours.exp() * (ours - theirs)).sum(-1).numpy()


def test_with_every_alternative_the_divergence_is_exact() -> None:
    ours, theirs = distributions(0, 50, 0.5)
    token = torch.arange(50) % VOCAB
    drift = token_drift(scores(ours, token, VOCAB), scores(theirs, token, VOCAB))
    np.testing.assert_allclose(drift.kl, exact(ours, theirs), atol=1e-5)
    np.testing.assert_array_equal(drift.same, (ours.argmax(-1) == theirs.argmax(-1)).numpy())


def test_with_few_alternatives_it_is_a_bound_that_grows() -> None:
    ours, theirs = distributions(1, 200, 0.7)
    token = torch.arange(200) % VOCAB
    divergences = [token_drift(scores(ours, token, top), scores(theirs, token, top)).kl for top in (1, 3, 6, VOCAB)]
    for few in divergences:
        assert (few <= exact(ours, theirs) + 1e-5).all()
    means = [divergence.mean() for divergence in divergences]
    assert means == sorted(means)
    assert means[0] > 0


def test_alternatives_that_one_side_never_told_join_the_rest() -> None:
    """By hand: token 0 is known to both (p .5, q .4), ids 1 and 2 to one side each."""
    log = np.log
    ours = Scores(np.array([0], np.int32), log([0.5]).astype(np.float32), np.array([[0, 1]], np.int32),
                  log([[0.5, 0.3]]).astype(np.float32))  # fmt: skip
    theirs = Scores(np.array([0], np.int32), log([0.4]).astype(np.float32), np.array([[2, NO_TOKEN]], np.int32),
                    np.array([[log(0.45), -np.inf]], np.float32))  # fmt: skip
    drift = token_drift(ours, theirs)
    assert drift.kl[0] == pytest.approx(0.5 * log(0.5 / 0.4) + 0.5 * log(0.5 / 0.6), abs=1e-6)
    assert drift.same[0] == 0


def parts(count: int, shift: float) -> list[TokenDrift]:
    chance = np.random.default_rng(3)
    actual = []
    for _ in range(count):
        reference = -chance.gamma(2.0, 1.0, 40)
        kl = chance.gamma(1.0, 0.01, 40)
        actual.append(TokenDrift(kl, (chance.random(40) < 0.95).astype(float), reference, reference - shift))
    return actual


def test_means_and_intervals() -> None:
    measurement = measure(parts(30, 0.02))
    assert (measurement.tokens, measurement.documents) == (1200, 30)
    figures = measurement.figures
    assert figures["perplexity_change"].value == pytest.approx(np.expm1(0.02))
    assert figures["logprob_change"].value == pytest.approx(-0.02)
    ratio = figures["perplexity"].value / figures["perplexity_reference"].value
    assert ratio == pytest.approx(np.exp(0.02))
    for name in ("kl", "top1", "perplexity"):
        figure = figures[name]
        assert figure.low is not None and figure.high is not None
        assert figure.low < figure.value < figure.high
    # Paired differences are known far better than the losses themselves.
    change = figures["logprob_change"]
    assert change.high is not None and change.low is not None and change.high - change.low < 1e-9


def test_more_documents_narrow_the_interval() -> None:
    def width(count: int) -> float:
        figure = measure(parts(count, 0.0)).figures["kl"]
        assert figure.low is not None and figure.high is not None
        return figure.high - figure.low

    assert width(200) < 0.6 * width(20)


def test_parts_of_a_document_are_joined_and_alone_it_has_no_interval() -> None:
    joined = by_document(parts(3, 0.0), [4, 4, 9])
    assert [len(document.kl) for document in joined] == [80, 40]
    alone = measure(joined[:1]).figures["kl"]
    assert alone.low is None and alone.high is None


def test_limits() -> None:
    drift = measure(parts(30, 0.02))
    checks = judge(drift.figures, {"max_kl": 0.05, "min_top1": 0.999, "max_perplexity_change": 0.01})
    assert [(check.limit, check.passed, check.certain) for check in checks] == [
        ("max_kl", True, True),
        ("min_top1", False, True),
        ("max_perplexity_change", False, True),
    ]
    comparison = Comparison("a", "b", 20, drift, None)
    assert report(comparison, checks)["passed"] is False
    assert report(comparison, checks[:1])["passed"] is True
    near = drift.figures["kl"].value * 1.001
    assert [(check.passed, check.certain) for check in judge(drift.figures, {"max_kl": near})] == [(True, False)]
    with pytest.raises(ConfigError, match="max_kll"):
        judge(drift.figures, {"max_kll": 1.0})


def test_a_broken_model_keeps_no_limit_and_its_report_is_json() -> None:
    drift = measure(parts(30, 0.02))
    broken = replace(
        drift, figures={name: replace(figure, value=float("nan")) for name, figure in drift.figures.items()}
    )
    limits = {"max_kl": 9.0, "min_top1": 0.0, "max_perplexity_change": 9.0}
    json_report = report(Comparison("a", "b", 20, broken, None), judge(broken.figures, limits))
    assert not any(check["passed"] for check in json_report["checks"])
    text = json.dumps(json_report, allow_nan=False)
    assert json.loads(text)["figures"]["kl"]["value"] is None
