// Tokenwise operations: norms, activation, embedding, and rotary embedding with the write to the cache.

#include "problem.h"
#include "qkv.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ridgeline {

// Linux enables the tiles' large state only on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool tiles_allowed = RIDGELINE_AMX && syscall(SYS_arch_prctl, 0x1023, 18) == 0;

namespace {

constexpr index ELEMENTS_PER_THREAD = 1 << 12;

template <class T> void norm(const T* x, T* out, index rows, index n, const Norm<T>& norm) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row) norm_row(x + row * n, out + row * n, n, norm);
}

// Rows to columns of a wider matrix, normed if the norm has weights.
template <class T>
void place(const T* x, T* out, index rows, index n, index x_step, index out_step, const Norm<T>& norm) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row)
        if (norm.weight)
            norm_row(x + row * x_step, out + row * out_step, n, norm);
        else
            std::copy_n(x + row * x_step, n, out + row * out_step);
}

// Rows of a table, times `scale`.
template <class T> void embed(const T* table, const std::int32_t* ids, T* out, index rows, index n, float scale) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row)
        for (index at = 0; at < n; at += LANES) {
            const Part kept = first_lanes(n - at);
            store(out + row * n + at, load(table + ids[row] * n + at, kept) * splat(scale), kept);
        }
}

template <class T> void activate(const T* gate_up, T* out, index rows, index n, Gate gate) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row) activate_row(gate_up + row * 2 * n, out + row * n, n, gate);
}

template <class T> void qkv_write(const Qkv<T>& s) {
    const index work = s.view.n_tokens * s.all() * s.view.dim;
#pragma omp parallel num_threads(threads_for(work, ELEMENTS_PER_THREAD))
    qkv_write(s, Team{omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace

// Request pages of 2 MiB. The memory must not have been touched yet.
RIDGELINE_API int rl_huge_pages(void* memory, index bytes) { return madvise(memory, bytes, MADV_HUGEPAGE); }
RIDGELINE_API const char* rl_instructions() {
    return tiles_allowed ? RIDGELINE_INSTRUCTIONS " and AMX tiles" : RIDGELINE_INSTRUCTIONS;
}
RIDGELINE_API int rl_threads() { return omp_get_max_threads(); }
RIDGELINE_API const char* rl_compiler() { return __VERSION__; }

#define RIDGELINE_ROWWISE(T, SUFFIX)                                                                                     \
    RIDGELINE_API void rl_norm_##SUFFIX(const T* x, const T* weight, T* out, index rows, index n, float eps,             \
                                        float offset) {                                                                  \
        norm(x, out, rows, n, Norm<T>{weight, eps, offset});                                                             \
    }                                                                                                                    \
    RIDGELINE_API void rl_place_##SUFFIX(const T* x, const T* weight, T* out, index rows, index n, index x_step,          \
                                         index out_step, float eps, float offset) {                                     \
        place(x, out, rows, n, x_step, out_step, Norm<T>{weight, eps, offset});                                          \
    }                                                                                                                    \
    RIDGELINE_API void rl_embed_##SUFFIX(const T* table, const std::int32_t* ids, T* out, index rows, index n,           \
                                         float scale) {                                                                 \
        embed(table, ids, out, rows, n, scale);                                                                         \
    }                                                                                                                    \
    RIDGELINE_API void rl_activate_##SUFFIX(const T* gate_up, T* out, index rows, index n, int gate) {                    \
        activate(gate_up, out, rows, n, Gate(gate));                                                                     \
    }                                                                                                                    \
    RIDGELINE_API void rl_qkv_write_##SUFFIX(const View* view, const T* qkv, T* out, T* cache, const float* cos_sin,      \
                                             const T* q_norm, const T* k_norm, index heads, index kv_heads, index half,  \
                                             float eps, float offset) {                                                  \
        qkv_write(Qkv<T>{*view, qkv, out, cache, cos_sin, q_norm, k_norm, heads, kv_heads, half, eps, offset});          \
    }

RIDGELINE_ROWWISE(bf16, bf16)
RIDGELINE_ROWWISE(float, f32)
RIDGELINE_REPLAYABLE(rl_norm_bf16)
RIDGELINE_REPLAYABLE(rl_norm_f32)
RIDGELINE_REPLAYABLE(rl_place_bf16)
RIDGELINE_REPLAYABLE(rl_place_f32)
RIDGELINE_REPLAYABLE(rl_embed_bf16)
RIDGELINE_REPLAYABLE(rl_embed_f32)
RIDGELINE_REPLAYABLE(rl_activate_bf16)
RIDGELINE_REPLAYABLE(rl_activate_f32)
RIDGELINE_REPLAYABLE(rl_qkv_write_bf16)
RIDGELINE_REPLAYABLE(rl_qkv_write_f32)

}  // namespace ridgeline
