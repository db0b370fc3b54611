// A tree of drafts by a recurrent draft, all of its tokens in one parallel region; see decoding/recurrent.py.
//
// Nodes that have children are grown together, level by level, so that the weights are read once for each level. They are
// integers so that they stay in the caches of the cores from one level to the next, and leave the last-level cache to the
// target's. Between two products threads only wait for each other.

#include "draw.h"
#include "integer.h"
#include "rows.h"

#include <vector>

namespace ridgeline {
namespace {

// Mirrored field by field in native_recurrent.py. embedding [vocab, d_model]; norms float32 [d_model]; ids [outputs]. Of each
// node of the largest tree, parents before children: parents, -1 for the last known token, and ranks, the child's number.
template <class T> struct Parts {
    const T* embedding;
    const float* inner_norm;
    const float* norm;
    const token* ids;
    const std::int32_t* parents;
    const std::int32_t* ranks;
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

// A node that has children, -1 for the last known token. before: where the level above holds the state that it was drawn from;
// children: how many its ranks reach.
struct Grown {
    index node, before, children;
};

// A token that stands under a node of a level.
struct Child {
    index above, rank, node;
};

struct Level {
    std::vector<Grown> grown;
    std::vector<Child> nodes;
    index most = 0;  // children of one
};

// What the first `count` nodes grow from, level by level.
template <class T> std::vector<Level> levels_of(const Parts<T>& p, index count) {
    std::vector<Level> levels;
    std::vector<index> depth(count), at(count, -1);  // of each node, and where its level has it if it is grown
    index root = -1;
    for (index node = 0; node < count; ++node) {
        const index parent = p.parents[node], rank = p.ranks[node];
        depth[node] = parent < 0 ? 0 : depth[parent] + 1;
        if (index(levels.size()) <= depth[node]) levels.emplace_back();
        Level& level = levels[depth[node]];
        index& place = parent < 0 ? root : at[parent];
        if (place < 0) {
            place = index(level.grown.size());
            const index above = parent < 0 ? -1 : p.parents[parent];
            level.grown.push_back({parent, parent < 0 ? -1 : above < 0 ? 0 : at[above], 0});
        }
        Grown& one = level.grown[place];
        one.children = std::max(one.children, rank + 1);
        level.most = std::max(level.most, one.children);
        level.nodes.push_back({place, rank, node});
    }
    return levels;
}

// What a team shares. best: of each thread, of each grown node of each row, as many as a node has children.
struct Room {
    float* stream[2];
    float* before;
    float* inner;
    float* logits;
    void* digits;
    Best* best;
    index most;  // best of a node
};

template <class T> void widen_row(const T* from, float* to, index n) {
    for (index at = 0; at < n; at += LANES) {
        const Part kept = first_lanes(n - at);
        store(to + at, load(from + at, kept), kept);
    }
}

// States that a level's nodes were drawn from, and what the next product adds to: the embeddings of their tokens. States of a
// level: [grown][n].
template <class T>
void embed(const Recurrent<T>& c, const Room& room, const Level& level, const float* above, float* to, Team team) {
    const Parts<T>& p = *c.parts;
    const index d = p.d_model;
    const Range own = share(index(level.grown.size()) * c.n, team.who, team.of);
    for (index at = own.begin; at < own.end; ++at) {
        const Grown& one = level.grown[at / c.n];
        const index row = at % c.n;
        widen_row(p.embedding + c.tokens(row)[c.known(row) + one.node] * d, to + at * d, d);
        if (one.node < 0) {
            widen_row(c.hidden + row * d, room.before + at * d, d);
        } else {
            std::memcpy(room.before + at * d, above + (one.before * c.n + row) * d, d * sizeof(float));
        }
    }
}

// The best of a thread's own logits, with the noise of the place that the tokens would have. A logit that was best is taken out
// before the next one is looked for.
template <class T> void draw(const Recurrent<T>& c, const Room& room, const Level& level, index depth, Team team) {
    const Parts<T>& p = *c.parts;
    const Range own = share(blocks_of(p.outputs), team.who, team.of);
    const index begin = own.begin * LANES, end = std::min(p.outputs, own.end * LANES), all = index(level.grown.size()) * c.n;
    for (index at = 0; at < all; ++at) {
        const index row = at % c.n;
        const Draw wanted = draw_of(c.state.of(c.rows[row]) + KEY, std::int32_t(c.known(row) + depth), 0, c.temperature[row]);
        float* logits = room.logits + at * p.outputs;
        Best* best = room.best + (team.who * all + at) * room.most;
        for (index rank = 0; rank < level.grown[at / c.n].children; ++rank) {
            best[rank] = best_of(logits, p.ids, wanted, begin, end);
            if (best[rank].score > -INFINITY) logits[best[rank].token] = -INFINITY;
        }
    }
}

// The best of all threads, behind what the rows know.
template <class T> void say(const Recurrent<T>& c, const Room& room, const Level& level, index threads) {
    const index all = index(level.grown.size()) * c.n;
    std::vector<index> taken(threads);
    std::vector<token> best(room.most);
    for (index at = 0; at < all; ++at) {
        std::fill(taken.begin(), taken.end(), 0);
        const index children = level.grown[at / c.n].children, row = at % c.n;
        for (index rank = 0; rank < children; ++rank) {
            index from = -1;
            Best top;
            for (index who = 0; who < threads; ++who) {
                if (taken[who] == children) continue;
                const Best& one = room.best[(who * all + at) * room.most + taken[who]];
                if (from < 0 || one.score > top.score) from = who, top = one;
            }
            ++taken[from];
            best[rank] = c.parts->ids[top.token];
        }
        for (const Child& child : level.nodes)
            if (child.above == at / c.n) c.tokens(row)[c.known(row) + child.node] = best[child.rank];
    }
}

template <class T> void run_team(const Recurrent<T>& c, const Room& room, const std::vector<Level>& levels, Team team) {
    const Parts<T>& p = *c.parts;
    const index d = p.d_model;
    const Norm<float> none{nullptr, 0, 0}, inner{p.inner_norm, p.eps, p.offset}, last{p.norm, p.eps, p.offset};
    for (index depth = 0; depth < index(levels.size()); ++depth) {
        const Level& level = levels[depth];
        const index n = index(level.grown.size()) * c.n;
        float* stream = room.stream[depth % 2];
        const auto multiply = [&](const float* x, const IntWeights& w, const float* added, float* out, index outputs,
                                  index inputs, Gate gate, const Norm<float>& norm) {
            int_product(Problem<float>{x, nullptr, nullptr, added, out, n, outputs, inputs, gate, norm}, w, room.digits, team);
        };
        embed(c, room, level, room.stream[(depth + 1) % 2], stream, team);
        team.wait();
        multiply(room.before, p.mix, stream, stream, d, d, Gate::NONE, depth ? last : none);
        team.wait();
        multiply(stream, p.gate_up, nullptr, room.inner, 2 * p.d_ff, d, Gate(p.gate), inner);
        team.wait();
        multiply(room.inner, p.down, stream, stream, d, p.d_ff, Gate::NONE, none);
        team.wait();
        multiply(stream, p.head, nullptr, room.logits, p.outputs, d, Gate::NONE, last);
        draw(c, room, level, depth, team);
        team.wait();
        if (team.who == 0) say(c, room, level, team.of);
        team.wait();
    }
}

index lines(index floats) { return (floats + LANES - 1) / LANES * LANES; }

template <class T> void run(const Recurrent<T>& c) {
    const Parts<T>& p = *c.parts;
    const std::vector<Level> levels = levels_of(p, c.count);
    index widest = 0, most = 0;
    for (const Level& level : levels) {
        widest = std::max(widest, index(level.grown.size()) * c.n);
        most = std::max(most, level.most);
    }
    const index d = p.d_model, sizes[] = {widest * d, widest * d, widest * d, widest * p.d_ff, widest * p.outputs};
    index all = 0;
    for (const index size : sizes) all += lines(size);
    const Scratch floats(all * index(sizeof(float))), digits(digits_room(widest, std::max(d, p.d_ff)));
    const int threads = threads_for(p.outputs * d, 1 << 14);
    std::vector<Best> best(widest * threads * most);
    float* at[5] = {(float*)floats.memory};
    for (int i = 1; i < 5; ++i) at[i] = at[i - 1] + lines(sizes[i - 1]);
    const Room room{{at[0], at[1]}, at[2], at[3], at[4], digits.memory, best.data(), most};
#pragma omp parallel num_threads(threads)
    run_team(c, room, levels, Team{omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace

RIDGELINE_API void rl_recurrent_bf16(const Recurrent<bf16>* c) { run(*c); }
RIDGELINE_API void rl_recurrent_f32(const Recurrent<float>* c) { run(*c); }

}  // namespace ridgeline
