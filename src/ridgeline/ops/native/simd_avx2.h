// The vectors of simd.h in AVX2, FMA and F16C, as two registers each.
#pragma once

#define RIDGELINE_INSTRUCTIONS "AVX2"

namespace ridgeline {

struct f32x16 {
    __m256 low, high;
};
struct i32x16 {
    __m256i low, high;
};
// All bits of a lane are set, or none.
struct mask16 {
    __m256 low, high;
};
struct Part {
    int lanes;
};
struct LinePart {
    int numbers;
};

constexpr int SUMS = 6;
constexpr Part ALL{LANES};

inline f32x16 floats_of(i32x16 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline i32x16 bits_of(f32x16 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline mask16 mask_of(i32x16 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }

inline f32x16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline i32x16 zero_bits() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline i32x16 splat(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 splat_bytes(int x) { return {_mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x))}; }
inline i32x16 lane_numbers() {
    return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_epi32(15, 14, 13, 12, 11, 10, 9, 8)};
}

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline i32x16 operator&(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline i32x16 operator|(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline i32x16 operator^(i32x16 a, i32x16 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
inline mask16 operator&(mask16 a, mask16 b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
inline mask16 operator|(mask16 a, mask16 b) { return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)}; }

inline f32x16 to_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline i32x16 to_int(f32x16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline f32x16 fms(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline f32x16 abs(f32x16 x) { return floats_of(bits_of(x) & splat(0x7fffffff)); }
inline f32x16 round(f32x16 x) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}

inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline i32x16 sub(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline i32x16 mul(i32x16 a, i32x16 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline i32x16 max_unsigned(i32x16 a, i32x16 b) {
    return {_mm256_max_epu32(a.low, b.low), _mm256_max_epu32(a.high, b.high)};
}
inline i32x16 shift_left(i32x16 x, int n) { return {_mm256_slli_epi32(x.low, n), _mm256_slli_epi32(x.high, n)}; }
inline i32x16 shift_right(i32x16 x, int n) { return {_mm256_srli_epi32(x.low, n), _mm256_srli_epi32(x.high, n)}; }
inline i32x16 shift_right_signed(i32x16 x, int n) { return {_mm256_srai_epi32(x.low, n), _mm256_srai_epi32(x.high, n)}; }
inline i32x16 shift_left_16(i32x16 x, int n) { return {_mm256_slli_epi16(x.low, n), _mm256_slli_epi16(x.high, n)}; }
inline i32x16 shift_right_16(i32x16 x, int n) { return {_mm256_srli_epi16(x.low, n), _mm256_srli_epi16(x.high, n)}; }
inline i32x16 and_or(i32x16 a, i32x16 b, i32x16 c) { return (a & b) | c; }

template <int HOW> mask16 compare(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.low, b.low, HOW), _mm256_cmp_ps(a.high, b.high, HOW)};
}
inline mask16 greater(f32x16 a, f32x16 b) { return compare<_CMP_GT_OQ>(a, b); }
inline mask16 less(f32x16 a, f32x16 b) { return compare<_CMP_LT_OQ>(a, b); }
inline mask16 not_less(f32x16 a, f32x16 b) { return compare<_CMP_NLT_UQ>(a, b); }
inline mask16 equal(f32x16 a, f32x16 b) { return compare<_CMP_EQ_OQ>(a, b); }
inline mask16 is_nan(f32x16 x) { return compare<_CMP_UNORD_Q>(x, x); }
inline mask16 greater(i32x16 a, i32x16 b) {
    return mask_of(i32x16{_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)});
}
inline mask16 equal(i32x16 a, i32x16 b) {
    return mask_of(i32x16{_mm256_cmpeq_epi32(a.low, b.low), _mm256_cmpeq_epi32(a.high, b.high)});
}
// bits: a single bit per lane.
inline mask16 has_bits(i32x16 x, i32x16 bits) { return equal(x & bits, bits); }
inline std::uint16_t word_of(mask16 m) { return std::uint16_t(_mm256_movemask_ps(m.low) | _mm256_movemask_ps(m.high) << 8); }
inline bool any(mask16 m) { return word_of(m); }
inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}

// Exponents are added as integers, which is valid up to 2^128, the code of infinity.
inline f32x16 scaled(f32x16 y, f32x16 whole, mask16 kept) {
    const f32x16 x = floats_of(add(bits_of(y), shift_left(to_int(whole), 23)));
    return {_mm256_and_ps(x.low, kept.low), _mm256_and_ps(x.high, kept.high)};
}
inline f32x16 exponent(f32x16 x) { return to_float(sub(shift_right(bits_of(x), 23), splat(127))); }
inline void split(f32x16 x, f32x16& m, f32x16& e) {
    const i32x16 whole = shift_right_signed(sub(bits_of(x), splat(0x3f400000)), 23);
    m = floats_of(sub(bits_of(x), shift_left(whole, 23)));
    e = to_float(whole);
}

inline float first_of(f32x16 x) { return _mm256_cvtss_f32(x.low); }
inline float sum_of(f32x16 x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of(f32x16 x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline std::int32_t sum_of(i32x16 x) {
    const __m256i eight = _mm256_add_epi32(x.low, x.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_srli_epi64(two, 32)));
}
inline std::uint32_t max_unsigned_of(i32x16 x) {
    const __m256i eight = _mm256_max_epu32(x.low, x.high);
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
    return std::uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_srli_epi64(two, 32))));
}

