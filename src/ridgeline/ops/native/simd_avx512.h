// The vectors of simd.h in AVX-512. BF16, VNNI and VBMI are used if the compiler targets them.
#pragma once

#define RIDGELINE_INSTRUCTIONS "AVX-512"

namespace ridgeline {

using f32x16 = __m512;
using i32x16 = __m512i;
using mask16 = __mmask16;
using Part = __mmask16;
using LinePart = __mmask32;

constexpr int SUMS = 24;
constexpr Part ALL = 0xffff;

inline Part first_lanes(index n) { return n >= LANES ? ALL : Part((1u << n) - 1); }
inline LinePart first_numbers(index n) { return n >= 2 * LANES ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }
inline mask16 mask_of(Part kept) { return kept; }

inline f32x16 zeros() { return _mm512_setzero_ps(); }
inline i32x16 zero_bits() { return _mm512_setzero_si512(); }
inline f32x16 splat(float x) { return _mm512_set1_ps(x); }
inline i32x16 splat(std::int32_t x) { return _mm512_set1_epi32(x); }
inline i32x16 splat_bytes(int x) { return _mm512_set1_epi8(char(x)); }
inline i32x16 lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

inline f32x16 floats_of(i32x16 x) { return _mm512_castsi512_ps(x); }
inline i32x16 bits_of(f32x16 x) { return _mm512_castps_si512(x); }
inline f32x16 to_float(i32x16 x) { return _mm512_cvtepi32_ps(x); }
inline i32x16 to_int(f32x16 x) { return _mm512_cvtps_epi32(x); }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32x16 fms(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmsub_ps(a, b, c); }
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fnmadd_ps(a, b, c); }
inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
inline f32x16 abs(f32x16 x) { return _mm512_abs_ps(x); }
inline f32x16 round(f32x16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline f32x16 scaled(f32x16 y, f32x16 whole, mask16 kept) { return _mm512_maskz_scalef_ps(kept, y, whole); }
inline f32x16 exponent(f32x16 x) { return _mm512_getexp_ps(x); }
inline void split(f32x16 x, f32x16& m, f32x16& e) {
    const __m512i whole = _mm512_srai_epi32(_mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x3f400000)), 23);
    m = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(whole, 23)));
    e = _mm512_cvtepi32_ps(whole);
}

inline i32x16 add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
inline i32x16 sub(i32x16 a, i32x16 b) { return _mm512_sub_epi32(a, b); }
inline i32x16 mul(i32x16 a, i32x16 b) { return _mm512_mullo_epi32(a, b); }
inline i32x16 max_unsigned(i32x16 a, i32x16 b) { return _mm512_max_epu32(a, b); }
inline i32x16 shift_left(i32x16 x, int n) { return _mm512_slli_epi32(x, n); }
inline i32x16 shift_right(i32x16 x, int n) { return _mm512_srli_epi32(x, n); }
inline i32x16 shift_right_signed(i32x16 x, int n) { return _mm512_srai_epi32(x, n); }
inline i32x16 shift_left_16(i32x16 x, int n) { return _mm512_slli_epi16(x, n); }
inline i32x16 shift_right_16(i32x16 x, int n) { return _mm512_srli_epi16(x, n); }
inline i32x16 and_or(i32x16 a, i32x16 b, i32x16 c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }

