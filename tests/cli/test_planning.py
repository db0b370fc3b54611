"""The planning commands end to end: tables, JSON, charts, and a calibration measured on this machine."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.bench.steps import FIT_SHAPES, OUTPUTS, VALIDATION_SHAPES, Bounds, Recorder, Shape, measure, shapes
from ridgeline.cli.main import main
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.host_weights import LINK_SHARE
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.probe import Device, Machine
from ridgeline.hardware.table import Accelerator, lookup

LLAMA = str(Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "llama-3.1-8b")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_roofline_of_a_model_on_an_accelerator(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, html = tmp_path / "r.svg", tmp_path / "r.html"
    out = run(capsys, "roofline", LLAMA, "--on", "h200", "--batch", "8", "--svg", str(svg), "--html", str(html))
    assert "ridge 206 FLOP/B" in out and "compute-bound" in out and "memory-bound" in out
    assert "uncalibrated" in out and "gate+up" in out
    ET.parse(svg)
    assert html.read_text().count("<table>") == 2


def test_roofline_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("roofline", LLAMA, "--on", "h200", "--context", "8192", "--prompt", "512", "-q", "fp8", "--json")
    facts = json.loads(run(capsys, *words))
    assert facts["accelerator"]["peak_flops"] == pytest.approx(1978.9e12) and facts["model"]["quantization"] == "fp8"
    assert facts["load"] == {"batch": 1, "context": 8192, "prompt": 512} and facts["calibrated"] is False
    decode = facts["phases"]["decode"]
    assert decode["floor_s"] <= decode["serial_floor_s"] < decode["predicted_s"]
    assert sum(operation["flops"] for operation in decode["operations"]) == decode["flops"]


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
}  # fmt: skip
"""Qwen3-30B-A3B in int4."""


def test_a_gpu_has_more_bytes_of_experts_than_a_processor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))

    def weights(place: str) -> int:
        facts = json.loads(run(capsys, "roofline", str(tmp_path), "--on", place, "--json"))
        return int(facts["model"]["weight_bytes"])

    assert weights("h200") - weights("epyc") == 48 * 128 * 3 * 768 * 2048 // 128 * 2

    words = ("calc", "kv", str(tmp_path), "--tokens", "64", "--on", "h200", "--json")
    facts = json.loads(run(capsys, *words))
    left = lookup("h200").memory_bytes - weights("h200")
    assert facts["sequences_that_fit"] == left // facts["sequence_bytes"]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Accelerator], None]:
    """Makes a row the specification of this machine's processor."""
    rows: list[Accelerator] = []
    monkeypatch.setattr("ridgeline.hardware.bandwidth.measured_rates", lambda device, dtype: (9e11, 5e10))
    for place in ("hardware.probe", "cli.roofline", "cli.fit"):
        monkeypatch.setattr(
            f"ridgeline.{place}.probe",
            lambda: Machine("x", 2, (), Device("cpu", "x", 1 << 40, 1 << 40, rows[-1]), ()),
        )
    return rows.append


def test_roofline_of_this_processor(
    capsys: pytest.CaptureFixture[str], processor: Callable[[Accelerator], None]
) -> None:
    """Its specification where it is known, measured rates where it is not, and never another machine's figures."""
    known = replace(lookup("epyc"), name="x, 2 cores", source="2 cores, Zen 4, at most 3.70 GHz")
    processor(known)
    for words in ((), ("--on", "cpu")):
        out = run(capsys, "roofline", *words)
        assert "x, 2 cores: 22.7 TFLOP/s dense, 461 GB/s" in out
        assert "This processor: 2 cores, Zen 4, at most 3.70 GHz." in out and "Measured on this machine" not in out
    processor(replace(known, flops={}, memory=replace(known.memory, bandwidth=0.0)))
    out = run(capsys, "roofline", "--on", "cpu")
    assert "x, 2 cores: 900 GFLOP/s dense, 50 GB/s" in out
    assert "Measured on this machine now, because the specification is unknown: FLOP/s and memory bandwidth." in out
    accelerator = json.loads(run(capsys, "roofline", "--on", "cpu", "--json"))["accelerator"]
    assert (accelerator["measured"], accelerator["serves"]) == (["dense", "memory.gb_s"], True)
    assert "ms per token (uncalibrated)" in run(capsys, "fit", "--on", "cpu", "--memory", "24G")


