// Products without tiles: fused multiply-adds along K with 16 outputs per vector.
#pragma once

#include <utility>

#include "problem.h"

namespace ridgeline {

constexpr index PREFETCH_BYTES = 4096;
constexpr index IN_FLIGHT = 1 << 14;  // bytes prefetched ahead, over all adjacent blocks
constexpr bool MANY_SUMS = SUMS >= 24;
constexpr index FEWER_ROWS = MANY_SUMS ? 8 : 2;  // up to this many rows, each has a pointer in a register
constexpr index FEW_ROWS = MANY_SUMS ? 16 : 2;   // up to this many rows, every weight is read once

// Operands of one step along K: two bfloat16 numbers or one float32 of x in every lane, times 64 bytes of weights.
inline i32x16 spread(const bf16* x) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return splat(both);
}
inline f32x16 spread(const float* x) { return splat(*x); }
inline f32x16 step(f32x16 sum, i32x16 x, i32x16 w) { return dot_pairs(sum, x, w); }
inline f32x16 step(f32x16 sum, f32x16 x, i32x16 w) { return fma(x, floats_of(w), sum); }

constexpr int power_of_two(int most) { return most < 2 ? 1 : 2 * power_of_two(most / 2); }

// ROWS of x times BLOCKS blocks of weights from `block` on. Up to MOST_SPLIT independent sums along K hide the latency of
// multiply-adds. Blocks alternate if registers do not hold the sums of all. GATED: the second half of the blocks belongs to the
// second half of the outputs. Only `rows` of ROWS exist, unless SURE. Weights that are read once are prefetched; those of the next
// blocks while these end, unless they are the last.
template <class T, int ROWS, int BLOCKS, int MOST_SPLIT, bool GATED, Form FORM, bool SURE = false, class Out>
void stream(const Problem<T, Out>& p, const T* x, index row, index rows, index block, bool last = false) {
    constexpr index each = sizeof(T) == 2 ? PAIR : 1;
    constexpr int OWN = GATED ? BLOCKS / 2 : BLOCKS, SPLIT = power_of_two(std::min(SUMS / (ROWS * BLOCKS), MOST_SPLIT));
    constexpr int TOGETHER = ROWS * BLOCKS * SPLIT <= SUMS ? BLOCKS : 1;
    const index wide = padded_k<T>(p.k);
    const T* w[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) w[b] = p.panel_of(block + b % OWN) + b / OWN * p.to_up();
    const T* from[ROWS];
    for (int r = 0; r < ROWS; ++r) from[r] = x + (row + std::min<index>(r, rows - 1)) * wide;
    const T* mixed = x + row * each;
    f32x16 sum[ROWS][BLOCKS][SPLIT];
    for (auto& of_row : sum)
        for (auto& of_block : of_row)
            for (auto& one : of_block) one = zeros();
    const bool asks = TOGETHER < 4 || p.m <= ROWS;
    constexpr index AHEAD = std::min<index>(8192, IN_FLIGHT / BLOCKS);
    const auto go = [&](index at, index ahead, int part, int first) __attribute__((always_inline)) {
        i32x16 line[TOGETHER];
#pragma GCC unroll 4
        for (int b = 0; b < TOGETHER; ++b) {
            const T* weights = w[first + b] + at * LANES;
            if (asks) _mm_prefetch((const char*)weights + ahead, _MM_HINT_T0);
            line[b] = load_bits(weights);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const T* own = SURE ? x + r * wide : from[r];
            const auto numbers = spread(FORM == Form::MIXED ? mixed + at * LANES + r * each : own + at);
#pragma GCC unroll 4
            for (int b = 0; b < TOGETHER; ++b) sum[r][first + b][part] = step(sum[r][first + b][part], numbers, line[b]);
        }
    };
    const auto go_on = [&](index at, index end, index ahead, int first) __attribute__((always_inline)) {
        for (; at + SPLIT * each <= end; at += SPLIT * each)
#pragma GCC unroll 8
            for (int part = 0; part < SPLIT; ++part) go(at + part * each, ahead, part, first);
        for (; at < end; at += each) go(at, ahead, 0, first);
    };
    constexpr index NUMBERS = AHEAD / (LANES * sizeof(T));
    const index turn = std::max<index>(0, wide - NUMBERS);
    const index next = last ? 0 : AHEAD + (TOGETHER > 1 ? OWN - 1 : 0) * wide * LANES * index(sizeof(T));
#pragma GCC unroll 4
    for (int first = 0; first < BLOCKS; first += TOGETHER) {
        go_on(0, turn, AHEAD, first);
        go_on(turn, wide, next, first);
    }
    for (int r = 0; r < ROWS && r < rows; ++r) {
        for (int b = 0; b < BLOCKS; ++b)
            for (int part = 1; part < SPLIT; ++part) sum[r][b][0] = sum[r][b][0] + sum[r][b][part];
        for (int b = 0; b < OWN; ++b)
            if constexpr (GATED)
                p.put_gated(row + r, (block + b) * LANES, sum[r][b][0], sum[r][b + OWN][0]);
            else
                p.put(row + r, (block + b) * LANES, sum[r][b][0]);
    }
}

// Number of adjacent blocks for 1 to 8 rows, and of independent sums for each. Each read of x serves all blocks, because loads
// limit several rows. That many streams of weights are fastest with a slow last-level cache; more sums would issue more requests at
// once, which is slower.
constexpr int SIDE[8] = {2, MANY_SUMS ? 2 : 1, 2, 4, 4, 4, 2, 2}, SPLITS[8] = {8, 2, 2, 2, 2, 2, 2, 2};
template <bool GATED> constexpr int side(index rows) { return std::max(GATED ? 2 : 1, SIDE[rows - 1]); }

