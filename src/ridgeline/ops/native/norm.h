// RMS norm of one row.
#pragma once

#include "common.h"

#include <cmath>

namespace ridgeline {

// Norm of a row: x / rms(x) * (weight + offset). weight null: no norm.
template <class T> struct Norm {
    const T* weight;
    float eps, offset;
};

// 1 / rms of n values.
template <class T> f32x16 norm_scale(const T* x, index n, float eps) {
    f32x16 squares = zeros();
    for (index at = 0; at < n; at += LANES) {
        const f32x16 part = load(x + at, first_lanes(n - at));
        squares = fma(part, part, squares);
    }
    return splat(1.0f / std::sqrt(sum_of(squares) / float(n) + eps));
}

// 16 normalised values from `at` on; 0 in lanes that are not kept.
template <class T> f32x16 normed(const T* x, index at, Part kept, f32x16 scale, const Norm<T>& norm) {
    const f32x16 factor = load(norm.weight + at, kept) + splat(norm.offset);
    return load(x + at, kept) * scale * factor;
}

// out may equal x.
template <class T> void norm_row(const T* x, T* out, index n, const Norm<T>& norm) {
    const f32x16 scale = norm_scale(x, n, norm.eps);
    for (index at = 0; at < n; at += LANES) {
        const Part kept = first_lanes(n - at);
        store(out + at, normed(x, at, kept, scale, norm), kept);
    }
}

}  // namespace ridgeline
