// Per-head norms, rotary embedding and the write to the cache, head by head.
#pragma once

#include "norm.h"
#include "stored.h"

namespace ridgeline {

// One call of qkv_write. qkv and out: [tokens, heads + 2 kv_heads, dim]; out may equal qkv. kv_heads: those of the view, or 0 for a
// layer that reads another layer's keys and values.
template <class T> struct Qkv {
    const View& view;
    const T* qkv;
    T* out;
    T* cache;
    const float* cos_sin;
    const T* q_norm;
    const T* k_norm;
    index heads, kv_heads, half;
    float eps, offset;

    index all() const { return heads + 2 * kv_heads; }
    // Write a head of keys or values to the cache.
    void keep(index token, index head, const T* from) const {
        const index page = view.slots[token] / view.page_tokens, place = view.slots[token] % view.page_tokens;
        const index kind = head >= heads + kv_heads, kv_head = head - heads - kind * kv_heads;
        if (view.format != Format::MODEL) return encode(view, Vector(view, cache, page, place, kind, kv_head), from);
        T* to = cache + page * view.page_stride + place * view.place_stride + kind * view.kind_stride + kv_head * view.head_stride;
        std::memcpy(to, from, view.dim * sizeof(T));
    }
};

// Rotate the first 2 half of n numbers, with paired halves, and copy the remainder. from may equal to.
template <class T> void turn(const T* from, T* to, const float* cos_sin, index n, index half) {
    for (index at = 0; at < half; at += LANES) {
        const Part lanes = first_lanes(half - at);
        const f32x16 cos = load(cos_sin + at, lanes), sin = load(cos_sin + half + at, lanes);
        const f32x16 first = load(from + at, lanes), second = load(from + half + at, lanes);
        store(to + at, fms(first, cos, second * sin), lanes);
        store(to + half + at, fma(second, cos, first * sin), lanes);
    }
    if (from != to && n > 2 * half) std::memcpy(to + 2 * half, from + 2 * half, (n - 2 * half) * sizeof(T));
}

template <class T> void write_head(const Qkv<T>& s, index token, index head) {
    const View& view = s.view;
    const index dim = view.dim, turned = s.heads + s.kv_heads, at = (token * s.all() + head) * dim;
    const T* from = s.qkv + at;
    T* to = s.out + at;
    const float* cos_sin = s.cos_sin + index(view.position[token]) * 2 * s.half;
    const T* weight = head < s.heads ? s.q_norm : s.k_norm;
    if (head >= turned) {
        if (from != to) std::memcpy(to, from, dim * sizeof(T));
    } else if (weight) {
        norm_row(from, to, dim, Norm<T>{weight, s.eps, s.offset});
        turn(to, to, cos_sin, dim, s.half);
    } else {
        turn(from, to, cos_sin, dim, s.half);
    }
    if (head >= s.heads) s.keep(token, head, to);
}

// One thread's part.
template <class T> void qkv_write(const Qkv<T>& s, Team team) {
    const index all = s.all();
    const Range own = share(s.view.n_tokens * all, team.who, team.of);
    for (index at = own.begin; at < own.end; ++at) write_head(s, at / all, at % all);
}

// The same divided by heads, if heads divide among the threads as the blocks of 16 outputs of the preceding product do. Each thread
// then processes its own outputs, and no barrier is needed in between.
template <class T> bool heads_divide(const Qkv<T>& s, index of) { return s.all() % of == 0 && s.view.dim % LANES == 0; }

template <class T> void write_own_heads(const Qkv<T>& s, Team team) {
    const Range own = share(s.all(), team.who, team.of);
    for (index token = 0; token < s.view.n_tokens; ++token)
        for (index head = own.begin; head < own.end; ++head) write_head(s, token, head);
}

}  // namespace ridgeline
