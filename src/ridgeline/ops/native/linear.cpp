// Exported products with packed weights, and packing.

#include "product.h"

namespace ridgeline {
namespace {

template <class T> void pack(const T* weight, T* packed, index n, index k) {
    constexpr index pair = sizeof(T) == 2 ? PAIR : 1;
    const index wide = padded_k<T>(k), blocks = blocks_of(n);
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks; ++block) {
        T* to = packed + block * LANES * wide;
        for (index at = 0; at < wide; ++at)
            for (index lane = 0; lane < LANES; ++lane) {
                const index row = block * LANES + lane;
                to[(at / pair * LANES + lane) * pair + at % pair] = row < n && at < k ? weight[row * k + at] : T{};
            }
    }
}

template <class T> void linear(const Problem<T>& p) {
    const Scratch room(room_of<T>(p.m, p.k));
#pragma omp parallel num_threads(threads_for(p.n * p.k, 1 << 14))
    {
        const TileConfig configured(form_of<T>(p.m, p.fixed) == Form::TILES);
        product(p, (T*)room.memory, Team{omp_get_thread_num(), omp_get_num_threads()});
    }
}

}  // namespace

template void product(const Problem<bf16>&, bf16*, Team);
template void product(const Problem<float>&, float*, Team);

#define RIDGELINE_LINEAR(T, SUFFIX)                                                                                      \
    RIDGELINE_API void rl_pack_##SUFFIX(const T* weight, T* packed, index n, index k) { pack(weight, packed, n, k); }     \
    RIDGELINE_API void rl_linear_##SUFFIX(const T* x, const T* packed, const T* bias, const T* added, T* out, index m,    \
                                          index n, index k, int gate, const T* norm, float eps, float offset,           \
                                          int fixed) {          \
        linear(Problem<T>{x, packed, bias, added, out, m, n, k, Gate(gate), {norm, eps, offset}, fixed != 0});                       \
    }

RIDGELINE_LINEAR(bf16, bf16)
RIDGELINE_LINEAR(float, f32)
RIDGELINE_REPLAYABLE(rl_linear_bf16)
RIDGELINE_REPLAYABLE(rl_linear_f32)

}  // namespace ridgeline
