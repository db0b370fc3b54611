"""`ridgeline plan` end to end: the ranking and its reasons, what starts today, JSON, a trace, and bad input."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.figures import run_json
from ridgeline.bench.record import write_run
from ridgeline.cli import serve
from ridgeline.cli.flags import read_flags
from ridgeline.cli.main import main
from ridgeline.cli.roofline import read_spec
from ridgeline.core.calibration import Calibration, Errors
from ridgeline.core.config import ModelConfig
from ridgeline.engine.hosts import check_hosts
from ridgeline.hardware.serving import cost_model
from ridgeline.hardware.table import lookup
from ridgeline.service.fleet.file import read_fleet
from ridgeline.service.fleet.rank_places import rank_places
from tests.bench.rows import make_run, row
from tests.cli.test_planning import LLAMA, run


def test_plan_ranks_layouts_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan",
        LLAMA,
        "--arithmetic",
        "--gpus",
        "8xh100",
        "--input-len",
        "2048",
        "--output-len",
        "256",
        "--formats",
        "fp8",
    )
    out = run(capsys, *words, "--slo", "ttft=500ms,tpot=20ms", "--top", "6")
    assert "8 x NVIDIA H100 SXM" in out and "predicted, uncalibrated" in out and "ttft=500ms,tpot=20ms" in out
    assert re.search(r"^1 +DP8 \(fp8\)|^1 +DP8 ", out, re.MULTILINE)
    assert re.search(r"DP8 before .*: 1\.\d\d times the throughput, because of \w+: ", out)
    assert f"DP8: ridgeline serve {LLAMA} --quantization fp8 --device cuda  (8 times" in out
    assert "PP2 x DP4: ridgeline serve" in out and "--pipeline-parallel-size 2" in out


def test_plan_as_json_has_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "plan", LLAMA, "--gpus", "6xh100", "--rate", "2", "--json", "--arithmetic"))
    ranked, refused = facts["ranking"], facts["refused"]
    assert len(ranked) + len(refused) == 16 and len(facts["why"]) == len(ranked) - 1
    assert facts["calibrated"] is False and facts["demand"] == {"input": 1024, "output": 256, "rate": 2.0, "slo": ""}
    assert all("cannot be split over" in entry["reason"] for entry in refused) and {
        entry["tensor"] for entry in refused
    } == {3, 6}
    best = ranked[0]
    assert best["requests_s"] == 2 and best["capacity_requests_s"] > 2 and best["tokens_s"] == 512
    assert best["memory"]["weight_bytes"] == pytest.approx(16.06e9, rel=0.01) and best["missed"] == ""


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Mixtral 8x7B."""


def test_plan_of_a_mixture_divides_whole_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    words = ("plan", str(tmp_path), "--arithmetic", "--gpus", "4xh100", "--context-parallel-size", "1")
    out = run(capsys, *words, "--top", "20")
    assert re.search(r"^\d+ +EP4 ", out, re.MULTILINE) and re.search(r"^\d+ +TP4\+EP ", out, re.MULTILINE)
    assert re.search(r"^TP4\+EP: ridgeline serve .*--expert-parallel", out, re.MULTILINE)
    command = re.search(r"^EP4: ridgeline serve .*", out, re.MULTILINE)
    assert command and {"--data-parallel-size 4", "--expert-parallel"} == {
        *re.findall(r"--data-parallel-size \d|--tensor-parallel-size|--expert-parallel", command[0])
    }
    assert "taken to have 1.1 times the mean" in out and "the busiest rank of" in out
    facts = json.loads(run(capsys, *words, "-tp", "4", "--json"))
    assert {(entry["experts"], entry["imbalance"] > 1) for entry in facts["ranking"]} == {(1, False), (4, True)}


def test_plan_prints_the_command_of_what_starts_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", LLAMA, "--gpus", "2xepyc", "--link-gb-s", "50", "-tp", "2", "--arithmetic")
    assert f"TP2: ridgeline serve {LLAMA} --device cpu --tensor-parallel-size 2" in out and "DP2" not in out
    out = run(capsys, "plan", LLAMA, "--gpus", "2xepyc", "--arithmetic")
    assert "3 layouts (CP2, PP2, TP2): the links between 2 devices are unknown." in out


