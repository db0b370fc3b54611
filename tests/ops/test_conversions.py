"""The instructions that convert codes to floats, executed here one by one, and that older GPUs have them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.ops.reference import FP8
from ridgeline.ops.triton.integer_matrix import (
    conversion,
    conversion_e4m3,
    dequantize_kernel,
    shift_of,
    with_fused,
)

WORD = 1 << 32
HALVES = [torch.bfloat16, torch.float16]


def lookup(a: int, b: int, c: int, table: int) -> int:
    """lop3 of three words."""
    out = 0
    for bits in range(8):
        if table >> bits & 1:
            out |= (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
    return out % WORD


def floats(words: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Words of two 16-bit floats as float64 [words, 2]."""
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(dtype).view(-1, 2).double()


def word(pair: torch.Tensor, dtype: torch.dtype) -> int:
    """Two float64 rounded to a word of 16-bit floats. Sums and products of two such floats are exact in float64."""
    return int(pair.to(dtype).view(torch.uint32).item())


def calculated(name: str, words: list[int], dtype: torch.dtype) -> int:
    """sub, mul or fma of words of two floats."""
    given = floats(words, dtype)
    if name == "sub":
        return word(given[0] - given[1], dtype)
    return word(given[0] * given[1] + (given[2] if name == "fma" else -0.0), dtype)


def executed(ptx: str, dtype: torch.dtype, registers: dict[str, int]) -> dict[str, int]:
    """The registers after a conversion."""
    registers = dict(registers)
    whole: dict[str, Callable[..., int]] = {
        "mov": lambda a: a,
        "shl": lambda a, b: (a << b) % WORD,
        "shr": lambda a, b: a >> b,
        "and": lambda a, b: a & b,
        "lop3": lookup,
    }
    for line in filter(None, (part.strip() for part in ptx.strip("{ }").split(";"))):
        name, rest = line.split(" ", 1)
        if two := re.fullmatch(r"\{(.+), (.+)\}, (.+)", rest):
            registers |= {two[1]: registers[two[3]] % (1 << 16), two[2]: registers[two[3]] >> 16}
        elif joined := re.fullmatch(r"(.+), \{(.+), (.+)\}", rest):
            registers[joined[1]] = registers[joined[2]] | registers[joined[3]] << 16
        elif name != ".reg":
            target, *sources = rest.split(", ")
            given = [registers[source] if source in registers else int(source, 0) for source in sources]
            name = name.split(".")[0]
            registers[target] = whole[name](*given) if name in whole else calculated(name, given, dtype)
    return registers


def converted(ptx: str, count: int, apart: bool, dtype: torch.dtype, rest: dict[str, int]) -> torch.Tensor:
    """The floats of a word of 2 * count codes: first those of the lower half, then those of the upper one."""
    registers = executed(ptx, dtype, rest)
    if apart:
        made = [registers[f"${index}"] for index in range(2 * count)]
        return torch.tensor(made, dtype=torch.int64).to(torch.uint16).view(dtype)
    return floats([registers[f"${index}"] for index in range(count)], dtype).T.flatten().to(dtype)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_e4m3_number(dtype: torch.dtype, apart: bool, fused: bool) -> None:
    """Each of the 254 numbers, in each byte of a word, to the bit, signed zeros too; times a scale, rounded once."""
    ptx, power = conversion_e4m3(dtype, apart), {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}[dtype]
    ptx = with_fused(ptx) if fused else ptx
    scale = torch.tensor([1.0, 0.171875]).mul(power).to(dtype).view(torch.int16).tolist()
    for code in range(256):
        codes = [(code + 64 * place) % 256 for place in range(4)]
        codes = [128 if byte & 127 == 127 else byte for byte in codes]
        want = torch.tensor(codes, dtype=torch.uint8).view(FP8).float()
        for bits, times in zip(scale, (1.0, 0.171875), strict=True):
            given = {"$4" if apart else "$2": int.from_bytes(bytes(codes), "little")}
            given["$6" if apart else "$4"] = bits if apart else bits * 65537
            out = converted(ptx, 2, apart, dtype, given)
            assert torch.equal(out, (want * times).to(dtype)) and torch.equal(out.signbit(), want.signbit())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_integer(dtype: torch.dtype, bits: int, apart: bool, fused: bool) -> None:
    """(code - zero point) * scale, rounded once. Codes of 8 bits are signed."""
    count, first, zero, scale = (2 if bits == 8 else 4), 16 // bits * (2 if apart else 1), 3.0, 0.171875
    shift = torch.tensor([zero + shift_of(bits, dtype), scale]).to(dtype).view(torch.int16).tolist()
    rest = {f"${first + 1 + place}": value if apart else value * 65537 for place, value in enumerate(shift)}
    ptx = conversion(bits, dtype, True, True, apart)
    ptx = with_fused(ptx) if fused else ptx
    for code in range(1 << bits):
        codes = [(code + 5 * place) % (1 << bits) for place in range(2 * count)]
        given = rest | {f"${first}": sum(value << bits * place for place, value in enumerate(codes))}
        signed = torch.tensor(codes).sub((1 << bits) * (torch.tensor(codes) >= 128)).double()
        want = ((signed - zero) * torch.tensor(scale).to(dtype).double()).to(dtype)
        assert torch.equal(converted(ptx, count, apart, dtype, given), want)


def compile_for(capability: int) -> None:
    """The conversion of a whole matrix of each form in bfloat16."""
    dtype, kernel = torch.bfloat16, dequantize_kernel
    for bits, ptx in (
        (8, conversion(8, dtype, False, False)),
        (4, conversion(4, dtype, True, True)),
        (8, conversion_e4m3(dtype)),
    ):
        fixed: dict[str, object] = {"SHIFT": 0.0, "GROUP": 0 if bits == 8 else 128, "ZEROS": False, "BITS": bits}
        fixed |= {
            "PTX": with_fused(ptx) if capability < 90 else ptx,
            "PDL": False,
            "ROWS": 32,
            "BLOCK": 256,
            "POWER": 1.0,
        }
        types = {"w_ptr": "*i16", "scale_ptr": "*fp16", "zero_ptr": "*u8", "out_ptr": "*bf16"}
        signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("capability", [89, *(pytest.param(number, marks=pytest.mark.long) for number in (80, 100))])
def test_other_gpus_have_the_instructions(apart: Callable[..., None], capability: int) -> None:
    apart(compile_for, capability)
