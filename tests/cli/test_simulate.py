"""`ridgeline simulate`: figures of a fleet, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main

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


def test_a_trace_and_an_autoscaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": 500 * row, "input_length": 700, "output_length": 4, "hash_ids": [1]} for row in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("simulate", MODEL, "--gpu", "h100", "--trace", str(trace), "--autoscale", "0:2", "--cold-start-s", "1")
    assert main([*words, "--json", "--max-model-len", "4096"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["answered"] == 60 and facts["hit_rate"] > 0.5 and facts["most"] <= 2


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
    ],
)
def test_what_is_refused(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MODEL, *options]) == 2
    assert words in capsys.readouterr().err
