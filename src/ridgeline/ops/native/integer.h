// Products with weights in 8, 4 or 3 bits: y[m, n] = sum_k x[m, k] (code[n, k] - zero[n, g]) scale[n, g], g = k / group.
//
// x is quantized in chunks of inputs with a common step, exact to 2^-15 of the chunk's largest value, or to 2^-8 with one digit.
// Products of codes with these multiples, split into digits for the instructions (Quads), are summed in integers, several inputs
// per instruction. Weights are never converted to float, and a token's sums do not depend on the other tokens.
//
// Packed layout: [N / 16][K / 32] pieces of `bits` lines of 64 bytes. Byte 4 lane + j of quad i (0..7) is for output `lane` and
// input 4 i + j. 8 bits: one line per quad. 4 bits: quads 2 l and 2 l + 1 in the lower and upper half of line l's bytes. 3 bits:
// the lower two bits of quads 0..3 and 4..7 in lines 0 and 1, lowest first, and bit i of line 2 is the third bit of quad i. 5 bits:
// as 4 bits, and bit i of line 4 is the fifth bit of quad i. 6 bits: for each half of the quads two lines as in 4 bits, and a line
// with the upper two bits of its four quads, lowest first. Scales are float16 [N / 16][groups][16], zero points are bytes in the
// same order; Scaling names other forms.
#pragma once

#include "integer_tiles.h"
#include "quads.h"

namespace ridgeline {

constexpr index CHUNK_K = 128;    // maximum inputs of a chunk
constexpr index TILE_ROWS = SUMS >= 16 ? 8 : 4;  // maximum rows of x that are multiplied together
constexpr index AHEAD = 4096;     // prefetch distance in bytes
constexpr index FAR = 1 << 16;    // bytes: largest distance of prefetches two iterations ahead

// How a product reads x. FLOAT: as above. ROUNDED: in 8 bits with a step per token. Others: likewise, but outliers and kept inputs
// stay in floating point. BATCH_OUTLIERS: inputs that are outliers of any token of the call. TOKEN_OUTLIERS: each token's own.
enum class Inputs : index { FLOAT, ROUNDED, BATCH_OUTLIERS, TOKEN_OUTLIERS };

// How groups store scales; see ops/blocks.py, whose arrays [N, n] (`scales` and `extra`) are stored as [N / 16][n][16]. FLOAT16: as above.
// FLOAT16_MINIMUM: and a float16 that is subtracted. SUPER_6BIT: scale and minimum are integers times two float16 of eight groups.
// SUPER_8BIT: the scale is an integer times a float16 of sixteen groups. E8M0: the scale is a power of two, and codes are e2m1.
// Groups have 32 inputs; in SUPER_8BIT 16.
enum class Scaling : index { FLOAT16, FLOAT16_MINIMUM, SUPER_6BIT, SUPER_8BIT, E8M0 };

inline bool has_outliers(Inputs inputs) { return inputs >= Inputs::BATCH_OUTLIERS; }

// binding.py mirrors the fields in this order. zeros null: 2^(bits - 1) everywhere. group >= k: one scale for all inputs; otherwise
// a multiple of 32. Inputs other than FLOAT: 8 bits, one scale, no zeros. kept [n_kept]: inputs whose weights are not in codes but
// in kept_columns, of x's type and in the layout of linear.cpp. more: weights of the outputs after the first `blocks` blocks of 16,
// in another format; null: there are none. With a gate there are none. Linears with `more` have groups of 16 or 32 inputs.
struct IntWeights {
    const std::uint8_t* codes;
    const std::uint16_t* scales;
    const std::uint8_t* zeros;
    index bits, group;
    Inputs inputs;
    const std::int32_t* kept;
    const void* kept_columns;
    index n_kept;
    Scaling scaling;
    const std::uint16_t* extra;
    index blocks;
    const IntWeights* more;

    bool in_blocks() const { return scaling != Scaling::FLOAT16 || bits == 5; }
};

// Quad `i` of the piece at `from`, one byte per code.
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
    if constexpr (BITS == 5) {
        const i32x16 fifth = load_bits(from + 256);
        return and_or(i < 4 ? shift_left_16(fifth, 4 - i) : shift_right_16(fifth, i - 4), splat_bytes(0x10), quad<4>(from, i));
    }
    if constexpr (BITS == 6) {
        const i32x16 upper = load_bits(from + 192 * (i / 4) + 128);
        const int place = i % 4;
        const i32x16 high = place < 2 ? shift_left_16(upper, 4 - 2 * place) : shift_right_16(upper, 2 * place - 4);
        return and_or(high, splat_bytes(0x30), quad<4>(from + 192 * (i / 4), place));
    }
}

