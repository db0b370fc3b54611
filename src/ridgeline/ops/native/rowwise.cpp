// What happens to each token alone: norms, activation, rotary embedding with the write into the cache.

#include "view.h"

#include <cmath>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ridgeline {

// Linux hands out the tiles' large state only on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool tiles_allowed = RIDGELINE_AMX && syscall(SYS_arch_prctl, 0x1023, 18) == 0;

namespace {

constexpr index ELEMENTS_PER_THREAD = 1 << 12;

// out = x / rms(x) * (weight + offset), for n values; out may be x.
template <class T> void norm_row(const T* x, const T* weight, T* out, index n, float eps, float offset) {
    __m512 squares = _mm512_setzero_ps();
    for (index at = 0; at < n; at += LANES) {
        const __m512 part = load(x + at, first_lanes(n - at));
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(n) + eps));
    for (index at = 0; at < n; at += LANES) {
        const __mmask16 lanes = first_lanes(n - at);
        const __m512 factor = _mm512_add_ps(load(weight + at, lanes), _mm512_set1_ps(offset));
        store(out + at, _mm512_mul_ps(_mm512_mul_ps(load(x + at, lanes), scale), factor), lanes);
    }
}

template <class T> void add_row(const T* x, const T* residual, T* total, index n) {
    for (index at = 0; at < n; at += LANES) {
        const __mmask16 lanes = first_lanes(n - at);
        store(total + at, _mm512_add_ps(load(x + at, lanes), load(residual + at, lanes)), lanes);
    }
}

// residual null: a norm alone.
template <class T>
void norm(const T* x, const T* residual, const T* weight, T* total, T* out, index rows, index n, float eps, float offset) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row) {
        const T* from = x + row * n;
        if (residual) {
            add_row(from, residual + row * n, total + row * n, n);
            from = total + row * n;
        }
        norm_row(from, weight, out + row * n, n, eps, offset);
    }
}

// gelu by tanh (Hendrycks and Gimpel 2016): x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), because 1 + tanh(y) = 2 sigmoid(2 y).
inline __m512 gelu(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216057308f))));
}

template <class T> void activate(const T* gate_up, T* out, index rows, index n, bool is_gelu) {
#pragma omp parallel for num_threads(threads_for(rows * n, ELEMENTS_PER_THREAD))
    for (index row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * 2 * n;
        for (index at = 0; at < n; at += LANES) {
            const __mmask16 lanes = first_lanes(n - at);
            const __m512 x = load(gate + at, lanes);
            const __m512 act = is_gelu ? gelu(x) : _mm512_mul_ps(x, sigmoid(x));
            store(out + row * n + at, _mm512_mul_ps(act, load(gate + n + at, lanes)), lanes);
        }
    }
}

// One call of qkv_write; out is [tokens, heads + 2 kv_heads, dim].
template <class T> struct Qkv {
    const View& view;
    const T* qkv;
    T* out;
    T* cache;
    const float* cos_sin;
    const T* q_norm;
    const T* k_norm;
    index heads, half;
    float eps, offset;
};

// The first 2 half of n numbers turn, halves paired; the rest stays. from may be to.
template <class T> void turn(const T* from, T* to, const float* cos_sin, index n, index half) {
    for (index at = 0; at < half; at += LANES) {
        const __mmask16 lanes = first_lanes(half - at);
        const __m512 cos = load(cos_sin + at, lanes), sin = load(cos_sin + half + at, lanes);
        const __m512 first = load(from + at, lanes), second = load(from + half + at, lanes);
        store(to + at, _mm512_fmsub_ps(first, cos, _mm512_mul_ps(second, sin)), lanes);
        store(to + half + at, _mm512_fmadd_ps(second, cos, _mm512_mul_ps(first, sin)), lanes);
    }
    if (from != to && n > 2 * half) std::memcpy(to + 2 * half, from + 2 * half, (n - 2 * half) * sizeof(T));
}

template <class T> void write_token(const Qkv<T>& s, index token) {
    const View& view = s.view;
    const index dim = view.dim, turned = s.heads + view.kv_heads, all = turned + view.kv_heads;
    const T* from = s.qkv + token * all * dim;
    T* to = s.out + token * all * dim;
    const float* cos_sin = s.cos_sin + index(view.position[token]) * 2 * s.half;
    const index page = view.slots[token] / view.page_tokens, place = view.slots[token] % view.page_tokens;
    T* cached = s.cache + page * view.page_stride + place * view.place_stride;
    for (index head = 0; head < all; ++head, from += dim, to += dim) {
        const T* weight = head < s.heads ? s.q_norm : s.k_norm;
        if (head >= turned) {
            std::memcpy(to, from, dim * sizeof(T));
        } else if (weight) {
            norm_row(from, weight, to, dim, s.eps, s.offset);
            turn(to, to, cos_sin, dim, s.half);
        } else {
            turn(from, to, cos_sin, dim, s.half);
        }
        if (head < s.heads) continue;
        const index kind = head >= turned, kv_head = head - (kind ? turned : s.heads);
        std::memcpy(cached + kind * view.kind_stride + kv_head * view.head_stride, to, dim * sizeof(T));
    }
}

template <class T> void qkv_write(const Qkv<T>& s) {
    const index tokens = s.view.n_tokens, each = (s.heads + 2 * s.view.kv_heads) * s.view.dim;
#pragma omp parallel for num_threads(threads_for(tokens * each, ELEMENTS_PER_THREAD))
    for (index token = 0; token < tokens; ++token) write_token(s, token);
}

}  // namespace

// Ask for pages of 2 MiB; memory must not have been touched yet.
RIDGELINE_API int rl_huge_pages(void* memory, index bytes) { return madvise(memory, bytes, MADV_HUGEPAGE); }
RIDGELINE_API int rl_uses_tiles() { return tiles_allowed; }
RIDGELINE_API int rl_threads() { return omp_get_max_threads(); }
RIDGELINE_API const char* rl_compiler() { return __VERSION__; }

#define RIDGELINE_ROWWISE(T, SUFFIX)                                                                                     \
    RIDGELINE_API void rl_norm_##SUFFIX(const T* x, const T* residual, const T* weight, T* total, T* out, index rows,     \
                                        index n, float eps, float offset) {                                              \
        norm(x, residual, weight, total, out, rows, n, eps, offset);                                                     \
    }                                                                                                                    \
    RIDGELINE_API void rl_activate_##SUFFIX(const T* gate_up, T* out, index rows, index n, int is_gelu) {                 \
        activate(gate_up, out, rows, n, is_gelu != 0);                                                                   \
    }                                                                                                                    \
    RIDGELINE_API void rl_qkv_write_##SUFFIX(const View* view, const T* qkv, T* out, T* cache, const float* cos_sin,      \
                                             const T* q_norm, const T* k_norm, index heads, index half, float eps,       \
                                             float offset) {                                                             \
        qkv_write(Qkv<T>{*view, qkv, out, cache, cos_sin, q_norm, k_norm, heads, half, eps, offset});                    \
    }

RIDGELINE_ROWWISE(bf16, bf16)
RIDGELINE_ROWWISE(float, f32)

}  // namespace ridgeline
