// Root-mean-square norm of one row.
#pragma once

#include "common.h"

#include <cmath>

namespace ridgeline {

// How a row is normed: x / rms(x) * (weight + offset). weight null: not at all.
template <class T> struct Norm {
    const T* weight;
    float eps, offset;
};

// 1 / rms of n values.
template <class T> __m512 norm_scale(const T* x, index n, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (index at = 0; at < n; at += LANES) {
        const __m512 part = load(x + at, first_lanes(n - at));
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    return _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(n) + eps));
}

// 16 values from `at` on, normed; lanes that are not kept are 0.
template <class T> __m512 normed(const T* x, index at, __mmask16 kept, __m512 scale, const Norm<T>& norm) {
    const __m512 factor = _mm512_add_ps(load(norm.weight + at, kept), _mm512_set1_ps(norm.offset));
    return _mm512_mul_ps(_mm512_mul_ps(load(x + at, kept), scale), factor);
}

// out may be x.
template <class T> void norm_row(const T* x, T* out, index n, const Norm<T>& norm) {
    const __m512 scale = norm_scale(x, n, norm.eps);
    for (index at = 0; at < n; at += LANES) {
        const __mmask16 kept = first_lanes(n - at);
        store(out + at, normed(x, at, kept, scale, norm), kept);
    }
}

}  // namespace ridgeline
