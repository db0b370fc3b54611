// A chain of drafts by a recurrent draft, all of its tokens in one parallel region; see decoding/recurrent.py.
//
// Its weights are integers so that they stay in the caches of the cores from one token to the next, and leave the last-level
// cache to the target's. Between two products threads only wait for each other.

#include "draw.h"
#include "integer.h"
#include "rows.h"

#include <vector>

namespace ridgeline {
namespace {

// Mirrored field by field in native_recurrent.py. embedding [vocab, d_model]; norms float32 [d_model]; ids [outputs].
template <class T> struct Parts {
    const T* embedding;
    const float* inner_norm;
    const float* norm;
    const token* ids;
    IntWeights mix, gate_up, down, head;
    index d_model, d_ff, outputs, gate;
    float eps, offset;
};

// Mirrored by the order of arguments there. hidden [n, d_model]: the target's, where it drew each row's last token.
template <class T> struct Recurrent {
    State state;
    const Parts<T>* parts;
    const std::int32_t* rows;  // [n]
    const float* temperature;  // [n]
    const T* hidden;
    index n, count;

    index known(index row) const { return state.of(rows[row])[KNOWN]; }
    token* tokens(index row) const { return state.tokens + rows[row] * state.width; }
};

// What a team shares. best: of each thread and row.
struct Room {
    float* stream[2];
    float* inner;
    float* logits;
    void* digits;
    Best* best;
};

template <class T> void widen_row(const T* from, float* to, index n) {
    for (index at = 0; at < n; at += LANES) {
        const Part kept = first_lanes(n - at);
        store(to + at, load(from + at, kept), kept);
    }
}

// What the next product adds to: the embeddings of the last tokens.
template <class T> void embed(const Recurrent<T>& c, float* to, index node, Team team) {
    const Parts<T>& p = *c.parts;
    const Range own = share(c.n, team.who, team.of);
    for (index row = own.begin; row < own.end; ++row)
        widen_row(p.embedding + c.tokens(row)[c.known(row) - 1 + node] * p.d_model, to + row * p.d_model, p.d_model);
}

// The best of a thread's own logits of each row, with the noise of the place that the token would have.
template <class T> void draw(const Recurrent<T>& c, const Room& room, index node, Team team) {
    const Parts<T>& p = *c.parts;
    const Range own = share(blocks_of(p.outputs), team.who, team.of);
    for (index row = 0; row < c.n; ++row) {
        const std::int32_t place = std::int32_t(c.known(row) + node);
        const Draw wanted = draw_of(c.state.of(c.rows[row]) + KEY, place, 0, c.temperature[row]);
        room.best[team.who * c.n + row] = best_of(room.logits + row * p.outputs, p.ids, wanted, own.begin * LANES,
                                                  std::min(p.outputs, own.end * LANES));
    }
}

// The tokens of all threads' bests, behind what the rows know.
template <class T> void say(const Recurrent<T>& c, const Room& room, index node, index threads) {
    for (index row = 0; row < c.n; ++row) {
        Best best = room.best[row];
        for (index who = 1; who < threads; ++who)
            if (room.best[who * c.n + row].score > best.score) best = room.best[who * c.n + row];
        const index place = c.known(row) + node;
        c.tokens(row)[place] = c.parts->ids[best.token];
    }
}

template <class T> void run_team(const Recurrent<T>& c, const Room& room, Team team) {
    const Parts<T>& p = *c.parts;
    const index n = c.n, d = p.d_model;
    const Norm<float> none{nullptr, 0, 0}, inner{p.inner_norm, p.eps, p.offset}, last{p.norm, p.eps, p.offset};
    const auto multiply = [&](const float* x, const IntWeights& w, const float* added, float* out, index outputs, index inputs,
                              Gate gate, const Norm<float>& norm) {
        int_product(Problem<float>{x, nullptr, nullptr, added, out, n, outputs, inputs, gate, norm}, w, room.digits, team);
    };
    for (index node = 0; node < c.count; ++node) {
        const float* before = room.stream[node % 2];
        float* stream = room.stream[(node + 1) % 2];
        embed(c, stream, node, team);
        multiply(before, p.mix, stream, stream, d, d, Gate::NONE, node ? last : none);
        team.wait();
        multiply(stream, p.gate_up, nullptr, room.inner, 2 * p.d_ff, d, Gate(p.gate), inner);
        team.wait();
        multiply(room.inner, p.down, stream, stream, d, p.d_ff, Gate::NONE, none);
        team.wait();
        multiply(stream, p.head, nullptr, room.logits, p.outputs, d, Gate::NONE, last);
        draw(c, room, node, team);
        team.wait();
        if (team.who == 0) say(c, room, node, team.of);
        team.wait();
    }
}

index lines(index floats) { return (floats + LANES - 1) / LANES * LANES; }

template <class T> void run(const Recurrent<T>& c) {
    const Parts<T>& p = *c.parts;
    const index n = c.n, d = p.d_model, sizes[] = {n * d, n * d, n * p.d_ff, n * p.outputs};
    index all = 0;
    for (const index size : sizes) all += lines(size);
    const Scratch floats(all * index(sizeof(float))), digits(digits_room(n, std::max(d, p.d_ff)));
    const int threads = threads_for(p.outputs * d, 1 << 14);
    std::vector<Best> best(n * threads);
    float* at[4] = {(float*)floats.memory};
    for (int i = 1; i < 4; ++i) at[i] = at[i - 1] + lines(sizes[i - 1]);
    const Room room{{at[0], at[1]}, at[2], at[3], digits.memory, best.data()};
    for (index row = 0; row < n; ++row) widen_row(c.hidden + row * d, room.stream[0] + row * d, d);
#pragma omp parallel num_threads(threads)
    run_team(c, room, Team{omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace

RIDGELINE_API void rl_recurrent_bf16(const Recurrent<bf16>* c) { run(*c); }
RIDGELINE_API void rl_recurrent_f32(const Recurrent<float>* c) { run(*c); }

}  // namespace ridgeline
