"""The fit finds the machine behind noisy steps, says how wrong it is, and is kept as JSON."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ridgeline.bench.steps import FIT_SHAPES, Bounds, shapes
from ridgeline.cli.calibrate import show
from ridgeline.cli.roofline import read_spec
from ridgeline.core.calibration import FACTORS, Calibration, Errors, load_calibration
from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import CostModel, joined, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.planner.calibrate import MAX_SHARE, NEEDS, Measured, calibrate, errors
from ridgeline.planner.nnls import nnls


@pytest.fixture(scope="module")
def guess() -> CostModel:
    layer = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
    spec = ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 131_072)
    return CostModel(spec, 989.4e12, 4.8e12)


def truth(guess: CostModel) -> CostModel:
    return replace(
        guess, compute_share=0.72, memory_share=0.86, overhead_s=2e-4, attention_share=0.35, kv_share=0.8, row_s=1e-6,
        token_s=1e-7, launch_s=2.5e-3, overlap=2.4,
    )  # fmt: skip


def steps(machine: CostModel, rows: tuple[int, ...], prompts: tuple[int, ...], noise: float) -> list[Measured]:
    """Decoding, prefills and both together, as `machine` would run them, off by a share of `noise`."""
    chance = random.Random(7)
    shapes = [((held,) * count, ()) for count in rows for held in (80, 900, 4000)]
    shapes += [((), ((0, length),)) for length in prompts]
    shapes += [((700,) * count, ((length, length),)) for count, length in zip(rows, prompts, strict=False)]
    measured = []
    for decode, chunks in shapes:
        step = Measured(decode, chunks, len(decode) + len(chunks), 1.0)
        measured.append(replace(step, seconds=machine.step_s(step.work(machine.spec)) * (1 + chance.gauss(0, noise))))
    return measured


def test_a_fit_predicts_sizes_it_has_not_seen(guess: CostModel) -> None:
    fit = steps(truth(guess), (1, 4, 16, 64, 256), (16, 64, 256, 1024, 4096), 0.03)
    judge = steps(truth(guess), (2, 10, 40, 150), (30, 120, 500, 2000), 0.0)
    calibration = calibrate(guess, fit, "machine", "2026-11-21")
    assert calibration.cost.calibrated and not guess.calibrated
    blind, seen = Errors.of(errors(guess, judge)), Errors.of(errors(calibration.cost, judge))
    assert seen.median < 0.04 < 0.1 < blind.median
    assert calibration.fitted.median <= calibration.unseen.median < 0.06
    assert calibration.cost.kv_share == pytest.approx(0.8, rel=0.1) and calibration.steps == len(fit)


def test_leaving_one_out_shows_what_a_fit_cannot_know(guess: CostModel) -> None:
    """A step that is twice as slow as its likes spoils its own error alone."""
    fit = steps(truth(guess), (1, 4, 16, 64), (16, 64, 256, 1024), 0.0)
    odd = [replace(fit[3], seconds=2 * fit[3].seconds), *fit[:3], *fit[4:]]
    calibration = calibrate(guess, odd, "machine", "2026-11-21")
    missed = errors(calibration.cost, odd)
    assert missed[0] < -0.4 and Errors.of(missed[1:]).median < 0.03


def test_too_few_steps_are_refused(guess: CostModel) -> None:
    few = steps(truth(guess), (1, 4, 16), (), 0.0)
    with pytest.raises(
        ConfigError, match="Only 9 distinct steps could be measured, and a fit needs 10: raise --most-tokens"
    ):
        calibrate(guess, few, "machine", "2026-11-21")
    with pytest.raises(ConfigError, match="Only 9 distinct steps"):
        calibrate(guess, few * 3, "machine", "2026-11-21")


@pytest.mark.long
def test_intervals_contain_the_factors_of_the_machine(guess: CostModel) -> None:
    """90 % intervals: of the fitted factors of 5 random machines, at least 80 % are inside. Most factors are fitted."""
    chance = random.Random(11)
    inside: list[bool] = []
    for _ in range(5):
        machine = replace(
            guess, compute_share=chance.uniform(0.4, 0.9), memory_share=chance.uniform(0.55, 0.95),
            overhead_s=chance.uniform(1e-4, 1e-3), attention_share=chance.uniform(0.2, 0.8), kv_share=chance.uniform(0.4, 0.95),
            row_s=chance.uniform(0, 5e-6), token_s=chance.uniform(0, 5e-7), launch_s=chance.uniform(1e-3, 1e-2),
            ramp_tokens=chance.uniform(0, 50), overlap=chance.uniform(1.2, 4),
        )  # fmt: skip
        measured = []
        for shape in shapes(FIT_SHAPES, Bounds(512, 8192, 110_000)):
            chunks = ((0, shape.prompt),) if shape.prompt else ()
            step = Measured((shape.context,) * shape.rows, chunks, shape.rows + len(chunks), 1.0)
            seconds = machine.step_s(step.work(guess.spec)) * (1 + chance.gauss(0, 0.02))
            measured.append(replace(step, seconds=seconds))
        calibration = calibrate(guess, measured, "machine", "2026-11-24")
        inside += [low <= getattr(machine, name) <= high for name, (low, high) in calibration.intervals.items()]
        assert all(
            low <= getattr(calibration.cost, name) <= high for name, (low, high) in calibration.intervals.items()
        )
        assert calibration.unseen.median < 0.025
    assert sum(inside) / len(inside) >= 0.8 and len(inside) >= 5 * 6


def test_steps_of_one_shape_leave_most_factors_at_their_defaults(guess: CostModel) -> None:
    """And the rest explains these steps, within the bound of shares."""
    chance, machine = random.Random(5), truth(guess)
    measured = []
    for held in range(100, 111):
        step = Measured((held,) * 8, (), 8, 1.0)
        measured.append(replace(step, seconds=machine.step_s(step.work(guess.spec)) * (1 + chance.gauss(0, 0.02))))
    calibration = calibrate(guess, measured, "machine", "2026-11-24")
    assert 1 <= len(calibration.intervals) <= 3 and calibration.fitted.median < 0.03
    defaults = {"attention_share": calibration.cost.compute_share, "kv_share": calibration.cost.memory_share}
    for name in set(FACTORS) - set(calibration.intervals):
        assert getattr(calibration.cost, name) == pytest.approx(defaults.get(name, getattr(guess, name)))
    assert all(getattr(calibration.cost, name) <= MAX_SHARE + 1e-9 for name in FACTORS if name.endswith("_share"))
    said = shown(calibration, measured)
    assert len(re.findall("not identified: needs steps with", said)) == len(FACTORS) - len(calibration.intervals)
    assert NEEDS["compute_share"] in said and "launch_s" not in calibration.intervals


def test_a_share_above_one_blames_the_peak(guess: CostModel) -> None:
    """A machine with twice the bandwidth of its figure: the share stays at the bound and the report says why."""
    measured = steps(
        replace(truth(guess), memory_share=1.7, kv_share=1.6), (1, 4, 16, 64, 256), (16, 64, 256, 1024, 4096), 0.01
    )
    calibration = calibrate(guess, measured, "machine", "2026-11-24")
    assert calibration.cost.memory_share == pytest.approx(MAX_SHARE)
    assert "memory_share is above 1: the peak of 4.8 TB/s is too low" in shown(calibration, measured)
    assert "is above 1" not in shown(
        calibrate(guess, steps(truth(guess), (1, 8, 64), (64, 512), 0.01), "a", "b"), measured
    )


def shown(calibration: Calibration, measured: list[Measured]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        show(console, calibration, measured)
    return capture.get()


@pytest.mark.parametrize(("model", "median"), [("llama-3.1-8b", 0.017), ("qwen3-0.6b", 0.034)])
def test_recorded_steps_are_predicted_from_the_others(model: str, median: float) -> None:
    """Steps of an H200 in prediction.json: half of them predict the rest, with sequences at their median length.

    Without a prior and bounds, the same fit missed by 1.4 and 1.6 % (8B), 2.9 and 2.0 % (0.6B) at the median.
    """
    root = Path(__file__).parents[2] / "benchmarks"
    recorded = []
    for row in json.loads((root / "results" / "prediction.json").read_text()):
        if row["model"] == model and "step" in row:
            match = re.fullmatch(r"(?:mixed|decode) (\d+) x (\d+)(?:, (.*))?", row["step"])
            assert match is not None
            rows, held, chunks = int(match[1]), int(match[2]), (match[3] or "").split()
            parts = tuple((int(start), int(count)) for start, count in (chunk.split("+") for chunk in chunks))
            recorded.append(Measured((held,) * rows, parts, rows + len(parts), row["measured_ms"] / 1e3))
    spec = read_spec(ModelConfig(model=str(root / "models" / model), load_format="dummy"))
    guess = CostModel(spec, 989.4e12, 4.8e12)
    for fit, judge in ((recorded[::2], recorded[1::2]), (recorded[1::2], recorded[::2])):
        calibration = calibrate(guess, fit, "NVIDIA H200", "2026-11-21")
        assert Errors.of(errors(calibration.cost, judge)).median < median
        assert all(getattr(calibration.cost, name) <= MAX_SHARE + 1e-9 for name in FACTORS if name.endswith("_share"))


def test_kept_as_json(guess: CostModel, tmp_path: Path) -> None:
    calibration = calibrate(guess, steps(truth(guess), (1, 8, 64), (64, 512, 4096), 0.01), "machine", "2026-11-21")
    path = tmp_path / "calibration.json"
    path.write_text(calibration.to_json())
    again = load_calibration(path, guess.spec)
    assert again == calibration
    assert all(name in json.loads(path.read_text())["factors"] for name in FACTORS)
    assert load_calibration(path, guess.spec, "machine") == calibration
    before = json.loads(path.read_text())
    assert before.pop("intervals").keys() == calibration.intervals.keys() != set()
    (tmp_path / "before.json").write_text(json.dumps(before))
    assert load_calibration(tmp_path / "before.json", guess.spec) == replace(calibration, intervals={})
    endless = replace(
        calibration, cost=replace(calibration.cost, overlap=math.inf), intervals={"overlap": (2.0, math.inf)}
    )
    path.write_text(endless.to_json())
    assert load_calibration(path, guess.spec) == endless and "Infinity" not in path.read_text()
    path.write_text(calibration.to_json())
    for spec, device, words in (
        (replace(guess.spec, vocab_size=32_000), "", r"its params is 8030\d+, not"),
        (replace(guess.spec, dtype="float16"), "", "its dtype is 'bfloat16', not 'float16'"),
        (replace(guess.spec, quantization="fp8"), "", "its quantization is '', not 'fp8'"),
        (guess.spec, "another", "its device is 'machine', not 'another'"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            load_calibration(path, spec, device)
        assert refused.value.param == "calibration" and "ridgeline calibrate" in refused.value.message
    path.write_text("{}")
    with pytest.raises(ConfigError, match="Cannot read the calibration"):
        load_calibration(path, guess.spec)
    with pytest.raises(ConfigError, match="Cannot read the calibration"):
        load_calibration(tmp_path / "missing.json", guess.spec)


def test_labels() -> None:
    assert Measured((8, 9, 10), (), 3, 1.0).label == "decode 3 x 9"
    assert Measured((), ((0, 512),), 1, 1.0).label == "prefill 0+512"
    assert Measured((5,), ((512, 512),), 2, 1.0).label == "mixed 1 x 5, 512+512"


def test_errors_are_medians_of_sizes() -> None:
    assert Errors.of([0.1, -0.2, 0.0]) == Errors(0.1, 0.2)


def test_a_step_with_chunks_waits_for_its_launch(guess: CostModel) -> None:
    slow = replace(guess, launch_s=1.0, overhead_s=0.0)
    chunk, decode = step_work(guess.spec, [(0, 64)]), step_work(guess.spec, [(64, 1)])
    assert slow.step_s(chunk) > 1.0 > slow.step_s(decode)


def test_overlap_lies_between_sum_and_maximum() -> None:
    assert joined(1.0, 3.0, 4.0) == 7 and joined(2.0, 3.0, 4.0) == 5 and joined(float("inf"), 3.0, 4.0) == 4
    assert joined(2.0, 0.0, 0.0) == 0


def test_nnls_meets_its_conditions() -> None:
    """Karush, Kuhn and Tucker: where a coefficient is above zero the slope is zero, elsewhere it points below zero."""
    chance = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = chance.normal(size=(12, 6)), chance.normal(size=12)
        solution = nnls(matrix, target)
        slope = matrix.T @ (matrix @ solution - target)
        assert (solution >= 0).all() and (slope >= -1e-8).all() and np.abs(slope[solution > 0]).max(initial=0) < 1e-8
    exact = np.array([0.0, 2.0, 0.5, 0.0, 1.0, 3.0])
    assert nnls(matrix, matrix @ exact) == pytest.approx(exact, abs=1e-9)
