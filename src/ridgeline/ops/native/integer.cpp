// Exported products with integer weights, and packing; see integer.h and integer_rounded.h.

#include "integer_rounded.h"

namespace ridgeline {
namespace {

// codes: one byte each, [n, k].
void pack(const std::uint8_t* codes, std::uint8_t* packed, index n, index k, index bits) {
    const index pieces = (k + PIECE_K - 1) / PIECE_K;
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks_of(n); ++block) {
        std::uint8_t* to = packed + block * pieces * bits * 64;
        std::memset(to, 0, pieces * bits * 64);
        for (index at = 0; at < pieces * PIECE_K; ++at)
            for (index lane = 0; lane < LANES; ++lane) {
                const index row = block * LANES + lane, i = at % PIECE_K / 4;
                if (row >= n || at >= k) continue;
                const std::uint8_t code = codes[row * k + at];
                std::uint8_t* piece = to + at / PIECE_K * bits * 64 + 4 * lane + at % 4;
                if (bits == 8) {
                    piece[64 * i] = code;
                } else if (bits == 6) {
                    std::uint8_t* half = piece + 192 * (i / 4);
                    half[64 * (i % 4 / 2)] |= std::uint8_t((code & 15) << 4 * (i % 2));
                    half[128] |= std::uint8_t(code >> 4 << 2 * (i % 4));
                } else if (bits >= 4) {
                    piece[64 * (i / 2)] |= std::uint8_t((code & 15) << 4 * (i % 2));
                    if (bits == 5) piece[256] |= std::uint8_t(code >> 4 << i);
                } else {
                    piece[64 * (i / 4)] |= std::uint8_t((code & 3) << 2 * (i % 4));
                    piece[128] |= std::uint8_t(code >> 2 << i);
                }
            }
    }
}

template <class T> void linear(const Problem<T>& p, const IntWeights& w) {
    const bool rounds = w.inputs != Inputs::FLOAT;
    const Scratch room(rounds ? rounded_room(p.m, p.k, w.inputs) : digits_room(p.m, p.k));
#pragma omp parallel num_threads(threads_for(p.n * p.k, 1 << 14))
    {
        const TileConfig configured(by_byte_tiles(p.m));
        const Team team{omp_get_thread_num(), omp_get_num_threads()};
        rounds ? rounded_product(p, w, room.memory, team) : int_product(p, w, room.memory, team);
    }
}

}  // namespace

template void int_product(const Problem<bf16>&, const IntWeights&, void*, Team);
template void int_product(const Problem<float>&, const IntWeights&, void*, Team);

RIDGELINE_API void rl_int_pack(const std::uint8_t* codes, std::uint8_t* packed, index n, index k, index bits) {
    pack(codes, packed, n, k, bits);
}

#define RIDGELINE_INTEGER(T, SUFFIX)                                                                                     \
    RIDGELINE_API void rl_int_linear_##SUFFIX(const T* x, const IntWeights* weights, const T* bias, const T* added, T* out, \
                                              index m, index n, index k, int gate, const T* norm, float eps, float offset) { \
        linear(Problem<T>{x, nullptr, bias, added, out, m, n, k, Gate(gate), {norm, eps, offset}}, *weights);             \
    }

RIDGELINE_INTEGER(bf16, bf16)
RIDGELINE_INTEGER(float, f32)
RIDGELINE_REPLAYABLE(rl_int_linear_bf16)
RIDGELINE_REPLAYABLE(rl_int_linear_f32)

}  // namespace ridgeline