def test_roofline_of_what_lies_in_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    said = "All weights fit into the L3 of 384.00 MiB: steps may be faster than these limits"
    assert said in run(capsys, "roofline", "--on", "epyc")
    assert said not in run(capsys, "roofline", LLAMA, "--on", "epyc")
    assert "L2 of 40.00 MiB, read at 7.22 TB/s" in run(capsys, "roofline", LLAMA, "--on", "a100 80gb")


def test_roofline_of_a_device_that_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "roofline", LLAMA, "--on", "trn2")
    assert "Ridgeline does not run on this device (Neuron SDK (PyTorch, JAX)): the figures are for comparison." in out
    assert "does not run" not in run(capsys, "roofline", LLAMA, "--on", "h200")


def test_adapters_take_memory_on_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("fit", LLAMA, "--on", "l40s", "--enable-lora", "--max-loras", "64", "--max-lora-rank", "64")
    assert "64 slots of rank 64" in run(capsys, *words, "--tensor-parallel-size", "2")
    assert "adapters" not in run(capsys, "fit", LLAMA, "--on", "l40s")
    assert main(words) == 1
    message = " ".join(capsys.readouterr().out.split())
    assert "64 slots of rank 64 for LoRA adapters take 20.00 GiB of it: lower --max-loras" in message


def test_roofline_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "roofline", LLAMA, "--on", "4090", "--batch", "64", "--context", "4096")
    assert "capacity-bound" in out and "times slower" in out


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_spill_counts_in_floor_rate_and_price(capsys: pytest.CaptureFixture[str], llama_70b: str) -> None:
    """A 70B in 16 bits on an A100: 56 GB cross a link of 32 GB/s in every step, which takes at least 1.75 s, 25 times the floor
    that ignores them. So does a prefill that computes for less time. Copies reach a share of the published rate."""
    words = ("roofline", llama_70b, "--on", "a100", "--prompt", "512")
    facts = json.loads(run(capsys, *words, "--json"))
    decode, prefill = facts["phases"]["decode"], facts["phases"]["prefill"]
    link_s = facts["spilled_bytes"] / 32e9
    assert decode["floor_s"] == decode["spill_s"] == pytest.approx(link_s) == pytest.approx(1.75, rel=0.03)
    copies_s = link_s / LINK_SHARE
    assert decode["predicted_s"] == pytest.approx(copies_s) and decode["bound"] == prefill["bound"] == "capacity"
    # The prompt's cache is smaller than that of the decoding sequence.
    assert 0.99 * link_s < prefill["floor_s"] < link_s and prefill["predicted_s"] == prefill["floor_s"] / LINK_SHARE
    out = " ".join(run(capsys, *words).split())
    price = float(out.split("hour (")[1].split("$")[1].split(" ")[0])
    rent = float(out.split("Rented at $")[1].split(" ")[0])
    assert price == pytest.approx(rent / 3600 * copies_s * 1e6, rel=0.01)
    assert "include these reads" in out and "= 0.46 tokens/s" in out
    # With the option, the weights that it names cross the link, though the model needs more than that to fit.
    split = json.loads(run(capsys, *words, "--json", "--cpu-offload-gb", "64"))
    assert split["spilled_bytes"] == pytest.approx(64 << 30, rel=0.01)
    assert split["phases"]["decode"]["predicted_s"] == pytest.approx(split["spilled_bytes"] / 32e9 / LINK_SHARE)


