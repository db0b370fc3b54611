// Consecutive decoder layers in one parallel region, for a step of any shape.
//
// Between two operations of a layer threads only meet at a barrier. No thread is woken, no memory is allocated and no Python runs
// in between. For one token that would take as long as the products.

#include "adapters.h"
#include "attention.h"
#include "integer_rounded.h"
#include "product.h"
#include "qkv.h"
#include "sparse.h"

#include <vector>

namespace ridgeline {
namespace {

// integer.bits 0: floating-point weights. sparse: null, or weights in the layout of sparse.h. adapters: null for none.
template <class T> struct Matrix {
    const T* packed;
    const T* bias;
    const void* sparse;
    IntWeights integer;
    const Adapters<T>* adapters;
};

template <class T> void multiply(const Problem<T>& p, const Matrix<T>& w, T* room, Team team) {
    if (w.integer.inputs != Inputs::FLOAT) return rounded_product(p, w.integer, room, team);
    if (w.integer.bits) return int_product(p, w.integer, room, team);
    if constexpr (sizeof(T) == 2)
        if (w.sparse) return sparse_product(p, w.sparse, room, team);
    product(p, room, team);
}

// Bytes of `room` for a product of m rows of k inputs.
template <class T> index room_for(const Matrix<T>& w, index m, index k) {
    if (w.integer.inputs != Inputs::FLOAT) return rounded_room(m, k, w.integer.inputs);
    return w.integer.bits ? digits_room(m, k) : room_of<T>(m, k);
}

// binding.py mirrors the fields in this order. Norms of q and k, and biases, may be null. kv_heads: see Qkv.
template <class T> struct Layer {
    const T* attention_norm;
    const T* feed_forward_norm;
    const T* q_norm;
    const T* k_norm;
    Matrix<T> qkv, out, gate_up, down;
    const float* cos_sin;
    index heads, kv_heads, half, d_ff, gate;
    float eps, offset;
};

template <class T> struct Stack {
    const Layer<T>* layers;
    index n;
    const View* const* views;  // of each layer
    T* const* caches;
    T* stream;  // [tokens, d_model], read and written
    index tokens, d_model;
    Groups groups;  // of tokens with an adapter
};

// Memory that a team shares between operations.
template <class T> struct Room {
    T* input;     // x of the current product, in product()'s layout
    T* qkv;       // [tokens, heads + 2 kv_heads, dim]
    T* attended;  // [tokens, heads, dim]
    T* inner;     // [tokens, d_ff]
    Partial* partials;
    T* normed;     // [grouped tokens, d_model]
    T* by_rank;    // A x, [grouped tokens, Adapters.width]
    T* gate_up;    // [tokens, 2 d_ff]
};

// A product, and what adapters add to it. The activation of a gate comes after both. Threads may divide the outputs in another way
// than `multiply` does.
template <class T>
void multiply_adapted(const Problem<T>& p, const Matrix<T>& w, const Groups& groups, const Room<T>& room, Team team) {
    Problem<T> ungated = p;
    ungated.gate = Gate::NONE;
    if (p.gated()) ungated.out = room.gate_up;
    multiply(ungated, w, room.input, team);
    if (p.norm.weight) {
        const Range own = share(groups.tokens(), team.who, team.of);
        for (index at = own.begin; at < own.end; ++at)
            norm_row(p.x + groups.order()[at] * p.k, room.normed + at * p.k, p.k, p.norm);
        team.wait();
    }
    add_up(groups, *w.adapters, p.norm.weight ? room.normed : p.x, p.norm.weight != nullptr, room.by_rank, team);
    team.wait();
    add_adapted(groups, *w.adapters, room.by_rank, ungated.out, team);
    if (!p.gated()) return;
    team.wait();
    const Range own = share(p.m, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row)
        activate_row(room.gate_up + row * p.n, p.out + row * (p.n / 2), p.n / 2, p.gate);
}

template <class T>
void run_layer(const Stack<T>& s, index at, const Schedule& planned, const Room<T>& room, Tickets& tickets, Work<T>& work,
               Team team) {
    const Layer<T>& l = s.layers[at];
    const View& view = *s.views[at];
    T* const cache = s.caches[at];
    const bool fixed = view.fixed != 0;
    const index m = s.tokens, d = s.d_model, width = (l.heads + 2 * l.kv_heads) * view.dim, own = l.heads * view.dim;
    const Norm<T> first{l.attention_norm, l.eps, l.offset}, second{l.feed_forward_norm, l.eps, l.offset}, none{nullptr, 0, 0};
    const Qkv<T> written{view, room.qkv, room.qkv, cache, l.cos_sin, l.q_norm, l.k_norm, l.heads, l.kv_heads, l.half, l.eps, l.offset};
    const auto adapts = [&](const Matrix<T>& w) { return w.adapters && s.groups.size(); };
    const auto linear = [&](const Problem<T>& p, const Matrix<T>& w) {
        adapts(w) ? multiply_adapted(p, w, s.groups, room, team) : multiply(p, w, room.input, team);
    };
    linear(Problem<T>{s.stream, l.qkv.packed, l.qkv.bias, nullptr, room.qkv, m, width, d, Gate::NONE, first, fixed}, l.qkv);
    if (!adapts(l.qkv) && heads_divide(written, team.of) && (l.qkv.integer.bits || form_of<T>(m, fixed) != Form::TILES)) {
        write_own_heads(written, team);
    } else {
        team.wait();
        qkv_write(written, team);
    }
    team.wait();
    attend(Call<T>{view, room.qkv, room.attended, cache, l.heads, width}, planned, room.partials, tickets, work, team);
    team.wait();
    linear(Problem<T>{room.attended, l.out.packed, l.out.bias, s.stream, s.stream, m, d, own, Gate::NONE, none, fixed}, l.out);
    team.wait();
    linear(Problem<T>{s.stream, l.gate_up.packed, l.gate_up.bias, nullptr, room.inner, m, 2 * l.d_ff, d, Gate(l.gate), second, fixed},
           l.gate_up);
    team.wait();
    linear(Problem<T>{room.inner, l.down.packed, l.down.bias, s.stream, s.stream, m, d, l.d_ff, Gate::NONE, none, fixed}, l.down);
    team.wait();
}

// Schedule of each layer. Layers with the same view and number of heads share one.
template <class T> std::vector<const Schedule*> schedules(const Stack<T>& s, std::vector<Schedule>& kept) {
    std::vector<const Schedule*> of_layer(s.n);
    kept.reserve(s.n);
    for (index at = 0; at < s.n; ++at) {
        for (index before = 0; before < at && !of_layer[at]; ++before)
            if (s.views[before] == s.views[at] && s.layers[before].heads == s.layers[at].heads) of_layer[at] = of_layer[before];
        if (of_layer[at]) continue;
        kept.push_back(schedule<T>(*s.views[at], s.layers[at].heads));
        of_layer[at] = &kept.back();
    }
    return of_layer;
}

index lines(index bytes) { return (bytes + 63) / 64 * 64; }

template <class T> void run(const Stack<T>& s) {
    std::vector<Schedule> kept;
    const std::vector<const Schedule*> planned = schedules(s, kept);
    index input = 0, qkv = 0, attended = 0, inner = 0, partials = 0, by_rank = 0;
    for (index at = 0; at < s.n; ++at) {
        const Layer<T>& l = s.layers[at];
        const View& view = *s.views[at];
        attended = std::max(attended, l.heads * view.dim);
        qkv = std::max(qkv, (l.heads + 2 * l.kv_heads) * view.dim);
        inner = std::max(inner, l.d_ff);
        input = std::max({input, room_for(l.qkv, s.tokens, s.d_model), room_for(l.out, s.tokens, l.heads * view.dim),
                          room_for(l.gate_up, s.tokens, s.d_model), room_for(l.down, s.tokens, l.d_ff)});
        partials = std::max(partials, planned[at]->room());
        for (const Matrix<T>* w : {&l.qkv, &l.out, &l.gate_up, &l.down})
            if (w->adapters) by_rank = std::max(by_rank, w->adapters->width());
    }
    const index each = s.tokens * index(sizeof(T)), adapted = s.groups.tokens() * index(sizeof(T));
    const index sizes[] = {input,        qkv * each,           attended * each,   inner * each,
                           partials,     adapted * s.d_model,  adapted * by_rank, adapted ? 2 * inner * each : 0};
    constexpr int COUNT = sizeof(sizes) / sizeof(*sizes);
    index begin[COUNT + 1] = {};
    for (int i = 0; i < COUNT; ++i) begin[i + 1] = begin[i] + lines(sizes[i]);
    const Scratch memory(begin[COUNT]);
    const auto at = [&](int i) { return (T*)((char*)memory.memory + begin[i]); };
    const Room<T> room{at(0), at(1), at(2), at(3), (Partial*)at(4), at(5), at(6), at(7)};
    std::vector<Tickets> tickets(s.n);
    Meeting meeting;
#pragma omp parallel num_threads(threads_for(s.d_model * inner, 1 << 14))
    {
        const TileConfig configured(tiles_allowed);
        Work<T> work;
        const Team team = Team::here(meeting);
        for (index layer = 0; layer < s.n; ++layer) run_layer(s, layer, *planned[layer], room, tickets[layer], work, team);
    }
}

}  // namespace

RIDGELINE_API void rl_layers_bf16(const Layer<bf16>* layers, index n, const View* const* views, bf16* const* caches,
                                  bf16* stream, index tokens, index d_model, const std::int32_t* groups) {
    run(Stack<bf16>{layers, n, views, caches, stream, tokens, d_model, {groups}});
}
RIDGELINE_API void rl_layers_f32(const Layer<float>* layers, index n, const View* const* views, float* const* caches,
                                 float* stream, index tokens, index d_model, const std::int32_t* groups) {
    run(Stack<float>{layers, n, views, caches, stream, tokens, d_model, {groups}});
}
RIDGELINE_REPLAYABLE(rl_layers_bf16)
RIDGELINE_REPLAYABLE(rl_layers_f32)

}  // namespace ridgeline
