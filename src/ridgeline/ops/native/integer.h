// Products with weights in 8, 4 or 3 bits: y[m, n] = sum_k x[m, k] (code[n, k] - zero[n, g]) scale[n, g], g = k / group.
//
// x is taken in chunks of inputs that share a scale, each number as two digits of 8 bits: x = step (128 high + low), |high| <=
// 127, |low| <= 64, exact to 2^-15 of the chunk's largest. Codes times digits are summed in integers, four inputs an
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
constexpr index TILE_ROWS = 8;    // most rows of x that are multiplied together
constexpr index AHEAD = 4096;     // bytes
constexpr float MOST = 16256.0f;  // 127 * 128

// zeros null: 2^(bits - 1) everywhere. group >= k: one scale for all inputs, else a multiple of 32.
struct IntWeights {
    const std::uint8_t* codes;
    const std::uint16_t* scales;
    const std::uint8_t* zeros;
    index bits, group;
};

// Sums of four products each: codes without sign, digits with.
inline __m512i dot_quads(__m512i sum, __m512i codes, __m512i digits) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sum, codes, digits);
#else
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(digits, 8), 8), odd = _mm512_srai_epi16(digits, 8);
    const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(0xff)), high = _mm512_srli_epi16(codes, 8);
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(low, even), _mm512_madd_epi16(high, odd)));
#endif
}

// Quad `i` of the piece at `from`, a byte a code.
template <int BITS> __m512i quad(const std::uint8_t* from, int i) {
    if constexpr (BITS == 8) return _mm512_loadu_si512(from + 64 * i);
    if constexpr (BITS == 4) {
        const __m512i line = _mm512_loadu_si512(from + 64 * (i / 2));
        return _mm512_and_si512(i % 2 ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(0x0f));
    }
    if constexpr (BITS == 3) {
        const __m512i line = _mm512_loadu_si512(from + 64 * (i / 4)), third = _mm512_loadu_si512(from + 128);
        const __m512i low = _mm512_and_si512(_mm512_srli_epi16(line, 2 * (i % 4)), _mm512_set1_epi8(3));
        const __m512i high = i < 2 ? _mm512_slli_epi16(third, 2 - i) : _mm512_srli_epi16(third, i - 2);
        return _mm512_ternarylogic_epi32(high, _mm512_set1_epi8(4), low, 0xea);  // (a & b) | c
    }
}

// x in digits. Rows come in tiles of `rows`, of which the last may be filled up with zeros. groups: of
// weights, each of so many chunks.
// digits: [tiles][K / 4][high, low][rows] of four bytes; steps, sums: [tiles][chunks][rows], sums of the digits' numbers.
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
template <class T> void fill_chunk(const Problem<T>& p, const Digits& d, index row, index chunk, __m512 scale) {
    constexpr int PARTS = CHUNK_K / LANES;
    const index first = chunk * d.chunk, end = std::min(first + d.chunk, d.pieces * PIECE_K), tile = row / d.rows, r = row % d.rows;
    __m512 part[PARTS];
    __m512i most = _mm512_setzero_si512();
    int parts = 0;
    for (index at = first; at < end; at += LANES, ++parts) {
        part[parts] = part_of(p, row, at, scale);
        // By their bits, a NaN is above all numbers.
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(part[parts])));
    }
    const std::uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const __m512 factor = _mm512_set1_ps(MOST / std::max(1e-30f, largest));
    std::int32_t* to = d.digits + tile * d.of_tile() + first / 4 * 2 * d.rows + r;
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < parts; ++i) {
        const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], factor));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(64)), 7);
        const __m512i low = _mm512_sub_epi32(number, _mm512_slli_epi32(high, 7));
        sum = _mm512_add_epi32(sum, number);
        alignas(16) std::int32_t quads[2][4];
        _mm_store_si128((__m128i*)quads[0], _mm512_cvtepi32_epi8(high));
        _mm_store_si128((__m128i*)quads[1], _mm512_cvtepi32_epi8(low));
        for (int q = 0; q < 4; ++q, to += 2 * d.rows) {
            to[0] = quads[0][q];
            to[d.rows] = quads[1][q];
        }
    }
    d.steps[(tile * d.chunks + chunk) * d.rows + r] = largest / MOST;
    d.sums[(tile * d.chunks + chunk) * d.rows + r] = _mm512_reduce_add_epi32(sum);
}

template <class T> void fill_digits(const Problem<T>& p, const Digits& d, Team team) {
    const Range own = share(d.tiles * d.rows * d.chunks, team.who, team.of);
    __m512 scale = _mm512_setzero_ps();
    for (index at = own.begin; at < own.end; ++at) {
        const index row = at / d.chunks, chunk = at % d.chunks;
        if (at == own.begin || chunk == 0) scale = row_scale(p, row);
        fill_chunk(p, d, row, chunk, scale);
    }
}

// The sums of one tile of rows times one block of 16 outputs.
template <int BITS, int ROWS> void tile_sums(const Digits& d, const IntWeights& w, index tile, index block, __m512* total) {
    constexpr int SPLIT = ROWS <= 2 ? 2 : 1;  // chains that hide the latency of the products
    const index in_chunk = d.chunk / PIECE_K;
    const std::uint8_t* from = w.codes + block * d.pieces * BITS * 64;
    const std::int32_t* x = d.digits + tile * d.of_tile();
    const float* steps = d.steps + tile * d.chunks * ROWS;
    const std::int32_t* sums = d.sums + tile * d.chunks * ROWS;
    for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
    for (index chunk = 0; chunk < d.chunks; ++chunk, steps += ROWS, sums += ROWS) {
        const index at = (block * d.groups + chunk / d.chunks_in_group) * LANES;
        const __m512i zero = w.zeros ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + at)))
                                     : _mm512_set1_epi32(1 << (BITS - 1));
        __m512i high[ROWS][SPLIT], low[ROWS][SPLIT];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            for (int s = 0; s < SPLIT; ++s) high[r][s] = low[r][s] = _mm512_setzero_si512();
            low[r][0] = w.zeros ? _mm512_mullo_epi32(zero, _mm512_set1_epi32(-sums[r])) : _mm512_set1_epi32(-sums[r] * (1 << (BITS - 1)));
        }
        const index pieces = std::min(in_chunk, d.pieces - chunk * in_chunk);
        for (index piece = 0; piece < pieces; ++piece, from += BITS * 64, x += PIECE_K / 4 * 2 * ROWS) {
            for (int line = 0; line < BITS; ++line) _mm_prefetch((const char*)from + AHEAD + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const __m512i codes = quad<BITS>(from, i);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    high[r][i % SPLIT] = dot_quads(high[r][i % SPLIT], codes, _mm512_set1_epi32(x[2 * i * ROWS + r]));
                    low[r][i % SPLIT] = dot_quads(low[r][i % SPLIT], codes, _mm512_set1_epi32(x[(2 * i + 1) * ROWS + r]));
                }
            }
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w.scales + at)));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            for (int s = 1; s < SPLIT; ++s) {
                high[r][0] = _mm512_add_epi32(high[r][0], high[r][s]);
                low[r][0] = _mm512_add_epi32(low[r][0], low[r][s]);
            }
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][0], 7), low[r][0]);
            total[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale), _mm512_set1_ps(steps[r]), total[r]);
        }
    }
}

using TileSums = void (*)(const Digits&, const IntWeights&, index, index, __m512*);

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
    __m512 total[2][TILE_ROWS];
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
