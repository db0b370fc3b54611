// bfloat16 products by AMX tiles: 16 or 32 rows times 32 outputs at a time.
#pragma once

#include "problem.h"

namespace ridgeline {

#if RIDGELINE_AMX

constexpr index TILE_PREFETCH = 4096;

// Two panels of 16 outputs that are computed together: a gate and the values it multiplies, or neighbours (the last panel twice if
// there is no second).
struct Panels {
    const bf16* first;
    index second;  // elements from the first panel to the second
};

template <class Out> index pairs_of(const Problem<bf16, Out>& p) { return p.gated() ? p.half() : (blocks_of(p.n) + 1) / 2; }

template <class Out> Panels panels_of(const Problem<bf16, Out>& p, index pair) {
    if (p.gated()) return {p.panel_of(pair), p.to_up()};
    return {p.panel_of(2 * pair), 2 * pair + 1 < blocks_of(p.n) ? p.panel() : 0};
}

// Store 16 rows of the sums of two panels; for neighbours a complete cache line of outputs at a time if there are 32.
template <class Out>
void put_tiles(const Problem<bf16, Out>& p, const float* first, const float* second, index row, index pair) {
    const index rows = std::min<index>(LANES, p.m - row), column = pair * (p.gated() ? LANES : 2 * LANES);
    const bool whole = sizeof(Out) == 2 && column + 2 * LANES <= p.n;
    for (index r = 0; r < rows; ++r) {
        __m512 low = _mm512_load_ps(first + r * LANES), high = _mm512_load_ps(second + r * LANES);
        if (p.gated()) {
            p.put_gated(row + r, column, low, high);
        } else if (whole) {
            const index at = (row + r) * p.n + column;
            low = p.biased(low, row + r, column, 0xffff);
            high = p.biased(high, row + r, column + LANES, 0xffff);
            if (p.added) {
                low = _mm512_add_ps(low, load(p.added + at));
                high = _mm512_add_ps(high, load(p.added + at + LANES));
            }
            _mm512_storeu_si512(p.out + at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        } else {
            p.put(row + r, column, low);
            if (column + LANES < p.n) p.put(row + r, column + LANES, high);
        }
    }
}

// 32 rows times a pair of panels, in four tiles of sums.
template <class Out> void four_tiles(const Problem<bf16, Out>& p, const bf16* tiles, index row, index pair) {
    constexpr index TILE = LANES * TILE_K;
    const index wide = padded_k<bf16>(p.k), steps = wide / TILE_K;
    const Panels panels = panels_of(p, pair);
    const bf16* x = tiles + row * wide;
    const bf16* w = panels.first;
    alignas(64) float sums[4][LANES * LANES];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (index at = 0; at < steps; ++at, x += TILE, w += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + wide * LANES, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + panels.second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    put_tiles(p, sums[0], sums[1], row, pair);
    put_tiles(p, sums[2], sums[3], row + LANES, pair);
}

// 16 rows times a pair of panels.
template <class Out> void two_tiles(const Problem<bf16, Out>& p, const bf16* tiles, index row, index pair) {
    constexpr index TILE = LANES * TILE_K;
    const index wide = padded_k<bf16>(p.k), steps = wide / TILE_K;
    const Panels panels = panels_of(p, pair);
    const bf16* x = tiles + row * wide;
    const bf16* w = panels.first;
    alignas(64) float sums[2][LANES * LANES];
    _tile_zero(0);
    _tile_zero(1);
    for (index at = 0; at < steps; ++at, x += TILE, w += TILE) {
        for (index line = 0; line < TILE; line += TILE_K) {
            _mm_prefetch((const char*)(w + line) + TILE_PREFETCH, _MM_HINT_T0);
            _mm_prefetch((const char*)(w + panels.second + line) + TILE_PREFETCH, _MM_HINT_T0);
        }
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + panels.second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    put_tiles(p, sums[0], sums[1], row, pair);
}

// All rows times a pair of panels.
template <class Out> void pair_by_tiles(const Problem<bf16, Out>& p, const bf16* tiles, index pair) {
    const index halves = blocks_of(p.m);
    for (index row = 0; row < halves / 2; ++row) four_tiles(p, tiles, row * 2 * LANES, pair);
    if (halves % 2) two_tiles(p, tiles, (halves - 1) * LANES, pair);
}

// Threads form a grid: at most one column per pair of panels; the remaining threads divide the rows. Each thread reads its weights
// once per chunk of rows, and the chunk stays in the cache. The thread's tiles must be configured.
template <class Out> void by_tiles(const Problem<bf16, Out>& p, const bf16* tiles, Team team) {
    constexpr index CACHED = 1 << 20;
    const index halves = blocks_of(p.m), pairs = pairs_of(p);
    const index columns = std::min<index>(team.of, pairs), rows = team.of / columns;
    if (team.who >= columns * rows) return;
    const index who = team.who / columns;
    const Range own = share(pairs, team.who % columns, columns), own_rows = share(halves / 2, who, rows);
    const index chunk = std::max<index>(1, CACHED / (2 * LANES * padded_k<bf16>(p.k) * index(sizeof(bf16))));
    for (index first = own_rows.begin; first < own_rows.end; first += chunk)
        for (index pair = own.begin; pair < own.end; ++pair)
            for (index row = first; row < std::min(first + chunk, own_rows.end); ++row)
                four_tiles(p, tiles, row * 2 * LANES, pair);
    if (halves % 2 && who == rows - 1)
        for (index pair = own.begin; pair < own.end; ++pair) two_tiles(p, tiles, (halves - 1) * LANES, pair);
}

#endif

}  // namespace ridgeline
