"""The breakdown of a step adds up to the step, for every kind of model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.cost import step_work
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.operations import NAMES, operations
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LLAMA = ModelSpec("L", 1000, 64, (LayerSpec(8, 2, 8, 96, Rope(dim=8)),) * 3, 4096)
LOCAL = replace(LLAMA.layers[0], window=16)
SHARING = replace(LLAMA.layers[0], share_from=0)
EXPERTS = replace(LLAMA.layers[0], d_ff=3 * 32 + 48, experts=ExpertSpec(16, 3, 32, shared_width=48))
SPECS = {
    "plain": LLAMA,
    "tied float32": replace(LLAMA, tied=True, dtype="float32"),
    "fp8 with biases": replace(LLAMA, quantization="fp8", qkv_bias=True, out_bias=True, mlp_bias=True),
    "windows, norms": replace(LLAMA, layers=(LOCAL, LOCAL, LLAMA.layers[0]), post_norms=True, qk_norm="head"),
    "shared keys": replace(LLAMA, layers=(LLAMA.layers[0], SHARING)),
    "both forms": replace(LLAMA, d_model=256, quantization="q4_k", head_format="q6_k", both_forms=True),
    "experts": replace(LLAMA, layers=(EXPERTS, LLAMA.layers[0], EXPERTS), quantization="int8"),
}
STEPS = {
    "decode": ([(128, 1), (7, 1)], None),
    "prefill": ([(0, 50)], None),
    "mixed": ([(30, 20), (40, 1), (0, 1)], 2),
    "no logits": ([(0, 50)], 0),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_sums_are_the_step(spec: ModelSpec, step: tuple[list[tuple[int, int]], int | None]) -> None:
    shares, logits = step
    parts = operations(spec, shares, logits)
    work = step_work(spec, shares, logits)
    assert [operation.name for operation in parts] == [
        name for name in NAMES if name != "router" or spec.layers[-1].experts
    ]
    assert sum(operation.flops for operation in parts) == work.flops
    assert sum(operation.bytes for operation in parts) == work.bytes


def test_a_step_without_tokens_has_no_operations() -> None:
    assert operations(LLAMA, []) == ()
    assert operations(LLAMA, [(5, 0)]) == ()


def test_single_operations() -> None:
    by_name = {operation.name: operation for operation in operations(LLAMA, [(9, 1), (19, 1)])}
    assert by_name["qkv"].count == 3
    assert by_name["qkv"].bytes == 3 * 2 * 64 * (64 + 32)
    assert by_name["qkv"].activation_bytes == 3 * 2 * 2 * (64 + 96)
    assert by_name["attention"].bytes == 3 * 2 * 32 * (10 + 20)
    assert by_name["attention"].flops == 3 * 4 * 64 * (10 + 20)
    assert by_name["rope+kv write"].bytes == 3 * 2 * 2 * 32
    assert by_name["norm"].count == 7
    assert by_name["head"].flops == 2 * 2 * 64 * 1000
    assert by_name["sampling"].activation_bytes == 2 * 2 * 1000 + 2 * 4


def test_quantized_matrices_take_smaller_activations() -> None:
    plain, small = (
        {operation.name: operation for operation in operations(s, [(0, 10)])} for s in (LLAMA, SPECS["fp8 with biases"])
    )
    for name in ("norm", "qkv", "gate+up", "down", "activation"):
        assert small[name].activation_bytes < plain[name].activation_bytes
    assert small["out"].activation_bytes == plain["out"].activation_bytes
    assert small["attention"] == plain["attention"]