// x in digits. Rows form tiles of `rows`; the last tile may be padded with zeros. groups: groups of weights, each of several
// chunks. digits: [tiles][K / 4][words][rows], or for tiles of bytes [M / 16][words][16][wide]; steps, sums, firsts:
// [tiles][chunks][rows]; sums: of the multiples; firsts: of the first 16.
struct Digits {
    index tiles, rows, chunk, chunks, pieces, words, wide;
    index groups, chunks_in_group;
    bool in_bytes;
    std::int32_t* digits;
    float* steps;
    std::int32_t* sums;
    std::int32_t* firsts;

    index of_tile() const { return wide / 4 * words * rows; }
    // Digit `word` of a row, in bytes.
    std::int8_t* bytes_of(index row, index word) const {
        return (std::int8_t*)digits + ((row / LANES * words + word) * LANES + row % LANES) * wide;
    }
    void lie(void* room) {
        digits = (std::int32_t*)room;
        steps = (float*)((char*)digits + tiles * rows * wide * words);
        sums = (std::int32_t*)(steps + tiles * chunks * rows);
        firsts = sums + tiles * chunks * rows;
    }
};

inline index greatest_divisor(index a, index b) { return b ? greatest_divisor(b, a % b) : a; }

inline Digits digits_of(index m, index k, index group, index words) {
    Digits d{};
    d.words = words;
    d.chunk = group >= k ? CHUNK_K : greatest_divisor(group, CHUNK_K);
    d.chunks = (k + d.chunk - 1) / d.chunk;
    d.chunks_in_group = group >= k ? d.chunks : group / d.chunk;
    d.groups = (d.chunks + d.chunks_in_group - 1) / d.chunks_in_group;
    d.pieces = (k + PIECE_K - 1) / PIECE_K;
    d.wide = d.pieces * PIECE_K;
    d.tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
    d.in_bytes = words == 2 && d.chunk % BYTE_TILE_K == 0 && by_byte_tiles(m);
    if (d.in_bytes) {
        d.tiles = blocks_of(m) * (LANES / TILE_ROWS), d.rows = TILE_ROWS, d.wide = tiles_k(k);
        return d;
    }
    const index least = (m + d.tiles - 1) / d.tiles;
    d.rows = least <= 4 ? least : least <= 6 ? 6 : TILE_ROWS;
    return d;
}

// Bytes for so many rows of x in digits, for any group size.
inline index digits_of_rows(index rows, index k) { return rows * (tiles_k(k) / PIECE_K) * (2 * PIECE_K + 12); }

inline index digits_room(index m, index k) { return digits_of_rows(m + LANES, k); }

// Quantize one chunk of a row, multiplied by the norm's `scale` if there is a norm.
template <int DIGITS, class T> void fill_chunk(const Problem<T>& p, const Digits& d, index row, index chunk, f32x16 scale) {
    constexpr int PARTS = CHUNK_K / LANES, WORDS = Quads<DIGITS>::WORDS;
    const index first = chunk * d.chunk, end = std::min(first + d.chunk, d.wide), tile = row / d.rows, r = row % d.rows;
    f32x16 part[PARTS];
    i32x16 most = zero_bits();
    int parts = 0;
    for (index at = first; at < end; at += LANES, ++parts) {
        part[parts] = part_of(p, row, at, scale);
        // As integers, the bits of a NaN exceed those of all numbers.
        most = max_unsigned(most, bits_of(abs(part[parts])));
    }
    const std::uint32_t bits = max_unsigned_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const f32x16 factor = splat(Quads<DIGITS>::MOST / std::max(1e-30f, largest));
    std::int32_t* to = d.digits + tile * d.of_tile() + first / 4 * WORDS * d.rows + r;
    i32x16 sum = zero_bits(), first_sum = sum;
    for (int i = 0; i < parts; ++i) {
        const i32x16 number = to_int(part[i] * factor);
        sum = add(sum, number);
        if (i == 0) first_sum = sum;
        alignas(16) std::int32_t words[WORDS][4];
        Quads<DIGITS>::cut(number, words);
        if (d.in_bytes) {
            for (int word = 0; word < WORDS; ++word) std::memcpy(d.bytes_of(row, word) + first + i * LANES, words[word], LANES);
            continue;
        }
        for (int q = 0; q < 4; ++q)
            for (int word = 0; word < WORDS; ++word, to += d.rows) *to = words[word][q];
    }
    d.steps[(tile * d.chunks + chunk) * d.rows + r] = largest / Quads<DIGITS>::MOST;
    d.sums[(tile * d.chunks + chunk) * d.rows + r] = sum_of(sum);
    d.firsts[(tile * d.chunks + chunk) * d.rows + r] = sum_of(first_sum);
}

