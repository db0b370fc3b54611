// Attention over one chunk of keys by vectors, in bfloat16: weights and values in pairs, and few queries with keys as lanes.
#pragma once

#include "chunk.h"

namespace ridgeline {

constexpr index FEW = 4;          // queries of a tile that are worth softening by keys
constexpr index FEW_VECTORS = 8;  // the same without tiles

// Weights [key][16 queries] to tiles [16 queries][32 keys]; those of the keys from n on are 0.
inline void pack_weights(index tile, index n, Work<bf16>& w) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                                21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const float* from = w.scores[tile];
    bf16* to = w.weights + tile * CHUNK * LANES;
    for (index key = 0; key < n; key += 32) {
        __m512i pairs[16];
        for (index i = 0; i < 16; ++i) {
            const index at = key + 2 * i;
            const __m512 first = at < n ? _mm512_load_ps(from + at * LANES) : _mm512_setzero_ps();
            const __m512 second = at + 1 < n ? _mm512_load_ps(from + (at + 1) * LANES) : _mm512_setzero_ps();
            pairs[i] = _mm512_permutexvar_epi16(interleave, narrow(second, first));
        }
        transpose(pairs);
        for (index q = 0; q < 16; ++q) _mm512_store_si512(to + key * LANES + q * 32, pairs[q]);
    }
}

// soften and pack_weights for few queries, with keys as lanes: 16 queries would leave most lanes idle. score: the scores of n
// keys with query q, [query][CHUNK]; room for `end` of them, a multiple of 32.
inline void soften_few(const View& v, const Row& row, const Lanes& lanes, index count, index begin, index n, float* score,
                       Work<bf16>& w) {
    const bool capped = v.softcap != 0.0f, masked = !all_seen(v, row, lanes, begin, begin + n);
    const __m512 scale = _mm512_set1_ps(capped ? v.scale / v.softcap : v.scale * LOG2E);
    const __m512 cap = _mm512_set1_ps(v.softcap * LOG2E), never = _mm512_set1_ps(-INFINITY);
    const index end = (n + 31) / 32 * 32;
    alignas(64) std::uint16_t who[CHUNK] = {};
    for (index key = 0; key < n; ++key) who[key] = masked ? seen(v, row, lanes, begin + key) : 0xffff;
    for (index q = 0; q < count; ++q, score += CHUNK) {
        __m512 top = never, total = _mm512_setzero_ps();
        for (index key = 0; key < end; key += LANES) {
            const __m256i bits = _mm256_load_si256((const __m256i*)(who + key));
            const __mmask16 kept = _mm256_test_epi16_mask(bits, _mm256_set1_epi16(std::int16_t(1 << q)));
            __m512 x = _mm512_mul_ps(_mm512_load_ps(score + key), scale);
            if (capped) x = _mm512_mul_ps(tanh(x), cap);
            x = _mm512_mask_mov_ps(never, kept, x);
            _mm512_store_ps(score + key, x);
            top = _mm512_max_ps(top, x);
        }
        const float best = std::max(w.top[0][q], _mm512_reduce_max_ps(top));
        const __m512 from = origin(_mm512_set1_ps(best));
        for (index key = 0; key < end; key += LANES) {
            const __m512 weight = exp2(_mm512_sub_ps(_mm512_load_ps(score + key), from));
            total = _mm512_add_ps(total, weight);
            store(w.weights + key / 32 * 32 * LANES + q * 32 + key % 32, weight);
        }
        w.fade[0][q] = _mm512_cvtss_f32(exp2(_mm512_sub_ps(_mm512_set1_ps(w.top[0][q]), from)));
        w.total[0][q] = w.total[0][q] * w.fade[0][q] + _mm512_reduce_add_ps(total);
        w.top[0][q] = best;
    }
}

// Values of two keys side by side times their weights, which lie in pairs too, for QUERIES queries from `first` on and HALVES
// times 32 numbers of each value from `d` on.
template <int QUERIES, int HALVES> void add_value_pairs(const View& v, index tile, index first, index d, index n, Work<bf16>& w) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const bf16* weights = w.weights + tile * CHUNK * LANES + first * 32;
    const __mmask32 kept[2] = {first_halves(v.dim - d), first_halves(v.dim - d - 32)};
    __m512 sum[QUERIES][2 * HALVES];
    for (auto& of_query : sum)
        for (auto& one : of_query) one = _mm512_setzero_ps();
    for (index key = 0; key < n; key += 2) {
        const bf16* a = w.keys[key] + v.kind_stride + d;
        // Behind the last key comes nothing: what lies there times a weight of 0 could be NaN.
        const bool both = key + 1 < n;
        const bf16* b = both ? w.keys[key + 1] + v.kind_stride + d : a;
        __m512i pair[2 * HALVES];
#pragma GCC unroll 2
        for (int i = 0; i < HALVES; ++i) {
            const __m512i x = _mm512_maskz_loadu_epi16(kept[i], a + 32 * i);
            const __m512i y = _mm512_maskz_loadu_epi16(both ? kept[i] : 0, b + 32 * i);
            pair[2 * i] = _mm512_unpacklo_epi16(x, y);
            pair[2 * i + 1] = _mm512_unpackhi_epi16(x, y);
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q) {
            std::int32_t weight;
            std::memcpy(&weight, weights + key / 32 * 32 * LANES + q * 32 + key % 32, 4);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * HALVES; ++i) sum[q][i] = dot_pairs(sum[q][i], _mm512_set1_epi32(weight), pair[i]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q) {
        float* sums = w.sums + (tile * LANES + first + q) * v.dim + d;
        const __m512 fade = _mm512_set1_ps(w.fade[tile][first + q]);
#pragma GCC unroll 4
        for (int i = 0; i < 2 * HALVES; ++i) {
            const __mmask16 lanes = first_lanes(std::max<index>(0, v.dim - d - i * LANES));
            const __m512 fresh = _mm512_permutex2var_ps(sum[q][i / 2 * 2], i % 2 ? high : low, sum[q][i / 2 * 2 + 1]);
            store(sums + i * LANES, _mm512_fmadd_ps(load(sums + i * LANES, lanes), fade, fresh), lanes);
        }
    }
}

