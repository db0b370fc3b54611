// Products of inputs in 8 bits with weights in 8 bits, summed in integers: W8A8 and LLM.int8() (arXiv:2208.07339).
//
// Sums of integers are exact, so vectors and tiles give the same result for any number of rows. LLM.int8() adds two products in
// floating point: outliers times dequantized weights, and kept inputs times their columns, which have the model's type.
#pragma once

#include "integer_inputs.h"
#include "product_vectors.h"

namespace ridgeline {

using Totals = f32x16[2][TILE_ROWS];

// Add the outliers of rows from `first` on, times the weights of two blocks.
template <class T>
void add_outliers(const IntWeights& w, const Rounded<T>& x, index first, const index (&blocks)[2], Totals& total) {
    for (int b = 0; b < 2; ++b) {
        const f32x16 scale = load_f16(w.scales + blocks[b] * LANES);
        for (index c = 0; c < index(x.columns.size()); ++c) {
            const index k = x.columns[c];
            const i32x16 line = load_bits(w.codes + (blocks[b] * x.d.pieces * 8 + k / 4) * 64);
            const i32x16 code = shift_right(shift_left(line, int(24 - k % 4 * 8)), 24);
            const f32x16 weight = to_float(sub(code, splat(128))) * scale;
            const float* values = x.far + c * x.rows + first;
            for (index r = 0; r < x.d.rows; ++r) total[b][r] = fma(weight, splat(values[r]), total[b][r]);
        }
    }
}

// Add the kept inputs times their columns.
template <class T> void add_kept(const IntWeights& w, const Rounded<T>& x, index first, const index (&blocks)[2], Totals& total) {
    constexpr index each = sizeof(T) == 2 ? PAIR : 1;
    const T* rows = x.kept + first * x.kept_wide;
    for (int b = 0; b < 2; ++b) {
        const T* columns = (const T*)w.kept_columns + blocks[b] * LANES * x.kept_wide;
        for (index at = 0; at < x.kept_wide; at += each) {
            const i32x16 line = load_bits(columns + at * LANES);
            for (index r = 0; r < x.d.rows; ++r) total[b][r] = step(total[b][r], spread(rows + r * x.kept_wide + at), line);
        }
    }
}

#if RIDGELINE_BYTE_TILES

// 16 rows of kept inputs times two blocks of their columns.
inline void kept_tiles(const bf16* x, index wide, const bf16* const (&w)[2], TileOf<float> (&sums)[2]) {
    _tile_zero(0);
    _tile_zero(1);
    for (index at = 0; at < wide; at += TILE_K) {
        _tile_loadd(4, x + at, wide * index(sizeof(bf16)));
        _tile_loadd(6, w[0] + at * LANES, 64);
        _tile_loadd(7, w[1] + at * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
}

// 32 rows from `first` on times two blocks: sums by tiles, then eight rows at a time.
template <class T> void tile_of_rounded(const Problem<T>& p, const IntWeights& w, const Rounded<T>& x, index first,
                                        const index (&blocks)[2], index count) {
    alignas(64) TileOf<std::int32_t> sums[2][2];
    alignas(64) TileOf<float> kept[2];
    const index panel = x.d.pieces * 8 * 64, halves = p.m - first > LANES ? 2 : 1;
    const std::uint8_t* const codes[2] = {w.codes + blocks[0] * panel, w.codes + blocks[1] * panel};
    const std::int8_t* numbers = (const std::int8_t*)x.d.digits + first * x.wide;
    (halves == 2 ? byte_tiles<2> : byte_tiles<1>)(numbers, x.wide, codes, x.d.pieces, sums);
    const f32x16 scale[2] = {load_f16(w.scales + blocks[0] * LANES), load_f16(w.scales + blocks[1] * LANES)};
    bool kept_by_tiles = false;
    for (index half = 0; half < halves; ++half) {
        if constexpr (sizeof(T) == 2) {
            // Tiles add in an order of their own, which steps of few rows do not have.
            kept_by_tiles = w.n_kept && w.inputs == Inputs::BATCH_OUTLIERS;
            const index columns = x.kept_wide * LANES;
            const T* const from = (const T*)w.kept_columns;
            const T* const kept_columns[2] = {from + blocks[0] * columns, from + blocks[1] * columns};
            if (kept_by_tiles) kept_tiles(x.kept + (first + half * LANES) * x.kept_wide, x.kept_wide, kept_columns, kept);
        }
        for (index r = 0; r < LANES; r += TILE_ROWS) {
            const index row = first + half * LANES + r;
            Totals total;
            for (int b = 0; b < 2; ++b)
                for (index i = 0; i < TILE_ROWS; ++i) {
                    const i32x16 sum = sub(load_bits(sums[half][b] + (r + i) * LANES), splat(x.d.sums[row + i] * 128));
                    total[b][i] = fma(to_float(sum) * scale[b], splat(x.d.steps[row + i]), zeros());
                    if (kept_by_tiles) total[b][i] = total[b][i] + load(kept[b] + (r + i) * LANES);
                }
            if (w.n_kept && !kept_by_tiles) add_kept(w, x, row, blocks, total);
            add_outliers(w, x, row, blocks, total);
            put_totals(p, row, TILE_ROWS, blocks, count, total);
        }
    }
}

// Rows are divided into chunks that stay in the cache, so that a thread reads its weights once for each.
template <class T> void by_byte_tiles(const Problem<T>& p, const IntWeights& w, const Rounded<T>& x, Range own) {
    constexpr index CACHED = 1 << 20;
    const index turn = p.gated() ? 1 : 2, tall = std::max<index>(1, CACHED / (2 * LANES * x.wide)) * 2 * LANES;
    for (index chunk = 0; chunk < p.m; chunk += tall)
        for (index block = own.begin; block < own.end; block += turn) {
            const index blocks[2] = {block, p.gated() ? block + p.half() : std::min(block + 1, own.end - 1)};
            for (index row = chunk; row < std::min(chunk + tall, p.m); row += 2 * LANES)
                tile_of_rounded(p, w, x, row, blocks, own.end - block);
        }
}

#endif

// One thread's part of a product. room: rounded_room(m, k, inputs) bytes that the team shares.
template <class T> void rounded_product(const Problem<T>& p, const IntWeights& w, void* room, Team team) {
    Rounded<T> x = rounded_of(p, w);
    const Team fills = team.by(x.rows, p.m + LANES);
    lie(x, (char*)room + (team.who - fills.who) * rounded_of_rows(x.rows, p.k, w.inputs));
    fill_rounded(p, w, x, fills);
    const Range own = share(p.units(), team.who, team.of);
#if RIDGELINE_BYTE_TILES
    if (x.tiles) return by_byte_tiles(p, w, x, own);
#endif
    sum_blocks(p, w, x.d, tile_sums_of<8, 1>(x.d.rows), own, 0, [&](index first, const index (&blocks)[2], Totals& total) {
        if (w.n_kept) add_kept(w, x, first, blocks, total);
        add_outliers(w, x, first, blocks, total);
    });
}

}  // namespace ridgeline