template <int DIGITS, class T> void fill_digits(const Problem<T>& p, const Digits& d, Team team) {
    const Range own = share(d.tiles * d.rows * d.chunks, team.who, team.of);
    f32x16 scale = zeros();
    for (index at = own.begin; at < own.end; ++at) {
        const index row = at / d.chunks, chunk = at % d.chunks;
        if (at == own.begin || chunk == 0) scale = row_scale(p, row);
        fill_chunk<DIGITS>(p, d, row, chunk, scale);
    }
}

// The sums of one tile of rows times two blocks of 16 outputs. A single row is multiplied with both blocks together, so that each
// read of it serves both. ahead: distance in bytes to the weights of the blocks that are multiplied two iterations later.
template <int BITS, int ROWS, int DIGITS>
void tile_sums(const Digits& d, const IntWeights& w, index tile, const index (&blocks)[2], index ahead,
               f32x16 (&of)[2][TILE_ROWS]) {
    constexpr int BOTH = ROWS == 1 ? 2 : 1, SPLIT = ROWS <= 2 ? 2 : 1;  // SPLIT: independent sums that hide latency
    constexpr int WORDS = Quads<DIGITS>::WORDS;
    const index in_chunk = d.chunk / PIECE_K;
    for (int first = 0; first < 2; first += BOTH) {
        const std::uint8_t* from[BOTH];
        const std::int32_t* x = d.digits + tile * d.of_tile();
        const float* steps = d.steps + tile * d.chunks * ROWS;
        const std::int32_t* sums = d.sums + tile * d.chunks * ROWS;
        for (int b = 0; b < BOTH; ++b) {
            from[b] = w.codes + blocks[first + b] * d.pieces * BITS * 64;
            for (int r = 0; r < ROWS; ++r) of[first + b][r] = zeros();
        }
        for (index chunk = 0; chunk < d.chunks; ++chunk, steps += ROWS, sums += ROWS) {
            Quads<DIGITS> sum[BOTH][ROWS][SPLIT];
            index at[BOTH];
            for (int b = 0; b < BOTH; ++b) {
                at[b] = (blocks[first + b] * d.groups + chunk / d.chunks_in_group) * LANES;
                const i32x16 zero = w.zeros ? load_bytes(w.zeros + at[b]) : splat(1 << (BITS - 1));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    for (int s = 1; s < SPLIT; ++s) sum[b][r][s].start(zero_bits());
                    sum[b][r][0].start(w.zeros ? mul(zero, splat(-sums[r])) : splat(-sums[r] * (1 << (BITS - 1))));
                }
            }
            const index pieces = std::min(in_chunk, d.pieces - chunk * in_chunk);
            for (index piece = 0; piece < pieces; ++piece, x += PIECE_K / 4 * WORDS * ROWS) {
#pragma GCC unroll 2
                for (int b = 0; b < BOTH; ++b)
                    for (int line = 0; line < BITS; ++line)
                        _mm_prefetch((const char*)from[b] + ahead + 64 * line, BOTH == 2 ? _MM_HINT_T1 : _MM_HINT_T0);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 2
                    for (int b = 0; b < BOTH; ++b) {
                        const i32x16 codes = quad<BITS>(from[b], i);
#pragma GCC unroll 8
                        for (int r = 0; r < ROWS; ++r) sum[b][r][i % SPLIT].take(codes, x + i * WORDS * ROWS + r, ROWS);
                    }
                }
                for (int b = 0; b < BOTH; ++b) from[b] += BITS * 64;
            }
#pragma GCC unroll 2
            for (int b = 0; b < BOTH; ++b) {
                const f32x16 scale = load_f16(w.scales + at[b]);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    for (int s = 1; s < SPLIT; ++s) sum[b][r][0].join(sum[b][r][s]);
                    of[first + b][r] = fma(to_float(sum[b][r][0].total()) * scale, splat(steps[r]), of[first + b][r]);
                }
            }
        }
    }
}

