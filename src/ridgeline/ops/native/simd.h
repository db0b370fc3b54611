// Vector types of the kernels, chosen by the compiler's target: AVX-512 F, BW, DQ and VL, otherwise AVX2, FMA and F16C.
//
// f32x16: 16 lanes of float32. i32x16: 64 bytes, 32-bit integers unless a name says otherwise. mask16: one boolean per lane. Part:
// the first lanes, as many as it is made with; other lanes load as 0 and are not stored. LinePart: likewise for the 32 bfloat16 in
// an i32x16. Operators: + - * / of f32x16, & | ^ of i32x16, & | of mask16.
//
// fma, fms, fnma: a b + c, a b - c, c - a b. min, max: return the second operand if one is NaN. round: to nearest, ties to even.
// scaled(y, whole, kept): y 2^whole in the lanes kept, 0 in the others; y from 2/3 to 3/2, whole from -126 to 128; 2^128 is
// infinite. exponent(x), split(x, m, e): x = m 2^e, m from 1 to 2, or from 3/4 to 3/2; for positive normal numbers. line(low,
// high), pairs(first, second): two times 16 numbers rounded to bfloat16, ties to even. line stores one half after the other; pairs
// stores two per lane, with `first` in the lower half. dot_pairs(sum, a, b): sum plus the products of both numbers of a lane.
// unpack_*: within each 16 bytes. even_parts, odd_parts: two of the four 16-byte parts of a, then of b. unpacked_low,
// unpacked_high: the first and last 16 of 32 lanes, where unpack_low_16 and unpack_high_16 produced a and b. and_or: (a & b) | c.
// lookup(table, codes): bytes of a table of 16 by bytes below 16. lanes_with(words, bit): which of 16 words have the bit. word_of(mask): mask as an integer, lane 0 in bit 0.
//
// dot_words(a, b): sums of the products of both 16-bit numbers of a lane. dot_bytes(sum, codes, digits): sum plus the products of
// four unsigned and four signed bytes of a lane. words_of, bytes_of: 16 numbers in fewer bits. settle(sum): the compiler computes a
// sum here; otherwise it reorders the additions of a loop and needs more registers than there are.
//
// Widener: converts 64 e4m3 numbers to two lines of bfloat16; of each 16 bytes the first 8 go to the first line.
//
// SUMS: number of f32x16 accumulators that stay in registers beside their operands.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ridgeline {

using index = std::int64_t;

constexpr int LANES = 16;

// bfloat16: the upper half of a float32.
struct bf16 {
    std::uint16_t bits;
};

}  // namespace ridgeline

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