def test_weights_in_host_memory_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An 8B in 16 bits on an L4 with a context of 65,536 tokens: the plan shows which weights leave and what a token takes."""
    model = write_llama(tmp_path)
    out = run(capsys, "fit", model, "--on", "l4", "--cpu-offload-gb", "12", "-c", "65536")
    assert "12.03 GiB of the weights, copied to the device in every step" in out
    assert f"fits  ridgeline serve {model} --cpu-offload-gb 12.0 --max-model-len 65536" in out
    per_token = float(out.split("one request")[1].split("about ")[1].split(" ms")[0])
    assert per_token == pytest.approx(12.03 * (1 << 30) / (32e9 * LINK_SHARE) * 1e3, rel=0.01)
    for words, message in (
        (("fit", model, "--on", "l4", "--cpu-offload-gb", "15"), "all layers but the last have 12.59 GiB"),
        (("fit", model, "--on", "l4", "--cpu-offload-gb", "0.1"), "it frees no memory, because copies need buffers"),
        (("fit", model, "--device", "cpu", "--cpu-offload-gb", "4"), "--cpu-offload-gb needs a GPU"),
        (("roofline", model, "--on", "cpu", "--cpu-offload-gb", "4"), "--cpu-offload-gb needs a GPU"),
        (("plan", model, "--gpus", "2xh100", "--cpu-offload-gb", "4"), "leave --cpu-offload-gb out"),
        (("calibrate", model, "--cpu-offload-gb", "4"), "leave --cpu-offload-gb out"),
    ):
        assert main(list(words)) != 0
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_device_without_a_host_link_gives_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("roofline", LLAMA, "--on", "groq")
    facts = json.loads(run(capsys, *words, "--json"), parse_constant=lambda name: pytest.fail(name))
    assert facts["phases"]["decode"]["floor_s"] is None and facts["phases"]["decode"]["predicted_s"] is None
    out = run(capsys, *words)
    assert "cannot read host memory" in out and "A decode step" not in out and "per million output tokens" not in out


CHARACTER_AI = (
    "--layers 36 --heads 64 --kv-heads 1 --head-dim 128 --tokens 8192 --window 1024 --global-every 6 --share-layers 3 "
    "--cache-dtype int8 --versus-kv-heads 8"
).split()
"""Options that it published in June 2024; layers and heads are examples."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("kv", "--layers", "40", "--heads", "40", "--head-dim", "128", "--batch", "32"), {"total_bytes": 53.687e9}),
        (
            ("kv", LLAMA, "--tokens", "1000", "--cache-dtype", "fp8"),
            {"token_bytes": 66_560, "sequence_bytes": 66.56e6},
        ),
        (
            (
                "kv",
                "--layers",
                "36",
                "--heads",
                "64",
                "--kv-heads",
                "1",
                "--head-dim",
                "128",
                "--tokens",
                "8192",
                "--window",
                "1024",
                "--global-every",
                "6",
                "--share-layers",
                "3",
                "--cache-dtype",
                "int8",
                "--versus-kv-heads",
                "8",
            ),
            {
                "times_less_heads": 8,
                "times_less_windows": 3.692,
                "times_less_sharing": 3,
                "times_less_format": 1.969,
                "times_less_product": 174.5,
            },
        ),
        (("kv", LLAMA, "--window", "512"), {"times_less_heads": 4, "times_less_windows": 4, "times_less_product": 16}),
        (("kv", "--layers", "60", "--heads", "128", "--head-dim", "128", "--latent", "576"), {"token_bytes": 69_120}),
        (
            ("cost", "--usd-hour", "2", "--tokens-s", "100", "--prefills-min", "100", "--output-tokens", "200"),
            {"usd_million_output_tokens": 5.5556, "usd_thousand_requests": 1.4444},
        ),
        (("cost", "--price", "35040", "--upkeep", "0.000001", "--watts", "1", "--tokens-s", "1"), {"usd_hour": 1.0}),
        (("cost", "--on", "h100", "--tokens-s", "1000"), {"usd_hour": 2.95}),
        (("energy", "--on", "h100", "--tokens-s", "9806"), {"chip_kwh_year": 6132, "joules_per_token": 0.07138}),
        (("breakeven", "--on", "h100", "--usd-hour", "3.75"), {"payback_months": 16.0}),
        (
            (
                "training",
                "--params",
                "1e9",
                "--train-tokens",
                "20e9",
                "--on",
                "h100",
                "--mfu",
                "0.5",
                "--usd-hour",
                "2",
            ),
            {
                "training_flops": 1.2e20,
                "tokens_per_param": 20,
                "served_tokens": 60e9,
                "device_hours": 67.4,
                "training_usd": 134.8,
            },
        ),
        (("training", LLAMA, "--train-tokens", "15e12"), {"training_flops": 7.227e23}),
        (
            ("training", "--training-usd", "1000", "--saved-usd", "0.01", "--requests", "100000"),
            {"payback_requests": 100_000, "pays": 1},
        ),
        (("training", "--training-usd", "1000", "--saved-usd", "0.01", "--requests", "99999"), {"pays": 0}),
        (("lora", LLAMA), {"adapter_bytes": 83_886_080, "slots_bytes": 8 * 83_886_080}),
        (
            ("lora", LLAMA, "--max-loras", "32", "--max-lora-rank", "60", "--tensor-parallel-size", "2"),
            # Inputs of q, k, v, gate and up, and outputs of out and down are whole on each rank.
            {"slots_bytes": 32 * 64 * 2 * 32 * (7 * 4096 + (4096 + 2 * 1024 + 4096 + 3 * 14336) // 2)},
        ),
    ],
)
def test_calculators(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: dict[str, float]) -> None:
    kind, *rest = words
    actual = json.loads(run(capsys, "calc", kind, *rest, "--json"))
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=0.005)
    assert run(capsys, "calc", kind, *rest)