def test_plan_takes_lengths_and_rate_from_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = ("2023-11-16 18:15:46.0,300,40", "2023-11-16 18:15:48.0,500,60")
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    facts = json.loads(run(capsys, "plan", LLAMA, "--gpus", "h100", "--trace", str(trace), "--json", "--arithmetic"))
    assert (
        facts["demand"] == {"input": 400, "output": 50, "rate": 0.5, "slo": ""}
        and facts["ranking"][0]["requests_s"] == 0.5
    )


def test_plan_of_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", LLAMA, "--gpus", "16xh100", "--input-len", "1000000", "--slo", "ttft=60s", "--arithmetic")
    assert "more than the model's context of 131,072" in out and re.search(r"^[12] +TP4 x CP2 x DP2", out, re.MULTILINE)
    assert "too little for a request of 1,000,256 tokens" in out


def test_plan_of_replicas_that_span_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """256 GPUs: each host of a replica has a command, which `ridgeline serve` accepts. Hosts with unequal numbers have none."""
    sizes = ("-tp", "8", "--pipeline-parallel-size", "2", "--context-parallel-size", "1")
    out = run(capsys, "plan", LLAMA, "--gpus", "256xh100", "--arithmetic", *sizes)
    (words,) = re.findall(r"^TP8 x PP2 x DP16: ridgeline serve (.*?)  \(16 times", out, re.MULTILINE)
    assert words.endswith("--nnodes 2 --master-addr HOST0 --node-rank K") and "HOST0 is the address of" in out
    filled = words.replace("HOST0", "10.0.0.1").removesuffix("K") + "1"
    engine = serve.resolve_arguments(read_flags(serve.parser(), shlex.split(filled))).engine
    check_hosts(engine)
    assert engine.ranks == 16 and engine.host_ranks == range(8, 16)
    out = run(capsys, "plan", LLAMA, "--gpus", "9xh100", "--arithmetic", "-tp", "1", "--pipeline-parallel-size", "9")
    assert "PP9: ridgeline" not in out and "unequal numbers of them on a replica's hosts" in out


def test_a_plan_starts_a_replica_of_two_hosts_on_ray(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("-tp", "8", "--pipeline-parallel-size", "2", "--context-parallel-size", "1", "--data-parallel-size", "1")
    made = proposals(capsys, "--gpus", "16xh100", "--rate", "5", *sizes)[0]
    assert made["start"] == "ridgeline up fleet.json" and made["cannot_start"] == ""
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(made["fleet"]))
    fleet = read_fleet(file, {})
    assert (fleet.fleet.launcher, fleet.fleet.replicas, fleet.fleet.replica_gpus) == ("ray", 1, 16)
    places = rank_places(fleet.serve, 16.0, 16, [8, 8])
    assert (places.actors, places.gpus) == (2, 8)


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
    assert main(["plan", LLAMA, *words, "--arithmetic"]) == 2
    assert message in capsys.readouterr().err


def test_plan_fails_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, "--gpus", "a10", "--input-len", "100000", "--arithmetic"]) == 1
    assert "what cannot be" in capsys.readouterr().out


def test_the_printed_command_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """A context that the cache cannot hold is limited, and `fit` agrees with the command."""
    out = run(capsys, "plan", LLAMA, "--gpus", "2xl4", "--arithmetic")
    command = re.search(r"DP2: ridgeline serve (\S+ .*?--max-model-len (\d+).*?)  \(2 times", out)
    assert command is not None and 1280 < int(command[2]) < 131072
    words = [word for word in command[1].split() if word not in ("--device", "cuda")]
    assert "fits" in run(capsys, "fit", *words, "--on", "l4")


SMALL = ("--input-len", "200", "--output-len", "8", "--finalists", "1", "--sample", "60")
"""A workload that is simulated quickly."""


