"""`ridgeline plan` end to end: the ranking and its reasons, what starts today, JSON, a trace, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from tests.cli.test_planning import LLAMA, run


def test_plan_ranks_layouts_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", LLAMA, "--gpus", "8xh100", "--input-len", "2048", "--output-len", "256", "--formats", "fp8")
    out = run(capsys, *words, "--slo", "ttft=500ms,tpot=20ms", "--top", "6")
    assert "8 x NVIDIA H100 SXM" in out and "predicted, uncalibrated" in out and "ttft=500ms,tpot=20ms" in out
    assert re.search(r"^1 +DP8 \(fp8\)|^1 +DP8 ", out, re.MULTILINE)
    assert re.search(r"DP8 before .*: 1\.\d\d times the throughput, because of \w+: ", out)
    assert f"DP8: ridgeline serve {LLAMA} --quantization fp8 --device cuda  (8 times" in out
    assert "TP8: ridgeline serve" not in out  # tensor parallelism starts on CPUs only


def test_plan_as_json_has_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "plan", LLAMA, "--gpus", "6xh100", "--rate", "2", "--json"))
    ranked, refused = facts["ranking"], facts["refused"]
    assert len(ranked) + len(refused) == 16 and len(facts["why"]) == len(ranked) - 1
    assert facts["calibrated"] is False and facts["demand"] == {"input": 1024, "output": 256, "rate": 2.0, "slo": ""}
    assert all("cannot be split over" in entry["reason"] for entry in refused) and {
        entry["tensor"] for entry in refused
    } == {3, 6}
    best = ranked[0]
    assert best["requests_s"] == 2 and best["capacity_requests_s"] > 2 and best["tokens_s"] == 512
    assert best["memory"]["weight_bytes"] == pytest.approx(16.06e9, rel=0.01) and best["missed"] == ""


def test_plan_prints_the_command_of_what_starts_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", LLAMA, "--gpus", "2xepyc", "--link-gb-s", "50", "-tp", "2")
    assert f"TP2: ridgeline serve {LLAMA} --device cpu --tensor-parallel-size 2" in out and "DP2" not in out
    out = run(capsys, "plan", LLAMA, "--gpus", "2xepyc")
    assert "3 layouts (CP2, PP2, TP2): the links between 2 devices are unknown." in out


def test_plan_takes_lengths_and_rate_from_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = ("2023-11-16 18:15:46.0,300,40", "2023-11-16 18:15:48.0,500,60")
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    facts = json.loads(run(capsys, "plan", LLAMA, "--gpus", "h100", "--trace", str(trace), "--json"))
    assert (
        facts["demand"] == {"input": 400, "output": 50, "rate": 0.5, "slo": ""}
        and facts["ranking"][0]["requests_s"] == 0.5
    )


def test_plan_of_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", LLAMA, "--gpus", "16xh100", "--input-len", "1000000", "--slo", "ttft=60s")
    assert "more than the model's context of 131,072" in out and re.search(r"^1 +TP4 x CP2 x DP2", out, re.MULTILINE)
    assert "too little for a request of 1,000,256 tokens" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--gpus is missing: give number and kind"),
        (("--gpus", "0xh100"), "is 0 devices"),
        (("--gpus", "8xh900"), "Unknown accelerator 'h900'"),
        (("--gpus", "8xh100", "--slo", "tpt=3"), "'tpt=3' is not a known limit"),
        (("--gpus", "8xh100", "--rate", "0"), "--rate is 0: give requests per second above 0"),
        (("--gpus", "8xh100", "--input-len", "0"), "--input-len is 0: give 1 token or more"),
        (("--gpus", "8xh100", "--link-gb-s", "-1"), "--link-gb-s is -1: give a number above 0"),
        (("--gpus", "8xh100", "--formats", "fp9"), "--formats 'fp9' is not served"),
        (("--gpus", "8xh100", "--pipeline-parallel-size", "3"), "No layout of 8 devices has the given parallel sizes"),
    ],
)
def test_plan_names_bad_input(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, *words]) == 2
    assert message in capsys.readouterr().err


def test_plan_fails_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, "--gpus", "a10", "--input-len", "100000"]) == 1
    assert "what cannot be" in capsys.readouterr().out


def test_the_printed_command_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """A context that the cache cannot hold is limited, and `fit` agrees with the command."""
    out = run(capsys, "plan", LLAMA, "--gpus", "2xl4")
    command = re.search(r"DP2: ridgeline serve (\S+ .*?--max-model-len (\d+).*?)  \(2 times", out)
    assert command is not None and 1280 < int(command[2]) < 131072
    words = [word for word in command[1].split() if word not in ("--device", "cuda")]
    assert "fits" in run(capsys, "fit", *words, "--on", "l4")


SPLIT = (
    *("plan", LLAMA, "--gpus", "2xepyc", "--link-gb-s", "20", "--input-len", "200", "--output-len", "2"),
    *("--slo", "ttft=20s,tpot=2s", "--split"),
)


def test_plan_of_prefill_apart_from_decode(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SPLIT)
    assert "prefill : decode, simulated: the highest rate at which 90% meet --slo" in out
    rates = [
        float(match[1])
        for name in ("joint", "1:1")
        if (match := re.search(rf"^{name} +[\d.]+ +([\d.]+) +[\d.]+ m?s", out, re.MULTILINE))
    ]
    assert rates[0] > rates[1] > 0, "so few tokens need no second engine"
    assert "2:1" not in out, "there are two devices"


@pytest.mark.long
def test_plan_of_prefill_apart_from_decode_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    split = json.loads(run(capsys, *SPLIT, "--json"))["split"]
    assert [entry["ratio"] for entry in split] == ["joint", "1:1"]
    assert split[0]["requests_s_device"] > split[1]["requests_s_device"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "2xh100"), "--split compares goodput, which --slo defines"),
        (("--gpus", "h100", "--slo", "ttft=1s"), "Give 2 or more, and --link-gb-s"),
        (
            ("--gpus", "2xl4", "--link-gb-s", "9", "--slo", "ttft=1s", "--dtype", "float32"),
            "does not fit on one NVIDIA L4",
        ),
    ],
)
def test_plan_of_a_split_that_cannot_be(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", LLAMA, *words, "--split"]) == 2
    assert message in capsys.readouterr().err
