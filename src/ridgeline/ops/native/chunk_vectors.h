// Attention over one chunk of keys by vectors in bfloat16: weights and values in pairs; for few queries, keys as lanes.
#pragma once

#include "chunk.h"

#include <utility>

namespace ridgeline {

constexpr index FEW = 4;          // up to this many queries of a tile use keys as lanes in the softmax
// Without AMX tiles: largest number of queries whose products with a key are added up, and largest number with keys as lanes from
// the start.
constexpr index FEW_VECTORS = SUMS >= 24 ? 4 : 8, SOME_VECTORS = SUMS >= 24 ? 15 : FEW_VECTORS;

// Convert weights [key][16 queries] to tiles [16 queries][32 keys]; weights of keys from n on are 0.
inline void pack_weights(index tile, index n, Work<bf16>& w) {
    const float* from = w.scores[tile];
    bf16* to = w.weights + tile * CHUNK * LANES;
    for (index key = 0; key < n; key += 32) {
        i32x16 part[16];
        for (index i = 0; i < 16; ++i) {
            const index at = key + 2 * i;
            const f32x16 first = at < n ? load(from + at * LANES) : zeros();
            const f32x16 second = at + 1 < n ? load(from + (at + 1) * LANES) : zeros();
            part[i] = pairs(first, second);
        }
        transpose(part);
        for (index q = 0; q < 16; ++q) store_bits(to + key * LANES + q * 32, part[q]);
    }
}

// soften and pack_weights for few queries, with keys as lanes: with 16 queries as lanes most lanes would be idle. score: scores of
// n keys with query q, [query][CHUNK]. end: space for keys, a multiple of 32.
inline void soften_few(const View& v, const Row& row, const Lanes& lanes, index count, index begin, index n, float* score,
                       Work<bf16>& w) {
    const bool capped = v.softcap != 0.0f;
    const index sure = surely_seen(v, row, lanes, begin, begin + n);
    const f32x16 scale = splat(capped ? v.scale / v.softcap : v.scale * LOG2E);
    const f32x16 cap = splat(v.softcap * LOG2E), never = splat(-INFINITY);
    const index end = (n + 31) / 32 * 32;
    alignas(64) std::uint16_t who[CHUNK] = {};
    std::memset(who, 0xff, sure * sizeof(*who));
    for (index key = sure; key < n; ++key) who[key] = word_of(seen(v, row, lanes, begin + key));
    // Compute all maxima first, because each has a long latency.
    alignas(64) float best[LANES];
    for (index q = 0; q < count; ++q) {
        f32x16 top = never;
        float* own = score + q * CHUNK;
        for (index key = 0; key < end; key += LANES) {
            f32x16 x = load(own + key) * scale;
            if (capped) x = tanh(x) * cap;
            x = select(lanes_with(who + key, q), x, never);
            store(own + key, x);
            top = max(top, x);
        }
        best[q] = std::max(w.top[0][q], max_of(top));
    }
    for (index q = 0; q < count; ++q, score += CHUNK) {
        const f32x16 from = origin(splat(best[q]));
        f32x16 total = zeros();
        for (index key = 0; key < end; key += LANES) {
            const f32x16 weight = exp2(load(score + key) - from);
            total = total + weight;
            store(w.weights + key / 32 * 32 * LANES + q * 32 + key % 32, weight);
        }
        w.fade[0][q] = first_of(exp2(splat(w.top[0][q]) - from));
        w.total[0][q] = w.total[0][q] * w.fade[0][q] + sum_of(total);
        w.top[0][q] = best[q];
    }
}

// Values of two adjacent keys times their weights, both in pairs, for QUERIES queries from `first` on and HALVES times 32 elements
// of each value from `d` on.
template <int QUERIES, int HALVES> void add_value_pairs(const View& v, index tile, index first, index d, index n, Work<bf16>& w) {
    const bf16* weights = w.weights + tile * CHUNK * LANES + first * 32;
    const bool asks = !(tile || first || d);
    const LinePart kept[2] = {first_numbers(v.dim - d), first_numbers(v.dim - d - 32)};
    f32x16 sum[QUERIES][2 * HALVES];
    for (auto& of_query : sum)
        for (auto& one : of_query) one = zeros();
    for (index key = 0; key < n; key += 2) {
        if (asks) ask(v, key, 2, v.kind_stride, w);
        const bf16* a = w.keys[key] + v.kind_stride + d;
        // Keys past the last use zeros: the memory there may be NaN, which a weight of 0 would not remove.
        const bool both = key + 1 < n;
        const bf16* b = both ? w.keys[key + 1] + v.kind_stride + d : a;
        i32x16 pair[2 * HALVES];
#pragma GCC unroll 2
        for (int i = 0; i < HALVES; ++i) {
            const i32x16 x = load_line(a + 32 * i, kept[i]);
            const i32x16 y = load_line(b + 32 * i, both ? kept[i] : first_numbers(0));
            pair[2 * i] = unpack_low_16(x, y);
            pair[2 * i + 1] = unpack_high_16(x, y);
        }
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; ++q) {
            std::int32_t weight;
            std::memcpy(&weight, weights + key / 32 * 32 * LANES + q * 32 + key % 32, 4);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * HALVES; ++i) sum[q][i] = dot_pairs(sum[q][i], splat(weight), pair[i]);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; ++q) {
        float* sums = w.sums + (tile * LANES + first + q) * v.dim + d;
        const f32x16 fade = splat(w.fade[tile][first + q]);
#pragma GCC unroll 4
        for (int i = 0; i < 2 * HALVES; ++i) {
            const Part lanes = first_lanes(std::max<index>(0, v.dim - d - i * LANES));
            const f32x16 a = sum[q][i / 2 * 2], b = sum[q][i / 2 * 2 + 1];
            const f32x16 fresh = i % 2 ? unpacked_high(a, b) : unpacked_low(a, b);
            store(sums + i * LANES, fma(load(sums + i * LANES, lanes), fade, fresh), lanes);
        }
    }
}

