// Products with weights in 8, 4 or 3 bits: y[m, n] = sum_k x[m, k] (code[n, k] - zero[n, g]) scale[n, g], g = k / group.
//
// x is taken in chunks of inputs that share a step, of which each number is a multiple, exact to 2^-15 of the chunk's largest.
// Codes times multiples, cut into digits as the instructions want them (quad_words), are summed in integers, several inputs an
// instruction, so weights are never widened, and a token's sums are the same whatever is computed beside it.
//
// Packed layout: [N / 16][K / 32] pieces of `bits` lines of 64 bytes, byte 4 lane + j of quad i (0..7) for output `lane` and
// input 4 i + j; 8 bits: a line a quad; 4 bits: quads 2 l and 2 l + 1 in the lower and upper half of line l's bytes; 3 bits:
// the lower two bits of quads 0..3 and 4..7 in lines 0 and 1, lowest first, and bit i of line 2 is the third of quad i.
// Scales are float16 [N / 16][groups][16], zeros bytes in the same order.
#pragma once

#include "problem.h"

namespace ridgeline {

constexpr index PIECE_K = 32;     // inputs of a piece
constexpr index CHUNK_K = 128;    // most inputs of a chunk
constexpr index TILE_ROWS = SUMS >= 16 ? 8 : 4;  // most rows of x that are multiplied together
constexpr index AHEAD = 4096;     // bytes
constexpr float MOST = 16256.0f;  // 127 * 128: what quad_words takes

// zeros null: 2^(bits - 1) everywhere. group >= k: one scale for all inputs, else a multiple of 32.
struct IntWeights {
    const std::uint8_t* codes;
    const std::uint16_t* scales;
    const std::uint8_t* zeros;
    index bits, group;
};

// Quad `i` of the piece at `from`, a byte a code.
template <int BITS> i32x16 quad(const std::uint8_t* from, int i) {
    if constexpr (BITS == 8) return load_bits(from + 64 * i);
    if constexpr (BITS == 4) {
        const i32x16 line = load_bits(from + 64 * (i / 2));
        return (i % 2 ? shift_right_16(line, 4) : line) & splat_bytes(0x0f);
    }
    if constexpr (BITS == 3) {
        const i32x16 line = load_bits(from + 64 * (i / 4)), third = load_bits(from + 128);
        const i32x16 low = shift_right_16(line, 2 * (i % 4)) & splat_bytes(3);
        const i32x16 high = i < 2 ? shift_left_16(third, 2 - i) : shift_right_16(third, i - 2);
        return and_or(high, splat_bytes(4), low);
    }
}

// x in digits. Rows come in tiles of `rows`, of which the last may be filled up with zeros. groups: of
// weights, each of so many chunks.
// digits: [tiles][K / 4][two words][rows]; steps, sums: [tiles][chunks][rows], sums of the multiples.
struct Digits {
    index tiles, rows, chunk, chunks, pieces;
    index groups, chunks_in_group;
    std::int32_t* digits;
    float* steps;
    std::int32_t* sums;