inline mask16 greater(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline mask16 not_less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline mask16 equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline mask16 is_nan(f32x16 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline mask16 greater(i32x16 a, i32x16 b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline mask16 equal(i32x16 a, i32x16 b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline mask16 has_bits(i32x16 x, i32x16 bits) { return _mm512_test_epi32_mask(x, bits); }
inline mask16 lanes_with(const std::uint16_t* words, int bit) {
    return _mm256_test_epi16_mask(_mm256_loadu_si256((const __m256i*)words), _mm256_set1_epi16(std::int16_t(1 << bit)));
}
inline std::uint16_t word_of(mask16 m) { return m; }
inline bool any(mask16 m) { return m; }
inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return _mm512_mask_mov_ps(no, m, yes); }

inline float first_of(f32x16 x) { return _mm512_cvtss_f32(x); }
inline float sum_of(f32x16 x) { return _mm512_reduce_add_ps(x); }
inline float max_of(f32x16 x) { return _mm512_reduce_max_ps(x); }
inline std::int32_t sum_of(i32x16 x) { return _mm512_reduce_add_epi32(x); }
inline std::uint32_t max_unsigned_of(i32x16 x) { return _mm512_reduce_max_epu32(x); }

inline i32x16 unpack_low_16(i32x16 a, i32x16 b) { return _mm512_unpacklo_epi16(a, b); }
inline i32x16 unpack_high_16(i32x16 a, i32x16 b) { return _mm512_unpackhi_epi16(a, b); }
inline f32x16 unpack_low_32(f32x16 a, f32x16 b) { return _mm512_unpacklo_ps(a, b); }
inline f32x16 unpack_high_32(f32x16 a, f32x16 b) { return _mm512_unpackhi_ps(a, b); }
inline f32x16 unpack_low_64(f32x16 a, f32x16 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline f32x16 unpack_high_64(f32x16 a, f32x16 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline f32x16 even_parts(f32x16 a, f32x16 b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
inline f32x16 odd_parts(f32x16 a, f32x16 b) { return _mm512_shuffle_f32x4(a, b, 0xdd); }
inline i32x16 unpack_low_32(i32x16 a, i32x16 b) { return _mm512_unpacklo_epi32(a, b); }
inline i32x16 unpack_high_32(i32x16 a, i32x16 b) { return _mm512_unpackhi_epi32(a, b); }
inline i32x16 unpack_low_64(i32x16 a, i32x16 b) { return _mm512_unpacklo_epi64(a, b); }
inline i32x16 unpack_high_64(i32x16 a, i32x16 b) { return _mm512_unpackhi_epi64(a, b); }
inline i32x16 even_parts(i32x16 a, i32x16 b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
inline i32x16 odd_parts(i32x16 a, i32x16 b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }
inline f32x16 unpacked_low(f32x16 a, f32x16 b) {
    return _mm512_permutex2var_ps(a, _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0), b);
}
inline f32x16 unpacked_high(f32x16 a, f32x16 b) {
    return _mm512_permutex2var_ps(a, _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8), b);
}

inline f32x16 widen(__m256i low) { return floats_of(shift_left(_mm512_cvtepu16_epi32(low), 16)); }

inline __m256i narrow(f32x16 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const i32x16 bits = bits_of(x), odd = shift_right(bits, 16) & splat(1);
    const i32x16 rounded = add(bits, add(odd, splat(0x7fff)));
    return _mm512_cvtepi32_epi16(shift_right(_mm512_mask_mov_epi32(rounded, is_nan(x), splat(0x7fc00000)), 16));
#endif
}

inline i32x16 line(f32x16 low, f32x16 high) {
#ifdef __AVX512BF16__
    return (i32x16)_mm512_cvtne2ps_pbh(high, low);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

inline i32x16 pairs(f32x16 first, f32x16 second) {
    const i32x16 interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                               5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(interleave, line(first, second));
}

inline f32x16 dot_pairs(f32x16 sum, i32x16 a, i32x16 b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const i32x16 high = splat(std::int32_t(0xffff0000));
    sum = fma(floats_of(shift_left(a, 16)), floats_of(shift_left(b, 16)), sum);
    return fma(floats_of(a & high), floats_of(b & high), sum);
#endif
}

inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline f32x16 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline f32x16 load(const float* p, Part m) { return _mm512_maskz_loadu_ps(m, p); }
inline f32x16 load(const bf16* p, Part m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store(float* p, f32x16 x, Part m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(bf16* p, f32x16 x, Part m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }
inline i32x16 load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline i32x16 load_bits(const void* p, Part m) { return _mm512_maskz_loadu_epi32(m, p); }
inline void store_bits(void* p, i32x16 x) { _mm512_storeu_si512(p, x); }
inline void store_bits(void* p, i32x16 x, Part m) { _mm512_mask_storeu_epi32(p, m, x); }
inline i32x16 load_line(const bf16* p, LinePart m) { return _mm512_maskz_loadu_epi16(m, p); }
inline f32x16 load_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline i32x16 load_bytes(const std::uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

inline i32x16 lookup(const std::uint8_t* table, i32x16 codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), codes);
}

inline i32x16 dot_words(i32x16 a, i32x16 b) { return _mm512_madd_epi16(a, b); }
#ifdef __AVX512VNNI__
inline i32x16 dot_bytes(i32x16 sum, i32x16 codes, i32x16 digits) { return _mm512_dpbusd_epi32(sum, codes, digits); }
#endif
inline __m256i words_of(i32x16 x) { return _mm512_cvtepi32_epi16(x); }
inline __m128i bytes_of(i32x16 x) { return _mm512_cvtepi32_epi8(x); }
inline void settle(i32x16& sum) { __asm__("" : "+v"(sum)); }

// Upper and lower halves of the bfloat16 numbers of the 128 magnitudes of e4m3; the last one is NaN.
struct Tables {
    alignas(64) std::uint8_t high[128], low[128];
    constexpr Tables() : high(), low() {
        for (int code = 0; code < 128; ++code) {
            int exponent = (code >> 3) + 120, mantissa = code & 7;
            if (code < 8) {  // multiples of 2^-9
                for (exponent = 121; mantissa && mantissa < 8; mantissa *= 2) --exponent;
                if (!mantissa) exponent = 0;
            }
            const int bits = code == 127 ? 0x7fc0 : exponent << 7 | (mantissa & 7) << 4;
            high[code] = std::uint8_t(bits >> 8);
            low[code] = std::uint8_t(bits);
        }
    }
};
inline constexpr Tables tables;

#ifdef __AVX512VBMI__
struct Widener {
    const i32x16 high[2] = {load_bits(tables.high), load_bits(tables.high + 64)};
    const i32x16 low[2] = {load_bits(tables.low), load_bits(tables.low + 64)};

    void operator()(const std::uint8_t* from, i32x16& first, i32x16& second) const {
        const i32x16 codes = load_bits(from), sign = splat_bytes(0x80);
        // The tables ignore the sign.
        const i32x16 upper = and_or(codes, sign, _mm512_permutex2var_epi8(high[0], codes, high[1]));
        const i32x16 lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        first = _mm512_unpacklo_epi8(lower, upper);
        second = _mm512_unpackhi_epi8(lower, upper);
    }
};
#else
// Exponent and mantissa are shifted into place, and the exponent is increased by the difference of the biases. Subnormal numbers
// and NaN come from a table.
struct Widener {
    static i32x16 wide(i32x16 codes) {
        alignas(64) std::uint16_t odd[32];
        for (int code = 0; code < 8; ++code) odd[code] = std::uint16_t(tables.high[code] << 8 | tables.low[code]);
        const i32x16 magnitude = codes & _mm512_set1_epi16(0x7f);
        const i32x16 moved = _mm512_add_epi16(shift_left_16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        const __mmask32 small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
        i32x16 bits = _mm512_mask_permutexvar_epi16(moved, small, magnitude, load_bits(odd));
        const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
        bits = _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7fc0));
        return bits | shift_left_16(codes & _mm512_set1_epi16(0x80), 8);
    }
    void operator()(const std::uint8_t* from, i32x16& first, i32x16& second) const {
        const i32x16 codes = load_bits(from), none = zero_bits();
        first = wide(_mm512_unpacklo_epi8(codes, none));
        second = wide(_mm512_unpackhi_epi8(codes, none));
    }
};
#endif

}  // namespace ridgeline