using TileSums = void (*)(const Digits&, const IntWeights&, index, const index (&)[2], index, f32x16 (&)[2][TILE_ROWS]);

template <int BITS, int DIGITS> TileSums tile_sums_of(index rows) {
    constexpr index MORE = std::min<index>(6, TILE_ROWS), MOST = TILE_ROWS;
    constexpr TileSums found[] = {nullptr,
                                  tile_sums<BITS, 1, DIGITS>,
                                  tile_sums<BITS, 2, DIGITS>,
                                  tile_sums<BITS, 3, DIGITS>,
                                  tile_sums<BITS, 4, DIGITS>,
                                  nullptr,
                                  tile_sums<BITS, MORE, DIGITS>,
                                  nullptr,
                                  tile_sums<BITS, MOST, DIGITS>};
    return found[rows];
}

// The same for weights in blocks; compiled in integer_blocks.cpp.
TileSums block_sums_of(const IntWeights& w, index rows);

template <int DIGITS> TileSums tile_sums_of(const IntWeights& w, index rows) {
    if constexpr (DIGITS == 2)
        if (w.in_blocks()) return block_sums_of(w, rows);
    return w.bits == 8   ? tile_sums_of<8, DIGITS>(rows)
           : w.bits == 4 ? tile_sums_of<4, DIGITS>(rows)
                         : tile_sums_of<3, DIGITS>(rows);
}

// Store the totals of rows from `first` on and two blocks; of neighbours, only `count` exist.
template <class T>
void put_totals(const Problem<T>& p, index first, index rows, const index (&blocks)[2], index count,
                const f32x16 (&total)[2][TILE_ROWS]) {
    for (index r = 0; r < rows && first + r < p.m; ++r) {
        if (p.gated()) {
            p.put_gated(first + r, blocks[0] * LANES, total[0][r], total[1][r]);
        } else {
            for (int b = 0; b < 2 && b < count; ++b) p.put(first + r, blocks[b] * LANES, total[b][r]);
        }
    }
}

// The blocks, or pairs of blocks, `own` times all tiles of rows. w begins with block `start`. more(first row, blocks, totals): adds
// to the totals.
template <class T, class More>
void sum_blocks(const Problem<T>& p, const IntWeights& w, const Digits& d, TileSums sums_of, Range own, index start, const More& more) {
    const index turn = p.gated() ? 1 : 2, far = 2 * turn * d.pieces * w.bits * 64, ahead = d.rows == 1 && far <= FAR ? far : AHEAD;
    f32x16 total[2][TILE_ROWS];
    for (index block = own.begin; block < own.end; block += turn)
        for (index tile = 0; tile < d.tiles; ++tile) {
            const index blocks[2] = {block, p.gated() ? block + p.half() : std::min(block + 1, own.end - 1)};
            const index held[2] = {blocks[0] - start, blocks[1] - start};
            sums_of(d, w, tile, held, ahead, total);
            more(tile * d.rows, blocks, total);
            put_totals(p, tile * d.rows, d.rows, blocks, own.end - block, total);
        }
}

#if RIDGELINE_BYTE_TILES

constexpr index TALL = 4 * LANES;  // rows whose totals stay in the cache while a thread reads its weights once

// Add 16 rows times two blocks, one chunk of inputs; as tile_sums, to the last bit. first: number of the first row. codes: of both
// blocks, a byte each. scale, zero: of the chunk's group.
inline void add_digit_tiles(const Digits& d, index first, index chunk, index pieces, const std::uint8_t* const (&codes)[2],
                            const f32x16 (&scale)[2], const i32x16 (&zero)[2], f32x16 (*total)[2][TILE_ROWS]) {
    alignas(64) TileOf<std::int32_t> sums[2][2];
    byte_tiles<2>(d.bytes_of(first, 0) + chunk * d.chunk, d.wide, codes, pieces, sums);
    for (index tile = 0; tile < LANES / TILE_ROWS; ++tile) {
        const index at = ((first / TILE_ROWS + tile) * d.chunks + chunk) * TILE_ROWS;
        for (index r = 0; r < TILE_ROWS; ++r)
            for (int b = 0; b < 2; ++b) {
                const index line = (tile * TILE_ROWS + r) * LANES;
                const i32x16 both = add(shift_left(load_bits(sums[1][b] + line), 7), load_bits(sums[0][b] + line));
                const i32x16 sum = sub(both, mul(zero[b], splat(d.sums[at + r])));
                total[tile][b][r] = fma(to_float(sum) * scale[b], splat(d.steps[at + r]), total[tile][b][r]);
            }
    }
}

