// Products with weights that are stored smaller than bfloat16 and converted while they are read.
//
// For a few tokens weights are converted in registers, for more tokens into the thread's cache, a few outputs at a time, and
// multiplied as bfloat16. Memory traffic is that of the stored weights, and the sums are those of bfloat16.
//
// Lines: the stored weights. lines.of(block) returns a reader of a block of 16 outputs; each call of it converts the next four
// lines of the layout of bfloat16 (problem.h). lines.span(k): inputs of K that share scales, a multiple of 8. lines.factors(block,
// i): the scales of a block's span i. Without scales, `SCALED` is false and a span is all inputs.
#pragma once

#include "product.h"

namespace ridgeline {

constexpr index GROUP = 4;  // blocks of outputs that are converted together; a pair for tiles
constexpr int LINES = 4;    // lines that a reader converts in a call

// Bytes of a thread's converted weights.
inline index converted_room(index k) { return GROUP * LANES * padded_k<bf16>(k) * index(sizeof(bf16)); }

// The weights of a line times the scales of its 16 outputs, rounded to bfloat16.
inline i32x16 scaled_line(i32x16 line, f32x16 factors) {
    const i32x16 second = line & splat(std::int32_t(0xffff0000));
    return pairs(floats_of(shift_left(line, 16)) * factors, floats_of(second) * factors);
}

// Sums of up to ROWS of x times one block, with weights converted in registers. Up to MOST_SPLIT sums along K hide the latency of
// multiply-adds. Scales multiply the sums of their spans.
template <int ROWS, int MOST_SPLIT, Form FORM, class Out, class Lines>
void sum_converted(const Problem<bf16, Out>& p, const Lines& lines, const bf16* x, index block, f32x16 (&total)[FEW_ROWS]) {
    constexpr int SPLIT = std::clamp(SUMS / ROWS, 1, MOST_SPLIT);
    const index wide = padded_k<bf16>(p.k), span = lines.span(wide);
    const bf16* rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = x + std::min<index>(r, p.m - 1) * wide;
    auto read = lines.of(block);
    for (index first = 0, number = 0; first < wide; first += span, ++number) {
        f32x16 sum[ROWS][SPLIT];
        for (auto& of_row : sum)
            for (auto& part : of_row) part = zeros();
        for (index at = first; at < std::min(first + span, wide); at += LINES * PAIR) {
            i32x16 line[LINES];
            read(line);
#pragma GCC unroll 4
            for (int i = 0; i < LINES; ++i)
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    const index k = at + i * PAIR;
                    const bf16* numbers = FORM == Form::MIXED ? x + k * LANES + r * PAIR : rows[r] + k;
                    sum[r][i % SPLIT] = step(sum[r][i % SPLIT], spread(numbers), line[i]);
                }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            for (int part = 1; part < SPLIT; ++part) sum[r][0] = sum[r][0] + sum[r][part];
            if constexpr (Lines::SCALED)
                total[r] = fma(sum[r][0], lines.factors(block, number), first ? total[r] : zeros());
            else
                total[r] = sum[r][0];
        }
    }
}

template <class Out, class Lines>
void sum_converted(const Problem<bf16, Out>& p, const Lines& lines, const bf16* x, index block, f32x16 (&total)[FEW_ROWS]) {
    if (p.m == 1) return sum_converted<1, 4, Form::ROWS>(p, lines, x, block, total);
    if (p.m == 2) return sum_converted<2, 4, Form::ROWS>(p, lines, x, block, total);
    if constexpr (FEW_ROWS > 2) {
        if (p.m <= 4) return sum_converted<4, 2, Form::ROWS>(p, lines, x, block, total);
        if (p.m <= 6) return sum_converted<6, 2, Form::ROWS>(p, lines, x, block, total);
        if (p.m <= FEWER_ROWS) return sum_converted<8, 2, Form::ROWS>(p, lines, x, block, total);
        if (p.m <= 12) return sum_converted<12, 1, Form::MIXED>(p, lines, x, block, total);
        sum_converted<16, 1, Form::MIXED>(p, lines, x, block, total);
    }
}

template <class Out, class Lines> void in_registers(const Problem<bf16, Out>& p, const Lines& lines, const bf16* x, Range own) {
    f32x16 total[FEW_ROWS], second[FEW_ROWS];
    for (index block = own.begin; block < own.end; ++block) {
        sum_converted(p, lines, x, block, total);
        if (p.gated()) sum_converted(p, lines, x, block + p.half(), second);
        for (index r = 0; r < p.m; ++r) {
            if (p.gated()) {
                p.put_gated(r, block * LANES, total[r], second[r]);
            } else {
                p.put(r, block * LANES, total[r]);
            }
        }
    }
}

template <class Lines> void convert(const Lines& lines, Range blocks, index panel, bf16* to) {
    const index wide = panel / LANES, span = lines.span(wide);
    for (index block = blocks.begin; block < blocks.end; ++block) {
        auto read = lines.of(block);
        for (index first = 0, number = 0; first < wide; first += span, ++number) {
            const f32x16 factors = lines.factors(block, number);
            for (index at = first; at < std::min(first + span, wide); at += LINES * PAIR, to += LINES * LANES * PAIR) {
                i32x16 line[LINES];
                read(line);
                for (int i = 0; i < LINES; ++i)
                    store_bits(to + i * LANES * PAIR, Lines::SCALED ? scaled_line(line[i], factors) : line[i]);
            }
        }
    }
}

// The blocks, or pairs of blocks, `own`, converted `group` at a time.
template <class Out, class Lines>
void in_groups(const Problem<bf16, Out>& p, const Lines& lines, const bf16* x, Form form, bf16* weights, Range own, index group) {
    for (index first = own.begin; first < own.end; first += group) {
        const Range blocks{first, std::min(first + group, own.end)};
        const index count = blocks.end - blocks.begin;
        convert(lines, blocks, p.panel(), weights);
        if (p.gated()) convert(lines, {blocks.begin + p.half(), blocks.end + p.half()}, p.panel(), weights + count * p.panel());
        Problem<bf16, Out> part = p;
        part.packed = weights;
        part.from_block = first;
        part.up_after = count;
#if RIDGELINE_AMX
        if (form == Form::TILES) {
            pair_by_tiles(part, x, p.gated() ? first : first / 2);
            continue;
        }
#endif
        p.gated() ? in_any_number<true>(part, x, blocks) : in_any_number<false>(part, x, blocks);
    }
}

// One thread's part of a product. x: in the layout `form`. weights: converted_room(k) bytes of the thread.
template <class Out, class Lines>
void converted_product(const Problem<bf16, Out>& p, const Lines& lines, const bf16* x, Form form, bf16* weights, Team team) {
    if (form != Form::TILES && p.m <= FEW_ROWS && !p.fixed)
        return in_registers(p, lines, x, share(p.units(), team.who, team.of));
    // Tiles compute pairs of blocks.
    const index pair = form == Form::TILES && !p.gated() ? 2 : 1;
    const Range own = share((p.units() + pair - 1) / pair, team.who, team.of);
    const index group = p.gated() ? (form == Form::TILES ? 1 : GROUP / 2) : form == Form::TILES ? 2 : GROUP;
    in_groups(p, lines, x, form, weights, {own.begin * pair, std::min(own.end * pair, p.units())}, group);
}

}  // namespace ridgeline
