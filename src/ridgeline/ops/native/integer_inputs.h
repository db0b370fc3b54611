// Inputs in 8 bits for products with 8-bit weights; see integer_rounded.h.
//
// A token's step is its largest magnitude / 127, and its numbers are its inputs as multiples of the step. In LLM.int8() outliers
// and kept inputs are 0 there and do not count for the step; their values stand beside the numbers.
#pragma once

#include "integer.h"

#include <vector>

namespace ridgeline {

constexpr float OUTLIER = 6.0f;
enum Mark : std::uint8_t { PLAIN, FAR_OUT, KEPT };

inline float number_of(float x) { return x; }
inline float number_of(bf16 x) {
    const std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

// x of one product. d: numbers, steps and sums; for tiles, numbers are rows of `wide` bytes. kept: [rows][kept_wide].
// far: [columns][rows], the values of outliers. marks: a Mark for each input. columns: inputs that are outliers.
template <class T> struct Rounded {
    Digits d;
    index rows, wide, kept_wide;
    bool tiles;
    T* kept;
    float* far;
    std::uint8_t* marks;
    std::vector<std::int32_t> columns;
};

// Bytes for so many rows, and for all rows of a product of m with copies for each thread where rows are few.
inline index rounded_of_rows(index rows, index k, Inputs inputs) {
    const index wide = tiles_k(k);
    return rows * (2 * wide + 8 + (has_outliers(inputs) ? 9 * wide : 0));
}
inline index rounded_room(index m, index k, Inputs inputs) { return rounded_of_rows(m + 2 * LANES, k, inputs); }

template <class T> Rounded<T> rounded_of(const Problem<T>& p, const IntWeights& w) {
    Rounded<T> x{};
    x.d = digits_of(p.m, p.k, p.k, Quads<1>::WORDS);
    x.d.chunk = x.d.pieces * PIECE_K;
    x.d.chunks = x.d.chunks_in_group = x.d.groups = 1;
    x.tiles = by_byte_tiles(p.m);
    if (x.tiles) x.d.rows = TILE_ROWS;
    x.rows = x.tiles ? (p.m + 2 * LANES - 1) / (2 * LANES) * 2 * LANES : x.d.tiles * x.d.rows;
    x.wide = x.tiles ? tiles_k(p.k) : x.d.chunk;
    x.kept_wide = padded_k<T>(w.n_kept);
    return x;
}

template <class T> void lie(Rounded<T>& x, void* room) {
    x.d.digits = (std::int32_t*)room;
    x.d.steps = (float*)((char*)room + x.rows * x.wide * x.d.words);
    x.d.sums = (std::int32_t*)(x.d.steps + x.rows);
    x.far = (float*)(x.d.sums + x.rows);
    x.kept = (T*)(x.far + x.rows * x.wide);
    x.marks = (std::uint8_t*)(x.kept + x.rows * x.kept_wide);
}

// Mark the inputs that are kept, and the others in which any token of this call reaches OUTLIER.
template <class T> void mark(const Problem<T>& p, const IntWeights& w, Rounded<T>& x, Team team) {
    if (team.who == 0) {
        std::memset(x.marks, PLAIN, x.wide);
        for (index i = 0; i < w.n_kept; ++i) x.marks[w.kept[i]] = KEPT;
    }
    team.wait();
    const Range own = share(p.m, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row) {
        const f32x16 scale = row_scale(p, row);
        for (index at = 0; at < p.k; at += LANES)
            for (unsigned lanes = word_of(not_less(abs(part_of(p, row, at, scale)), splat(OUTLIER))); lanes; lanes &= lanes - 1) {
                std::uint8_t* const of = x.marks + at + __builtin_ctz(lanes);
                if (__atomic_load_n(of, __ATOMIC_RELAXED) == PLAIN) __atomic_store_n(of, FAR_OUT, __ATOMIC_RELAXED);
            }
    }
    team.wait();
    for (index k = 0; k < p.k; ++k)
        if (x.marks[k] == FAR_OUT) x.columns.push_back(std::int32_t(k));
}

// Inputs that are rounded; 0 for the others.
template <class T> f32x16 inliers(const Rounded<T>& x, Inputs inputs, index at, f32x16 values) {
    if (!has_outliers(inputs)) return values;
    const i32x16 marks = load_bytes(x.marks + at);
    if (inputs == Inputs::BATCH_OUTLIERS) return select(greater(marks, splat(std::int32_t(PLAIN))), zeros(), values);
    const mask16 kept = greater(marks, splat(std::int32_t(FAR_OUT)));
    return select(kept, zeros(), select(not_less(abs(values), splat(OUTLIER)), zeros(), values));
}

// The values of a row's outliers and kept inputs.
template <class T> void fill_floats(const Problem<T>& p, const IntWeights& w, Rounded<T>& x, index row, f32x16 scale) {
    const float factor = first_of(scale);
    const auto value = [&](index k) {
        if (row >= p.m) return 0.0f;
        const float number = number_of(p.x[row * p.k + k]);
        return p.norm.weight ? number * factor * (number_of(p.norm.weight[k]) + p.norm.offset) : number;
    };
    for (index c = 0; c < index(x.columns.size()); ++c) {
        const float number = value(x.columns[c]);
        x.far[c * x.rows + row] = w.inputs == Inputs::TOKEN_OUTLIERS && std::abs(number) < OUTLIER ? 0.0f : number;
    }
    for (index at = 0; at < x.kept_wide; at += LANES) {
        alignas(64) float numbers[LANES] = {};
        for (index i = 0; i < LANES && at + i < w.n_kept; ++i) numbers[i] = value(w.kept[at + i]);
        store(x.kept + row * x.kept_wide + at, load(numbers), first_lanes(x.kept_wide - at));
    }
}

template <class T> void fill_rounded_row(const Problem<T>& p, const IntWeights& w, Rounded<T>& x, index row) {
    const f32x16 scale = row_scale(p, row);
    const auto part = [&](index at) { return at < p.k ? inliers(x, w.inputs, at, part_of(p, row, at, scale)) : zeros(); };
    i32x16 most = zero_bits(), sum = zero_bits();
    // As integers, the bits of a NaN exceed those of all numbers.
    for (index at = 0; at < p.k; at += LANES) most = max_unsigned(most, bits_of(abs(part(at))));
    const std::uint32_t bits = max_unsigned_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float step = std::max(1.17549435e-38f, largest) / 127.0f;
    const index tile = row / x.d.rows, r = row % x.d.rows;
    std::int32_t* to = x.d.digits + tile * x.d.of_tile() + r;
    for (index at = 0; at < x.wide; at += LANES) {
        const i32x16 number = to_int(part(at) / splat(step));
        sum = add(sum, number);
        alignas(16) std::int32_t words[Quads<1>::WORDS][4];
        Quads<1>::cut(number, words);
        if (x.tiles) {
            std::memcpy((char*)x.d.digits + row * x.wide + at, words[0], LANES);
            continue;
        }
        for (int q = 0; q < 4; ++q)
            for (int word = 0; word < Quads<1>::WORDS; ++word, to += x.d.rows) *to = words[word][q];
    }
    // The largest magnitude may be NaN or infinite; so are the sums then.
    x.d.steps[row] = largest == largest ? step : largest;
    x.d.sums[row] = sum_of(sum);
    if (has_outliers(w.inputs)) fill_floats(p, w, x, row, scale);
}

template <class T> void fill_rounded(const Problem<T>& p, const IntWeights& w, Rounded<T>& x, Team team) {
    if (has_outliers(w.inputs)) mark(p, w, x, team);
    const Range own = share(x.rows, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row) fill_rounded_row(p, w, x, row);
    team.wait();
}

}  // namespace ridgeline
