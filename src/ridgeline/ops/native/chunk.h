// Attention of one block of packed queries over one chunk of keys, by vectors.
//
// The query heads that share a KV head are packed as extra queries, token by token. 16 packed queries are the lanes of a
// vector: scores are kept as [key][16 queries], so that masks, maxima and sums need no reduction across lanes. The softmax
// runs from chunk to chunk with a running maximum (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.
#pragma once

#include "visible.h"

#include <cmath>

namespace ridgeline {

constexpr index CHUNK = 128;
constexpr index MAX_DIM = 256;
constexpr index MAX_TILES = 2;  // of 16 packed queries, computed together

template <class T> struct Call {
    const View& view;
    const T* q;
    T* out;
    const T* cache;
    index heads, q_stride;  // q_stride: elements from one token's queries to the next

    index group() const { return heads / view.kv_heads; }
};

// Packed queries first .. first + count - 1 of one row and KV head, over the slots begin .. end - 1.
struct Item {
    index row, kv_head, first, count, begin, end;
    index partial;  // where its unfinished sums go, or -1
};

template <class T> struct Work {
    alignas(64) T q[MAX_TILES * LANES * MAX_DIM];  // per tile [dim / 2][16][2], float32 [dim][16]; few: [query][MAX_DIM]
    alignas(64) float scores[MAX_TILES][(CHUNK + LANES) * LANES];
    alignas(64) float sums[MAX_TILES * LANES * MAX_DIM];
    alignas(64) T weights[MAX_TILES * CHUNK * LANES];  // per tile [CHUNK / 32][16][32]; bfloat16 only
    alignas(64) T values[CHUNK * MAX_DIM];             // [CHUNK / 32][dim / 16][16][16][2]; tiles only
    const T* keys[CHUNK + LANES];
    // Of each query: the largest score so far, the sum of weights relative to it, what older sums shrink by.
    alignas(64) float top[MAX_TILES][LANES], total[MAX_TILES][LANES], fade[MAX_TILES][LANES];
};

template <class T> void pack_queries(const Call<T>& c, const Row& row, const Item& item, Work<T>& w) {
    constexpr index pair = sizeof(T) == 2 ? 2 : 1;
    const index dim = c.view.dim, group = c.group();
    const index tiles = (item.count + LANES - 1) / LANES;
    std::memset(w.q, 0, tiles * LANES * dim * sizeof(T));
    for (index i = 0; i < item.count; ++i) {
        const index at = item.first + i;
        const T* from = c.q + (row.first_token + at / group) * c.q_stride + (item.kv_head * group + at % group) * dim;
        T* to = w.q + i / LANES * LANES * dim + i % LANES * pair;
        for (index d = 0; d < dim; d += pair) std::memcpy(to + d * LANES, from + d, pair * sizeof(T));
    }
}

// The same for few queries: one behind the other, padded with zeros to whole vectors.
template <class T> void list_queries(const Call<T>& c, const Row& row, const Item& item, Work<T>& w) {
    const index dim = c.view.dim, group = c.group();
    for (index i = 0; i < item.count; ++i) {
        const index at = item.first + i;
        const T* from = c.q + (row.first_token + at / group) * c.q_stride + (item.kv_head * group + at % group) * dim;
        T* to = w.q + i * MAX_DIM;
        std::memcpy(to, from, dim * sizeof(T));
        std::memset(to + dim, 0, (-dim & 31) * sizeof(T));
    }
}

template <class T> void find_keys(const Call<T>& c, const Row& row, index kv_head, index begin, index n, Work<T>& w) {
    const View& v = c.view;
    const std::int32_t* table = v.table + row.device_row * v.table_stride;
    const T* head = c.cache + kv_head * v.head_stride;
    index page = begin / v.page_tokens, place = begin % v.page_tokens;
    for (index i = 0; i < n;) {
        const T* from = head + table[page] * v.page_stride + place * v.place_stride;
        for (; place < v.page_tokens && i < n; ++place, ++i, from += v.place_stride) w.keys[i] = from;
        ++page;
        place = 0;
    }
}

// Ask for the keys and values of a chunk ahead of time: pages lie anywhere, so nothing else foresees them.
template <class T> void fetch(const Call<T>& c, const Row& row, index kv_head, index begin, index end) {
    const View& v = c.view;
    const std::int32_t* table = v.table + row.device_row * v.table_stride;
    const index bytes = v.dim * sizeof(T);
    for (index slot = begin; slot < end; ++slot) {
        const index place = slot % v.page_tokens * v.place_stride;
        const T* key = c.cache + kv_head * v.head_stride + table[slot / v.page_tokens] * v.page_stride + place;
        for (index line = 0; line < bytes; line += 64) {
            _mm_prefetch((const char*)key + line, _MM_HINT_T0);
            _mm_prefetch((const char*)(key + v.kind_stride) + line, _MM_HINT_T1);
        }
    }
}

inline __m512 score_step(__m512 sum, const bf16* k, const bf16* q) {
    std::int32_t both;
    std::memcpy(&both, k, 4);
    return dot_pairs(sum, _mm512_set1_epi32(both), _mm512_load_si512(q));
}
inline __m512 score_step(__m512 sum, const float* k, const float* q) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*k), _mm512_load_ps(q), sum);
}