// Twice as many queries at a time where half as many registers hold a value.
template <int HALVES> void add_part(const View& v, index tile, index count, index d, index n, Work<bf16>& w) {
    constexpr int MOST = HALVES == 1 ? 8 : 4;
    index first = 0;
    for (; first + MOST <= count; first += MOST) add_value_pairs<MOST, HALVES>(v, tile, first, d, n, w);
    if (count - first >= 4) add_value_pairs<4, HALVES>(v, tile, first, d, n, w), first += 4;
    if (count - first == 3) add_value_pairs<3, HALVES>(v, tile, first, d, n, w);
    if (count - first == 2) add_value_pairs<2, HALVES>(v, tile, first, d, n, w);
    if (count - first == 1) add_value_pairs<1, HALVES>(v, tile, first, d, n, w);
}

inline void add_values(const View& v, index tile, index count, index n, Work<bf16>& w) {
    for (index d = 0; d < v.dim; d += 64) {
        if (v.dim - d > 32) {
            add_part<2>(v, tile, count, d, n, w);
        } else {
            add_part<1>(v, tile, count, d, n, w);
        }
    }
}

// Sums of each of four vectors, spread over the four parts of one: [part][vector].
inline __m512 sum_four(const __m512 (&x)[4]) {
    const __m512d a = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])));
    const __m512d b = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// The four parts of each of four vectors added up: [vector][16 / 4].
inline __m512 sum_parts(const __m512 (&x)[4]) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Scores of n keys with QUERIES queries from `first` on, each key read once: to w.scores[0], [query][CHUNK].
template <int QUERIES> void score_few(const View& v, index first, index n, Work<bf16>& w) {
    const bf16* q = w.q + first * MAX_DIM;
    for (index i = n; i % LANES; ++i) w.keys[i] = w.keys[n - 1];
    for (index key = 0; key < n; key += LANES) {
        __m512 fours[QUERIES][4];
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) {
            __m512 sum[QUERIES][4];
            for (auto& of_query : sum)
                for (auto& one : of_query) one = _mm512_setzero_ps();
            for (index d = 0; d < v.dim; d += 32)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const __m512i k = _mm512_maskz_loadu_epi16(first_halves(v.dim - d), w.keys[key + 4 * four + i] + d);
#pragma GCC unroll 4
                    for (int at = 0; at < QUERIES; ++at)
                        sum[at][i] = dot_pairs(sum[at][i], _mm512_load_si512(q + at * MAX_DIM + d), k);
                }
#pragma GCC unroll 4
            for (int at = 0; at < QUERIES; ++at) fours[at][four] = sum_four(sum[at]);
        }
        for (int at = 0; at < QUERIES; ++at)
            _mm512_store_ps(w.scores[0] + (first + at) * CHUNK + key, sum_parts(fours[at]));
    }
}

// A chunk for at most FEW_VECTORS packed queries.
inline void chunk_of_few(
    const View& v, const Row& row, const Lanes& lanes, index count, index begin, index n, Work<bf16>& w) {
    index first = 0;
    for (; first + 4 <= count; first += 4) score_few<4>(v, first, n, w);
    if (count - first == 3) score_few<3>(v, first, n, w);
    if (count - first == 2) score_few<2>(v, first, n, w);
    if (count - first == 1) score_few<1>(v, first, n, w);
    soften_few(v, row, lanes, count, begin, n, w.scores[0], w);
    add_values(v, 0, count, n, w);
}

// A chunk for one tile of packed queries.
template <class T>
void chunk_by_vectors(const View& v, const Row& row, const Lanes& lanes, index tile, index count, index begin, index n,
                      Work<T>& w) {
    score_vectors(v, tile, n, w);
    soften(v, row, lanes, tile, begin, n, w);
    if constexpr (sizeof(T) == 2) {
        pack_weights(tile, n, w);
    } else {
        fade_sums(tile, count, v.dim, w);
    }
    add_values(v, tile, count, n, w);
}

}  // namespace ridgeline
