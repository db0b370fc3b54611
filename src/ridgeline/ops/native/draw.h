// Draw a token in one pass over the logits, with the formula of ops.sample and the noise of ops.noise.
//
// A token's score is z - T log E, E = -log(1 - u), where u is a hash of the draw and the token. E is at least u, and the exponent
// of u bounds -log u from above. If even that bound does not reach the best score so far, which is the usual case, no logarithm is
// computed.
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

inline i32x16 mix(i32x16 word, i32x16 key) {
    const i32x16 first = splat(std::int32_t(FIRST)), second = splat(std::int32_t(SECOND));
    word = mul(word ^ shift_right(word, 16), first);
    word = word ^ key;
    word = mul(word ^ shift_right(word, 15), second);
    return word ^ shift_right(word, 15);
}

// Key words of a draw at `position`; see noise.draw_key.
inline Draw draw_of(const std::int32_t* key, std::int32_t position, int purpose, float temperature) {
    const std::uint32_t where = std::uint32_t(position) * GOLDEN + std::uint32_t(purpose + 1) * PURPOSE;
    const std::uint32_t first = mix(where + std::uint32_t(key[0]), std::uint32_t(key[1]));
    return {first, mix(where + std::uint32_t(key[1]), first), temperature};
}

// Natural logarithm of positive normal numbers: x = m 2^e with m in [3/4, 3/2), log m = 2 artanh s with s = (m - 1) / (m + 1), by
// its series. Terms from s^13 on are below the rounding error.
inline f32x16 log(f32x16 x) {
    const f32x16 one = splat(1.0f);
    f32x16 m, e;
    split(x, m, e);
    const f32x16 s = (m - one) / (m + one), q = s * s;
    f32x16 y = splat(2.0f / 11);
    y = fma(y, q, splat(2.0f / 9));
    y = fma(y, q, splat(2.0f / 7));
    y = fma(y, q, splat(2.0f / 5));
    y = fma(y, q, splat(2.0f / 3));
    y = y * q * s;
    return fma(e, splat(0.69314718056f), fma(s, splat(2.0f), y));
}

// log(-log(1 - u)). The rounding error of 1 - u is added back to its logarithm to first order.
inline f32x16 log_exponential(f32x16 u) {
    const f32x16 one = splat(1.0f), rest = one - u;
    const f32x16 lost = (one - rest) - u;
    return log(zeros() - (log(rest) + lost / rest));
}

// The same without a division, within 0.006: log m is a cubic in m - 1 without a constant term, so that results near 1 are accurate
// too.
inline f32x16 rough_log(f32x16 x) {
    f32x16 m, e;
    split(x, m, e);
    const f32x16 d = m - splat(1.0f);
    const f32x16 y = fma(fma(splat(0.25032594f), d, splat(-0.51169298f)), d, splat(1.00491466f));
    return fma(e, splat(0.69314718056f), y * d);
}
inline f32x16 rough_log_exponential(f32x16 u) { return rough_log(max(u, zeros() - rough_log(splat(1.0f) - u))); }

struct Best {
    float score = -INFINITY;
    std::int32_t token = 0;

    void offer(f32x16 scores, index at) {
        const float top = max_of(scores);
        if (!(top > score)) return;
        score = top;
        token = std::int32_t(at) + __builtin_ctz(word_of(equal(scores, splat(top))));
    }
};

// u of 16 tokens.
inline f32x16 uniforms(i32x16 tokens, const Draw& draw) {
    const i32x16 hashed = add(mul(tokens, splat(std::int32_t(GOLDEN))), splat(std::int32_t(draw.first)));
    const f32x16 u = to_float(shift_right(mix(hashed, splat(std::int32_t(draw.second))), 1)) + splat(0.5f);
    return min(u * splat(4.656612873077393e-10f), splat(1.0f - 0x1p-24f));
}

// Sum of exp(score - top) over the logits begin .. end - 1 of tokens `ids`, within one percent.
inline float weight_of(const float* logits, const std::int32_t* ids, const Draw& draw, index begin, index end, float top) {
    f32x16 sum = zeros();
    for (index at = begin; at < end; at += LANES) {
        const Part inside = first_lanes(end - at);
        f32x16 score = load(logits + at, inside) - splat(top);
        if (draw.temperature != 0.0f)
            score = fnma(splat(draw.temperature), rough_log_exponential(uniforms(load_bits(ids + at, inside), draw)), score);
        sum = sum + select(mask_of(inside), exp(score), zeros());
    }
    return sum_of(sum);
}

// Best of the logits begin .. end - 1, the first of equal ones. NaN never wins. ids: their tokens; null: consecutive numbers.
template <class T> Best best_of(const T* logits, const std::int32_t* ids, const Draw& draw, index begin, index end) {
    const f32x16 never = splat(-INFINITY), temperature = splat(draw.temperature);
    // -log u <= -log 2 (exponent of u). The margin of a thousandth covers the rounding of scores, and that of a millionth the
    // rounding of z.
    const f32x16 per_bit = splat(-0.69314718056f * draw.temperature), slack = splat(1e-3f * draw.temperature);
    Best best;
    for (index at = begin; at < end; at += LANES) {
        const Part inside = first_lanes(end - at);
        const f32x16 z = select(mask_of(inside), load(logits + at, inside), never);
        if (draw.temperature == 0.0f) {
            if (any(greater(z, splat(best.score)))) best.offer(max(z, never), at);
            continue;
        }
        const f32x16 u = uniforms(ids ? load_bits(ids + at, inside) : add(splat(std::int32_t(at)), lane_numbers()), draw);
        f32x16 bound = fma(exponent(u), per_bit, z + slack);
        bound = fma(abs(z), splat(1e-6f), bound);
        if (!any(greater(bound, splat(best.score)))) continue;
        best.offer(max(fnma(temperature, log_exponential(u), z), never), at);
    }
    return best;
}

}  // namespace ridgeline
