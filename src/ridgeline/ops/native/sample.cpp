// Drawing tokens as the library offers it; see draw.h.

#include "draw.h"
#include "rows.h"

#include <vector>

namespace ridgeline {

constexpr index LOGITS_PER_THREAD = 1 << 13;

namespace {

// Row `row` of n: its logits and what it is drawn with. again: whatever the row before drew does.
template <class T> struct Wanted {
    const T* logits;
    Draw draw;
    bool again = false;
};

// wanted(row) -> Wanted; ids: as in draw.h.
template <class Of> void draw_all(index n, index vocab, const std::int32_t* ids, std::int32_t* tokens, const Of& wanted) {
    const int threads = threads_for(n * vocab, LOGITS_PER_THREAD);
    std::vector<Best> found(n * threads);
#pragma omp parallel num_threads(threads)
    {
        const index who = omp_get_thread_num(), of = omp_get_num_threads(), blocks = (vocab + LANES - 1) / LANES;
        const Range own = share(blocks, who, of);
        for (index row = 0; row < n; ++row) {
            const auto one = wanted(row);
            const index end = std::min(vocab, own.end * LANES), at = who * n + row;
            found[at] = one.again ? found[at - 1] : best_of(one.logits, ids, one.draw, own.begin * LANES, end);
        }
    }
    for (index row = 0; row < n; ++row) {
        Best best = found[row];
        for (index who = 1; who < threads; ++who)
            if (found[who * n + row].score > best.score) best = found[who * n + row];
        tokens[row] = ids ? ids[best.token] : best.token;
    }
}

// What device rows draw behind their last known tokens and their drafts; mirrored by the order of arguments in native_rows.py.
template <class T> struct Draws {
    State state;
    const float* temperature;  // [rows], `stride` apart
    index stride;
    const std::int32_t* rows;   // [n]
    const std::int32_t* depth;  // [n, wide], null: chains
    const std::int32_t* at;     // [n, wide], whose logits each is drawn from, null: in order
    const T* logits;            // [tokens, vocab]
    index n, wide, vocab;
    token* drawn;  // [n, wide]
};

template <class T> void draw_rows(const Draws<T>& d) {
    draw_all(d.n * d.wide, d.vocab, nullptr, d.drawn, [&](index at) {
        const index row = d.rows[at / d.wide], from = d.at ? d.at[at] : at;
        const std::int32_t* ints = d.state.of(row);
        const std::int32_t place = ints[KNOWN] + (d.depth ? d.depth[at] : std::int32_t(at % d.wide));
        // A row with fewer drafts than others repeats its last token, and nobody reads what is drawn there.
        const bool again = at % d.wide && d.at && d.at[at - 1] == from;
        return Wanted<T>{d.logits + from * d.vocab, draw_of(ints + KEY, place, 0, d.temperature[row * d.stride]), again};
    });
}

}  // namespace

// logits float32 [n, vocab], rows `stride` apart; temperature, key [n, 2] and position with steps from row to row. ids: see draw.h.
RIDGELINE_API void rl_sample(const float* logits, const float* temperature, const std::int32_t* key,
                             const std::int32_t* position, std::int32_t* tokens, index n, index vocab, const index* strides,
                             int purpose, const std::int32_t* ids) {
    draw_all(n, vocab, ids, tokens, [&](index row) {
        const Draw draw = draw_of(key + row * strides[2], position[row * strides[3]], purpose, temperature[row * strides[1]]);
        return Wanted<float>{logits + row * strides[0], draw};
    });
}

RIDGELINE_API void rl_draw_bf16(const Draws<bf16>* d) { draw_rows(*d); }
RIDGELINE_API void rl_draw_f32(const Draws<float>* d) { draw_rows(*d); }
RIDGELINE_AGAIN(rl_sample)
RIDGELINE_AGAIN(rl_draw_bf16)
RIDGELINE_AGAIN(rl_draw_f32)

}  // namespace ridgeline