// Each number of rows up to 8 has its own function. BLOCKS 0: as many as SIDE defines.
template <bool GATED, int BLOCKS, class T, class Out, int... BEFORE>
void as_many_rows(const Problem<T, Out>& p, const T* x, index block, bool last, std::integer_sequence<int, BEFORE...>) {
    ((p.m == BEFORE + 1
          ? stream<T, BEFORE + 1, BLOCKS ? BLOCKS : side<GATED>(BEFORE + 1), SPLITS[BEFORE], GATED, Form::ROWS, true>(
                p, x, 0, p.m, block, last)
          : void()),
     ...);
}

// 9 to 16 rows times one block, or one pair of blocks.
template <bool GATED, class T, class Out> void some_rows(const Problem<T, Out>& p, const T* x, index block) {
    constexpr Form MIXED = Form::MIXED;
    const index m = p.m;
    if (m <= 12) return stream<T, 12, GATED ? 2 : 1, 2, GATED, MIXED>(p, x, 0, m, block);
    if constexpr (GATED) {
        stream<T, 8, 2, 1, true, MIXED>(p, x, 0, m, block);
        stream<T, 8, 2, 1, true, MIXED>(p, x, 8, m - 8, block);
    } else {
        stream<T, 16, 1, 1, false, MIXED>(p, x, 0, m, block);
    }
}

template <bool GATED, class T, class Out> void few_rows(const Problem<T, Out>& p, const T* x, Range own) {
    constexpr auto UP_TO_8 = std::make_integer_sequence<int, 8>();
    index block = own.begin;
    if (p.m <= 8)
        for (const index units = side<GATED>(p.m) / (GATED ? 2 : 1); block + units <= own.end; block += units)
            as_many_rows<GATED, 0>(p, x, block, block + units == own.end, UP_TO_8);
    for (; block < own.end; ++block)
        if (p.m <= 8) {
            as_many_rows<GATED, GATED ? 2 : 1>(p, x, block, block + 1 == own.end, UP_TO_8);
        } else {
            some_rows<GATED>(p, x, block);
        }
}

// Many rows: as many rows times blocks as registers hold; x and a few blocks of weights stay in the cache.
template <class T, bool GATED, class Out> void many_rows(const Problem<T, Out>& p, const T* x, Range own) {
    // Converting a line of bfloat16 takes registers too.
    constexpr index ROWS = MANY_SUMS || sizeof(T) == 4 ? 6 : 4, BLOCKS = MANY_SUMS ? 4 : GATED ? 2 : 1;
    constexpr index UNITS = GATED ? BLOCKS / 2 : BLOCKS;
    index block = own.begin;
    for (; block + UNITS <= own.end; block += UNITS)
        for (index row = 0; row < p.m; row += ROWS)
            stream<T, ROWS, BLOCKS, 1, GATED, Form::ROWS>(p, x, row, std::min(ROWS, p.m - row), block);
    for (; block < own.end; ++block)
        for (index row = 0; row < p.m; row += ROWS)
            stream<T, ROWS, GATED ? 2 : 1, 2, GATED, Form::ROWS>(p, x, row, std::min(ROWS, p.m - row), block);
}

// Any number of rows with one sum along K per output: a few rows times BLOCKS blocks from `block` on.
template <class T, int BLOCKS, bool GATED, class Out> void rows_in_order(const Problem<T, Out>& p, const T* x, index block) {
    constexpr Form ROWS = Form::ROWS;
    constexpr index MOST = std::min(6, SUMS / BLOCKS);
    for (index row = 0; row < p.m; row += MOST) {
        const index rows = std::min(MOST, p.m - row);
        if (rows == 1) {
            stream<T, 1, BLOCKS, 1, GATED, ROWS>(p, x, row, rows, block);
        } else if (rows <= MOST / 2) {
            stream<T, MOST / 2, BLOCKS, 1, GATED, ROWS>(p, x, row, rows, block);
        } else {
            stream<T, MOST, BLOCKS, 1, GATED, ROWS>(p, x, row, rows, block);
        }
    }
}

// Adjacent blocks hide the latency of multiply-adds, because a second sum along K is not allowed.
template <class T, bool GATED, class Out> void in_order(const Problem<T, Out>& p, const T* x, Range own) {
    constexpr index BLOCKS = MANY_SUMS ? 4 : 2, UNITS = GATED ? BLOCKS / 2 : BLOCKS;
    index block = own.begin;
    for (; block + UNITS <= own.end; block += UNITS) rows_in_order<T, BLOCKS, GATED>(p, x, block);
    for (; block < own.end; ++block) rows_in_order<T, GATED ? 2 : 1, GATED>(p, x, block);
}

// The blocks, or pairs of blocks, `own`, of a product with more than FEW_ROWS rows or a fixed order.
template <bool GATED, class T, class Out> void in_any_number(const Problem<T, Out>& p, const T* x, Range own) {
    p.fixed ? in_order<T, GATED>(p, x, own) : many_rows<T, GATED>(p, x, own);
}

// The blocks, or pairs of blocks, `own`.
template <class T, class Out> void by_vectors(const Problem<T, Out>& p, const T* x, Range own) {
    if (p.fixed || p.m > FEW_ROWS) return p.gated() ? in_any_number<true>(p, x, own) : in_any_number<false>(p, x, own);
    p.gated() ? few_rows<true>(p, x, own) : few_rows<false>(p, x, own);
}

}  // namespace ridgeline
