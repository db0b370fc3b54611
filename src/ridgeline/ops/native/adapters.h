// What LoRA adapters add to a linear: y[t] += B A x[t], with A and B of the slot of token t; see ridgeline.ops.adapters.
//
// Tokens are grouped by slot once per step, so that the tokens of a slot share the reads of its matrices. A is read row by row and
// multiplied by up to PASS_TOKENS tokens at a time; 16 sums become one vector. B is read in blocks of 16 outputs, in which two
// bfloat16 of an output are neighbours. Both are prefetched: a slot's matrices are too small for the CPU to foresee its reads.
// Tokens without an adapter are not multiplied.
#pragma once

#include "product_vectors.h"

namespace ridgeline {

// Words: number of groups, place of the order among the words, of each group its slot and the end of its tokens, the order. A
// group's tokens are order[begin] .. order[end - 1], where begin is the end of the group before it.
struct Groups {
    const std::int32_t* words;

    index size() const { return words ? words[0] : 0; }
    const std::int32_t* order() const { return words + words[1]; }
    index slot(index group) const { return words[2 + 2 * group]; }
    index end(index group) const { return words[3 + 2 * group]; }
    index begin(index group) const { return group ? end(group - 1) : 0; }
    index tokens() const { return size() ? end(size() - 1) : 0; }
};

// Matrices of a linear for all slots; binding.py mirrors the fields in this order. A slot has A [parts * r, inputs] from a + slot *
// a_stride on, and B in blocks of 16 outputs, [outputs / 16][r / 2][16][2], float32 [outputs / 16][r][16], padded with zeros. r, a
// multiple of 8, is ranks[slot]; 0: the adapter does not change the linear. ends: last output of each part, exclusive.
template <class T> struct Adapters {
    const T* a;
    const T* b;
    const std::int32_t* ranks;
    const index* ends;
    index a_stride, b_stride, inputs, parts, most_rank;

    index outputs() const { return ends[parts - 1]; }
    // Numbers of A x of a token.
    index width() const { return parts * most_rank; }
};

constexpr index PASS_TOKENS = MANY_SUMS ? 4 : 2;  // most tokens of one pass over A or B
constexpr int PASS_SUMS = MANY_SUMS ? 16 : 4;     // sums of a pass over A
constexpr index UNIT_ROWS = 8;                    // rows of A in a unit of work; ranks are multiples of it
constexpr int UNIT_BLOCKS = MANY_SUMS ? 4 : 2;    // blocks of B in a unit of work
constexpr index UNIT_OUTPUTS = UNIT_BLOCKS * LANES;
constexpr index AHEAD_OF_USE = 4096;  // bytes of B between a prefetch and its use

// The sums of the lanes of 16 vectors.
inline f32x16 sums_of(f32x16 (&s)[16]) {
    for (int i = 0; i < 8; ++i) s[i] = unpack_low_32(s[2 * i], s[2 * i + 1]) + unpack_high_32(s[2 * i], s[2 * i + 1]);
    for (int i = 0; i < 4; ++i) s[i] = unpack_low_64(s[2 * i], s[2 * i + 1]) + unpack_high_64(s[2 * i], s[2 * i + 1]);
    for (int i = 0; i < 2; ++i) s[i] = even_parts(s[2 * i], s[2 * i + 1]) + odd_parts(s[2 * i], s[2 * i + 1]);
    return even_parts(s[0], s[1]) + odd_parts(s[0], s[1]);
}

inline i32x16 numbers_at(const bf16* p, index left) { return load_line(p, first_numbers(left)); }
inline i32x16 numbers_at(const float* p, index left) { return load_bits(p, first_lanes(left)); }
inline f32x16 dot(f32x16 sum, i32x16 a, i32x16 b, const bf16*) { return dot_pairs(sum, a, b); }
inline f32x16 dot(f32x16 sum, i32x16 a, i32x16 b, const float*) { return fma(floats_of(a), floats_of(b), sum); }

// UNIT_ROWS rows of A times TOKENS tokens: to `out` of each token. next: what is read after them.
template <class T, int TOKENS>
void multiply_a(const T* a, const T* next, index k, const T* const (&x)[PASS_TOKENS], T* const (&out)[PASS_TOKENS]) {
    constexpr index each = 64 / sizeof(T);
    constexpr int ROWS = std::min<int>(UNIT_ROWS, PASS_SUMS / power_of_two(2 * TOKENS - 1));
    for (int first = 0; first < UNIT_ROWS; first += ROWS, a += ROWS * k, next += ROWS * k) {
        f32x16 sum[16];
        for (auto& one : sum) one = zeros();
        const auto go = [&](index at, index left) __attribute__((always_inline)) {
            i32x16 numbers[TOKENS];
            for (int t = 0; t < TOKENS; ++t) numbers[t] = left < each ? numbers_at(x[t] + at, left) : load_bits(x[t] + at);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const T* from = a + row * k + at;
                _mm_prefetch((const char*)(next + row * k + at), _MM_HINT_T0);
                const i32x16 weights = left < each ? numbers_at(from, left) : load_bits(from);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) sum[t * ROWS + row] = dot(sum[t * ROWS + row], weights, numbers[t], a);
            }
        };
        index at = 0;
        for (; at + each <= k; at += each) go(at, each);
        if (at < k) go(at, k - at);
        float total[16];
        store(total, sums_of(sum));
        for (int t = 0; t < TOKENS; ++t)
            store(out[t] + first, load(total + t * ROWS, first_lanes(ROWS)), first_lanes(ROWS));
    }
}

