"""Pruned weights that stay packed are multiplied like dense ones, and a pruned model is smaller in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.core.config import ModelConfig
from ridgeline.models.hub import resolve_model
from ridgeline.ops import native_cpu
from ridgeline.ops.native.arena import Arena
from ridgeline.ops.native.binding import Library, open_library
from ridgeline.ops.native.files import library_path
from ridgeline.ops.native_cpu import NativeOps
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Normed
from tests.combinations import crossed

BF16 = torch.bfloat16
SHARES = [0.0, 0.1, 0.5, 1.0]
"""Of non-zero weights."""


@pytest.fixture(scope="module", params=["this-cpu", pytest.param("plain", marks=pytest.mark.long), "avx2"])
def library(request: pytest.FixtureRequest) -> Library:
    name = request.param
    where = request.getfixturevalue("folder") if name == "this-cpu" else request.getfixturevalue("plainer")(name)
    return open_library(library_path(where))


def pruned(outputs: int, inputs: int, share: float) -> torch.Tensor:
    return (torch.randn(outputs, inputs) * (torch.rand(outputs, inputs) < share)).to(BF16)


@pytest.mark.parametrize(
    ("share", "rows", "threads"),
    crossed(SHARES, [1, 2, 3, 8, 12, 16, 17, 40], (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (49, 33), (160, 70)])
def test_products(library: Library, threads: int, share: float, rows: int, outputs: int, inputs: int) -> None:
    ops = NativeOps(library, Arena(library))
    weight, x = pruned(outputs, inputs, share), torch.randn(rows, inputs).to(BF16)
    packed, bias, stream = ops.pack_sparse(weight), torch.randn(outputs).to(BF16), torch.randn(rows, outputs).to(BF16)
    assert packed.shape[0] == outputs
    norm = Normed(x, torch.rand(inputs).to(BF16), 1e-5, False)
    for given in (x, norm):
        want = REFERENCE.matmul.unquantized.linear(given, weight, bias)
        torch.testing.assert_close(ops.linear(given, packed, bias), want, rtol=2e-2, atol=4e-2)
    want = REFERENCE.matmul.unquantized.linear_add(x, weight, None, stream)
    torch.testing.assert_close(ops.linear_add(x, packed, None, stream.clone()), want, rtol=2e-2, atol=4e-2)
    want = REFERENCE.matmul.unquantized.linear_activate(x, weight[: outputs // 32 * 32], None, "silu")
    mine = ops.linear_activate(x, ops.pack_sparse(weight[: outputs // 32 * 32]), None, "silu")
    torch.testing.assert_close(mine, want, rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40])
def test_in_a_fixed_order_bits_equal_those_of_dense_weights(library: Library, threads: int, rows: int) -> None:
    ops, weight = NativeOps(library, Arena(library), fixed=True), pruned(96, 200, 0.5)
    x = torch.randn(rows, 200).to(BF16)
    packed = ops.pack_sparse(weight)
    assert torch.equal(ops.linear(x, packed, None), ops.linear(x, ops.pack(weight), None))
    gated = ops.linear_activate(x, packed, None, "silu")
    assert torch.equal(gated, ops.linear_activate(x, ops.pack(weight), None, "silu"))


def test_bytes_and_which_weights_stay_packed(library: Library) -> None:
    ops, dense = NativeOps(library, Arena(library)), torch.randn(256, 512).to(BF16)
    half = pruned(256, 512, 0.5)
    assert ops.pack_sparse(half).nbytes < 0.58 * half.nbytes
    assert ops.pack_pruned(dense).dtype is BF16
    assert (ops.pack_pruned(half).dtype is not BF16) == library.expands
    assert ops.pack_pruned(half.float()).dtype is torch.float32


def test_a_pruned_checkpoint_is_served_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, by deterministic operations, from seven tenths of the bytes; embedding and head stay dense."""
    if not open_library(library_path()).expands:
        pytest.skip("this CPU does not expand lines in one instruction")
    source = Checkpoint(resolve_model(ModelConfig()))
    Job(source, read_recipe("magnitude-50"), [], tmp_path / "pruned").run(lambda stage, done, total: None)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers, sizes = [], []
    for most, deterministic in ((native_cpu.MOST_NONZERO, True), (native_cpu.MOST_NONZERO, False), (0.0, True)):
        monkeypatch.setattr(native_cpu, "MOST_NONZERO", most)
        llm = LLM(str(tmp_path / "pruned"), device="cpu", max_model_len=128, deterministic=deterministic)
        answers.append([choice.choices[0].token_ids for choice in llm.generate(["One day", "The cat sat"], greedy)])
        sizes.append(llm._engine.engine.setup.facts["weight_bytes"])
        llm.close()
    assert answers[0] == answers[2]
    assert [len(answer) for answer in answers[1]] == [24, 24]
    assert sizes[0] == sizes[1] < 0.7 * sizes[2]
