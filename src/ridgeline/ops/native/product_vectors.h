// Products without tiles: by fused multiply-adds along K, 16 outputs a vector.
#pragma once

#include <utility>

#include "problem.h"

namespace ridgeline {

constexpr index PREFETCH_BYTES = 4096;
constexpr bool MANY_SUMS = SUMS >= 24;
constexpr index FEWER_ROWS = MANY_SUMS ? 8 : 2;  // up to so many a register points to each
constexpr index FEW_ROWS = MANY_SUMS ? 16 : 2;   // up to so many every weight is read once

// What one step along K takes: two bfloat16 numbers or one float32 of x, times 64 bytes of weights.
inline f32x16 step(f32x16 sum, const bf16* x, i32x16 w) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return dot_pairs(sum, splat(both), w);
}
inline f32x16 step(f32x16 sum, const float* x, i32x16 w) {
    return fma(splat(*x), floats_of(w), sum);
}

// ROWS of x times BLOCKS blocks of weights from `block` on; up to MOST_SPLIT independent sums along K hide the latency of the
// multiply-adds; blocks take turns where registers do not hold the sums of all. GATED: the second half of the blocks is of the
// second half of the outputs. Only `rows` of ROWS are there.
template <class T, int ROWS, int BLOCKS, int MOST_SPLIT, bool GATED, Form FORM, class Out>
void stream(const Problem<T, Out>& p, const T* x, index row, index rows, index block) {
    constexpr index each = sizeof(T) == 2 ? PAIR : 1;
    constexpr int OWN = GATED ? BLOCKS / 2 : BLOCKS, SPLIT = std::clamp(SUMS / (ROWS * BLOCKS), 1, MOST_SPLIT);
    constexpr int TOGETHER = ROWS * BLOCKS * SPLIT <= SUMS ? BLOCKS : 1;
    const index wide = padded_k<T>(p.k);
    const T* w[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) w[b] = p.panel_of(block + b % OWN + b / OWN * p.half());
    const T* from[ROWS];
    for (int r = 0; r < ROWS; ++r) from[r] = x + (row + std::min<index>(r, rows - 1)) * wide;
    const T* mixed = x + row * each;
    f32x16 sum[ROWS][BLOCKS][SPLIT];
    for (auto& of_row : sum)
        for (auto& of_block : of_row)
            for (auto& one : of_block) one = zeros();
    const auto go = [&](index at, int part, int first) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int b = first; b < first + TOGETHER; ++b) {
            const T* weights = w[b] + at * LANES;
            if (TOGETHER < 4) _mm_prefetch((const char*)weights + PREFETCH_BYTES, _MM_HINT_T0);
            const i32x16 line = load_bits(weights);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const T* numbers = FORM == Form::MIXED ? mixed + at * LANES + r * each : from[r] + at;
                sum[r][b][part] = step(sum[r][b][part], numbers, line);
            }
        }
    };
#pragma GCC unroll 4
    for (int first = 0; first < BLOCKS; first += TOGETHER) {
        index at = 0;
        for (; at + SPLIT * each <= wide; at += SPLIT * each)
#pragma GCC unroll 8
            for (int part = 0; part < SPLIT; ++part) go(at + part * each, part, first);
        for (; at < wide; at += each) go(at, 0, first);
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

// MOST_SPLIT for 1 to 8 rows, of one block and of a pair.
constexpr int SPLITS[2][8] = {{8, 4, 4, 4, 2, 2, 2, 2}, {4, 4, 4, 2, 1, 1, 1, 1}};

// Each number of rows up to 8 has its own: with weights in the caches the multiply-adds are what takes the time, one a cycle.
template <bool GATED, class T, class Out, int... BEFORE>
void as_many_rows(const Problem<T, Out>& p, const T* x, index block, std::integer_sequence<int, BEFORE...>) {
    ((p.m == BEFORE + 1
          ? stream<T, BEFORE + 1, GATED ? 2 : 1, SPLITS[GATED][BEFORE], GATED, Form::ROWS>(p, x, 0, p.m, block)
          : void()),
     ...);
}

// Up to 16 rows by one block, or one pair of blocks.
template <bool GATED, class T, class Out> void few_rows(const Problem<T, Out>& p, const T* x, index block) {
    constexpr Form MIXED = Form::MIXED;
    const index m = p.m;
    if (m <= 8) return as_many_rows<GATED>(p, x, block, std::make_integer_sequence<int, 8>());
    if (m <= 12) return stream<T, 12, GATED ? 2 : 1, 2, GATED, MIXED>(p, x, 0, m, block);
    if constexpr (GATED) {
        stream<T, 8, 2, 1, true, MIXED>(p, x, 0, m, block);
        stream<T, 8, 2, 1, true, MIXED>(p, x, 8, m - 8, block);
    } else {
        stream<T, 16, 1, 1, false, MIXED>(p, x, 0, m, block);
    }
}

// Many rows: as many times so many blocks as there are registers for, x and a few blocks of weights staying in the cache.
template <class T, bool GATED, class Out> void many_rows(const Problem<T, Out>& p, const T* x, Range own) {
    // Widening a line of bfloat16 takes registers too.
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

// Any number of rows with one sum along K for each output: a few rows times BLOCKS blocks from `block` on.
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

// Blocks side by side hide the latency of the multiply-adds, as no second sum along K may.
template <class T, bool GATED, class Out> void in_order(const Problem<T, Out>& p, const T* x, Range own) {
    constexpr index BLOCKS = MANY_SUMS ? 4 : 2, UNITS = GATED ? BLOCKS / 2 : BLOCKS;
    index block = own.begin;
    for (; block + UNITS <= own.end; block += UNITS) rows_in_order<T, BLOCKS, GATED>(p, x, block);
    for (; block < own.end; ++block) rows_in_order<T, GATED ? 2 : 1, GATED>(p, x, block);
}

// The blocks, or pairs of blocks, `own`.
template <class T, class Out> void by_vectors(const Problem<T, Out>& p, const T* x, Range own) {
    if (p.fixed) return p.gated() ? in_order<T, true>(p, x, own) : in_order<T, false>(p, x, own);
    if (p.m > FEW_ROWS) return p.gated() ? many_rows<T, true>(p, x, own) : many_rows<T, false>(p, x, own);
    for (index block = own.begin; block < own.end; ++block) p.gated() ? few_rows<true>(p, x, block) : few_rows<false>(p, x, block);
}

}  // namespace ridgeline