// Add BLOCKS blocks of B times the r numbers of TOKENS tokens to y, from output `first` on; only outputs from `from` to `to`. next:
// what is read later.
template <class T, int TOKENS, int BLOCKS>
void multiply_b(const T* b, const T* next, index r, const T* const (&inner)[PASS_TOKENS], T* const (&y)[PASS_TOKENS], index first,
                index from, index to) {
    constexpr index each = sizeof(T) == 2 ? PAIR : 1;
    f32x16 sum[TOKENS][BLOCKS];
    for (auto& of_token : sum)
        for (auto& one : of_token) one = zeros();
    for (index at = 0; at < r; at += each) {
        i32x16 line[BLOCKS];
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) {
            _mm_prefetch((const char*)(next + (block * r + at) * LANES), _MM_HINT_T0);
            line[block] = load_bits(b + (block * r + at) * LANES);
        }
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; ++t) {
            const auto numbers = spread(inner[t] + at);
#pragma GCC unroll 4
            for (int block = 0; block < BLOCKS; ++block) sum[t][block] = step(sum[t][block], numbers, line[block]);
        }
    }
    const bool whole = from == first && to == first + BLOCKS * LANES;
    for (int t = 0; t < TOKENS; ++t) {
        float kept[BLOCKS * LANES];
        for (int block = 0; block < BLOCKS; ++block)
            if (T* const at = y[t] + first + block * LANES; whole)
                store(at, load(at) + sum[t][block]);
            else
                store(kept + block * LANES, sum[t][block]);
        for (index at = from; !whole && at < to; at += LANES) {
            const Part lanes = first_lanes(to - at);
            store(y[t] + at, load(y[t] + at, lanes) + load(kept + at - first, lanes), lanes);
        }
    }
}

// use(group, row of units, first token, tokens) for the units of a thread: each group has rows_of(group) rows of units, and a row
// has a unit for each chunk of the group's tokens.
template <class RowsOf, class Use> void each_unit(const Groups& groups, Team team, const RowsOf& rows_of, const Use& use) {
    const auto chunks = [&](index group) { return (groups.end(group) - groups.begin(group) + PASS_TOKENS - 1) / PASS_TOKENS; };
    index all = 0, before = 0;
    for (index group = 0; group < groups.size(); ++group) all += rows_of(group) * chunks(group);
    const Range own = share(all, team.who, team.of);
    for (index group = 0; group < groups.size() && before < own.end; ++group) {
        const index in_row = chunks(group), units = rows_of(group) * in_row;
        for (index unit = std::max<index>(0, own.begin - before); unit < std::min(units, own.end - before); ++unit) {
            const index token = groups.begin(group) + unit % in_row * PASS_TOKENS;
            use(group, unit / in_row, token, std::min(PASS_TOKENS, groups.end(group) - token));
        }
        before += units;
    }
}

// Where the unit `later` units after row `row` of a group begins: in the group's memory or in that of the next one. null: nowhere.
template <class T, class RowsOf, class At>
const T* unit_after(const Groups& groups, index group, index row, index later, const RowsOf& rows_of, const At& at) {
    for (row += later; group < groups.size(); row -= rows_of(group++))
        if (row < rows_of(group)) return at(group, row);
    return nullptr;
}