// Call act<n>() for the n from 1 to MOST that equals `count`.
template <class Act, int... BEFORE> void as_many(index count, Act&& act, std::integer_sequence<int, BEFORE...>) {
    ((count == BEFORE + 1 ? act(std::integral_constant<int, BEFORE + 1>()) : void()), ...);
}

// Call act(queries, first) for all queries, in the fewest groups of about equal size whose sums stay in registers.
template <int MOST, class Act> void in_turns(index count, Act&& act) {
    index first = 0;
    for (index turns = (count + MOST - 1) / MOST; turns; --turns) {
        const index queries = (count - first + turns - 1) / turns;
        as_many(queries, [&](auto n) { act(n, first); }, std::make_integer_sequence<int, MOST>());
        first += queries;
    }
}

template <int HALVES> void add_part(const View& v, index tile, index count, index d, index n, Work<bf16>& w) {
    in_turns<SUMS / (2 * HALVES)>(count, [&](auto queries, index first) {
        add_value_pairs<queries(), HALVES>(v, tile, first, d, n, w);
    });
}

inline void add_values(const View& v, index tile, index count, index n, Work<bf16>& w) {
    constexpr int HALVES = SUMS >= 16 ? 2 : 1;
    for (index d = 0; d < v.dim; d += 32 * HALVES) {
        if (HALVES > 1 && v.dim - d > 32) {
            add_part<HALVES>(v, tile, count, d, n, w);
        } else {
            add_part<1>(v, tile, count, d, n, w);
        }
    }
}

// Sums of each of four vectors, spread over the four parts of one vector: [part][vector].
inline f32x16 sum_four(const f32x16 (&x)[4]) {
    const f32x16 a = unpack_low_32(x[0], x[1]) + unpack_high_32(x[0], x[1]);
    const f32x16 b = unpack_low_32(x[2], x[3]) + unpack_high_32(x[2], x[3]);
    return unpack_low_64(a, b) + unpack_high_64(a, b);
}