// Scores of n keys with the 16 queries of a tile, by vectors: four keys at a time, the queries' numbers stay in order.
template <class T> void score_vectors(const View& v, index tile, index n, Work<T>& w) {
    constexpr index pair = sizeof(T) == 2 ? 2 : 1, KEYS = 4;
    const T* q = w.q + tile * LANES * v.dim;
    for (index i = n; i % KEYS; ++i) w.keys[i] = w.keys[n - 1];
    for (index key = 0; key < n; key += KEYS) {
        __m512 sum[KEYS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (index d = 0; d < v.dim; d += pair)
#pragma GCC unroll 4
            for (index i = 0; i < KEYS; ++i) sum[i] = score_step(sum[i], w.keys[key + i] + d, q + d * LANES);
        for (index i = 0; i < KEYS; ++i) _mm512_store_ps(w.scores[tile] + (key + i) * LANES, sum[i]);
    }
}

// What weights are relative to: the maximum, or 0 where nothing was seen yet.
inline __m512 origin(__m512 top) {
    return _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ), _mm512_setzero_ps());
}

// Scores to weights 2^(score - top), the running maximum and sum moved on; w.fade is what older sums shrink by.
template <class T>
void soften(const View& v, const Row& row, const Lanes& lanes, index tile, index begin, index n, Work<T>& w) {
    float* scores = w.scores[tile];
    const bool capped = v.softcap != 0.0f, masked = !all_seen(v, row, lanes, begin, begin + n);
    const __m512 scale = _mm512_set1_ps(capped ? v.scale / v.softcap : v.scale * LOG2E);
    const __m512 cap = _mm512_set1_ps(v.softcap * LOG2E), never = _mm512_set1_ps(-INFINITY);
    __m512 top = _mm512_load_ps(w.top[tile]);
    for (index key = 0; key < n; ++key) {
        __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + key * LANES), scale);
        if (capped) x = _mm512_mul_ps(tanh(x), cap);
        if (masked) x = _mm512_mask_mov_ps(never, seen(v, row, lanes, begin + key), x);
        _mm512_store_ps(scores + key * LANES, x);
        top = _mm512_max_ps(top, x);
    }
    const __m512 from = origin(top);
    __m512 total = _mm512_setzero_ps();
    for (index key = 0; key < n; ++key) {
        const __m512 weight = exp2(_mm512_sub_ps(_mm512_load_ps(scores + key * LANES), from));
        total = _mm512_add_ps(total, weight);
        _mm512_store_ps(scores + key * LANES, weight);
    }
    const __m512 fade = exp2(_mm512_sub_ps(_mm512_load_ps(w.top[tile]), from));
    _mm512_store_ps(w.fade[tile], fade);
    _mm512_store_ps(w.total[tile], _mm512_fmadd_ps(_mm512_load_ps(w.total[tile]), fade, total));
    _mm512_store_ps(w.top[tile], top);
}

template <class T> void fade_sums(index tile, index count, index dim, Work<T>& w) {
    for (index q = 0; q < count; ++q) {
        if (w.fade[tile][q] == 1.0f) continue;
        float* sums = w.sums + (tile * LANES + q) * dim;
        for (index d = 0; d < dim; d += LANES) {
            const __mmask16 kept = first_lanes(dim - d);
            store(sums + d, _mm512_mul_ps(load(sums + d, kept), _mm512_set1_ps(w.fade[tile][q])), kept);
        }
    }
}

inline void add_values(const View& v, index tile, index count, index n, Work<float>& w) {
    constexpr index WIDE = 4;
    const float* weights = w.scores[tile];
    for (index q = 0; q < count; ++q)
        for (index d = 0; d < v.dim; d += WIDE * LANES) {
            float* sums = w.sums + (tile * LANES + q) * v.dim + d;
            __mmask16 kept[WIDE];
            __m512 sum[WIDE];
            for (index i = 0; i < WIDE; ++i) {
                kept[i] = first_lanes(std::max<index>(0, v.dim - d - i * LANES));
                sum[i] = load(sums + i * LANES, kept[i]);
            }
            for (index key = 0; key < n; ++key) {
                const __m512 weight = _mm512_set1_ps(weights[key * LANES + q]);
                const float* value = w.keys[key] + v.kind_stride + d;
#pragma GCC unroll 4
                for (index i = 0; i < WIDE; ++i) sum[i] = _mm512_fmadd_ps(weight, load(value + i * LANES, kept[i]), sum[i]);
            }
            for (index i = 0; i < WIDE; ++i) store(sums + i * LANES, sum[i], kept[i]);
        }
}

}  // namespace ridgeline