    index of_tile() const { return pieces * PIECE_K / 4 * 2 * rows; }
};

inline index greatest_divisor(index a, index b) { return b ? greatest_divisor(b, a % b) : a; }

inline Digits digits_of(index m, index k, index group, void* room) {
    Digits d{};
    d.chunk = group >= k ? CHUNK_K : greatest_divisor(group, CHUNK_K);
    d.chunks = (k + d.chunk - 1) / d.chunk;
    d.chunks_in_group = group >= k ? d.chunks : group / d.chunk;
    d.groups = (d.chunks + d.chunks_in_group - 1) / d.chunks_in_group;
    d.pieces = (k + PIECE_K - 1) / PIECE_K;
    d.tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
    const index least = (m + d.tiles - 1) / d.tiles;
    d.rows = least <= 4 ? least : least <= 6 ? 6 : TILE_ROWS;
    d.digits = (std::int32_t*)room;
    d.steps = (float*)(d.digits + d.tiles * d.of_tile());
    d.sums = (std::int32_t*)(d.steps + d.tiles * d.chunks * d.rows);
    return d;
}

// Bytes for x in digits, at any group.
inline index digits_room(index m, index k) {
    const index rows = m + TILE_ROWS, pieces = (k + PIECE_K - 1) / PIECE_K;
    return rows * pieces * (2 * PIECE_K + 8);
}

// One chunk of a row, normed by `scale` where asked for.
template <class T> void fill_chunk(const Problem<T>& p, const Digits& d, index row, index chunk, f32x16 scale) {
    constexpr int PARTS = CHUNK_K / LANES;
    const index first = chunk * d.chunk, end = std::min(first + d.chunk, d.pieces * PIECE_K), tile = row / d.rows, r = row % d.rows;
    f32x16 part[PARTS];
    i32x16 most = zero_bits();
    int parts = 0;
    for (index at = first; at < end; at += LANES, ++parts) {
        part[parts] = part_of(p, row, at, scale);
        // By their bits, a NaN is above all numbers.
        most = max_unsigned(most, bits_of(abs(part[parts])));
    }
    const std::uint32_t bits = max_unsigned_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const f32x16 factor = splat(MOST / std::max(1e-30f, largest));
    std::int32_t* to = d.digits + tile * d.of_tile() + first / 4 * 2 * d.rows + r;
    i32x16 sum = zero_bits();
    for (int i = 0; i < parts; ++i) {
        const i32x16 number = to_int(part[i] * factor);
        sum = add(sum, number);
        alignas(16) std::int32_t first_words[4], second_words[4];
        quad_words(number, first_words, second_words);
        for (int q = 0; q < 4; ++q, to += 2 * d.rows) {
            to[0] = first_words[q];
            to[d.rows] = second_words[q];
        }
    }
    d.steps[(tile * d.chunks + chunk) * d.rows + r] = largest / MOST;
    d.sums[(tile * d.chunks + chunk) * d.rows + r] = sum_of(sum);
}

template <class T> void fill_digits(const Problem<T>& p, const Digits& d, Team team) {
    const Range own = share(d.tiles * d.rows * d.chunks, team.who, team.of);
    f32x16 scale = zeros();
    for (index at = own.begin; at < own.end; ++at) {
        const index row = at / d.chunks, chunk = at % d.chunks;
        if (at == own.begin || chunk == 0) scale = row_scale(p, row);
        fill_chunk(p, d, row, chunk, scale);
    }
}

// The sums of one tile of rows times one block of 16 outputs.
template <int BITS, int ROWS>
void tile_sums(const Digits& d, const IntWeights& w, index tile, index block, f32x16* of_rows) {
    constexpr int SPLIT = ROWS <= 2 ? 2 : 1;  // chains that hide the latency of the products
    const index in_chunk = d.chunk / PIECE_K;
    const std::uint8_t* from = w.codes + block * d.pieces * BITS * 64;
    const std::int32_t* x = d.digits + tile * d.of_tile();
    const float* steps = d.steps + tile * d.chunks * ROWS;
    const std::int32_t* sums = d.sums + tile * d.chunks * ROWS;
    for (int r = 0; r < ROWS; ++r) of_rows[r] = zeros();
    for (index chunk = 0; chunk < d.chunks; ++chunk, steps += ROWS, sums += ROWS) {
        const index at = (block * d.groups + chunk / d.chunks_in_group) * LANES;
        const i32x16 zero = w.zeros ? load_bytes(w.zeros + at) : splat(1 << (BITS - 1));
        QuadSums sum[ROWS][SPLIT];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            for (int s = 1; s < SPLIT; ++s) sum[r][s] = quad_sums(zero_bits());
            sum[r][0] = quad_sums(w.zeros ? mul(zero, splat(-sums[r])) : splat(-sums[r] * (1 << (BITS - 1))));
        }
        const index pieces = std::min(in_chunk, d.pieces - chunk * in_chunk);
        for (index piece = 0; piece < pieces; ++piece, from += BITS * 64, x += PIECE_K / 4 * 2 * ROWS) {
            for (int line = 0; line < BITS; ++line) _mm_prefetch((const char*)from + AHEAD + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const i32x16 codes = quad<BITS>(from, i);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    add_quads(sum[r][i % SPLIT], codes, x[2 * i * ROWS + r], x[(2 * i + 1) * ROWS + r]);
            }
        }
        const f32x16 scale = load_f16(w.scales + at);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            for (int s = 1; s < SPLIT; ++s) sum[r][0] = add(sum[r][0], sum[r][s]);
            of_rows[r] = fma(to_float(total(sum[r][0])) * scale, splat(steps[r]), of_rows[r]);
        }
    }
}

using TileSums = void (*)(const Digits&, const IntWeights&, index, index, f32x16*);

template <int BITS> TileSums tile_sums_of(index rows) {
    constexpr TileSums found[] = {nullptr, tile_sums<BITS, 1>, tile_sums<BITS, 2>, tile_sums<BITS, 3>, tile_sums<BITS, 4>,
                                  nullptr, tile_sums<BITS, 6>, nullptr, tile_sums<BITS, 8>};
    return found[rows];
}

// One thread's part of a product; p.packed is not read. room: digits_room(m, k) bytes that the team shares.
template <class T> void int_product(const Problem<T>& p, const IntWeights& w, void* room, Team team) {
    const Digits d = digits_of(p.m, p.k, w.group, room);
    fill_digits(p, d, team);
    team.wait();
    const TileSums sums_of = w.bits == 8 ? tile_sums_of<8>(d.rows) : w.bits == 4 ? tile_sums_of<4>(d.rows) : tile_sums_of<3>(d.rows);
    const Range own = share(p.units(), team.who, team.of);
    f32x16 total[2][TILE_ROWS];
    for (index block = own.begin; block < own.end; ++block)
        for (index tile = 0; tile < d.tiles; ++tile) {
            sums_of(d, w, tile, block, total[0]);
            if (p.gated()) sums_of(d, w, tile, block + p.half(), total[1]);
            for (index r = 0; r < d.rows && tile * d.rows + r < p.m; ++r) {
                if (p.gated()) {
                    p.put_gated(tile * d.rows + r, block * LANES, total[0][r], total[1][r]);
                } else {
                    p.put(tile * d.rows + r, block * LANES, total[0][r]);
                }
            }
        }
}

}  // namespace ridgeline
