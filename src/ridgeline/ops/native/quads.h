// Sums of products of integers in the form that the instructions compute.
//
// Quads<DIGITS> sums products of four numbers of magnitude up to MOST with four unsigned byte codes. Four numbers occupy WORDS words
// (cut, for 16 numbers). take adds products, and total() is exact.
#pragma once

#include "simd.h"

namespace ridgeline {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Numbers as 8-bit digits: one, or two as 128 high + low, |high| <= 127, |low| <= 64.
template <int DIGITS> struct ByteQuads {
    static constexpr int WORDS = DIGITS;
    static constexpr float MOST = DIGITS == 1 ? 127 : 127 * 128;
    i32x16 high, low;

    static void cut(i32x16 number, std::int32_t (&words)[WORDS][4]) {
        if constexpr (DIGITS == 2) {
            const i32x16 high = shift_right_signed(add(number, splat(64)), 7);
            number = sub(number, shift_left(high, 7));
            _mm_storeu_si128((__m128i*)words[1], bytes_of(high));
        }
        _mm_storeu_si128((__m128i*)words[0], bytes_of(number));
    }
    void start(i32x16 from) { high = zero_bits(), low = from; }
    // Words are `apart` from each other.
    void take(i32x16 codes, const std::int32_t* words, index apart) {
        low = dot_bytes(low, codes, splat(words[0]));
        if constexpr (DIGITS == 2) high = dot_bytes(high, codes, splat(words[apart]));
    }
    void join(const ByteQuads& more) { high = add(high, more.high), low = add(low, more.low); }
    i32x16 total() const { return DIGITS == 2 ? add(shift_left(high, 7), low) : low; }
};
#endif

// 16-bit numbers, also for one digit: first and third of a quad, then second and fourth. One instruction multiplies both numbers of
// a word by codes. That takes as many instructions as two 8-bit digits would, but needs no second digit.
template <int DIGITS> struct WordQuads {
    static constexpr int WORDS = 2;
    static constexpr float MOST = DIGITS == 1 ? 127 : 127 * 128;
    i32x16 both;

    static void cut(i32x16 number, std::int32_t (&words)[WORDS][4]) {
        const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
        alignas(32) std::int32_t pairs[4][2];
        _mm256_store_si256((__m256i*)pairs, _mm256_shuffle_epi8(words_of(number), order));
        for (int quad = 0; quad < 4; ++quad) words[0][quad] = pairs[quad][0], words[1][quad] = pairs[quad][1];
    }
    void start(i32x16 from) { both = from; }
    // Words are `apart` from each other.
    void take(i32x16 codes, const std::int32_t* words, index apart) {
        const i32x16 even = codes & splat(0x00ff00ff), odd = shift_right_16(codes, 8);
        both = add(both, dot_words(even, splat(words[0])));
        both = add(both, dot_words(odd, splat(words[apart])));
        settle(both);
    }
    void join(const WordQuads& more) { both = add(both, more.both); }
    i32x16 total() const { return both; }
};

#ifdef __AVX512VNNI__
template <int DIGITS> using Quads = ByteQuads<DIGITS>;
#elif defined(__AVXVNNI__)
// 256 bits at a time, words take no more instructions than two digits.
template <int DIGITS> using Quads = std::conditional_t<DIGITS == 1, ByteQuads<1>, WordQuads<2>>;
#else
template <int DIGITS> using Quads = WordQuads<DIGITS>;
#endif

}  // namespace ridgeline
