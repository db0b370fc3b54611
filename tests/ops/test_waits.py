"""What a kernel reads before it waits for the kernel before it (programmatic dependent launch): weights, and nothing that a
step writes; in attention, keys and values of earlier steps. Read off the compiler's code for a Hopper GPU, since a race seldom
shows; no GPU is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ridgeline.ops.triton import fp8_vector, gemv, tuning, walk, words
from ridgeline.ops.triton.activation import KINDS

WAITS = re.compile(r"griddepcontrol\.wait|tt\.grid_dependency_wait")
"""As Triton 3.6 writes it, and 3.9."""
READS = re.compile(r"(tt\.load|async_copy_global_to_local).*?!tt\.ptr<(\w+)>")
Reads = set[tuple[str, str]]
"""How, and of which type, compiled code reads through pointers."""
LOAD, COPY = "tt.load", "async_copy_global_to_local"


def reads_around_the_wait(code: str) -> tuple[Reads, Reads]:
    """What the compiled code reads (before, after) its last wait. Each side has a read, or READS no longer matches what the
    compiler writes."""
    *before, after = WAITS.split(code)
    assert before, "the kernel has no wait"
    reads = set(READS.findall("".join(before))), set(READS.findall(after))
    assert all(reads), f"READS matches nothing on one side of the wait: {reads}"
    return reads


def compiled_reads(
    kernel: JITFunction, types: Mapping[str, str], constants: Mapping[str, object], warps: int, stages: int = 3
) -> tuple[Reads, Reads]:
    """reads_around_the_wait of a kernel, compiled for Hopper. The loop around the wait is pipelined: its copies begin before."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    apart = [["tt.divisibility", 16]]
    aligned = {
        (param.num,): apart
        for param in kernel.params
        if not (param.is_constexpr or param.do_not_specialize or param.do_not_specialize_on_alignment)
        and signature[param.name] != "fp32"
    }
    source = ASTSource(kernel, signature, dict(constants), aligned)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    before, after = reads_around_the_wait(made.asm["ttgir"])
    assert any(how == COPY for how, _ in before), "the loop is not pipelined"
    return before, after


def kinds(reads: Reads) -> set[str]:
    return {kind for _, kind in reads}


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
    assert kinds(before) == {"bf16"} and "f16" in kinds(after)


def check_fp8(k: int, rows: int, warps: int, stages: int) -> None:
    """Weights are int32 words with float32 scales; x comes in 64-bit words, the stream is bfloat16."""
    words = triton.next_power_of_2(k // 4)
    types = {"x_ptr": "*i64", "gain_ptr": "*i64", "w_ptr": "*i32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16"}
    types |= {"out_ptr": "*bf16", "eps": "fp32"}
    constants = {"BIAS": False, "ADD": True, "NORM": False, "OFFSET": False, "KIND": KINDS[None], "PDL": True}
    constants |= {"EVEN_K": k // 4 == words, "PACKED": True, "STAGES": stages, "ROWS": rows, "WORDS": words}
    before, after = compiled_reads(fp8_vector._kernel, types, constants, warps)
    assert kinds(before) == {"i32", "f32"} and "i64" in kinds(after)


def check_attention(bits: int, scales: int) -> None:
    """Keys and values are copied ahead, as bfloat16 or as words; loaded are page numbers and positions, and scales of words.
    Queries, which the kernel before has written, are loaded after the wait."""
    tile = tuning.WORD_TILES[bits][128] if bits else tuning.SPLIT_TILES[128]
    cache, scale = ("i16", "fp16") if bits else ("bf16", "bf16")
    integers = ("table", "position", "ancestors", "key_positions", "units", "arrivals")
    types = {f"{name}_ptr": "*i32" for name in integers} | {"q_ptr": "*bf16", "out_ptr": "*bf16", "scale": "fp32"}
    types |= {f"{name}_ptr": "*fp32" for name in ("lse", "part", "part_lse")} | {"cap": "fp32"}
    types |= {"kv_ptr": f"*{cache}", "scales_ptr": f"*{scale}"}
    constants = {"kv_heads": 8, "group": 4, "head_dim": 128, "page_tokens": 64, "window": 0, "part_queries": 4}
    constants |= {"TREE": False, "COMPACTED": False, "CAPPED": False, "PRECISION": "tf32", "PDL": True, "FUSED": True}
    constants |= {"KEYS": tile.keys, "AHEAD": tile.stages * tile.keys, "WIDTH": 128, "PACKED": 4, "PARTS": 4}
    constants |= {"BITS": bits, "SCALES": scales, "QUERIES": max(4, 8 // scales) if bits else 16}
    if bits:
        constants |= {"FLOAT": bits == 8, "WORDS": 128 * bits // 16, "GROUPS": scales}
    kernel = words.words_kernel if bits else walk.split_kernel
    before, after = compiled_reads(kernel, types, constants, tile.warps, tile.stages)
    assert before == {(COPY, cache), (LOAD, "i32")} | ({(LOAD, "f16")} if bits else set())
    assert (LOAD, "bf16") in after


CALLS = [
    *((check_resident, *sizes) for sizes in ((8192, 2, 16, 3, 1, True), (4096, 2, 8, 4, 1, False))),
    (check_fp8, 4096, 4, 8, 4),
    (check_attention, 0, 1),
    (check_attention, 8, 1),
    *(
        pytest.param((check, *sizes), marks=pytest.mark.long)
        for check, *sizes in (
            (check_resident, 4096, 4, 8, 5, 1, True),
            (check_resident, 2048, 4, 4, 3, 2, True),
            (check_fp8, 14336, 2, 8, 3),
            (check_attention, 4, 4),
        )
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[1:])))
def test_only_what_no_kernel_of_the_step_writes_is_read_before_the_wait(
    apart: Callable[..., Any], call: tuple[Any, ...]
) -> None:
    apart(*call)


READ = "%v = tt.load %p : tensor<64x!tt.ptr<bf16>>\n"
WAIT = 'tt.elementwise_inline_asm "griddepcontrol.wait;"\n'


@pytest.mark.parametrize("wait", [WAIT, "tt.grid_dependency_wait\n"])
def test_reads_are_found_on_both_sides_of_the_wait(wait: str) -> None:
    expected = {("tt.load", "bf16")}, {("tt.load", "f32")}
    assert reads_around_the_wait(READ + wait + READ.replace("bf16", "f32")) == expected
    assert reads_around_the_wait(wait + READ + wait + READ.replace("bf16", "f32")) == expected, "the last of two"


@pytest.mark.parametrize(
    "code", ["", READ + READ, WAIT, READ + WAIT, WAIT + READ, (READ + WAIT + READ).replace("tt.load", "tt.fetch")]
)
def test_code_without_a_wait_or_without_reads_is_refused(code: str) -> None:
    with pytest.raises(AssertionError):
        reads_around_the_wait(code)
