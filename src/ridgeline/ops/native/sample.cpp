// Exported sampling functions; see draw.h and limits.h.

#include "limits.h"
#include "rows.h"

#include <vector>

namespace ridgeline {

constexpr index LOGITS_PER_THREAD = 1 << 13;

namespace {

// A row of logits and the parameters of its draw.
template <class T> struct Wanted {
    const T* logits;
    Draw draw;
    Limits limits;
};

// wanted(row) -> Wanted; it has no limits if there are ids. ids: as in draw.h.
template <class Of> void draw_all(index n, index vocab, const std::int32_t* ids, std::int32_t* tokens, const Of& wanted) {
    const int threads = threads_for(n * vocab, LOGITS_PER_THREAD);
    std::vector<Best> found(n * threads);
    Meeting meeting;
#pragma omp parallel num_threads(threads)
    {
        const Team team = Team::here(meeting);
        const index who = team.who, of = team.of, blocks = (vocab + LANES - 1) / LANES;
        const Range own = share(blocks, who, of);
        for (index row = 0; row < n; ++row) {
            const auto one = wanted(row);
            const index end = std::min(vocab, own.end * LANES), at = who * n + row;
            found[at] = best_of(one.logits, ids, one.draw, own.begin * LANES, end);
        }
        team.wait();
        for (index row = who; row < n; row += of) {
            Best best = found[row];
            for (index other = 1; other < of; ++other)
                if (found[other * n + row].score > best.score) best = found[other * n + row];
            const auto one = wanted(row);
            tokens[row] = ids ? ids[best.token] : best.token;
            if (one.draw.temperature == 0.0f || !one.limits.any(vocab)) continue;
            tokens[row] = Limited(one.logits, vocab, one.draw, one.limits)(best);
        }
    }
}

// Draws of device rows after their last known tokens and draft nodes. native_rows.py mirrors the order of arguments.
template <class T> struct Draws {
    State state;
    const float* knobs;  // [rows, n_knobs]
    index n_knobs;
    const std::int32_t* rows;   // [n]
    const std::int32_t* depth;  // [n], null: zeros
    const T* logits;            // [n, vocab]
    index n, vocab;
    token* drawn;  // [n]
};

template <class T> void draw_rows(const Draws<T>& d) {
    draw_all(d.n, d.vocab, nullptr, d.drawn, [&](index at) {
        const std::int32_t* ints = d.state.of(d.rows[at]);
        const float* knobs = d.knobs + d.rows[at] * d.n_knobs;
        const Draw draw = draw_of(ints + KEY, ints[KNOWN] + (d.depth ? d.depth[at] : 0), 0, knobs[TEMPERATURE]);
        return Wanted<T>{d.logits + at * d.vocab, draw, Limits{ints[TOP_K], knobs[TOP_P], knobs[MIN_P]}};
    });
}

}  // namespace

// logits float32 [n, vocab], rows `stride` apart; temperature, key [n, 2], position; top_k, top_p and min_p, or null; strides
// between rows. ids: see draw.h.
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
RIDGELINE_REPLAYABLE(rl_sample)
RIDGELINE_REPLAYABLE(rl_draw_bf16)
RIDGELINE_REPLAYABLE(rl_draw_f32)

}  // namespace ridgeline
