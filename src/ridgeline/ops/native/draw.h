// Drawing a token in one pass over the logits: the formula of ops.sample with the noise of ops.noise.
//
// A token's score is z - T log E, E = -log(1 - u) and u a hash of the draw and the token. E is at least u, and what -log u can
// be at most stands in the exponent of u: where even that does not reach the best score so far, and it seldom does, no
// logarithm is computed.
#pragma once

#include "common.h"

#include <cmath>

namespace ridgeline {

constexpr std::uint32_t FIRST = 0x21F0AAAD, SECOND = 0x735A2D97, GOLDEN = 0x9E3779B9, PURPOSE = 0x85EBCA6B;

struct Draw {
    std::uint32_t first, second;  // key words
    float temperature;
};

inline std::uint32_t mix(std::uint32_t word, std::uint32_t key) {
    word = ((word ^ word >> 16) * FIRST) ^ key;
    word = (word ^ word >> 15) * SECOND;
    return word ^ word >> 15;
}

inline __m512i mix(__m512i word, __m512i key) {
    const __m512i first = _mm512_set1_epi32(std::int32_t(FIRST)), second = _mm512_set1_epi32(std::int32_t(SECOND));
    word = _mm512_mullo_epi32(_mm512_xor_si512(word, _mm512_srli_epi32(word, 16)), first);
    word = _mm512_xor_si512(word, key);
    word = _mm512_mullo_epi32(_mm512_xor_si512(word, _mm512_srli_epi32(word, 15)), second);
    return _mm512_xor_si512(word, _mm512_srli_epi32(word, 15));
}

// Key words of a draw at `position`; see noise.draw_key.
inline Draw draw_of(const std::int32_t* key, std::int32_t position, int purpose, float temperature) {
    const std::uint32_t where = std::uint32_t(position) * GOLDEN + std::uint32_t(purpose + 1) * PURPOSE;
    const std::uint32_t first = mix(where + std::uint32_t(key[0]), std::uint32_t(key[1]));
    return {first, mix(where + std::uint32_t(key[1]), first), temperature};
}

// Natural logarithm of positive normal numbers: x = m 2^e with m in [3/4, 3/2), log m = 2 artanh s of s = (m - 1) / (m + 1) by
// its series, whose terms from s^13 on are below the rounding.
inline __m512 log(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const __m512 e = _mm512_getexp_ps(_mm512_div_ps(x, m));
    const __m512 s = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one)), q = _mm512_mul_ps(s, s);
    __m512 y = _mm512_set1_ps(2.0f / 11);
    y = _mm512_fmadd_ps(y, q, _mm512_set1_ps(2.0f / 9));
    y = _mm512_fmadd_ps(y, q, _mm512_set1_ps(2.0f / 7));
    y = _mm512_fmadd_ps(y, q, _mm512_set1_ps(2.0f / 5));
    y = _mm512_fmadd_ps(y, q, _mm512_set1_ps(2.0f / 3));
    y = _mm512_mul_ps(_mm512_mul_ps(y, q), s);
    return _mm512_fmadd_ps(e, _mm512_set1_ps(0.69314718056f), _mm512_fmadd_ps(s, _mm512_set1_ps(2.0f), y));
}

// log(-log(1 - u)). What 1 - u loses to rounding is put back into its logarithm to first order.
inline __m512 log_exponential(__m512 u) {
    const __m512 one = _mm512_set1_ps(1.0f), rest = _mm512_sub_ps(one, u);
    const __m512 lost = _mm512_sub_ps(_mm512_sub_ps(one, rest), u);
    return log(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_add_ps(log(rest), _mm512_div_ps(lost, rest))));
}

struct Best {
    float score = -INFINITY;
    std::int32_t token = 0;

    void offer(__m512 scores, index at) {
        const float top = _mm512_reduce_max_ps(scores);
        if (!(top > score)) return;
        score = top;
        token = std::int32_t(at) + __builtin_ctz(_mm512_cmpeq_ps_mask(scores, _mm512_set1_ps(top)));
    }
};

// The best of the logits begin .. end - 1; the first one of equals. NaN never wins. ids: their tokens, null: as they are numbered.
template <class T> Best best_of(const T* logits, const std::int32_t* ids, const Draw& draw, index begin, index end) {
    const __m512 never = _mm512_set1_ps(-INFINITY), heat = _mm512_set1_ps(draw.temperature);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i golden = _mm512_set1_epi32(std::int32_t(GOLDEN)), first = _mm512_set1_epi32(std::int32_t(draw.first));
    const __m512i second = _mm512_set1_epi32(std::int32_t(draw.second));
    // -log u <= -log 2 (exponent of u); the thousandth covers the rounding of scores, as does the millionth of z.
    const __m512 per_bit = _mm512_set1_ps(-0.69314718056f * draw.temperature), slack = _mm512_set1_ps(1e-3f * draw.temperature);
    Best best;
    for (index at = begin; at < end; at += LANES) {
        const __mmask16 inside = first_lanes(end - at);
        const __m512 z = _mm512_mask_mov_ps(never, inside, load(logits + at, inside));
        if (draw.temperature == 0.0f) {
            if (_mm512_cmp_ps_mask(z, _mm512_set1_ps(best.score), _CMP_GT_OQ)) best.offer(_mm512_max_ps(z, never), at);
            continue;
        }
        const __m512i token = ids ? _mm512_maskz_loadu_epi32(inside, ids + at)
                                  : _mm512_add_epi32(_mm512_set1_epi32(std::int32_t(at)), lanes);
        const __m512i word = mix(_mm512_add_epi32(_mm512_mullo_epi32(token, golden), first), second);
        __m512 u = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(word, 1)), _mm512_set1_ps(0.5f));
        u = _mm512_min_ps(_mm512_mul_ps(u, _mm512_set1_ps(4.656612873077393e-10f)), _mm512_set1_ps(1.0f - 0x1p-24f));
        __m512 bound = _mm512_fmadd_ps(_mm512_getexp_ps(u), per_bit, _mm512_add_ps(z, slack));
        bound = _mm512_fmadd_ps(_mm512_abs_ps(z), _mm512_set1_ps(1e-6f), bound);
        if (!_mm512_cmp_ps_mask(bound, _mm512_set1_ps(best.score), _CMP_GT_OQ)) continue;
        best.offer(_mm512_max_ps(_mm512_fnmadd_ps(heat, log_exponential(u), z), never), at);
    }
    return best;
}

}  // namespace ridgeline
