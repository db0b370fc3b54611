"""`ridgeline simulate`: figures of a fleet, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.bench.figures import run_json
from ridgeline.bench.record import write_run
from ridgeline.cli.main import main
from ridgeline.cli.roofline import read_spec
from ridgeline.core.calibration import cost_values
from ridgeline.core.config import ModelConfig
from ridgeline.hardware.serving import cost_model
from ridgeline.hardware.table import lookup
from tests.bench.rows import make_run, row

MODEL = str(Path(__file__).parents[2] / "benchmarks" / "models" / "llama-3.1-8b")
LOAD = ("--gpu", "h100", "--rate", "20", "--requests", "40", "--output-len", "16", "--max-model-len", "8192")


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", MODEL, *LOAD, "--replicas", "2", "--slo", "ttft=1s,tpot=50ms", "--lose", "0.5:1")
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["answered"] + facts["failed"] == facts["requests"] == 40 and not facts["calibrated"]
    assert 0 < facts["ttft_s"] < 1 and 0.5 < facts["attainment"] <= 1 and facts["usd_per_million_tokens"] > 0
    assert main(list(words)) == 0
    shown = capsys.readouterr().out
    assert "40 requests" in shown and "uncalibrated" in shown and "within the SLO" in shown and "$" in shown


def test_a_surrogate_gives_nearly_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = []
    for words in ((), ("--surrogate",)):
        assert main(["simulate", MODEL, *LOAD, "--replicas", "2", *words, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    for name in ("ttft_s", "tpot_s", "e2e_s", "busy_s"):
        assert figures[1][name] == pytest.approx(figures[0][name], rel=0.05), name


def test_a_trace_and_an_autoscaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": 500 * row, "input_length": 700, "output_length": 4, "hash_ids": [1]} for row in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("simulate", MODEL, "--gpu", "h100", "--trace", str(trace), "--autoscale", "0:2", "--cold-start-s", "1")
    assert main([*words, "--json", "--max-model-len", "4096"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["answered"] == 60 and facts["hit_rate"] > 0.5 and facts["most"] <= 2


def recorded(folder: Path) -> str:
    """The folder of a run against a server of this model on an H100, which records what its clients saw."""
    cost = cost_model(lookup("h100"), read_spec(ModelConfig(MODEL, load_format="dummy")))
    facts = {
        "model_options": {}, "options": {}, "device": "NVIDIA H100 80GB HBM3", "page_tokens": 64, "max_num_seqs": 64,
        "blocks": 6000, "max_len": 8192, "cost": cost_values(cost),
        "max_num_batched_tokens": 2048, "steps_in_flight": 1, "root": MODEL,
    }  # fmt: skip
    rows = [
        {
            "arrived_at": 0.05 * number, "prompt_tokens": 900 + number, "cached_tokens": 0, "output_tokens": 40, "ttft_s": 0.06,
            "tpot_s": 0.01, "finish_reasons": ["stop"], "e2e_s": 0.5, "prefix_hashes": [],
            "decoding": {"mixed_s": 0.0, "device_s": 0.0}, "spent": {},
        }
        for number in range(60)
    ]  # fmt: skip
    state = {"facts": facts, "ceilings": {}, "now": {}, "figures": {}, "latencies": {}, "late": {}, "requests": rows}
    run = make_run([row(at) for at in range(3)], "", seconds=3.0, server=state, rate=20.0)
    write_run(run, folder, run_json(run))
    return str(folder)


def test_recorded_requests_with_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--recorded", recorded(tmp_path / "run"), "--resamples", "3"]
    change = ["--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "1024", "--replicas", "2"]
    assert main([*words, *change, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 60 and facts["changed"].endswith("2 replicas behind prefix")
    estimates = {each["name"]: each for each in facts["estimates"]}
    assert estimates["TTFT p99"]["recorded"] == {"value": 0.06, "low": 0.06, "high": 0.06}
    faster = estimates["TPOT p50"]
    assert faster["change"] < 0 and faster["expected"]["value"] == pytest.approx(0.01 * (1 + faster["change"]))
    assert main([*words, *change]) == 0
    shown = capsys.readouterr().out
    assert "60 recorded requests" in shown and "would have been" in shown and "simulated as recorded" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--recorded needs a change"),
        (("--rate", "3", "--replicas", "2"), "--rate does not go with --recorded"),
        (("--threads", "2"), "--threads cannot be replayed"),
        (("--replicas", "0"), "--replicas is 0"),
        (("--replicas", "2", "--route", "best"), "--route is 'best'"),
    ],
)
def test_what_a_replay_refuses(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--recorded", recorded(tmp_path / "run"), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--gpu is missing"),
        (("--gpu", "h9000", "--rate", "1"), "--gpu 'h9000'"),
        (("--gpu", "h100"), "--rate is missing"),
        (("--gpu", "h100", "--rate", "0"), "--rate is 0"),
        ((*LOAD, "--replicas", "0"), "--replicas is 0"),
        ((*LOAD, "--route", "best"), "--route is 'best'"),
        ((*LOAD, "--lose", "soon"), "--lose is 'soon'"),
        ((*LOAD, "--autoscale", "4:2"), "--autoscale is '4:2'"),
        ((*LOAD, "--input-len", "9000"), "No request of the workload fits"),
        ((*LOAD, "--surrogate", "--batching", "static:4"), "--surrogate has no --batching but continuous"),
    ],
)
def test_what_is_refused(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MODEL, *options]) == 2
    assert words in capsys.readouterr().err