// Add the four parts of each of four vectors: [vector][16 / 4].
inline f32x16 sum_parts(const f32x16 (&x)[4]) {
    const f32x16 a = even_parts(x[0], x[1]) + odd_parts(x[0], x[1]), b = even_parts(x[2], x[3]) + odd_parts(x[2], x[3]);
    return even_parts(a, b) + odd_parts(a, b);
}

// Scores of n keys with QUERIES queries from `first` on, reading each key once, to w.scores[0], [query][CHUNK].
template <int QUERIES> void score_few(const View& v, index first, index n, Work<bf16>& w) {
    const bf16* q = w.q + first * MAX_DIM;
    for (index i = n; i % LANES; ++i) w.keys[i] = w.keys[n - 1];
    for (index key = 0; key < n; key += LANES) {
        if (!first) ask(v, key, LANES, 0, w);
        f32x16 fours[QUERIES][4];
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) {
            f32x16 sum[QUERIES][4];
            for (auto& of_query : sum)
                for (auto& one : of_query) one = zeros();
            for (index d = 0; d < v.dim; d += 32)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const i32x16 k = load_line(w.keys[key + 4 * four + i] + d, first_numbers(v.dim - d));
#pragma GCC unroll 4
                    for (int at = 0; at < QUERIES; ++at)
                        sum[at][i] = dot_pairs(sum[at][i], load_bits(q + at * MAX_DIM + d), k);
                }
#pragma GCC unroll 4
            for (int at = 0; at < QUERIES; ++at) fours[at][four] = sum_four(sum[at]);
        }
        for (int at = 0; at < QUERIES; ++at)
            store(w.scores[0] + (first + at) * CHUNK + key, sum_parts(fours[at]));
    }
}

// Scores of 32 keys, stored as column pairs in w.values, with QUERIES queries from `first` on.
template <int QUERIES> void score_columns(const View& v, index first, index key, Work<bf16>& w) {
    f32x16 sum[QUERIES][2];
    for (auto& of_query : sum) of_query[0] = of_query[1] = zeros();
    for (index d = 0; d < v.dim; d += 2) {
        const i32x16 low = load_bits(w.values + d * 2 * LANES), high = load_bits(w.values + (d + 1) * 2 * LANES);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; ++q) {
            std::int32_t both;
            std::memcpy(&both, w.q + (first + q) * MAX_DIM + d, 4);
            sum[q][0] = dot_pairs(sum[q][0], low, splat(both));
            sum[q][1] = dot_pairs(sum[q][1], high, splat(both));
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; ++q)
        for (int half = 0; half < 2; ++half) store(w.scores[0] + (first + q) * CHUNK + key + half * LANES, sum[q][half]);
}

// Scores of n keys, one per lane, for query counts at which transposing the keys takes less time than reductions across lanes.
inline void score_some(const View& v, index count, index n, Work<bf16>& w) {
    for (index i = n; i % (2 * LANES); ++i) w.keys[i] = w.keys[n - 1];
    for (index key = 0; key < n; key += 2 * LANES) {
        for (index half = 0; half < 2; ++half) {
            ask(v, key + half * LANES, LANES, 0, w);
            for (index d = 0; d < v.dim; d += 32) {
                i32x16 turned[LANES];
                for (index i = 0; i < LANES; ++i) turned[i] = load_line(w.keys[key + half * LANES + i] + d, first_numbers(v.dim - d));
                transpose(turned);
                for (index i = 0; i < LANES; ++i) store_bits(w.values + (d + 2 * i + half) * 2 * LANES, turned[i]);
            }
        }
        in_turns<SUMS / 2>(count, [&](auto queries, index first) { score_columns<queries()>(v, first, key, w); });
    }
}

// A chunk for at most SOME_VECTORS packed queries.
inline void chunk_of_few(
    const View& v, const Row& row, const Lanes& lanes, index count, index begin, index n, Work<bf16>& w) {
    if (count > FEW_VECTORS) {
        score_some(v, count, n, w);
    } else {
        in_turns<std::min(4, SUMS / 4)>(count, [&](auto queries, index first) { score_few<queries()>(v, first, n, w); });
    }
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
