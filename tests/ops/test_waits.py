"""What a kernel reads before it waits for the kernel before it (programmatic dependent launch): weights, and nothing that a
step writes. Read off the compiler's code for a Hopper GPU, since a race seldom shows; no GPU is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ridgeline.ops.triton import fp8_vector, gemv
from ridgeline.ops.triton.activation import KINDS

WAITS = re.compile(r"griddepcontrol\.wait|tt\.grid_dependency_wait")
"""As Triton 3.6 writes it, and 3.9."""
READS = re.compile(r"(?:tt\.load|async_copy_global_to_local).*?!tt\.ptr<(\w+)>")


def reads_around_the_wait(code: str) -> tuple[set[str], set[str]]:
    """Types of what the compiled code reads through pointers (before, after) its first wait. Each side has a read, or READS no
    longer matches what the compiler writes."""
    before, *rest = WAITS.split(code, maxsplit=1)
    assert rest, "the kernel has no wait"
    after = rest[0]
    reads = set(READS.findall(before)), set(READS.findall(after))
    assert all(reads), f"READS matches nothing on one side of the wait: {reads}"
    return reads


def compiled_reads(
    kernel: JITFunction, types: Mapping[str, str], constants: Mapping[str, object], warps: int
) -> tuple[set[str], set[str]]:
    """reads_around_the_wait of a kernel, compiled for Hopper. The loop around the wait is pipelined: its copies begin before."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    apart = [["tt.divisibility", 16]]
    names = [param.name for param in kernel.params if not (param.is_constexpr or param.do_not_specialize_on_alignment)]
    aligned = {(kernel.arg_names.index(name),): apart for name in names if name != "eps"}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
    code = made.asm["ttgir"]
    assert "async_copy_global_to_local" in WAITS.split(code)[0], "the loop is not pipelined"
    return reads_around_the_wait(code)


def check_resident(k: int, rows: int, warps: int, stages: int, tokens: int, add: bool) -> None:
    """x is float16, the stream and what comes out float32, so that only what is bfloat16 may be read early."""
    block = triton.next_power_of_2(k)
    types = {
        "x_ptr": "*fp16",
        "gain_ptr": "*bf16",
        "w_ptr": "*bf16",
        "bias_ptr": "*bf16",
        "out_ptr": "*fp32",
        "eps": "fp32",
    }
    constants = {"TOKENS": tokens, "BIAS": False, "ADD": add, "NORM": not add, "OFFSET": False, "PDL": True}
    constants |= {"KIND": KINDS[None], "EVEN_K": k == block, "STAGES": stages, "ROWS": rows, "BLOCK": block}
    before, after = compiled_reads(gemv.resident_kernel, types, constants, warps)
    assert before == {"bf16"} and "f16" in after


def check_fp8(k: int, rows: int, warps: int, stages: int) -> None:
    """Weights are int32 words with float32 scales; x comes in 64-bit words, the stream is bfloat16."""
    words = triton.next_power_of_2(k // 4)
    types = {"x_ptr": "*i64", "gain_ptr": "*i64", "w_ptr": "*i32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16"}
    types |= {"out_ptr": "*bf16", "eps": "fp32"}
    constants = {"BIAS": False, "ADD": True, "NORM": False, "OFFSET": False, "KIND": KINDS[None], "PDL": True}
    constants |= {"EVEN_K": k // 4 == words, "PACKED": True, "STAGES": stages, "ROWS": rows, "WORDS": words}
    before, after = compiled_reads(fp8_vector._kernel, types, constants, warps)
    assert before == {"i32", "f32"} and "i64" in after


CALLS = [
    *((check_resident, *sizes) for sizes in ((8192, 2, 16, 3, 1, True), (4096, 2, 8, 4, 1, False))),
    (check_fp8, 4096, 4, 8, 4),
    *(
        pytest.param((check, *sizes), marks=pytest.mark.long)
        for check, *sizes in (
            (check_resident, 4096, 4, 8, 5, 1, True),
            (check_resident, 2048, 4, 4, 3, 2, True),
            (check_fp8, 14336, 2, 8, 3),
        )
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[1:])))
def test_only_weights_are_read_before_the_wait(apart: Callable[..., Any], call: tuple[Any, ...]) -> None:
    apart(*call)


LOAD = "%v = tt.load %p : tensor<64x!tt.ptr<bf16>>\n"
WAIT = 'tt.elementwise_inline_asm "griddepcontrol.wait;"\n'


@pytest.mark.parametrize("wait", [WAIT, "tt.grid_dependency_wait\n"])
def test_reads_are_found_on_both_sides_of_the_wait(wait: str) -> None:
    assert reads_around_the_wait(LOAD + wait + LOAD.replace("bf16", "f32")) == ({"bf16"}, {"f32"})


@pytest.mark.parametrize(
    "code", ["", LOAD + LOAD, WAIT, LOAD + WAIT, WAIT + LOAD, (LOAD + WAIT + LOAD).replace("tt.load", "tt.fetch")]
)
def test_code_without_a_wait_or_without_reads_is_refused(code: str) -> None:
    with pytest.raises(AssertionError):
        reads_around_the_wait(code)