def test_the_product_of_savings_is_shown_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    shown = " ".join(run(capsys, "calc", "kv", *CHARACTER_AI).split())
    assert "1 key-value head instead of 8 8.00 x less: 144.00 MiB" in shown
    assert "windows of 1,024 tokens in 30 of 36 layers 3.69 x less: 39.00 MiB" in shown
    assert "12 caches for 36 layers 3.00 x less: 13.00 MiB int8 instead of bfloat16 1.97 x less: 6.60 MiB" in shown
    assert "product 8.00 x 3.69 x 3.00 x 1.97 = 174.5 x less" in shown
    assert "product" not in run(capsys, "calc", "kv", "--layers", "4", "--heads", "8", "--head-dim", "64")


def test_owning_that_never_pays_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calc", "breakeven", "--usd-hour", "0.01", "--price", "30000", "--watts", "700")
    assert json.loads(run(capsys, *words, "--json"))["payback_months"] is None
    assert run(capsys, *words).count("never") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calc", "kv", "--heads", "8"), "--layers is missing"),
        (("calc", "kv", LLAMA, "--layers", "8"), "MODEL and --layers are given: leave one of them out"),
        (("calc", "kv", LLAMA, "--cache-dtype", "int7"), "--cache-dtype 'int7' is unknown"),
        (("calc", "kv", LLAMA, "--global-every", "6"), "give --window too"),
        (("calc", "kv", LLAMA, "--share-layers", "33"), "give at most 32, the number of layers"),
        (("calc", "kv", LLAMA, "--share-layers", "0"), "--share-layers is 0: give a number above 0"),
        (
            ("calc", "kv", "--layers", "3", "--heads", "6", "--kv-heads", "2", "--head-dim", "8", "--latent", "9"),
            "leave --kv-heads out",
        ),
        (("calc", "lora", LLAMA, "--max-lora-rank", "300"), "--max-lora-rank is 300"),
        (("calc", "cost", "--tokens-s", "100"), "give --usd-hour"),
        (("calc", "cost", "--usd-hour", "2"), "--tokens-s is missing"),
        (("calc", "cost", "--usd-hour", "-2", "--tokens-s", "1"), "--usd-hour is -2: give a number above 0"),
        (("calc", "breakeven", "--usd-hour", "2"), "give --price"),
        (
            ("calc", "breakeven", "--price", "9", "--usd-hour", "2", "--utilization", "1.5"),
            "--utilization is 1.5: give a share of at most 1",
        ),
        (("calc", "energy"), "--watts is missing"),
        (("calc", "training"), "--params is missing"),
        (("calc", "training", "--params", "1e9"), "--train-tokens is missing"),
        (("calc", "training", LLAMA, "--params", "1e9"), "MODEL and --params are given"),
        (("calc", "training", "--training-usd", "1", "--mfu", "0.3"), "--training-usd replaces --mfu"),
        (
            ("calc", "training", LLAMA, "--train-tokens", "1e9", "--mfu", "0.3"),
            "--mfu needs the device of the training",
        ),
        (("calc", "training", LLAMA, "--train-tokens", "1e9", "--on", "h100", "--mfu", "3"), "a share of at most 1"),
        (("calc", "training", "--training-usd", "1", "--requests", "9"), "lacks the saving: give --saved-usd"),
        (("calc", "training", LLAMA, "--train-tokens", "1e9", "--saved-usd", "1"), "give --training-usd, or --on"),
        (("calc", "training", "--training-usd", "1", "--before", "x"), "give --before and --after"),
        (
            ("calc", "training", "--training-usd", "1", "--before", "x", "--after", "x", "--saved-usd", "1"),
            "leave one of them out",
        ),
        (("calc", "energy", "--watts", "nan"), "'nan' is not a finite number"),
        (("calc", "energy", "--watts", "700", "--pue", "0.9"), "--pue is 0.9: give a number of at least 1"),
        (("calc", "cost", "--usd-hour", "inf", "--tokens-s", "1"), "'inf' is not a finite number"),
        (("calc", "cost", "--usd-hour", "2", "--price", "9", "--tokens-s", "1"), "--usd-hour is for rented hardware"),
        (
            ("calc", "cost", "--usd-hour", "2", "--years", "3", "--tokens-s", "1"),
            "--years applies to owned hardware",
        ),
        (("calc", "cost", "--price", "-9", "--tokens-s", "1"), "--price is -9: give a number above 0"),
        (
            ("calc", "cost", "--price", "9", "--tokens-s", "1", "--residual", "1.5"),
            "--residual is 1.5: give a share of at most 1",
        ),
        (
            ("calc", "cost", "--price", "9", "--tokens-s", "1", "--upkeep", "-0.1"),
            "--upkeep is -0.1: give a number of at least 0",
        ),
        (("calc", "kv", "--layers", "3", "--heads", "6", "--kv-heads", "4", "--head-dim", "8"), "a divisor"),
        (("calc", "kv", "--tokens", "1e3"), "'1e3' is not a whole number"),
        (("roofline", "--context", "0.5K5"), "is not a whole number"),
        (("roofline", LLAMA, "--on", "abacus"), "Unknown accelerator 'abacus'"),
        (("roofline", LLAMA, "--on", "h200", "--batch", "0"), "--batch is 0: give 1 or more"),
        (("roofline", LLAMA, "--on", "h200", "--context", "1M"), "give at most 131072, the context of the model"),
        (
            ("roofline", LLAMA, "--on", "h200", "--max-model-len", "1K", "--prompt", "2K"),
            "give at most 1024, the context of the model",
        ),
        (("fit", "--memory", "-1"), "--memory is -1: give a number of bytes above 0"),
        (("fit", "--on", "h100", "--device", "cpu"), "leave one of them out"),
        (("fit", "--batching", "static:0"), "batching"),
        (("fit", "--speculate", "foo"), "'foo' is unknown"),
        (("fit", "--speculate", "medusa:/nowhere"), "/nowhere does not exist"),
        (("fit", "--speculate", "reference:/nowhere"), "/nowhere is not a file"),
        (("fit", "--calibration", "/nowhere.json"), "Cannot read the calibration"),
        (("roofline", LLAMA, "--on", "h200", "--calibration", "/nowhere.json"), "Cannot read the calibration"),
        (("calibrate", "--repeats", "0"), "--repeats is 0: give 1 or more"),
        (("calibrate", "--most-tokens", "0"), "--most-tokens is 0: give 1 or more"),
        (("calibrate", "--calibration", "x"), "give --out instead of --calibration"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_roofline_of_a_short_context_is_of_no_longer_one(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "roofline", LLAMA, "--on", "h200", "--max-model-len", "300", "--json"))
    assert facts["load"] == {"batch": 1, "context": 300, "prompt": 300}


