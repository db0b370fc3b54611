"""The kernels of experts compile for a GPU without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.ops.triton import expert_kernels, expert_prompts
from ridgeline.ops.triton import experts as kernels
from ridgeline.ops.triton.integer_matrix import conversion, conversion_e4m3, with_fused
from tests.combinations import crossed

TYPES = {
    "logits_ptr": "*bf16",
    "x_ptr": "*bf16",
    "load_ptr": "*i64",
    "shares_ptr": "*fp32",
    "scale_ptr": "*fp16",
    "zero_ptr": "*u8",
    "bias_ptr": "*bf16",
}
PLAIN = {"FORM": 0, "SHIFT": 0.0, "GROUP": 0, "ZEROS": False, "BITS": 4, "PTX": "", "POWER": 1.0}
HALF = torch.bfloat16
FORMS: dict[str, dict[str, object]] = {
    "floats": PLAIN,
    "mxfp4": {**PLAIN, "FORM": 2},
    "int4-zp": {
        **PLAIN, "FORM": 1, "SHIFT": 128.0, "GROUP": 128, "ZEROS": True, "PTX": conversion(4, HALF, True, True),
    },
    "int8": {**PLAIN, "FORM": 1, "BITS": 8, "PTX": conversion(8, HALF, False, False)},
    "fp8-block": {**PLAIN, "FORM": 1, "GROUP": 128, "BITS": 8, "PTX": conversion_e4m3(HALF), "POWER": 2.0**120},
}  # fmt: skip
"""Constants of the products with weights of each form."""
STORED = {
    "floats": ("*bf16", "*fp16"),
    "mxfp4": ("*u8", "*u8"),
    "fp8-block": ("*i16", "*fp32"),
    "int4-zp": ("*i16", "*i32"),
}
"""Types of weights and scales."""


PROMPT_TYPES = {
    "x_scale_ptr": "*fp32",
    "w_scale_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "out_ptr": "*bf16",
    "shares_ptr": "*fp32",
}


def compiled(
    name: str, form: str, constants: dict[str, object], block: kernels.Block, x: str = "*bf16", capability: int = 90
) -> Any:
    kernel = getattr(expert_prompts if "prompt" in name or name == "round_kernel" else expert_kernels, name)
    weight, scale = STORED.get(form, ("*i16", "*fp16"))
    known = {**TYPES, "x_ptr": x, "w_ptr": x if form == "floats" else weight, "scale_ptr": scale, "out_ptr": x}
    constants = {"PDL": capability >= 90, **constants}
    if name in ("inner_kernel", "outer_kernel"):
        conversions = FORMS[form] if capability >= 90 else {**FORMS[form], "PTX": with_fused(str(FORMS[form]["PTX"]))}
        constants = {**conversions, "WIDE": block.outputs, "BLOCK": block.inputs, **constants}
    if "prompt" in name:
        number = "fp8e4nv" if form == "e4m3" else "bf16"
        known = {**PROMPT_TYPES, "x_ptr": f"*{number}", "w": f"tensordesc<{number}[{block.outputs},{block.inputs}]>"}
        constants = {"WIDE": block.outputs, "BLOCK": block.inputs, "ROUNDED": form == "e4m3", **constants}
    signature = {
        argument: "constexpr"
        if argument in constants
        else known.get(argument, "*i32" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    apart = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument in (*known, "width", "inputs", "outputs", "units", "groups")
        if argument in signature and argument != "w"
    }
    options = {"num_warps": block.warps, "num_stages": block.stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, signature, constants, apart), target=target, options=options)


def check_compiles(name: str, form: str, constants: dict[str, object], block: kernels.Block) -> str:
    """Compile a kernel for a Hopper GPU; the names of its matrix instructions and copies."""
    made = compiled(name, form, constants, block)
    assert made.metadata.shared <= 227 << 10
    return " ".join(
        part
        for part in ("wgmma", "mma.sync", "cp.async", "cp.async.bulk.tensor", "f32.e4m3.e4m3")
        if part in made.asm["ptx"]
    )


def shared_memory(*arguments: Any) -> int:
    return int(compiled(*arguments).metadata.shared)


KERNELS = (
    ("inner_kernel", {"KIND": 1, "BIASED": False}),
    ("outer_kernel", {"BIASED": False}),
    ("inner_kernel", {"KIND": 3, "BIASED": True}),
    ("outer_kernel", {"BIASED": True}),
)


def block_of(name: str, tile: kernels.Tile) -> kernels.Block:
    return tile.inner if name == "inner_kernel" else tile.outer


@pytest.mark.parametrize(
    ("kernel", "form", "size"),
    crossed(
        KERNELS,
        tuple(FORMS),
        (0, 1, 2, 3),
        quick=lambda kernel, form, size: (kernel, form, size) in ((0, 0, 0), (1, 2, 0)),
    ),
)
def test_the_products_compile_for_hopper(kernel: tuple[str, dict[str, object]], form: str, size: int, apart) -> None:
    name, more = kernel
    tiles = kernels.TILES if form in ("floats", "mxfp4") else kernels.HOPPER_CODE_TILES
    tile = tiles[min(size, len(tiles) - 1)][1]
    used = apart(check_compiles, name, form, {"SORTED": True, "ROWS": tile.rows, **more}, block_of(name, tile))
    assert "mma" in used and "cp.async" in used


@pytest.mark.parametrize(
    ("name", "form", "size"),
    crossed(
        ("inner_prompt_kernel", "outer_prompt_kernel", "round_kernel"),
        ("floats", "e4m3"),
        (0, 1),
        quick=lambda name, form, size: (name, form, size) in ((0, 1, 0), (2, 1, 0)),
    ),
)
def test_prompts_compile_for_hopper(name: str, form: str, size: int, apart) -> None:
    tile = (kernels.HOPPER_TILES[:1] * 2 if form == "floats" else kernels.HOPPER_ROUNDED_TILES)[size][1]
    if name == "round_kernel":
        apart(check_compiles, name, "floats", {"BLOCK": 1024 << size}, tile.inner)
        return
    constants = {"ROWS": tile.rows, "BIASED": bool(size), "EVEN": not size}
    block, constants = (tile.inner, {"KIND": 1, **constants}) if "inner" in name else (tile.outer, constants)
    used = apart(check_compiles, name, form, constants, block)
    assert "wgmma" in used and "cp.async.bulk.tensor" in used and ("e4m3" in used) == (form == "e4m3")


@pytest.mark.parametrize(
    ("name", "form", "x", "size"),
    crossed(
        ("inner_kernel", "outer_kernel"),
        ("floats", "int4-zp"),
        (torch.float32, torch.bfloat16),
        (0, 1),
        quick=lambda name, form, x, size: name == x == 0 and form == size == 1,
    ),
)
def test_tiles_of_all_gpus_fit_into_99_kib(name: str, form: str, x: torch.dtype, size: int, apart) -> None:
    """Of shared memory, which a program may have on a GPU of Ada's generation."""
    tile = (kernels.TILES if form == "floats" else kernels.CODE_TILES)[size][1]
    tile = tile.of_floats() if x is torch.float32 else tile
    constants: dict[str, object] = {"SORTED": True, "BIASED": False, "ROWS": tile.rows}
    constants |= {"KIND": 1} if name == "inner_kernel" else {}
    constants |= {"PTX": ""} if x is torch.float32 else {}
    number = "*fp32" if x is torch.float32 else "*bf16"
    assert apart(shared_memory, name, form, constants, block_of(name, tile), number, 89) <= 99 << 10


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("route_kernel", {"NORMALIZED": True, "CHOICES": 8, "BLOCK": 128}),
        *(
            pytest.param(name, constants, marks=pytest.mark.long)
            for name, constants in (
                ("sort_kernel", {"ROWS": 64, "BLOCK": 1024}),
                ("sort_kernel", {"ROWS": 128, "BLOCK": 8192}),
                ("sum_kernel", {"BLOCK": kernels.SUMMED}),
            )
        ),
    ],
)
def test_routing_compiles_for_hopper(name: str, constants: dict[str, object], apart) -> None:
    apart(check_compiles, name, "floats", constants, kernels.FEW.inner)