inline i32x16 unpack_low_16(i32x16 a, i32x16 b) {
    return {_mm256_unpacklo_epi16(a.low, b.low), _mm256_unpacklo_epi16(a.high, b.high)};
}
inline i32x16 unpack_high_16(i32x16 a, i32x16 b) {
    return {_mm256_unpackhi_epi16(a.low, b.low), _mm256_unpackhi_epi16(a.high, b.high)};
}
inline i32x16 unpack_low_32(i32x16 a, i32x16 b) {
    return {_mm256_unpacklo_epi32(a.low, b.low), _mm256_unpacklo_epi32(a.high, b.high)};
}
inline i32x16 unpack_high_32(i32x16 a, i32x16 b) {
    return {_mm256_unpackhi_epi32(a.low, b.low), _mm256_unpackhi_epi32(a.high, b.high)};
}
inline i32x16 unpack_low_64(i32x16 a, i32x16 b) {
    return {_mm256_unpacklo_epi64(a.low, b.low), _mm256_unpacklo_epi64(a.high, b.high)};
}
inline i32x16 unpack_high_64(i32x16 a, i32x16 b) {
    return {_mm256_unpackhi_epi64(a.low, b.low), _mm256_unpackhi_epi64(a.high, b.high)};
}
inline f32x16 unpack_low_32(f32x16 a, f32x16 b) { return floats_of(unpack_low_32(bits_of(a), bits_of(b))); }
inline f32x16 unpack_high_32(f32x16 a, f32x16 b) { return floats_of(unpack_high_32(bits_of(a), bits_of(b))); }
inline f32x16 unpack_low_64(f32x16 a, f32x16 b) { return floats_of(unpack_low_64(bits_of(a), bits_of(b))); }
inline f32x16 unpack_high_64(f32x16 a, f32x16 b) { return floats_of(unpack_high_64(bits_of(a), bits_of(b))); }
inline i32x16 even_parts(i32x16 a, i32x16 b) {
    return {_mm256_permute2x128_si256(a.low, a.high, 0x20), _mm256_permute2x128_si256(b.low, b.high, 0x20)};
}
inline i32x16 odd_parts(i32x16 a, i32x16 b) {
    return {_mm256_permute2x128_si256(a.low, a.high, 0x31), _mm256_permute2x128_si256(b.low, b.high, 0x31)};
}
inline f32x16 even_parts(f32x16 a, f32x16 b) { return floats_of(even_parts(bits_of(a), bits_of(b))); }
inline f32x16 odd_parts(f32x16 a, f32x16 b) { return floats_of(odd_parts(bits_of(a), bits_of(b))); }
inline f32x16 unpacked_low(f32x16 a, f32x16 b) {
    return {_mm256_permute2f128_ps(a.low, b.low, 0x20), _mm256_permute2f128_ps(a.low, b.low, 0x31)};
}
inline f32x16 unpacked_high(f32x16 a, f32x16 b) {
    return {_mm256_permute2f128_ps(a.high, b.high, 0x20), _mm256_permute2f128_ps(a.high, b.high, 0x31)};
}

