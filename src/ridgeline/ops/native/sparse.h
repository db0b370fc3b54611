// Products with pruned weights: a bit mask and the weights that are not 0, in bfloat16.
//
// Packed layout: `starts` [blocks + 1] int64, the number of each block's first weight in `values`; `masks` uint32 [blocks][K / 2],
// one bit for each number of a line of the layout of bfloat16 (problem.h); `values`, line by line, with a line of padding.
#pragma once

#include "converted.h"

namespace ridgeline {

#ifdef __AVX512VBMI2__
#define RIDGELINE_EXPANDS 1
inline i32x16 expanded(const bf16* values, std::uint32_t mask) { return _mm512_maskz_expand_epi16(mask, load_bits(values)); }
#else
#define RIDGELINE_EXPANDS 0
inline i32x16 expanded(const bf16* values, std::uint32_t mask) {
    alignas(64) bf16 line[2 * LANES] = {};
    for (; mask; mask &= mask - 1) line[__builtin_ctz(mask)] = *values++;
    return load_bits(line);
}
#endif

struct SparseLines {
    static constexpr bool SCALED = false;
    const std::int64_t* starts;
    const std::uint32_t* masks;
    const bf16* values;
    index lines;

    struct Reader {
        const std::uint32_t* mask;
        const bf16* values;
        void operator()(i32x16 (&line)[LINES]) {
            _mm_prefetch((const char*)values + PREFETCH_BYTES, _MM_HINT_T0);
            _mm_prefetch((const char*)values + PREFETCH_BYTES + 64, _MM_HINT_T0);
            for (int i = 0; i < LINES; ++i, ++mask) {
                line[i] = expanded(values, *mask);
                values += __builtin_popcount(*mask);
            }
        }
    };
    Reader of(index block) const { return {masks + block * lines, values + starts[block]}; }
    index span(index wide) const { return wide; }
    f32x16 factors(index, index) const { return zeros(); }
};

inline SparseLines sparse_lines(const void* packed, index n, index k) {
    const index blocks = blocks_of(n), lines = padded_k<bf16>(k) / PAIR;
    const auto* starts = (const std::int64_t*)packed;
    const auto* masks = (const std::uint32_t*)(starts + blocks + 1);
    return {starts, masks, (const bf16*)(masks + blocks * lines), lines};
}

// As form_of, but vectors also multiply two rows where tiles would, because they need no copy of the expanded weights.
inline Form sparse_form(index m, bool fixed) { return m <= 2 && !fixed ? Form::ROWS : form_of<bf16>(m, fixed); }

// One thread's part of a product. room: room_of<bf16>(m, k) bytes that the team shares.
inline void sparse_product(const Problem<bf16>& p, const void* packed, bf16* room, Team team) {
    const Form form = sparse_form(p.m, p.fixed);
    const bf16* x = prepare(p, form, room, team);
    const bool converts = form == Form::TILES || p.m > FEW_ROWS || p.fixed;
    const Scratch weights(converts ? converted_room(p.k) : 0);
    converted_product(p, sparse_lines(packed, p.n, p.k), x, form, (bf16*)weights.memory, team);
}

}  // namespace ridgeline
