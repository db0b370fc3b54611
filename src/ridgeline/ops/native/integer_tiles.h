// Sums of bytes by AMX tiles: 16 or 32 rows of numbers times two blocks of weights.
#pragma once

#include "problem.h"

namespace ridgeline {

constexpr index PIECE_K = 32;         // inputs of a piece of packed weights
constexpr index BYTE_TILE_K = 64;     // inputs of a tile of bytes
constexpr index MOST_BY_VECTORS = 4;  // rows above this are multiplied by tiles

#if RIDGELINE_AMX && defined(__AMX_INT8__)
#define RIDGELINE_BYTE_TILES 1
#else
#define RIDGELINE_BYTE_TILES 0
#endif

inline bool by_byte_tiles(index m) { return RIDGELINE_BYTE_TILES && tiles_allowed && m > MOST_BY_VECTORS; }

// k, rounded up to complete tiles.
constexpr index tiles_k(index k) { return (k + BYTE_TILE_K - 1) / BYTE_TILE_K * BYTE_TILE_K; }

#if RIDGELINE_BYTE_TILES

// Sums of 16 rows times a block.
template <class N> using TileOf = N[LANES * LANES];

// HALVES times 16 rows times two blocks, of `pieces` pieces each. x: rows of `wide` bytes. sums: of each half and block.
template <int HALVES> void byte_tiles(const std::int8_t* x, index wide, const std::uint8_t* const (&w)[2], index pieces,
                                      TileOf<std::int32_t> (&sums)[2][2]) {
    alignas(64) std::uint8_t last[2][BYTE_TILE_K * LANES];
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HALVES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (index piece = 0; piece < pieces; piece += 2) {
        const std::uint8_t* from[2] = {w[0] + piece * PIECE_K * LANES, w[1] + piece * PIECE_K * LANES};
        if (piece + 1 == pieces)  // half a tile: the other numbers are 0, but their memory may not be ours
            for (int b = 0; b < 2; ++b) from[b] = (const std::uint8_t*)std::memcpy(last[b], from[b], PIECE_K * LANES);
        _tile_loadd(4, x + piece * PIECE_K, wide);
        _tile_loadd(6, from[0], 64);
        _tile_loadd(7, from[1], 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if constexpr (HALVES == 2) {
            _tile_loadd(5, x + LANES * wide + piece * PIECE_K, wide);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if constexpr (HALVES == 2) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

#endif

}  // namespace ridgeline
