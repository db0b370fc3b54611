"""MFU and MBU of `bench curve`: what the server counted, or what the model's formulas say of a server without counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ridgeline.bench.efficiency import Limits, point, work
from ridgeline.cli.main import main
from ridgeline.core.config import ModelConfig
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import lookup
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model, shipped_model

from ..live.served import served
from .rows import make_run, row

H200 = lookup("h200")
COUNTED = {
    "steps": 100.0, "busy_s": 1.0, "flops": 5e13, "useful_flops": 4e13, "draft_flops": 1e13, "bytes": 2.4e12,
    "draft_bytes": 2.4e11, "joules": 900.0, "prompt_joules": 200.0, "output_joules": 500.0,
}  # fmt: skip
SERVER = {"facts": {"matrix_dtype": "int8"}, "ceilings": {"flops": 1e15, "bytes": 1e13}}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model(resolve_model(ModelConfig()))[0]


def test_a_server_that_counts_is_believed(spec: ModelSpec) -> None:
    """The folder stores bf16, the server quantized it while loading: its counters decide, and the peak of its products."""
    run = make_run([row()], seconds=2.0, concurrency=1, counted=COUNTED, server=SERVER)
    curve_point = point(run, Limits(spec, H200, named=True))
    assert curve_point.mbu == pytest.approx(2.4e12 / 2 / 4.8e12) and curve_point.mbu_busy == pytest.approx(0.5)
    assert curve_point.mfu == pytest.approx(4e13 / 2 / H200.flops["int8"])
    assert curve_point.mfu_busy == pytest.approx(2 * curve_point.mfu) and curve_point.mfu_executed == pytest.approx(
        1.5 * curve_point.mfu_busy
    )
    assert curve_point.mbu_executed == pytest.approx(1.1 * curve_point.mbu_busy)
    assert curve_point.note == "100 steps and their work, as counted by the server"
    on_server = point(run, Limits())
    assert on_server.mbu == pytest.approx(0.12) and on_server.mfu == pytest.approx(0.02), (
        "peaks of the server's own device"
    )
    measured = {"flops": 0.0, "bytes": 1e13, "measured_flops": 5e14, "measured_bytes": 1e12}
    hidden = point(
        make_run(run.rows, seconds=2.0, concurrency=1, counted=COUNTED, server={"ceilings": measured}), Limits()
    )
    assert (hidden.mfu, hidden.mbu) == pytest.approx((0.04, 0.12)) and "measured on that machine" in hidden.note
    low = {"ceilings": measured | {"bytes": 0.0, "measured_flops": 1e12}}
    exceeded = point(make_run(run.rows, seconds=2.0, concurrency=1, counted=COUNTED, server=low), Limits())
    assert exceeded.mfu_executed == exceeded.mbu_executed == pytest.approx(1.0) and exceeded.mfu == pytest.approx(1 / 3)
    assert "steps exceeded these rates" in exceeded.note
    unknown = point(make_run([row()], seconds=2.0, concurrency=1, counted=COUNTED, server=None), Limits())
    assert unknown.mfu is None and "--on" in unknown.note


def test_a_server_without_counters_is_computed_from_the_folder(spec: ModelSpec) -> None:
    run = make_run([row()], seconds=2.0, concurrency=1, counted=None)
    curve_point = point(run, Limits(spec, H200))
    assert curve_point.mbu == pytest.approx(work(run, spec, 11).bytes / 2 / H200.bandwidth)
    assert "as --model-folder stores them" in curve_point.note and curve_point.mbu_busy is None
    eight = point(run, Limits(replace(spec, quantization="w8a8"), H200))
    assert curve_point.mfu is not None and eight.mfu == pytest.approx(
        curve_point.mfu * H200.flops["bfloat16"] / H200.flops["int8"]
    ), "int8 has twice the rate"
    assert "need --model-folder and --on" in point(run, Limits()).note


@pytest.mark.long
def test_a_server_that_quantizes_while_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: ModelSpec
) -> None:
    """Bytes of a step are those of the integers that it serves, not those of the folder."""
    flags = ("--device", "cpu", "-q", "int4", "--max-num-seqs", "4", "--max-model-len", "512", "--threads", "1")
    with served(tmp_path, *flags) as server:
        load = ["--num-prompts", "4", "--input-len", "16", "--output-len", "24", "--levels", "1", "--json"]
        known = ["--on", "h200", "--model-folder", "shipped"]
        main(["bench", "curve", server.url, *load, *known, "--out", str(tmp_path / "curve")])
    curve = msgspec.json.decode(capsys.readouterr().out)
    (run,), (curve_point,) = curve["runs"], curve["points"]
    counted = run["ridgeline"]["server_work"]
    per_step = counted["bytes"] / counted["steps"]
    stored = served_spec(read_model(shipped_model())[0], ModelConfig(quantization="int4"))
    assert stored.step_weight_bytes < per_step < spec.step_weight_bytes
    assert curve_point["mbu"] == pytest.approx(counted["bytes"] / run["duration"] / H200.bandwidth, rel=1e-3)
    assert 0 < curve_point["mfu"] <= curve_point["mfu_busy"] <= curve_point["mfu_executed"] < 1
