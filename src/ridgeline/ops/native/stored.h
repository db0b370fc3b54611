// Keys and values that the cache stores in 8 or 4 bits; ops.stored defines the formulas.
//
// A vector is a key or a value of one head and token. Attention decodes the vectors of a chunk of keys and then computes as it does
// without a format: a chunk is small enough for the thread's cache.
#pragma once

#include "e4m3.h"
#include "view.h"

#include <algorithm>

namespace ridgeline {

constexpr float SMALLEST_SCALE = 0x1p-14f;

// 16 codes of four bits, two in each of 8 bytes.
inline i32x16 load_nibbles(const std::uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)from), low = _mm_set1_epi8(15);
    alignas(16) std::uint8_t codes[LANES];
    _mm_store_si128((__m128i*)codes, _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
    return load_bytes(codes);
}

// 16 elements from `at` on, without their scale.
inline f32x16 load_codes(const std::uint8_t* codes, index at, index count, Format format) {
    if (format == Format::INT4) return to_float(sub(load_nibbles(codes + at / 2), splat(8)));
    alignas(16) std::uint8_t bytes[LANES] = {};
    const std::uint8_t* from = codes + at;
    if (count < LANES) std::copy_n(from, count, bytes), from = bytes;
    const i32x16 lanes = load_bytes(from);
    return format == Format::FP8 ? from_e4m3(lanes) : to_float(shift_right_signed(shift_left(lanes, 24), 24));
}

inline void store_codes(std::uint8_t* codes, index at, index count, Format format, f32x16 scaled) {
    alignas(64) std::int32_t lanes[LANES];
    store_bits(lanes, format == Format::FP8 ? bits_of_e4m3(round_to_e4m3(scaled)) : to_int(round(scaled)));
    if (format == Format::INT4)
        for (index i = 0; i < count; i += 2) codes[(at + i) / 2] = std::uint8_t(lanes[i] + 8) | std::uint8_t(lanes[i + 1] + 8) << 4;
    else
        for (index i = 0; i < count; ++i) codes[at + i] = std::uint8_t(lanes[i]);
}

inline float largest_of(Format format) { return format == Format::FP8 ? 448.0f : format == Format::INT8 ? 127.0f : 7.0f; }

// Elements that share a scale.
inline index group_of(const View& v) { return v.format == Format::INT4 ? 32 : v.dim; }

// Where the cache stores the vector of a slot and head; kind 1: the value.
struct Vector {
    std::uint8_t* codes;
    std::uint16_t* scales;

    Vector(const View& v, const void* cache, index page, index place, index kind, index head) {
        const index scales = v.dim / group_of(v), heads = v.kv_heads;
        std::uint8_t* first = (std::uint8_t*)cache + page * v.page_stride;
        codes = first + place * v.place_stride + kind * v.kind_stride + head * v.head_stride;
        this->scales = (std::uint16_t*)(first + v.to_scales) + ((kind * heads + head) * v.page_tokens + place) * scales;
    }
};

template <class T> void encode(const View& v, const Vector& to, const T* from) {
    const index group = group_of(v);
    for (index first = 0; first < v.dim; first += group) {
        f32x16 most = zeros();
        for (index at = first; at < first + group; at += LANES) most = max(most, abs(load(from + at, first_lanes(first + group - at))));
        const std::uint16_t scale = _cvtss_sh(std::max(max_of(most) / largest_of(v.format), SMALLEST_SCALE), 0);
        to.scales[first / group] = scale;
        const f32x16 step = splat(_cvtsh_ss(scale));
        for (index at = first; at < first + group; at += LANES) {
            const index count = std::min<index>(LANES, first + group - at);
            store_codes(to.codes, at, count, v.format, load(from + at, first_lanes(count)) / step);
        }
    }
}

template <class T> void decode(const View& v, const Vector& from, T* to) {
    const index group = group_of(v);
    for (index at = 0; at < v.dim; at += LANES) {
        const index count = std::min<index>(LANES, v.dim - at);
        const f32x16 step = splat(_cvtsh_ss(from.scales[at / group]));
        store(to + at, load_codes(from.codes, at, count, v.format) * step, first_lanes(count));
    }
}

}  // namespace ridgeline
