// Drawing tokens as the library offers it; see draw.h and limits.h.

#include "limits.h"
#include "rows.h"

#include <vector>

namespace ridgeline {

constexpr index LOGITS_PER_THREAD = 1 << 13;

namespace {

// Row `row` of n: its logits and what it is drawn with. again: whatever the row before drew does.
template <class T> struct Wanted {
    const T* logits;
    Draw draw;
    Limits limits;
    bool again = false;
};

// wanted(row) -> Wanted, without limits where there are ids; ids: as in draw.h.
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
        Team{int(who), int(of)}.wait();
        for (index row = who; row < n; row += of) {
            Best best = found[row];
            for (index other = 1; other < of; ++other)
                if (found[other * n + row].score > best.score) best = found[other * n + row];
            const auto one = wanted(row);
            tokens[row] = ids ? ids[best.token] : best.token;
            if (one.again || one.draw.temperature == 0.0f || !one.limits.any(vocab)) continue;
            tokens[row] = Limited(one.logits, vocab, one.draw, one.limits)(best);
        }
    }
}

// What device rows draw behind their last known tokens and their drafts; mirrored by the order of arguments in native_rows.py.
template <class T> struct Draws {
    State state;
    const float* knobs;  // [rows, n_knobs]
    index n_knobs;
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
        const float* knobs = d.knobs + row * d.n_knobs;
        const Limits limits{ints[TOP_K], knobs[TOP_P], knobs[MIN_P]};
        return Wanted<T>{d.logits + from * d.vocab, draw_of(ints + KEY, place, 0, knobs[TEMPERATURE]), limits, again};
    });
}

}  // namespace

// logits float32 [n, vocab], rows `stride` apart; temperature, key [n, 2], position, and top_k, top_p and min_p or null, with steps
// from row to row. ids: see draw.h.
RIDGELINE_API void rl_sample(const float* logits, const float* temperature, const std::int32_t* key, const std::int32_t* position,
                             const std::int32_t* top_k, const float* top_p, const float* min_p, std::int32_t* tokens, index n,
                             index vocab, const index* strides, int purpose, const std::int32_t* ids) {
    draw_all(n, vocab, ids, tokens, [&](index row) {
        const Draw draw = draw_of(key + row * strides[2], position[row * strides[3]], purpose, temperature[row * strides[1]]);
        Limits limits;
        if (top_k) limits = {top_k[row * strides[4]], top_p[row * strides[5]], min_p[row * strides[6]]};
        return Wanted<float>{logits + row * strides[0], draw, limits};
    });
}

RIDGELINE_API void rl_draw_bf16(const Draws<bf16>* d) { draw_rows(*d); }
RIDGELINE_API void rl_draw_f32(const Draws<float>* d) { draw_rows(*d); }
RIDGELINE_AGAIN(rl_sample)
RIDGELINE_AGAIN(rl_draw_bf16)
RIDGELINE_AGAIN(rl_draw_f32)

}  // namespace ridgeline
