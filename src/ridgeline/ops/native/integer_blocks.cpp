// Sums of products with weights in blocks; see Scaling in integer.h. A chunk of x is a piece of 32 inputs, so that every format
// has the same chunks.

#include "integer.h"

namespace ridgeline {
namespace {

// Twice the numbers of e2m1, plus 12.
constexpr std::uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Scales of a group of 16 outputs, and what is subtracted after them.
struct Factors {
    f32x16 scale, minimum;
};

// What is subtracted from a code; 0 where a minimum is subtracted.
template <int BITS, Scaling FORM> constexpr std::int32_t zero_of() {
    if (FORM == Scaling::E8M0) return 12;
    return FORM == Scaling::FLOAT16 || FORM == Scaling::SUPER_8BIT ? 1 << (BITS - 1) : 0;
}

// group: of 32 inputs, in SUPER_8BIT of 16. groups: of a block of outputs.
template <Scaling FORM> Factors factors_of(const IntWeights& w, index block, index group, index groups) {
    const index at = (block * groups + group) * LANES;
    if constexpr (FORM == Scaling::FLOAT16) return {load_f16(w.scales + at), zeros()};
    if constexpr (FORM == Scaling::FLOAT16_MINIMUM) return {load_f16(w.scales + at), load_f16(w.extra + at)};
    const std::uint8_t* bytes = (const std::uint8_t*)w.scales;
    if constexpr (FORM == Scaling::SUPER_6BIT) {
        // Eight bytes have the lower four bits of scale and minimum of each group, four bytes the upper two bits of two groups.
        const index super = block * groups / 8 + group / 8;
        const std::uint8_t* from = bytes + super * 12 * LANES;
        const i32x16 low = load_bytes(from + group % 8 * LANES);
        const i32x16 high = shift_right(load_bytes(from + (8 + group % 8 / 2) * LANES), int(group % 2 * 4));
        const i32x16 scale = (low & splat(15)) | shift_left(high & splat(3), 4);
        const i32x16 minimum = shift_right(low, 4) | shift_left(high & splat(12), 2);
        const std::uint16_t* supers = w.extra + super * 2 * LANES;
        return {to_float(scale) * load_f16(supers), to_float(minimum) * load_f16(supers + LANES)};
    }
    if constexpr (FORM == Scaling::SUPER_8BIT) {
        const i32x16 scale = shift_right_signed(shift_left(load_bytes(bytes + at), 24), 24);
        return {to_float(scale) * load_f16(w.extra + (block * groups / 16 + group / 16) * LANES), zeros()};
    }
    // The exponent 0 is 2^-127, which the bits of a float32 store as 0. It does not change a sum.
    if constexpr (FORM == Scaling::E8M0) return {floats_of(shift_left(load_bytes(bytes + at), 23)) * splat(0.5f), zeros()};
}

// As tile_sums in integer.h.
template <int BITS, Scaling FORM, int ROWS>
void block_sums(const Digits& d, const IntWeights& w, index tile, const index (&blocks)[2], index ahead,
                f32x16 (&of)[2][TILE_ROWS]) {
    constexpr int BOTH = ROWS == 1 ? 2 : 1, HALVES = FORM == Scaling::SUPER_8BIT ? 2 : 1, QUADS = 8 / HALVES;
    constexpr int WORDS = Quads<2>::WORDS;
    constexpr std::int32_t ZERO = zero_of<BITS, FORM>();
    const index groups = d.pieces * HALVES;
    for (int first = 0; first < 2; first += BOTH) {
        const std::uint8_t* from[BOTH];
        const std::int32_t* x = d.digits + tile * d.of_tile();
        const index line_of_tile = tile * d.chunks * ROWS;
        for (int b = 0; b < BOTH; ++b) {
            from[b] = w.codes + blocks[first + b] * d.pieces * BITS * 64;
            for (int r = 0; r < ROWS; ++r) of[first + b][r] = zeros();
        }
        for (index piece = 0; piece < d.pieces; ++piece, x += PIECE_K / 4 * WORDS * ROWS) {
            const index line = line_of_tile + piece * ROWS;
            const float* steps = d.steps + line;
#pragma GCC unroll 2
            for (int b = 0; b < BOTH; ++b)
                for (int i = 0; i < BITS; ++i)
                    _mm_prefetch((const char*)from[b] + ahead + 64 * i, BOTH == 2 ? _MM_HINT_T1 : _MM_HINT_T0);
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; ++half) {
                Quads<2> sum[BOTH][ROWS];
                std::int32_t numbers[ROWS];
                for (int r = 0; r < ROWS; ++r) {
                    numbers[r] = HALVES == 1 ? d.sums[line + r] : half == 0 ? d.firsts[line + r] : d.sums[line + r] - d.firsts[line + r];
                    for (int b = 0; b < BOTH; ++b) sum[b][r].start(splat(-ZERO * numbers[r]));
                }
#pragma GCC unroll 8
                for (int q = 0; q < QUADS; ++q) {
                    const int i = half * QUADS + q;
#pragma GCC unroll 2
                    for (int b = 0; b < BOTH; ++b) {
                        i32x16 codes = quad<BITS>(from[b], i);
                        if constexpr (FORM == Scaling::E8M0) codes = lookup(E2M1, codes);
#pragma GCC unroll 8
                        for (int r = 0; r < ROWS; ++r) sum[b][r].take(codes, x + i * WORDS * ROWS + r, ROWS);
                    }
                }
#pragma GCC unroll 2
                for (int b = 0; b < BOTH; ++b) {
                    const Factors factors = factors_of<FORM>(w, blocks[first + b], piece * HALVES + half, groups);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r) {
                        f32x16& total = of[first + b][r];
                        total = fma(to_float(sum[b][r].total()) * factors.scale, splat(steps[r]), total);
                        if constexpr (ZERO == 0) total = fnma(factors.minimum, splat(steps[r] * float(numbers[r])), total);
                    }
                }
            }
            for (int b = 0; b < BOTH; ++b) from[b] += BITS * 64;
        }
    }
}

template <int BITS, Scaling FORM> TileSums of_rows(index rows) {
    constexpr index MORE = std::min<index>(6, TILE_ROWS), MOST = TILE_ROWS;
    constexpr TileSums found[] = {nullptr,
                                  block_sums<BITS, FORM, 1>,
                                  block_sums<BITS, FORM, 2>,
                                  block_sums<BITS, FORM, 3>,
                                  block_sums<BITS, FORM, 4>,
                                  nullptr,
                                  block_sums<BITS, FORM, MORE>,
                                  nullptr,
                                  block_sums<BITS, FORM, MOST>};
    return found[rows];
}

}  // namespace

TileSums block_sums_of(const IntWeights& w, index rows) {
    switch (w.scaling) {
        case Scaling::FLOAT16: return of_rows<5, Scaling::FLOAT16>(rows);
        case Scaling::FLOAT16_MINIMUM:
            return (w.bits == 5 ? of_rows<5, Scaling::FLOAT16_MINIMUM> : of_rows<4, Scaling::FLOAT16_MINIMUM>)(rows);
        case Scaling::SUPER_6BIT: return (w.bits == 5 ? of_rows<5, Scaling::SUPER_6BIT> : of_rows<4, Scaling::SUPER_6BIT>)(rows);
        case Scaling::SUPER_8BIT: return of_rows<6, Scaling::SUPER_8BIT>(rows);
        default: return of_rows<4, Scaling::E8M0>(rows);
    }
}

}  // namespace ridgeline