def test_what_fits_counts_the_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    def sequences(*words: str) -> int:
        out = run(capsys, "fit", LLAMA, "--on", "h100", "--max-model-len", "8K", *words)
        return int(out.split("concurrency")[1].split()[0])

    assert sequences("--speculate", f"draft:{LLAMA}") < sequences("--speculate", "reference") / 2


def write_llama(folder: Path, **changes: object) -> str:
    """A folder with only the config.json of a Llama."""
    config = json.loads((Path(LLAMA) / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_fit_prints_the_best_command_and_the_alternatives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    model = write_llama(tmp_path, **wide)
    assert main(["fit", model, "--on", "a100"]) == 1
    out = capsys.readouterr().out
    command = re.search(r"This command works: ridgeline serve \S+ (--quantization int4 --max-model-len \d+)\n", out)
    assert command is not None and "not built yet" not in out
    rows = out.split("what fits, best first\n")[1].splitlines()
    assert rows[0].split() == ["added", "risk", "context", "one", "request", "all", "requests", "options"]
    assert [row.split()[0] for row in rows[1:4]] == ["medium", "small", "large"] and rows[1].rstrip().endswith(
        command[1]
    )
    assert "A context below 131072 is a loss of function" in out and "awq-int4-g128" in out
    served = run(capsys, "fit", model, "--on", "a100", *command[1].split())
    assert "35.81 GiB in int4, head in int8, embedding in bfloat16" in served and "as given" in served
    assert f"fits  ridgeline serve {model} {command[1]}" in served


def test_fit_prints_no_command_for_hardware_that_the_engine_does_not_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tpu v5e", "gaudi 3", "m4", "mi300x"):
        assert main(["fit", LLAMA, "--on", name]) == 1
        out = capsys.readouterr().out
        assert "Ridgeline does not run on " in out and "ridgeline serve" not in out and "ms/token" not in out


def test_fit_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(LLAMA).parent / "qwen3-0.6b")
    words = (model, "--device", "cpu", "--max-model-len", "4K")
    assert f"fits  ridgeline serve {model}" in run(capsys, "fit", *words, "--memory", "16G")
    assert main(["fit", *words, "--memory", "1800M"]) == 1
    out = capsys.readouterr().out
    assert "weights in int8 (small risk to quality)" in out and "fp8" not in out


def test_a_calibration_is_measured_and_used(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    words = (str(tiny), "--load-format", "dummy", "--device", "cpu", "--most-tokens", "700", "--repeats", "1")
    out = run(capsys, "calibrate", *words, "--out", str(path))
    assert "decode 1 x " in out and "prefill 0+8" in out and "on steps left out of the fit" in out
    facts = json.loads(path.read_text())
    assert facts["steps"] >= 10 and facts["leave_one_out_error"]["median"] > 0
    report = json.loads(run(capsys, "roofline", str(tiny), "--on", "cpu", "--calibration", str(path), "--json"))
    assert report["calibrated"] is True
    assert "(calibrated)" in run(capsys, "fit", str(tiny), "--device", "cpu", "--calibration", str(path))
    assert main(["roofline", LLAMA, "--on", "h200", "--calibration", str(path)]) == 2
    assert "belongs to another model or device" in capsys.readouterr().err


@pytest.fixture(scope="module")
def local(tiny: Path) -> Iterator[LocalEngine]:
    model = ModelConfig(model=str(tiny), load_format="dummy")
    engine = LocalEngine.start(model, EngineConfig(device="cpu", max_num_seqs=8, max_num_batched_tokens=64))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("shape", "decode", "chunks"),
    [
        (Shape(3, 20), 3, {()}),
        (Shape(0, 0, 40), 0, {((0, 40),)}),
        (Shape(0, 0, 150), 0, {((0, 64),), ((64, 64),), ((128, 22),)}),
        (Shape(2, 10, 100), 2, {((0, 62),), ((62, 38),)}),
    ],
)
def test_steps_hold_what_was_asked_for(
    local: LocalEngine, shape: Shape, decode: int, chunks: set[tuple[tuple[int, int], ...]]
) -> None:
    plain = local.engine.loop.runner
    measured = measure(local, [shape], repeats=2)
    assert local.engine.loop.runner is plain and not isinstance(plain, Recorder)
    assert {step.chunks for step in measured} == chunks
    for step in measured:
        assert len(step.decode) == decode and step.seconds > 0
        assert all(held >= shape.context for held in step.decode)
        last = step.chunks and sum(step.chunks[-1]) == shape.prompt
        assert step.logits == decode + bool(last)


def test_ladders_keep_within_bounds_and_apart() -> None:
    bounds = Bounds(rows=16, max_len=4096, tokens=20_000)
    fit, judge = shapes(FIT_SHAPES, bounds), shapes(VALIDATION_SHAPES, bounds)
    for step in fit + judge:
        assert step.rows + bool(step.prompt) <= 16 and step.tokens <= 20_000
        assert max(step.context, step.prompt) + OUTPUTS < 4096
    assert not {step for step in judge if step in fit}
    assert {bool(step.rows) + 2 * bool(step.prompt) for step in fit} == {1, 2, 3}