// As sum_blocks, with x in bytes.
template <int BITS, class T> void by_digit_tiles(const Problem<T>& p, const IntWeights& w, const Digits& d, Range own) {
    const index turn = p.gated() ? 1 : 2, in_chunk = d.chunk / PIECE_K;
    f32x16 total[TALL / TILE_ROWS][2][TILE_ROWS];
    alignas(64) std::uint8_t unpacked[2][CHUNK_K * LANES];
    for (index block = own.begin; block < own.end; block += turn) {
        const index blocks[2] = {block, p.gated() ? block + p.half() : std::min(block + 1, own.end - 1)};
        for (index start = 0; start < p.m; start += TALL) {
            const index rows = std::min(blocks_of(p.m - start) * LANES, TALL);
            for (auto& of_tile : total)
                for (auto& of_block : of_tile) std::fill_n(of_block, TILE_ROWS, zeros());
            for (index chunk = 0; chunk < d.chunks; ++chunk) {
                const index pieces = std::min(in_chunk, d.pieces - chunk * in_chunk);
                const std::uint8_t* codes[2];
                f32x16 scale[2];
                i32x16 zero[2];
                for (int b = 0; b < 2; ++b) {
                    const index at = (blocks[b] * d.groups + chunk / d.chunks_in_group) * LANES;
                    scale[b] = load_f16(w.scales + at);
                    zero[b] = w.zeros ? load_bytes(w.zeros + at) : splat(1 << (BITS - 1));
                    codes[b] = w.codes + (blocks[b] * d.pieces + chunk * in_chunk) * BITS * 64;
                    if constexpr (BITS < 8) {
                        for (index piece = 0; piece < pieces; ++piece)
                            for (int i = 0; i < 8; ++i)
                                store_bits(unpacked[b] + (piece * 8 + i) * 64, quad<BITS>(codes[b] + piece * BITS * 64, i));
                        codes[b] = unpacked[b];
                    }
                }
                for (index row = 0; row < rows; row += LANES)
                    add_digit_tiles(d, start + row, chunk, pieces, {codes[0], codes[1]}, scale, zero, total + row / TILE_ROWS);
            }
            for (index row = 0; row < rows; row += TILE_ROWS)
                put_totals(p, start + row, TILE_ROWS, blocks, own.end - block, total[row / TILE_ROWS]);
        }
    }
}

#endif

// One thread's part of a product; p.packed is not read. room: digits_room(m, k) bytes that the team shares.
template <int DIGITS = 2, class T> void int_product(const Problem<T>& p, const IntWeights& w, void* room, Team team) {
    Digits d = digits_of(p.m, p.k, std::max(w.group, PIECE_K), Quads<DIGITS>::WORDS);
    const index rows = d.tiles * d.rows;
    const Team fills = team.by(rows, p.m + TILE_ROWS);
    d.lie((char*)room + (team.who - fills.who) * digits_of_rows(rows, p.k));
    fill_digits<DIGITS>(p, d, fills);
    fills.wait();
    const Range own = share(p.units(), team.who, team.of);
#if RIDGELINE_BYTE_TILES
    if (d.in_bytes) {
        const auto by_tiles_of = w.bits == 8 ? by_digit_tiles<8, T> : w.bits == 4 ? by_digit_tiles<4, T> : by_digit_tiles<3, T>;
        return by_tiles_of(p, w, d, own);
    }
#endif
    index begin = 0;
    for (const IntWeights* part = &w; part; part = part->more) {
        const index end = part->more ? begin + part->blocks : p.units();
        const Range held{std::clamp(own.begin, begin, end), std::clamp(own.end, begin, end)};
        sum_blocks(p, *part, d, tile_sums_of<DIGITS>(*part, d.rows), held, begin, [](auto&&...) {});
        begin = end;
    }
}

// Compiled once, in integer.cpp.
extern template void int_product(const Problem<bf16>&, const IntWeights&, void*, Team);
extern template void int_product(const Problem<float>&, const IntWeights&, void*, Team);

}  // namespace ridgeline
