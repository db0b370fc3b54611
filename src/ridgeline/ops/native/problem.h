// Products with packed weights: y[M, N] = x[M, K] W[N, K]^T + bias, x normed on the way in, the end of it fused.
//
// Packed layout, bfloat16: [N / 16][K / 2][16][2], padded with zeros to whole blocks of 16 outputs and 32 inputs. Read in
// order it is what a matrix-vector product wants, and 16 pairs of it are the second operand of an AMX product.
// float32: [N / 16][K][16], padded to 16 outputs.
//
// Work is shared by units of neighbouring blocks. Where a gate ends the product, a unit is a block of the gate and the block
// of the other half that it weighs, so that the thread that has both sums writes one result.
#pragma once

#include "norm.h"

namespace ridgeline {

constexpr index PAIR = 2;
constexpr index TILE_K = 32;

template <class T> constexpr index padded_k(index k) { return sizeof(T) == 2 ? (k + TILE_K - 1) / TILE_K * TILE_K : k; }
constexpr index blocks_of(index n) { return (n + LANES - 1) / LANES; }

enum class Gate : int { NONE, SILU, GELU };

// gelu by tanh (Hendrycks and Gimpel 2016): x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), because 1 + tanh(y) = 2 sigmoid(2 y).
inline __m512 gelu(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216057308f))));
}

inline __m512 act(Gate gate, __m512 x) { return gate == Gate::GELU ? gelu(x) : _mm512_mul_ps(x, sigmoid(x)); }

// bias, added: null or what is added to the result, [N] and [M, N] (added may be out). With a gate the first N / 2 outputs are
// the gate, N / 2 is a multiple of 16, out is [M, N / 2], and nothing is added. fixed: each output is summed along K in one
// order, whatever M is. scales, row_scales: null or float32 [N] and [M], by which sums are multiplied. from_block: which block
// of 16 outputs lies at `packed`.
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

    index panel() const { return padded_k<T>(k) * LANES; }
    bool gated() const { return gate != Gate::NONE; }
    index half() const { return n / 2 / LANES; }
    const T* panel_of(index block) const { return packed + (block - from_block) * panel(); }
    index units() const { return gated() ? half() : blocks_of(n); }

    __m512 biased(__m512 sum, index row, index first, __mmask16 lanes) const {
        if (scales) sum = _mm512_mul_ps(sum, _mm512_mul_ps(load(scales + first, lanes), _mm512_set1_ps(row_scales[row])));
        return bias ? _mm512_add_ps(sum, load(bias + first, lanes)) : sum;
    }

    // Row `row` of 16 outputs from `first` on.
    void put(index row, index first, __m512 sum) const {
        const __mmask16 lanes = first_lanes(n - first);
        sum = biased(sum, row, first, lanes);
        if (added) sum = _mm512_add_ps(sum, load(added + row * n + first, lanes));
        store(out + row * n + first, sum, lanes);
    }

    // The same of a gate and what it weighs.
    void put_gated(index row, index first, __m512 gate_sum, __m512 sum) const {
        gate_sum = biased(gate_sum, row, first, 0xffff);
        sum = biased(sum, row, n / 2 + first, 0xffff);
        store(out + row * (n / 2) + first, _mm512_mul_ps(act(gate, gate_sum), sum));
    }
};

// x as a product reads it: ROWS: one row of padded_k numbers behind the other; TILES: [M / 16][K / 32][16][32]; MIXED, for at
// most 16 rows: [K / 2][16][2], float32 [K][16], so that one step along K reads one cache line.
enum class Form { ROWS, TILES, MIXED };

template <class T> constexpr index room_of(index m, index k) {
    return (m + LANES - 1) / LANES * LANES * padded_k<T>(k) * index(sizeof(T));
}

template <class T, class Out> __m512 row_scale(const Problem<T, Out>& p, index row) {
    return p.norm.weight && row < p.m ? norm_scale(p.x + row * p.k, p.k, p.norm.eps) : _mm512_setzero_ps();
}

// 16 numbers of a row of x, normed where asked for; zeros behind its end, and in rows behind the last.
template <class T, class Out> __m512 part_of(const Problem<T, Out>& p, index row, index at, __m512 scale) {
    const __mmask16 kept = row < p.m ? first_lanes(std::max<index>(0, p.k - at)) : 0;
    const T* from = p.x + (kept ? row : 0) * p.k;
    return p.norm.weight ? normed(from, at, kept, scale, p.norm) : load(from + at, kept);
}

// 64 bytes of a row of x.
template <class Out> __m512i line_of(const Problem<float, Out>& p, index row, index at, __m512 scale) {
    return _mm512_castps_si512(part_of(p, row, at, scale));
}
template <class Out> __m512i line_of(const Problem<bf16, Out>& p, index row, index at, __m512 scale) {
    if (!p.norm.weight) return _mm512_maskz_loadu_epi16(row < p.m ? first_halves(p.k - at) : 0, p.x + row * p.k + at);
    return narrow(part_of(p, row, at + LANES, scale), part_of(p, row, at, scale));
}

// One thread's part of x in `room`, in the form ROWS or TILES.
template <class T, class Out> void fill_rows(const Problem<T, Out>& p, T* room, Form form, Team team) {
    constexpr index line = 64 / sizeof(T);
    const index wide = padded_k<T>(p.k);
    const Range own = share(form == Form::ROWS ? p.m : blocks_of(p.m) * LANES, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row) {
        const __m512 scale = row_scale(p, row);
        T* to = form == Form::ROWS ? room + row * wide : room + row / LANES * LANES * wide + row % LANES * line;
        for (index at = 0; at < wide; at += line) {
            const __m512i part = line_of(p, row, at, scale);
            const index left = std::min<index>(line, wide - at) * index(sizeof(T)) / 4;
            _mm512_mask_storeu_epi32(to + (form == Form::ROWS ? at : at * LANES), first_lanes(left), part);
        }
    }
}

// The same in the form MIXED: threads share the columns, because all rows of one lie in one cache line.
template <class T, class Out> void fill_mixed(const Problem<T, Out>& p, T* room, Team team) {
    constexpr index line = 64 / sizeof(T);
    const index wide = padded_k<T>(p.k);
    const Range own = share((wide + line - 1) / line, team.who, team.of);
    __m512 scale[LANES];
    for (index row = 0; row < LANES; ++row) scale[row] = row_scale(p, row);
    for (index at = own.begin * line; at < std::min(wide, own.end * line); at += line) {
        __m512i part[LANES];
        for (index row = 0; row < LANES; ++row) part[row] = line_of(p, row, at, scale[row]);
        transpose(part);
        const index left = std::min<index>(line, wide - at) * index(sizeof(T)) / 4;
        for (index i = 0; i < left; ++i) _mm512_storeu_si512(room + at * LANES + i * line, part[i]);
    }
}

}  // namespace ridgeline