// Rounded values are in the upper half of a lane. The lower half holds the remainder.
inline i32x16 rounded_up(f32x16 x) {
    const i32x16 bits = bits_of(x), odd = shift_right(bits, 16) & splat(1);
    const i32x16 rounded = add(bits, add(odd, splat(0x7fff)));
    return bits_of(select(is_nan(x), floats_of(splat(0x7fc00000)), floats_of(rounded)));
}

inline __m256i narrow(f32x16 x) {
    const i32x16 kept = shift_right(rounded_up(x), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(kept.low, kept.high), 0xd8);
}

inline f32x16 widen(__m256i x) {
    const i32x16 lanes{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
    return floats_of(shift_left(lanes, 16));
}

inline i32x16 line(f32x16 low, f32x16 high) { return {narrow(low), narrow(high)}; }

inline i32x16 pairs(f32x16 first, f32x16 second) {
    return shift_right(rounded_up(first), 16) | (rounded_up(second) & splat(std::int32_t(0xffff0000)));
}

inline f32x16 dot_pairs(f32x16 sum, i32x16 a, i32x16 b) {
    const i32x16 high = splat(std::int32_t(0xffff0000));
    sum = fma(floats_of(shift_left(a, 16)), floats_of(shift_left(b, 16)), sum);
    return fma(floats_of(a & high), floats_of(b & high), sum);
}

inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load(const bf16* p) {
    const __m128i* from = (const __m128i*)p;
    const i32x16 lanes{_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
    return floats_of(shift_left(lanes, 16));
}
inline void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline i32x16 load_bits(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void store_bits(void* p, i32x16 x) {
    _mm256_storeu_si256((__m256i*)p, x.low);
    _mm256_storeu_si256((__m256i*)p + 1, x.high);
}

// Parts: complete vectors are handled first, because others are rare and a masked store takes some CPUs over 10 cycles.
inline Part first_lanes(index n) { return {int(std::min<index>(n, LANES))}; }
inline LinePart first_numbers(index n) { return {int(std::clamp<index>(n, 0, 2 * LANES))}; }
inline mask16 mask_of(Part m) {
    alignas(64) static constexpr std::int32_t kept[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                                 -1, -1, -1, -1, -1, -1, -1, -1};
    return mask_of(load_bits(kept + LANES - m.lanes));
}
inline i32x16 load_bits(const void* p, Part m) {
    if (m.lanes == LANES) return load_bits(p);
    const i32x16 kept = bits_of(f32x16{mask_of(m).low, mask_of(m).high});
    return {_mm256_maskload_epi32((const int*)p, kept.low), _mm256_maskload_epi32((const int*)p + 8, kept.high)};
}
inline void store_bits(void* p, i32x16 x, Part m) {
    if (m.lanes == LANES) return store_bits(p, x);
    const i32x16 kept = bits_of(f32x16{mask_of(m).low, mask_of(m).high});
    _mm256_maskstore_epi32((int*)p, kept.low, x.low);
    _mm256_maskstore_epi32((int*)p + 8, kept.high, x.high);
}
inline f32x16 load(const float* p, Part m) { return floats_of(load_bits(p, m)); }
inline void store(float* p, f32x16 x, Part m) { store_bits(p, bits_of(x), m); }
inline f32x16 load(const bf16* p, Part m) {
    if (m.lanes == LANES) return load(p);
    bf16 kept[LANES] = {};
    std::memcpy(kept, p, m.lanes * sizeof(bf16));
    return load(kept);
}
inline void store(bf16* p, f32x16 x, Part m) {
    if (m.lanes == LANES) return store(p, x);
    bf16 kept[LANES];
    store(kept, x);
    std::memcpy(p, kept, m.lanes * sizeof(bf16));
}
inline i32x16 load_line(const bf16* p, LinePart m) {
    if (m.numbers == 2 * LANES) return load_bits(p);
    bf16 kept[2 * LANES] = {};
    std::memcpy(kept, p, m.numbers * sizeof(bf16));
    return load_bits(kept);
}
inline f32x16 load_f16(const std::uint16_t* p) {
    const __m128i* from = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
inline i32x16 load_bytes(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline mask16 lanes_with(const std::uint16_t* words, int bit) {
    const __m128i* from = (const __m128i*)words;
    const i32x16 wide{_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
    return has_bits(wide, splat(std::int32_t(1) << bit));
}

inline i32x16 lookup(const std::uint8_t* table, i32x16 codes) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, codes.low), _mm256_shuffle_epi8(both, codes.high)};
}

inline i32x16 dot_words(i32x16 a, i32x16 b) { return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)}; }
#ifdef __AVXVNNI__
inline i32x16 dot_bytes(i32x16 sum, i32x16 codes, i32x16 digits) {
    return {_mm256_dpbusd_avx_epi32(sum.low, codes.low, digits.low), _mm256_dpbusd_avx_epi32(sum.high, codes.high, digits.high)};
}
#endif
inline __m256i words_of(i32x16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8); }
inline __m128i bytes_of(i32x16 x) {
    const __m256i words = words_of(x);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void settle(i32x16& sum) { __asm__("" : "+x"(sum.low), "+x"(sum.high)); }

// e4m3 s eeee mmm is bfloat16 s (eeee + 120) mmm 0000. Its upper half depends on s eee alone; the lower half is the remainder of
// the code. Subnormal numbers come from separate tables.
struct Widener {
    static __m256i table(__m128i x) { return _mm256_broadcastsi128_si256(x); }
    // Upper halves by s eee, and both halves of m 2^-9.
    const __m256i upper = table(_mm_set_epi8(-61, -62, -63, -64, -65, -66, -67, -68, 67, 66, 65, 64, 63, 62, 61, 60));
    const __m256i small_upper = table(_mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 60, 60, 60, 60, 59, 59, 59, 0));
    const __m256i small_lower = table(_mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0x60, 0x40, 0x20, 0, char(0xc0), char(0x80), 0, 0));

    void widen(__m256i codes, __m256i& first, __m256i& second) const {
        const __m256i nibble = _mm256_set1_epi8(0x0f), sign = _mm256_set1_epi8(char(0x80));
        const __m256i magnitude = _mm256_andnot_si256(sign, codes);
        const __m256i small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude);
        const __m256i nan = _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f));
        __m256i high = _mm256_shuffle_epi8(upper, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
        __m256i low = _mm256_andnot_si256(nibble, _mm256_slli_epi16(codes, 4));
        const __m256i tiny = _mm256_or_si256(_mm256_shuffle_epi8(small_upper, magnitude), _mm256_and_si256(codes, sign));
        high = _mm256_blendv_epi8(_mm256_or_si256(high, _mm256_and_si256(nan, _mm256_set1_epi8(0x7f))), tiny, small);
        low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(small_lower, magnitude), small);
        first = _mm256_unpacklo_epi8(low, high);
        second = _mm256_unpackhi_epi8(low, high);
    }
    void operator()(const std::uint8_t* from, i32x16& first, i32x16& second) const {
        const i32x16 codes = load_bits(from);
        widen(codes.low, first.low, second.low);
        widen(codes.high, first.high, second.high);
    }
};

}  // namespace ridgeline
