// Attention of one block of packed queries over one chunk of keys, with AMX tiles.
//
// Keys are the first operand, loaded directly from their page, 16 of them per tile. Packed queries are the second operand, so
// scores have the layout [key][16 queries]. Values are first interleaved in pairs, as the second operand requires.
#pragma once

#include "chunk_vectors.h"

namespace ridgeline {

#if RIDGELINE_AMX

// Scores of 32 keys with `tiles` tiles of queries. 16 keys, loaded from their page, are the first operand.
inline void score_tiles(const View& v, index tiles, index n, Work<bf16>& w) {
    constexpr index TILE = LANES * 32;
    const index stride = v.place_stride * 2, each = LANES * v.dim, second_q = tiles > 1 ? each : 0;
    for (index key = 0; key < n; key += 2 * LANES) {
        const bf16* k0 = w.keys[key];
        const bf16* k1 = key + LANES < n ? w.keys[key + LANES] : k0;
        const bf16* q = w.q;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (index d = 0; d < v.dim; d += 32, q += TILE) {
            _tile_loadd(4, k0 + d, stride);
            _tile_loadd(5, k1 + d, stride);
            _tile_loadd(6, q, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (tiles > 1) {
                _tile_loadd(7, q + second_q, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, w.scores[0] + key * LANES, 64);
        _tile_stored(1, w.scores[0] + (key + LANES) * LANES, 64);
        if (tiles > 1) {
            _tile_stored(2, w.scores[1] + key * LANES, 64);
            _tile_stored(3, w.scores[1] + (key + LANES) * LANES, 64);
        }
    }
}

// Store the first four columns of 16 rows of 16 numbers, each at to[column] + at.
inline void columns(const float* from, float* const (&to)[FEW], index at) {
    __m512 r[4];
    for (index i = 0; i < 4; ++i) {
        r[i] = _mm512_castps128_ps512(_mm_load_ps(from + i * LANES));
        r[i] = _mm512_insertf32x4(r[i], _mm_load_ps(from + (4 + i) * LANES), 1);
        r[i] = _mm512_insertf32x4(r[i], _mm_load_ps(from + (8 + i) * LANES), 2);
        r[i] = _mm512_insertf32x4(r[i], _mm_load_ps(from + (12 + i) * LANES), 3);
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1])), d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
    _mm512_store_ps(to[0] + at, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
    _mm512_store_ps(to[1] + at, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    _mm512_store_ps(to[2] + at, _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)));
    _mm512_store_ps(to[3] + at, _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

// Interleave the values of two adjacent keys, 32 numbers at a time. Columns 4 l .. 4 l + 3 of the first tile are numbers 8 l .. 8 l
// + 3, those of the second tile the next four (the order of the unpack instructions; finish() restores it).
inline void pack_values(const View& v, index n, Work<bf16>& w) {
    const index tiles = v.dim / LANES;
    for (index at = 0; at < (n + 31) / 32 * 32; at += 2) {
        // Keys past the end count as zeros, because the memory there may be NaN, and 0 times NaN is NaN.
        const __mmask32 has_first = at < n ? ~0u : 0, has_second = at + 1 < n ? ~0u : 0;
        const bf16* first = w.keys[std::min(at, n - 1)] + v.kind_stride;
        const bf16* second = w.keys[std::min(at + 1, n - 1)] + v.kind_stride;
        bf16* to = w.values + at / 32 * 32 * v.dim + at % 32 * LANES;
        for (index tile = 0; tile < tiles; tile += 2) {
            const __m512i a = _mm512_maskz_loadu_epi16(has_first, first + tile * LANES);
            const __m512i b = _mm512_maskz_loadu_epi16(has_second, second + tile * LANES);
            _mm512_store_si512(to + tile * LANES * 32, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + (tile + 1) * LANES * 32, _mm512_unpackhi_epi16(a, b));
        }
    }
}

// One tile of queries times 64 elements of the values, with four sums at once, because each product waits for the previous one.
inline void add_wide_values(const View& v, index n, index d, Work<bf16>& w) {
    constexpr index TILE = LANES * 32;
    const index stride = v.dim * 4;
    float* sums = w.sums + d;
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + LANES, stride);
    _tile_loadd(2, sums + 2 * LANES, stride);
    _tile_loadd(3, sums + 3 * LANES, stride);
    for (index key = 0; key < n; key += 32) {
        const bf16* value = w.values + key * v.dim + d * 32;
        _tile_loadd(4, w.weights + key * LANES, 64);
        _tile_loadd(5, value, 64);
        _tile_loadd(6, value + TILE, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, value + 2 * TILE, 64);
        _tile_loadd(6, value + 3 * TILE, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + LANES, stride);
    _tile_stored(2, sums + 2 * LANES, stride);
    _tile_stored(3, sums + 3 * LANES, stride);
}

inline void add_values_tiles(const View& v, index tiles, index n, Work<bf16>& w) {
    constexpr index TILE = LANES * 32;
    const index stride = v.dim * 4;
    index d = 0;
    for (; tiles == 1 && d + 4 * LANES <= v.dim; d += 4 * LANES) add_wide_values(v, n, d, w);
    for (; d < v.dim; d += 2 * LANES) {
        float* sums = w.sums + d;
        float* more = sums + LANES * v.dim;
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + LANES, stride);
        if (tiles > 1) {
            _tile_loadd(2, more, stride);
            _tile_loadd(3, more + LANES, stride);
        }
        for (index key = 0; key < n; key += 32) {
            const bf16* value = w.values + key * v.dim + d * 32;
            _tile_loadd(4, w.weights + key * LANES, 64);
            _tile_loadd(6, value, 64);
            _tile_loadd(7, value + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (tiles > 1) {
                _tile_loadd(5, w.weights + (CHUNK + key) * LANES, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + LANES, stride);
        if (tiles > 1) {
            _tile_stored(2, more, stride);
            _tile_stored(3, more + LANES, stride);
        }
    }
}

// Convert from the order of pack_values to the order of a head.
inline void restore_order(index rows, index dim, float* sums) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (index at = 0; at < rows * dim; at += 32) {
        const __m512 a = _mm512_load_ps(sums + at), b = _mm512_load_ps(sums + at + LANES);
        _mm512_store_ps(sums + at, _mm512_permutex2var_ps(a, low, b));
        _mm512_store_ps(sums + at + LANES, _mm512_permutex2var_ps(a, high, b));
    }
}

inline void chunk_by_tiles(
    const View& v, const Row& row, const Lanes* lanes, index count, index begin, index n, Work<bf16>& w) {
    const index tiles = (count + LANES - 1) / LANES;
    score_tiles(v, tiles, n, w);
    // Placed long before the use: a tile load waits until the stores that produced it have reached the cache.
    pack_values(v, n, w);
    if (count <= FEW && !v.fixed) {
        float* scores[FEW];
        for (index q = 0; q < FEW; ++q) scores[q] = w.scores[1] + q * CHUNK;
        for (index key = 0; key < n; key += LANES) columns(w.scores[0] + key * LANES, scores, key);
        soften_few(v, row, lanes[0], count, begin, n, w.scores[1], w);
        fade_sums(0, count, v.dim, w);
    } else {
        for (index tile = 0; tile < tiles; ++tile) {
            soften(v, row, lanes[tile], tile, begin, n, w);
            fade_sums(tile, std::min<index>(LANES, count - tile * LANES), v.dim, w);
            pack_weights(tile, n, w);
        }
    }
    add_values_tiles(v, tiles, n, w);
}

#else

inline void chunk_by_tiles(const View&, const Row&, const Lanes*, index, index, index, Work<bf16>&) {}
inline void restore_order(index, index, float*) {}

#endif

}  // namespace ridgeline