// A thread's part of A x, to inner [grouped tokens, width]. x: [tokens, inputs], in the order of the groups if `sorted`.
template <class T> void add_up(const Groups& groups, const Adapters<T>& w, const T* x, bool sorted, T* inner, Team team) {
    const auto rows_of = [&](index group) { return w.parts * w.ranks[groups.slot(group)] / UNIT_ROWS; };
    const auto a_of = [&](index group, index row) {
        return w.a + groups.slot(group) * w.a_stride + row * UNIT_ROWS * w.inputs;
    };
    each_unit(groups, team, rows_of, [&](index group, index row, index token, index count) {
        const T* from[PASS_TOKENS] = {};
        T* to[PASS_TOKENS] = {};
        for (index t = 0; t < count; ++t) {
            from[t] = x + (sorted ? token + t : groups.order()[token + t]) * w.inputs;
            to[t] = inner + (token + t) * w.width() + row * UNIT_ROWS;
        }
        const T* const a = a_of(group, row);
        const T* next = unit_after<T>(groups, group, row, 1, rows_of, a_of);
        next = next ? next : w.b + groups.slot(0) * w.b_stride;
        if (count == 1) return multiply_a<T, 1>(a, next, w.inputs, from, to);
        if (count == 2) return multiply_a<T, 2>(a, next, w.inputs, from, to);
        if constexpr (PASS_TOKENS == 4)
            count == 3 ? multiply_a<T, 3>(a, next, w.inputs, from, to) : multiply_a<T, 4>(a, next, w.inputs, from, to);
    });
}

// The same for 1 to PASS_TOKENS tokens.
template <class T, int BLOCKS>
void multiply_b(const T* b, const T* next, index r, const T* const (&inner)[PASS_TOKENS], T* const (&y)[PASS_TOKENS], index count,
                index first, index from, index to) {
    if (count == 1) return multiply_b<T, 1, BLOCKS>(b, next, r, inner, y, first, from, to);
    if (count == 2) return multiply_b<T, 2, BLOCKS>(b, next, r, inner, y, first, from, to);
    if constexpr (PASS_TOKENS == 4)
        count == 3 ? multiply_b<T, 3, BLOCKS>(b, next, r, inner, y, first, from, to)
                   : multiply_b<T, 4, BLOCKS>(b, next, r, inner, y, first, from, to);
}

// A thread's part of y += B (A x), with y [tokens, outputs].
template <class T> void add_adapted(const Groups& groups, const Adapters<T>& w, const T* inner, T* y, Team team) {
    const index outputs = w.outputs();
    const auto rank_of = [&](index group) -> index { return w.ranks[groups.slot(group)]; };
    const auto rows_of = [&](index group) { return rank_of(group) ? (outputs + UNIT_OUTPUTS - 1) / UNIT_OUTPUTS : 0; };
    const auto b_of = [&](index group, index row) {
        return w.b + groups.slot(group) * w.b_stride + row * UNIT_OUTPUTS * rank_of(group);
    };
    each_unit(groups, team, rows_of, [&](index group, index row, index token, index count) {
        const index r = rank_of(group), later = AHEAD_OF_USE / (UNIT_OUTPUTS * r * index(sizeof(T))) + 1;
        const T* const b = b_of(group, row);
        const T* const found = token == groups.begin(group) ? unit_after<T>(groups, group, row, later, rows_of, b_of) : nullptr;
        const T* const next = found ? found : b;
        const T* from[PASS_TOKENS] = {};
        T* to[PASS_TOKENS] = {};
        for (index t = 0; t < count; ++t) to[t] = y + groups.order()[token + t] * outputs;
        const index begin = row * UNIT_OUTPUTS, end = std::min(begin + UNIT_OUTPUTS, outputs);
        for (index part = 0, first = 0; part < w.parts; first = w.ends[part++]) {
            const index own = std::max(begin, first), behind = std::min(end, w.ends[part]);
            if (own >= behind) continue;
            for (index t = 0; t < count; ++t) from[t] = inner + (token + t) * w.width() + part * r;
            if (end - begin > UNIT_OUTPUTS - LANES) {
                multiply_b<T, UNIT_BLOCKS>(b, next, r, from, to, count, begin, own, behind);
                continue;
            }
            for (index at = own / LANES * LANES; at < behind; at += LANES)
                multiply_b<T, 1>(b + (at - begin) * r, b, r, from, to, count, at, std::max(own, at), std::min(behind, at + LANES));
        }
    });
}

}  // namespace ridgeline
