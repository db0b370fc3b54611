"""The hash of ops.noise inside kernels: noise from (row key, position, purpose, token) in wrapping 32-bit arithmetic."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

FIRST = tl.constexpr(0x21F0AAAD)
SECOND = tl.constexpr(0x735A2D97)
GOLDEN = tl.constexpr(0x9E3779B9)
PURPOSE = tl.constexpr(0x85EBCA6B)
LARGEST = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(word, key):
    word = word ^ (word >> 16)
    word = word * FIRST
    word = word ^ key
    word = word ^ (word >> 15)
    word = word * SECOND
    return word ^ (word >> 15)


@triton.jit
def draw_key(key_ptr, position, purpose: tl.constexpr):
    """The two key words of a draw. key_ptr: the row's two key words. See ops.noise.draw_key."""
    first = tl.load(key_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(key_ptr + 1).to(tl.uint32, bitcast=True)
    where = position.to(tl.uint32, bitcast=True) * GOLDEN
    for _ in tl.static_range(purpose + 1):
        where = where + PURPOSE
    word_0 = _mix(where + first, second)
    return word_0, _mix(where + second, word_0)


@triton.jit
def _log(x, LIBRARY_LOG: tl.constexpr):
    """Natural logarithm of float32 by the hardware instruction, with an error below 2^-22 (relative, or absolute near 1; PTX ISA,
    lg2.approx). A library function takes twenty instructions. LIBRARY_LOG: use the library, on devices without the instruction."""
    if LIBRARY_LOG:
        return tl.log(x)
    two = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return two * 0.6931471805599453


@triton.jit
def _log_exponential(word, LIBRARY_LOG: tl.constexpr):
    """log(-log(1 - u)) for u = (word / 2 + 1/2) / 2^31, rounded once. For small u, where 1 - u would lose digits, -log(1 - u) is
    computed by its series."""
    u = tl.minimum((word | 1).to(tl.float32) * 2.3283064365386963e-10, LARGEST)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return _log(tl.where(u < 0.06, series, -_log(1.0 - u, LIBRARY_LOG)), LIBRARY_LOG)


@triton.jit
def score(logit, token, first, second, temperature, LIBRARY_LOG: tl.constexpr):
    """Gumbel-max score: tempered logit plus noise, the largest of which is drawn. first, second: see draw_key."""
    word = _mix(token.to(tl.uint32) * GOLDEN + first, second)
    return logit - temperature * _log_exponential(word, LIBRARY_LOG)
