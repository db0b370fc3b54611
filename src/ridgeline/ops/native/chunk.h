// Attention of one block of packed queries over one chunk of keys, by vectors.
//
// Query heads that share a KV head are packed as extra queries, token by token. 16 packed queries are the lanes of a vector. Scores
// are stored as [key][16 queries], so that masks, maxima and sums need no reduction across lanes. The softmax uses a running
// maximum over the chunks (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.
#pragma once

#include "stored.h"
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
    float* lse = nullptr;   // [tokens, heads], null: not needed

    index group() const { return heads / view.kv_heads; }
};

// Packed queries first .. first + count - 1 of one row and KV head, over the slots begin .. end - 1.
struct Item {
    index row, kv_head, first, count, begin, end;
    index partial;  // index of its partial sums, or -1
};

template <class T> struct Work {
    Work() = default;
    Work(const Work&) = delete;  // it contains pointers to itself
    alignas(64) T q[MAX_TILES * LANES * MAX_DIM];  // per tile [dim / 2][16][2], float32 [dim][16]; few: [query][MAX_DIM]
    alignas(64) float scores[MAX_TILES][(CHUNK + LANES) * LANES];
    alignas(64) float sums[MAX_TILES * LANES * MAX_DIM];
    alignas(64) T weights[MAX_TILES * CHUNK * LANES];  // per tile [CHUNK / 32][16][32]; bfloat16 only
    alignas(64) T values[CHUNK * MAX_DIM];             // tiles: [CHUNK / 32][dim / 16][16][16][2]; else 32 keys, [dim / 2][2][16][2]
    const T* lists[2][CHUNK + LANES];
    const T** keys = lists[0];   // of the current chunk
    const T** ahead = lists[1];  // of the next chunk
    index coming = 0;            // number of keys in `ahead`
    alignas(64) T decoded[(CHUNK + LANES) * 2 * MAX_DIM];  // keys and values of the current chunk, where the cache stores codes
    // Per query: largest score so far, sum of weights relative to it, factor for older sums.
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

// The same for few queries: contiguous, padded with zeros to complete vectors.
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

// Number of an item's keys that are computed together from `begin` on. In a fixed order all chunks end at multiples of CHUNK,
// wherever a window begins.
inline index chunk_of(const View& v, index begin, index end) {
    return std::min(CHUNK - (v.fixed ? begin % CHUNK : 0), end - begin);
}

// Collect the addresses of the next chunk's keys.
template <class T> void foresee(const Call<T>& c, const Row& row, index kv_head, index begin, index end, Work<T>& w) {
    const View& v = c.view;
    const index n = w.coming = chunk_of(v, begin, end);
    if (v.format != Format::MODEL) {
        for (index i = 0; i < n; ++i) w.ahead[i] = w.decoded + i * 2 * v.dim;
        return;
    }
    const std::int32_t* table = v.table + row.device_row * v.table_stride;
    const T* head = c.cache + kv_head * v.head_stride;
    index page = begin / v.page_tokens, place = begin % v.page_tokens;
    for (index i = 0; i < n;) {
        const T* from = head + table[page] * v.page_stride + place * v.place_stride;
        for (; place < v.page_tokens && i < n; ++place, ++i, from += v.place_stride) w.ahead[i] = from;
        ++page;
        place = 0;
    }
}

// Decode the keys and values of a chunk to where `foresee` says that they lie.
template <class T> void decode_chunk(const Call<T>& c, const Row& row, index kv_head, index begin, index n, Work<T>& w) {
    const View& v = c.view;
    const std::int32_t* table = v.table + row.device_row * v.table_stride;
    for (index i = 0; i < n; ++i) {
        const index slot = begin + i, page = table[slot / v.page_tokens], place = slot % v.page_tokens;
        T* to = w.decoded + i * 2 * v.dim;
        decode(v, Vector(v, c.cache, page, place, 0, kv_head), to);
        decode(v, Vector(v, c.cache, page, place, 1, kv_head), to + v.dim);
    }
}

// The view of keys and values after decode_chunk.
inline View as_decoded(const View& v) {
    View decoded = v;
    decoded.kind_stride = v.dim;
    decoded.place_stride = 2 * v.dim;
    return decoded;
}

// Prefetch some of the next keys, or their values, at a fixed distance from each key. Pages are scattered, so the hardware
// prefetcher does not predict them. Prefetches are spread over other work, because many at once would queue.
template <class T> void ask(const View& v, index from, index count, index behind, const Work<T>& w) {
    const index end = std::min(from + count, w.coming), bytes = v.dim * sizeof(T);
    for (; from < end; ++from)
        for (index line = 0; line < bytes; line += 64) _mm_prefetch((const char*)(w.ahead[from] + behind) + line, _MM_HINT_T0);
}

template <class T> void ask_all(const View& v, const Work<T>& w) {
    ask(v, 0, w.coming, 0, w);
    ask(v, 0, w.coming, v.kind_stride, w);
}

inline f32x16 score_step(f32x16 sum, const bf16* k, const bf16* q) {
    std::int32_t both;
    std::memcpy(&both, k, 4);
    return dot_pairs(sum, splat(both), load_bits(q));
}
inline f32x16 score_step(f32x16 sum, const float* k, const float* q) {
    return fma(splat(*k), load(q), sum);
}

// Scores of n keys with the 16 queries of a tile, by vectors: four keys at a time; the queries' elements stay in order.
template <class T> void score_vectors(const View& v, index tile, index n, Work<T>& w) {
    constexpr index pair = sizeof(T) == 2 ? 2 : 1, KEYS = 4;
    const T* q = w.q + tile * LANES * v.dim;
    for (index i = n; i % KEYS; ++i) w.keys[i] = w.keys[n - 1];
    for (index key = 0; key < n; key += KEYS) {
        if (!tile) ask(v, key, KEYS, 0, w);
        f32x16 sum[KEYS] = {zeros(), zeros(), zeros(), zeros()};
        for (index d = 0; d < v.dim; d += pair)
#pragma GCC unroll 4
            for (index i = 0; i < KEYS; ++i) sum[i] = score_step(sum[i], w.keys[key + i] + d, q + d * LANES);
        for (index i = 0; i < KEYS; ++i) store(w.scores[tile] + (key + i) * LANES, sum[i]);
    }
}

// Reference of the weights: the maximum, or 0 if no key was seen yet.
inline f32x16 origin(f32x16 top) {
    return select(equal(top, splat(-INFINITY)), zeros(), top);
}

// Convert scores to weights 2^(score - top), and update the running maximum and sum. w.fade: factor for older sums.
template <class T>
void soften(const View& v, const Row& row, const Lanes& lanes, index tile, index begin, index n, Work<T>& w) {
    float* scores = w.scores[tile];
    const bool capped = v.softcap != 0.0f;
    const index sure = surely_seen(v, row, lanes, begin, begin + n);
    const f32x16 scale = splat(capped ? v.scale / v.softcap : v.scale * LOG2E);
    const f32x16 cap = splat(v.softcap * LOG2E), never = splat(-INFINITY);
    f32x16 top = load(w.top[tile]);
    for (index key = 0; key < n; ++key) {
        f32x16 x = load(scores + key * LANES) * scale;
        if (capped) x = tanh(x) * cap;
        if (key >= sure) x = select(seen(v, row, lanes, begin + key), x, never);
        store(scores + key * LANES, x);
        top = max(top, x);
    }
    const f32x16 from = origin(top);
    f32x16 total = zeros();
    for (index key = 0; key < n; ++key) {
        const f32x16 weight = exp2(load(scores + key * LANES) - from);
        total = total + weight;
        store(scores + key * LANES, weight);
    }
    const f32x16 fade = exp2(load(w.top[tile]) - from);
    store(w.fade[tile], fade);
    store(w.total[tile], fma(load(w.total[tile]), fade, total));
    store(w.top[tile], top);
}

template <class T> void fade_sums(index tile, index count, index dim, Work<T>& w) {
    for (index q = 0; q < count; ++q) {
        if (w.fade[tile][q] == 1.0f) continue;
        float* sums = w.sums + (tile * LANES + q) * dim;
        for (index d = 0; d < dim; d += LANES) {
            const Part kept = first_lanes(dim - d);
            store(sums + d, load(sums + d, kept) * splat(w.fade[tile][q]), kept);
        }
    }
}

inline void add_values(const View& v, index tile, index count, index n, Work<float>& w) {
    constexpr index WIDE = 4;
    const float* weights = w.scores[tile];
    for (index q = 0; q < count; ++q)
        for (index d = 0; d < v.dim; d += WIDE * LANES) {
            float* sums = w.sums + (tile * LANES + q) * v.dim + d;
            Part kept[WIDE];
            f32x16 sum[WIDE];
            for (index i = 0; i < WIDE; ++i) {
                kept[i] = first_lanes(std::max<index>(0, v.dim - d - i * LANES));
                sum[i] = load(sums + i * LANES, kept[i]);
            }
            for (index key = 0; key < n; ++key) {
                const f32x16 weight = splat(weights[key * LANES + q]);
                const float* value = w.keys[key] + v.kind_stride + d;
#pragma GCC unroll 4
                for (index i = 0; i < WIDE; ++i) sum[i] = fma(weight, load(value + i * LANES, kept[i]), sum[i]);
            }
            for (index i = 0; i < WIDE; ++i) store(sums + i * LANES, sum[i], kept[i]);
        }
}

}  // namespace ridgeline
