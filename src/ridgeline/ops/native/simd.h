// The vectors that the kernels speak of, by what the compiler targets: AVX-512 F, BW, DQ and VL, or else AVX2, FMA and F16C.
//
// f32x16: 16 lanes of float32. i32x16: 64 bytes, integers of 32 bits where a name says nothing else. mask16: a truth a lane.
// Part: the first so many lanes, of what is loaded (the others are 0) and stored (the others stay); LinePart: the first so many
// of the 32 numbers of bfloat16 in an i32x16. Operators: + - * / of f32x16, & | ^ of i32x16, & | of mask16.
//
// fma, fms, fnma: a b + c, a b - c, c - a b. min, max: the second, where one is a NaN. round: to the nearest, of two the even.
// scaled(y, whole, kept): y 2^whole in the lanes kept, 0 in the others; y from 2/3 to 3/2, whole from -126 to 128; 2^128 is
// infinite. exponent(x), split(x, m, e): x = m 2^e, m from 1 to 2, or from 3/4 to 3/2; of positive normal numbers.
// line(low, high), pairs(first, second): two times 16 numbers in bfloat16, rounded to the nearest even: one half behind the
// other, or two in a lane, `first` in its lower half. dot_pairs(sum, a, b): sums increased by the products of both of a lane.
// unpack_*: within each 16 bytes. even_parts, odd_parts: two of the four 16 bytes of a, then of b. unpacked_low, unpacked_high:
// the first and the last 16 of 32 lanes, where unpack_low_16 and unpack_high_16 spread what became a and b.
// and_or: (a & b) | c. lanes_with(words, bit): which of 16 words have it. word_of(mask): lane 0 is bit 0.
//
// Products of integers are cut to what instructions take: Quads<DIGITS>, of numbers up to MOST either way, are sums of products of
// four numbers, which are WORDS words (cut, of 16 numbers), with four codes, bytes without sign (take), and total() is exact.
// Widener: 64 numbers of e4m3 to two lines of bfloat16, of each 16 bytes the first 8 to the first line.
//
// SUMS: how many f32x16 stay in registers beside what is added to them.
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