def proposals(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(run(capsys, "plan", LLAMA, *SMALL, *words, "--json"))["proposals"]
    return made


def test_a_plan_says_what_a_load_costs_and_what_starts_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rented cards of two kinds for a rate: as few replicas as keep the objectives, and the fleet file that starts them."""
    words = ("--candidates", "h100,l40s", "--rate", "250", "--slo", "p99(ttft)<=300ms,tpot=30ms", "--finalists", "2")
    single = ("-tp", "1", "--pipeline-parallel-size", "1", "--context-parallel-size", "1")
    facts = json.loads(run(capsys, "plan", LLAMA, *SMALL, *words, *single, "--json"))
    best, other = facts["proposals"]
    assert {best["device"], other["device"]} == {"NVIDIA H100 SXM", "NVIDIA L40S"}
    for each in (best, other):
        assert each["missed"] == "" and each["rate"] == 250 <= each["capacity"] and each["basis"] == "uncalibrated"
        assert each["usd_hour"] == pytest.approx(each["usd_device_hour"] * each["replicas"])
        assert each["usd_thousand"] == pytest.approx(each["usd_hour"] / 3600 / 250 * 1000)
        assert each["usd_million"] == pytest.approx(each["usd_thousand"] / 8 * 1000)
        assert each["joules_token"] == pytest.approx(each["watts"] / 250 / 8)
        assert each["carbon_g_request"] == pytest.approx(each["joules_token"] * 8 * 1.2 * 450 / 3.6e6)
        assert each["headroom"] == pytest.approx(each["capacity"] / 250 - 1) and 0 < each["lane_share"] < 1
        assert 0 < each["ttft_s"]["p50"] <= each["ttft_s"]["p99"] <= 0.3
    assert best["usd_hour"] <= other["usd_hour"] and "per 1K requests" in facts["why"][0]
    assert best["start"] == "ridgeline up fleet.json" and best["replicas"] > 1
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(best["fleet"]))
    fleet = read_fleet(file, {})
    assert fleet.fleet.replicas == best["replicas"] == len(fleet.gpus) and fleet.serve["model"] == LLAMA


def test_a_plan_as_text_and_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--rate", "20", "--usd-hour", "2", "--carbon-g-kwh", "100", "--html", str(tmp_path / "plan.html"))
    out = run(capsys, "plan", LLAMA, *SMALL, "--gpus", "h100", *words)
    assert "20 requests/s of 200 + 8 tokens on average" in out and "uncalibrated: `ridgeline calibrate`" in out
    assert "NVIDIA H100 SXM $2 an hour (given)" in out and "100 g/kWh" in out
    assert re.search(rf"^1: ridgeline serve {LLAMA} .*--device cuda", out, re.MULTILINE)
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page and "$2 per hour" in page and "ridgeline serve" in page


def test_given_chips_and_given_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed chips: how much they serve. Fixed replicas: which chips do it."""
    slo = ("--slo", "ttft=300ms,tpot=30ms")
    owned = proposals(capsys, "--gpus", "4xh100", *slo)[0]
    assert owned["replicas"] == 4 and owned["rate"] == pytest.approx(owned["capacity"])
    rate = str(round(0.9 * owned["capacity"] / 4))
    kinds = (
        "--candidates",
        "h100,l40s",
        "--finalists",
        "4",
        "--pipeline-parallel-size",
        "1",
        "-tp",
        "1",
        "--context-parallel-size",
        "1",
    )
    fixed = proposals(capsys, *kinds, "--data-parallel-size", "1", "--rate", rate, *slo)
    met = [each for each in fixed if not each["missed"]]
    assert [each["device"] for each in met] == ["NVIDIA H100 SXM"] and all(each["replicas"] == 1 for each in fixed)


def test_limits_on_money_and_power(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", LLAMA, *SMALL, "--gpus", "8xh100")
    facts = json.loads(run(capsys, *words, "--most-usd-hour", "9", "--json"))
    assert facts["proposals"][0]["replicas"] == 3, "at $2.95 each"
    facts = json.loads(run(capsys, *words, "--most-watts", "1500", "--json"))
    assert facts["proposals"][0]["replicas"] == 2, "of 700 W"
    assert main([*words, "--rate", "2000", "--most-usd-hour", "3", "--json"]) == 1
    assert "an hour > $3" in json.loads(capsys.readouterr().out)["proposals"][0]["missed"]


def test_prices_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[[gpu]]\nkind = "h100"\nusd_hour = 1.5\ndate = "2026-11-01"\ncount = 2\n')
    best = proposals(capsys, "--candidates", str(file), "--rate", "20")[0]
    assert (best["usd_device_hour"], best["priced"]) == (1.5, "2026-11-01")
    file.write_text('[[gpu]]\nkind = "h100"\nusd = 1.5\n')
    assert main(["plan", LLAMA, "--candidates", str(file)]) == 2
    assert "gpu 1 has an unknown key 'usd': use kind, count, usd_hour, date" in capsys.readouterr().err


def test_a_calibration_of_the_card_improves_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Measured at half the speed of the defaults: exactly for the model, and by its factors for another number format."""
    spec = read_spec(ModelConfig(LLAMA, load_format="dummy"))
    cost = replace(cost_model(lookup("h100"), spec), compute_share=0.3, memory_share=0.375, calibrated=True)
    errors = Errors(0.03, 0.06)
    file = tmp_path / "calibration.json"
    file.write_text(Calibration(cost, "NVIDIA H100 80GB HBM3", "2026-11-27", 40, errors, errors).to_json())
    words = ("--gpus", "h100", "--formats", "fp8", "--finalists", "2")
    plain = {each["weights"]: each for each in proposals(capsys, *words)}
    slower = {each["weights"]: each for each in proposals(capsys, *words, "--calibration", str(file))}
    assert {name: each["basis"] for name, each in slower.items()} == {"bfloat16": "calibrated", "fp8": "transferred"}
    for name, each in slower.items():
        assert each["capacity"] < 0.75 * plain[name]["capacity"]
    assert main(["plan", LLAMA, "--gpus", "l40s", "--calibration", str(file)]) == 2
    assert "was measured on NVIDIA H100 80GB HBM3, and this is for NVIDIA L40S" in capsys.readouterr().err


def test_measured_beside_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan for the requests of a run: its lengths and times, and its percentiles."""
    rows = [row(number, at=0.1 * number, ttft=0.02, tokens=9) for number in range(40)]
    run_ = make_run(rows, seconds=4.0, rate=10.0)
    write_run(run_, tmp_path / "run", run_json(run_))
    words = ("plan", LLAMA, "--gpus", "h100", "--finalists", "1", "--sample", "40", "--measured", str(tmp_path / "run"))
    facts = json.loads(run(capsys, *words, "--json"))
    assert facts["demand"]["rate"] == pytest.approx(10, rel=0.01) and facts["demand"]["output"] == 9
    assert facts["measured"]["ttft"]["measured"]["p99"] == pytest.approx(0.02)
    assert facts["measured"]["ttft"]["predicted"] == facts["proposals"][0]["ttft_s"]
    assert "predicted beside measured" in run(capsys, *words)
    assert main([*words, "--rate", "3"]) == 2
    assert "--rate does not go with --measured" in capsys.readouterr().err
    closed = make_run(rows, seconds=4.0, rate=None)
    write_run(closed, tmp_path / "closed", run_json(closed))
    assert main([*words[:-1], str(tmp_path / "closed")]) == 2
    assert "in a closed loop the server sets the rate" in capsys.readouterr().err


SPLIT = (
    *("--gpus", "2xepyc", "--link-gb-s", "20", "--input-len", "200", "--output-len", "2", "-tp", "1"),
    *("--pipeline-parallel-size", "1", "--context-parallel-size", "1", "--slo", "ttft=20s,tpot=2s", "--split"),
)


def test_plan_of_prefill_apart_from_decode(capsys: pytest.CaptureFixture[str]) -> None:
    joint, split = proposals(capsys, *SPLIT)
    assert (joint["split"], split["split"], split["devices"]) == ("joint", "1:1", 2), "there are two devices"
    assert joint["capacity"] > split["capacity"] > 0, "so few tokens need no second engine"
    assert split["start"].endswith("--prefill-engines 1 --decode-engines 1") and split["ttft_s"]["p99"] <= 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "2xh100", "--split"), "--split compares goodput, which --slo defines"),
        (("--gpus", "h100", "--slo", "ttft=1s", "--split"), "Give 2 or more, and --link-gb-s"),
        (
            ("--gpus", "2xl4", "--link-gb-s", "9", "--slo", "ttft=1s", "--dtype", "float32", "--split"),
            "does not fit on one",
        ),
        (("--gpus", "2xh100", "--split", "--arithmetic"), "--split needs simulations: leave out --arithmetic"),
        (("--gpus", "2xh100", "--most-usd-hour", "1", "--arithmetic"), "--most-usd-hour needs simulations: leave out"),
        (("--on", "h100"), "Unknown option '--on': `ridgeline plan --help` lists the options"),
        (("--candidates", "h900"), "--candidates 'h900': Unknown accelerator"),
        (("--candidates", "h100,h100"), "NVIDIA H100 SXM is given twice"),
        (("--gpus", "h100", "--most-watts", "0"), "--most-watts is 0: give a number above 0"),
        (("--gpus", "h100", "--pue", "0.5"), "--pue is 0.5: give 1 or more"),
        (("--gpus", "h100", "--kv-formats", "fp5"), "--kv-formats 'fp5' is unknown: use"),
    ],
)
def test_plan_of_what_cannot_be(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


BLOCKS = {"quant_method": "gguf", "format": "q4_k", "layers": [], "head": "q6_k"}
"""As in the configuration of a GGUF file."""


def test_linears_in_both_forms_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `fit` and `plan`, for a Hopper GPU, whose cache keeps three quarters of the memory that is left."""
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))

    def rows(*words: str) -> dict[str, str]:
        assert main(["fit", str(tmp_path), "--max-model-len", "8192", *words]) == 0
        text = re.sub(r"\n {10,}", " ", capsys.readouterr().out)
        return {name: " ".join(value.split()) for name, value in re.findall(r"^(\S+(?: \S+)*) {2,}(\S.*)$", text, re.M)}

    both, short = rows("--on", "h200"), rows("--on", "h200", "--memory", "30G")
    assert both["expanded weights"].startswith("13.98 GiB: quantized linears are in bfloat16 too")
    assert short["expanded weights"].startswith("none: in bfloat16 linears take 13.98 GiB, more than may be taken")
    stage = rows("--on", "h200", "--memory", "20G", "--pipeline-parallel-size", "2")
    assert stage["expanded weights"].startswith("none: in bfloat16 linears take 8.29 GiB"), "the larger of two stages"
    caches = [float(rows("--on", "h200", *words)["KV cache"].split()[0]) for words in ((), ("--deterministic",))]
    assert caches[1] - caches[0] == pytest.approx(13.98, abs=0.02)
    for words in (("--on", "h200", "--deterministic"), ("--on", "l40s"), ("--on", "cpu")):
        assert "expanded weights" not in rows(*words)
    words = [
        "plan",
        str(tmp_path),
        "--arithmetic",
        "--gpus",
        "2xh200",
        "--input-len",
        "512",
        "--output-len",
        "200",
        "--json",
    ]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    sizes = {entry["tensor"]: entry["memory"]["expanded_bytes"] / 2**30 for entry in facts["ranking"]}
    assert sizes[2] == pytest.approx(6.99, abs=0.01)
    assert any(
        note.startswith("Weights of TP2 include 7.0 GiB of quantized linears in bfloat16 too")
        for note in facts["notes"]
    )


def test_options_that_predictions_do_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--arithmetic", "--gpus", "1xh100"]
    assert (
        main([*words, "--speculate", "reference", "--kv-retention", "window:sinks=4,keep=64", "--deterministic"]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "Not in the predictions, only in the commands: --kv-retention, --speculate, --deterministic." in said
    assert main([*words, "--device", "cuda"]) == 0 and "Not in the predictions" not in capsys.readouterr().out
    assert main([*words, "--device", "cpu"]) == 2
    assert "--device is cpu, and NVIDIA H100 SXM is planned" in capsys.readouterr().err
