// Draft a chain with a small decoder: its unread tokens and all drafted tokens in one call. See ridgeline.ops.table.ChainParts.
//
// A draft model pays only if little time is added to its products. For one row, ten calls from Python between two tokens take as
// long as the tokens.

#include "rows.h"
#include "view.h"

#include <vector>

namespace ridgeline {

// Functions of the other files, by their exported names.
extern "C" {
void rl_layers_bf16(const void* layers, index n, const View* const* views, bf16* const* caches, bf16* stream, index tokens,
                    index d_model, const std::int32_t* groups);
void rl_layers_f32(const void* layers, index n, const View* const* views, float* const* caches, float* stream, index tokens,
                   index d_model, const std::int32_t* groups);
void rl_embed_bf16(const bf16* table, const std::int32_t* ids, bf16* out, index rows, index n, float scale);
void rl_embed_f32(const float* table, const std::int32_t* ids, float* out, index rows, index n, float scale);
void rl_norm_bf16(const bf16* x, const bf16* weight, bf16* out, index rows, index n, float eps, float offset);
void rl_norm_f32(const float* x, const float* weight, float* out, index rows, index n, float eps, float offset);
void rl_linear_bf16(const bf16* x, const bf16* packed, const bf16* bias, const bf16* added, bf16* out, index m, index n, index k,
                    int gate, const bf16* norm, float eps, float offset, int fixed);
void rl_linear_f32(const float* x, const float* packed, const float* bias, const float* added, float* out, index m, index n,
                   index k, int gate, const float* norm, float eps, float offset, int fixed);
void rl_sample(const float* logits, const float* temperature, const std::int32_t* key, const std::int32_t* position,
               const std::int32_t* top_k, const float* top_p, const float* min_p, std::int32_t* tokens, index n, index vocab,
               const index* strides, int purpose, const std::int32_t* ids);
}

namespace {

// One name for both types.
void run_layers(const void* l, index n, const View* const* v, bf16* const* c, bf16* x, index t, index d) {
    rl_layers_bf16(l, n, v, c, x, t, d, nullptr);
}
void run_layers(const void* l, index n, const View* const* v, float* const* c, float* x, index t, index d) {
    rl_layers_f32(l, n, v, c, x, t, d, nullptr);
}
void embed(const bf16* table, const token* ids, bf16* out, index m, index n, float s) { rl_embed_bf16(table, ids, out, m, n, s); }
void embed(const float* table, const token* ids, float* out, index m, index n, float s) { rl_embed_f32(table, ids, out, m, n, s); }
void norm(const bf16* x, const bf16* w, bf16* out, index m, index n, float e, float o) { rl_norm_bf16(x, w, out, m, n, e, o); }
void norm(const float* x, const float* w, float* out, index m, index n, float e, float o) { rl_norm_f32(x, w, out, m, n, e, o); }
void multiply(const bf16* x, const bf16* w, bf16* out, index m, index n, index k, int fixed) {
    rl_linear_bf16(x, w, nullptr, nullptr, out, m, n, k, 0, nullptr, 0, 0, fixed);
}
void multiply(const float* x, const float* w, float* out, index m, index n, index k, int fixed) {
    rl_linear_f32(x, w, nullptr, nullptr, out, m, n, k, 0, nullptr, 0, 0, fixed);
}

// native_chain.py mirrors the fields in this order. embedding [vocab, d_model]; head packed [outputs, d_model]; ids [outputs],
// null: consecutive numbers.
template <class T> struct Parts {
    const void* layers;
    index n_layers, d_model;
    const T* embedding;
    const T* norm;
    const T* head;
    const token* ids;
    index outputs;
    float eps, offset, scale;
    std::int32_t fixed;
};

// Tokens at the end of rows, in the form of Gather, that are read before the first token is drafted.
struct Last {
    const std::int32_t* n_query;  // [n], all 1: they end at the next query token
    const std::int32_t* q_start;  // [n + 1]
    const std::int32_t* row_of;   // [count]
    const std::int32_t* place;    // [count]
    index count;
};

// native_chain.py mirrors the order of arguments. state.ints is a copy that advances with the draft. views refer to length,
// position, slots.
template <class T> struct Chain {
    State state;
    const Parts<T>* parts;
    const std::int32_t* rows;  // [n]
    const float* temperature;  // [n]
    index n, count;
    const View* const* views;  // of each layer
    T* const* caches;
    std::int32_t* position;  // [n]
    std::int32_t* length;    // [n]
    std::int64_t* slots;     // [groups, n]
    Last last;
};

template <class T> void embed(const Parts<T>& p, const token* tokens, index n, T* stream) {
    embed(p.embedding, tokens, stream, n, p.d_model, p.scale);
}

template <class T> void widen_all(const T* from, float* to, index n) {
    for (index at = 0; at < n; at += LANES) {
        const Part kept = first_lanes(n - at);
        store(to + at, load(from + at, kept), kept);
    }
}

// Read the rows' last tokens. hidden [n, d_model]: normalised state after each row's last token.
template <class T> void catch_up(const Chain<T>& c, T* hidden) {
    const Parts<T>& p = *c.parts;
    const Last& last = c.last;
    const index d = p.d_model;
    std::vector<std::int32_t> position(last.count), tokens(last.count), length(c.n);
    std::vector<std::int64_t> slots(c.state.groups * last.count);
    std::vector<T> stream(last.count * d);
    gather(Gather{c.state, c.rows, last.n_query, last.row_of, last.place, nullptr, c.n, last.count, position.data(), tokens.data(),
                  length.data(), slots.data()});
    embed(p, tokens.data(), last.count, stream.data());
    std::vector<View> views;
    std::vector<const View*> found;
    for (index at = 0; at < p.n_layers; ++at) {
        views.push_back(*c.views[at]);
        View& view = views.back();
        const index group = (view.slots - c.slots) / c.n;
        view.slots = slots.data() + group * last.count;
        view.q_start = last.q_start;
        view.length = length.data();
        view.position = position.data();
        view.n_tokens = last.count;
    }
    for (const View& view : views) found.push_back(&view);
    run_layers(p.layers, p.n_layers, found.data(), c.caches, stream.data(), last.count, d);
    for (index row = 0; row < c.n; ++row)
        norm(stream.data() + (last.q_start[row + 1] - 1) * d, p.norm, hidden + row * d, 1, d, p.eps, p.offset);
}

template <class T> void run(const Chain<T>& c) {
    const Parts<T>& p = *c.parts;
    const index n = c.n, size = n * p.outputs, strides[] = {p.outputs, 1, 2, 1};
    std::vector<T> scores(size), stream(n * p.d_model), hidden(n * p.d_model);
    std::vector<float> logits(size);
    std::vector<std::int32_t> key(2 * n), place(n), drawn(n), said(3 * n), tokens(n);
    catch_up(c, hidden.data());
    for (index node = 0; node < c.count; ++node) {
        for (index row = 0; row < n; ++row) {
            const std::int32_t* own = c.state.of(c.rows[row]);
            std::copy(own + KEY, own + KEY + 2, key.data() + 2 * row);
            place[row] = own[KNOWN];
        }
        multiply(hidden.data(), p.head, scores.data(), n, p.outputs, p.d_model, p.fixed);
        widen_all(scores.data(), logits.data(), size);
        rl_sample(logits.data(), c.temperature, key.data(), place.data(), nullptr, nullptr, nullptr, drawn.data(), n, p.outputs,
                  strides, 0, p.ids);
        advance(Advance{c.state, c.rows, drawn.data(), n, said.data()});
        if (node + 1 == c.count) return;
        gather(Gather{c.state, c.rows, nullptr, nullptr, nullptr, nullptr, n, n, c.position, tokens.data(), c.length, c.slots});
        embed(p, tokens.data(), n, stream.data());
        run_layers(p.layers, p.n_layers, c.views, c.caches, stream.data(), n, p.d_model);
        norm(stream.data(), p.norm, hidden.data(), n, p.d_model, p.eps, p.offset);
    }
}

}  // namespace

RIDGELINE_API void rl_chain_bf16(const Chain<bf16>* c) { run(*c); }
RIDGELINE_API void rl_chain_f32(const Chain<float>* c) { run(*c); }
RIDGELINE_REPLAYABLE(rl_chain_bf16)
RIDGELINE_REPLAYABLE(rl_chain_f32)

}  // namespace ridgeline
