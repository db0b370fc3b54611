"""The ledger covers a step completely, and what it times computes what the step computes."""

from __future__ import annotations

import json
from pathlib import Path

import ledger
import pieces
import pytest
import torch
from ledger import Case, Ceilings, Whole, covered, lines, parse, text
from stopwatch import Energy, Stopwatch

from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.operations import operations
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.rows import Int

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 16,
    "query_pre_attn_scalar": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
CASES = [parse(name) for name in ("decode:3x20", "prefill:24+8", "mixed:2x20+9")]
SLOW = Ceilings(bytes_s=1e9, flops_s=1e9, matrices_flops_s=1e9, cache_bytes=0)


def load(folder: Path, config: dict[str, object], quantization: str = "") -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(str(folder), load_format="dummy", quantization=quantization)
    return build(folder, model=model, ops=REFERENCE, device=torch.device("cpu"))


@pytest.mark.parametrize(("config", "quantization"), [(LLAMA, ""), (LLAMA, "fp8"), (GEMMA, "")])
@torch.inference_mode()
def test_every_call_of_a_step_is_in_the_ledger(tmp_path: Path, config: dict[str, object], quantization: str) -> None:
    model = load(tmp_path, config, quantization)
    whole = Whole(model, CASES, repeats=2)
    for case in CASES:
        by_operation = {
            line.operation: line for line in lines(model, whole, case, SLOW, Stopwatch(torch.device("cpu"), 1))
        }
        assert list(by_operation) == [*pieces.RUNS, "sum", "step", "step to step", "rest", *pieces.ALONE]
        assert all(line.measured_us is not None for line in by_operation.values())
        assert all(len(text(line)) == len(ledger.HEADER) for line in by_operation.values())
        work = step_work(model.spec, case.shares)
        runs = [by_operation[name] for name in pieces.RUNS]
        assert sum(run.bytes for run in runs) == work.bytes == by_operation["step"].bytes
        assert sum(run.flops for run in runs) == work.flops == by_operation["step"].flops
        assert by_operation["step"].floor_us <= by_operation["sum"].floor_us


@pytest.mark.parametrize("config", [LLAMA, GEMMA])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@torch.inference_mode()
def test_naive_attention_is_attention(tmp_path: Path, config: dict[str, object], case: Case) -> None:
    model = load(tmp_path, config)
    whole = Whole(model, CASES, repeats=1)
    whole.seat(case)
    at = pieces.place(model, whole.runner, case.shares)
    q = torch.randn(case.tokens, 4, 8)
    for view in at.views:
        want, _ = REFERENCE.attention.attend(q, q[:, :2], q[:, :2], view, at.step)
        torch.testing.assert_close(pieces.naive_attention(q, view, case.shares), want)


@torch.inference_mode()
def test_rows_stand_where_the_runner_put_them(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA)
    whole = Whole(model, CASES, repeats=1)
    case = CASES[2]
    whole.seat(case)
    step = pieces.place(model, whole.runner, case.shares).step
    assert step.position.tolist() == [20, 20, *range(9)]
    assert step.length.tolist() == [21, 21, 9]
    assert step.q_start.tolist() == [0, 1, 2, 11]
    known = whole.runner.rows.ints[1:4, 0]
    assert known.tolist() == [20, 20, 0]


@torch.inference_mode()
def test_calls_of_a_run_are_as_many_as_it_says(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA)
    case = CASES[0]
    whole = Whole(model, CASES, repeats=1)
    whole.seat(case)
    measured = pieces.Pieces(model, pieces.place(model, whole.runner, case.shares), case.shares)
    for name, run in covered(model.spec, case.shares, operations(model.spec, case.shares)).items():
        assert len(measured.run(name)) == run.count


def test_steps_are_read() -> None:
    assert parse("decode:2x5").shares == ((5, 1), (5, 1))
    assert parse("prefill:7").shares == ((0, 7),)
    assert parse("prefill:7+3").shares == ((3, 7),)
    assert parse("mixed:1x4+6").shares == ((4, 1), (0, 6))
    for wrong in ("decode:5", "prefill:x", "mixed:1x2", "decode:0x5", "prefill:0", ""):
        with pytest.raises(SystemExit, match="--steps"):
            parse(wrong)


def test_a_cache_holds_activations_and_arithmetic_bounds_prefill() -> None:
    operation = ledger.Operation("qkv", count=2, flops=10, bytes=100, activation_bytes=50)
    roof = Ceilings(bytes_s=100.0, flops_s=1e9, matrices_flops_s=10.0, cache_bytes=24)
    assert roof.moved(operation) == 150 and roof.floor_s(operation) == 1.5
    assert Ceilings(100.0, 1e9, 10.0, 25).floor_s(operation) == 1.0
    assert Ceilings(1e9, 1e9, 10.0, 25).floor_s(operation) == 1.0
    assert Ceilings(1e9, 10.0, 1e9, 25).floor_s(operation) < 1e-6


@torch.inference_mode()
def test_peak_memory_counts_what_was_freed_again() -> None:
    def call() -> torch.Tensor:
        wide = torch.zeros(1000, 100)
        return wide.sum(1)

    assert Stopwatch(torch.device("cpu"), 1).peak_bytes(call) == 4 * (100_000 + 1000)


def test_joules_are_those_of_one_round_of_all_calls() -> None:
    """Two calls a round, of which each takes half a joule: what ran before clocks had settled is not counted."""
    taken = [100.0]

    def call() -> None:
        taken[0] += 0.5

    watch = Stopwatch(torch.device("cpu"), 1, Energy(lambda: taken[0], settling_s=0.01, counted_s=0.02))
    assert watch.joules([call, call]) == pytest.approx(1.0)
    assert Stopwatch(torch.device("cpu"), 1).joules([call]) is None


def test_who_counts_no_joules_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ["--model", str(tmp_path), "--steps", "decode:1x20", "--device", "cpu", "--repeats", "1"]
    with pytest.raises(SystemExit, match="--joules"):
        ledger.main([*given, "--joules"])


@torch.inference_mode()
def test_rows_that_verify_drafts_go_on_from_step_to_step(tmp_path: Path) -> None:
    case = parse("verify:3x20+2")
    assert case.decode and case.tokens == 9
    whole = Whole(load(tmp_path, LLAMA), [case], repeats=2)
    assert len(whole.run(case, 0, 2)) == len(whole.run(case, 2, 2)) == 2
    known = whole.runner.rows.ints[1:4, Int.KNOWN]
    assert bool((known >= 21 + 4).all()) and bool((known <= 21 + 3 * 4).all())
