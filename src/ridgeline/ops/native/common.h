// Element types, vector helpers and thread ranges shared by all operations.
// Built only for CPUs with AVX-512 F, BW, DQ and VL; AVX512_BF16 and AMX are used where the compiler targets them.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define RIDGELINE_API extern "C" __attribute__((visibility("default")))

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RIDGELINE_AMX 1
#else
#define RIDGELINE_AMX 0
#endif

namespace ridgeline {

using index = std::int64_t;

constexpr int LANES = 16;

// bfloat16: the upper half of a float32.
struct bf16 {
    std::uint16_t bits;
};

inline __mmask16 first_lanes(index n) { return n >= LANES ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }

inline __mmask32 first_halves(index n) { return n >= 2 * LANES ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

inline __m512 widen(__m256i low) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16)); }

// Round to nearest even.
inline __m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i kept = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}

// 32 numbers, `low` first.
inline __m512i narrow(__m512 high, __m512 low) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

// 16 float32 sums, each increased by the products of one pair of bfloat16 numbers (the second of the pair in the upper half).
inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32(std::int32_t(0xffff0000));
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store(float* p, __m512 x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(bf16* p, __m512 x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }

// x as the type T would hold it.
template <class T> inline __m512 rounded(__m512 x) {
    if constexpr (sizeof(T) == 2) return widen(narrow(x));
    return x;
}

// 2^x within 2 units in the last place: x = whole + part, |part| <= 1/2, Taylor's polynomial for 2^part. Bounded first, so
// that infinities do not become infinity minus infinity; a NaN, as second operand, passes. What is below the smallest normal
// number becomes 0 by a mask: to round such a number costs the CPU over 100 cycles.
inline __m512 exp2(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_max_ps(_mm512_set1_ps(-200.0f), x));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530393381609954e-4f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3333558146428443423e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291076284771619e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504108664821579953e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022650695910071233e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718055994530942e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, y, whole);
}

constexpr float LOG2E = 1.44269504088896340736f;

inline __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(LOG2E))); }

// 1 / (1 + e^-x)
inline __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// tanh x = 2 sigmoid(2 x) - 1, exact to 1e-7 of 1 (not of the result).
inline __m512 tanh(__m512 x) {
    return _mm512_fmsub_ps(_mm512_set1_ps(2.0f), sigmoid(_mm512_add_ps(x, x)), _mm512_set1_ps(1.0f));
}

// A 16 x 16 matrix of 32-bit elements, rows to columns.
inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            t[8 * j + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + i + 4], 0x88);
            t[8 * j + i + 4] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// The part of 0 .. n - 1 that is thread `who`'s of `of`.
struct Range {
    index begin, end;
};
inline Range share(index n, index who, index of) { return {n * who / of, n * (who + 1) / of}; }

// A thread among those that share an operation's work; all of them must come to every `wait`.
struct Team {
    int who, of;
    void wait() const {
        if (of > 1) {
#pragma omp barrier
        }
    }
};

// Memory of one call, aligned to a cache line.
struct Scratch {
    void* memory;
    explicit Scratch(index bytes) : memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
    ~Scratch() { std::free(memory); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};

inline int threads_for(index work, index least_each) {
    const index most = omp_in_parallel() ? 1 : omp_get_max_threads();
    return int(std::clamp<index>(work / least_each, 1, most));
}

// Whether the kernel lets this process use AMX tiles; asked once, when the library is opened.
extern bool tiles_allowed;

// All eight tiles of 16 rows of 64 bytes. The configuration belongs to the thread, and others (oneDNN) set their own.
struct TileConfig {
    const bool on;
    explicit TileConfig(bool wanted) : on(RIDGELINE_AMX && wanted) {
#if RIDGELINE_AMX
        if (!on) return;
        alignas(64) std::uint8_t bytes[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {
            bytes[16 + 2 * tile] = 64;
            bytes[48 + tile] = 16;
        }
        _tile_loadconfig(bytes);
#endif
    }
    ~TileConfig() {
#if RIDGELINE_AMX
        if (on) _tile_release();
#endif
    }
    TileConfig(const TileConfig&) = delete;
    TileConfig& operator=(const TileConfig&) = delete;
};

}  // namespace ridgeline
