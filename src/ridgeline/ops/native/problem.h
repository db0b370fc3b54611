// Products with packed weights: y[M, N] = x[M, K] W[N, K]^T + bias, with an optional norm of x and a fused epilogue.
//
// Packed layout, bfloat16: [N / 16][K / 2][16][2], padded with zeros to complete blocks of 16 outputs and 32 inputs. A
// matrix-vector product reads it sequentially, and 16 pairs of it are the second operand of an AMX product. float32: [N /
// 16][K][16], padded to 16 outputs.
//
// Threads share units of adjacent blocks. With a gate, a unit is a block of the gate and the block of up that it multiplies, so
// that the thread with both sums writes one result.
#pragma once

#include "norm.h"

namespace ridgeline {

constexpr index PAIR = 2;
constexpr index TILE_K = 32;

template <class T> constexpr index padded_k(index k) { return sizeof(T) == 2 ? (k + TILE_K - 1) / TILE_K * TILE_K : k; }
constexpr index blocks_of(index n) { return (n + LANES - 1) / LANES; }

enum class Gate : int { NONE, SILU, GELU };

// gelu by tanh (Hendrycks and Gimpel 2016): x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), because 1 + tanh(y) = 2 sigmoid(2 y).
inline f32x16 gelu(f32x16 x) {
    const f32x16 cubic = fma(x * x, splat(0.044715f), splat(1.0f));
    return x * sigmoid(x * cubic * splat(1.5957691216057308f));
}

inline f32x16 act(Gate gate, f32x16 x) { return gate == Gate::GELU ? gelu(x) : x * sigmoid(x); }

// act(gate) * up of one row, each n numbers.
template <class T> void activate_row(const T* gate_up, T* out, index n, Gate gate) {
    for (index at = 0; at < n; at += LANES) {
        const Part lanes = first_lanes(n - at);
        store(out + at, act(gate, load(gate_up + at, lanes)) * load(gate_up + n + at, lanes), lanes);
    }
}

// bias, added: null, or summands [N] and [M, N] of the result (added may equal out). With a gate, the first N / 2 outputs are the
// gate, N / 2 is a multiple of 16, out is [M, N / 2], and `added` is null. fixed: each output is summed along K in one order for
// any M. scales, row_scales: null, or factors float32 [N] and [M] of the sums. from_block: number of the block of 16 outputs at
// `packed`. up_after: blocks from a block of the gate to the block that it multiplies; 0: half of all.
template <class T, class Out = T> struct Problem {
    const T* x;
    const T* packed;
    const Out* bias;
    const Out* added;
    Out* out;
    index m, n, k;
    Gate gate;
    Norm<T> norm;
    bool fixed = false;
    const float* scales = nullptr;
    const float* row_scales = nullptr;
    index from_block = 0;
    index up_after = 0;

    index panel() const { return padded_k<T>(k) * LANES; }
    bool gated() const { return gate != Gate::NONE; }
    index half() const { return n / 2 / LANES; }
    const T* panel_of(index block) const { return packed + (block - from_block) * panel(); }
    index to_up() const { return (up_after ? up_after : half()) * panel(); }
    index units() const { return gated() ? half() : blocks_of(n); }

    f32x16 biased(f32x16 sum, index row, index first, Part lanes) const {
        if (scales) sum = sum * (load(scales + first, lanes) * splat(row_scales[row]));
        return bias ? sum + load(bias + first, lanes) : sum;
    }

    // Store row `row` of 16 outputs from `first` on.
    void put(index row, index first, f32x16 sum) const {
        const Part lanes = first_lanes(n - first);
        sum = biased(sum, row, first, lanes);
        if (added) sum = sum + load(added + row * n + first, lanes);
        store(out + row * n + first, sum, lanes);
    }

    // The same for a gate and the values that it multiplies.
    void put_gated(index row, index first, f32x16 gate_sum, f32x16 sum) const {
        gate_sum = biased(gate_sum, row, first, ALL);
        sum = biased(sum, row, n / 2 + first, ALL);
        store(out + row * (n / 2) + first, act(gate, gate_sum) * sum);
    }
};

// Layout of x for a product. ROWS: contiguous rows of padded_k numbers. TILES: [M / 16][K / 32][16][32]. MIXED, for up to 16 rows:
// [K / 2][16][2], float32 [K][16], so that each step along K reads one cache line.
enum class Form { ROWS, TILES, MIXED };

template <class T> constexpr index room_of(index m, index k) {
    return (m + LANES - 1) / LANES * LANES * padded_k<T>(k) * index(sizeof(T));
}

template <class T, class Out> f32x16 row_scale(const Problem<T, Out>& p, index row) {
    return p.norm.weight && row < p.m ? norm_scale(p.x + row * p.k, p.k, p.norm.eps) : zeros();
}

// 16 numbers of a row of x, normalised if there is a norm; zeros past its end and in rows past the last.
template <class T, class Out> f32x16 part_of(const Problem<T, Out>& p, index row, index at, f32x16 scale) {
    const index left = row < p.m ? std::max<index>(0, p.k - at) : 0;
    const Part kept = first_lanes(left);
    const T* from = p.x + (left ? row : 0) * p.k;
    return p.norm.weight ? normed(from, at, kept, scale, p.norm) : load(from + at, kept);
}

// 64 bytes of a row of x.
template <class Out> i32x16 line_of(const Problem<float, Out>& p, index row, index at, f32x16 scale) {
    return bits_of(part_of(p, row, at, scale));
}
template <class Out> i32x16 line_of(const Problem<bf16, Out>& p, index row, index at, f32x16 scale) {
    if (!p.norm.weight) return load_line(p.x + row * p.k + at, first_numbers(row < p.m ? p.k - at : 0));
    return line(part_of(p, row, at, scale), part_of(p, row, at + LANES, scale));
}

// One thread's part of x in `room`, with layout ROWS or TILES.
template <class T, class Out> void fill_rows(const Problem<T, Out>& p, T* room, Form form, Team team) {
    constexpr index each = 64 / sizeof(T);
    const index wide = padded_k<T>(p.k);
    const Range own = share(form == Form::ROWS ? p.m : blocks_of(p.m) * LANES, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row) {
        const f32x16 scale = row_scale(p, row);
        T* to = form == Form::ROWS ? room + row * wide : room + row / LANES * LANES * wide + row % LANES * each;
        for (index at = 0; at < wide; at += each) {
            const i32x16 part = line_of(p, row, at, scale);
            const index left = std::min<index>(each, wide - at) * index(sizeof(T)) / 4;
            store_bits(to + (form == Form::ROWS ? at : at * LANES), part, first_lanes(left));
        }
    }
}

// The same with layout MIXED. Threads share the columns, because all rows of a column are in one cache line.
template <class T, class Out> void fill_mixed(const Problem<T, Out>& p, T* room, Team team) {
    constexpr index each = 64 / sizeof(T);
    const index wide = padded_k<T>(p.k);
    const Range own = share((wide + each - 1) / each, team.who, team.of);
    f32x16 scale[LANES];
    for (index row = 0; row < LANES; ++row) scale[row] = row_scale(p, row);
    for (index at = own.begin * each; at < std::min(wide, own.end * each); at += each) {
        i32x16 part[LANES];
        for (index row = 0; row < LANES; ++row) part[row] = line_of(p, row, at, scale[row]);
        transpose(part);
        const index left = std::min<index>(each, wide - at) * index(sizeof(T)) / 4;
        for (index i = 0; i < left; ++i) store_bits(room + at * LANES + i * each, part[i]);
    }
}

}  // namespace ridgeline
