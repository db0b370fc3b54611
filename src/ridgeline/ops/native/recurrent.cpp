// Draft a tree with a recurrent draft model; all its tokens are drafted in one parallel region. See speculation/recurrent.py.
//
// Nodes with children are expanded together, level by level, so that weights are read once per level. Weights are integers, so that
// they stay in the cores' caches between levels and leave the last-level cache to the target's weights. All nodes of a level see
// the same keys, so their queries are packed like heads of one token. Between two operations threads only meet at a barrier.
//
// A draft is cut where further nodes no longer pay. The probability that a drawn token matches the target is estimated by its share
// of the exponentials of all perturbed logits.

#include "attention.h"
#include "draw.h"
#include "integer.h"
#include "qkv.h"
#include "rows.h"

#include <deque>
#include <vector>

namespace ridgeline {
namespace {

// native_recurrent.py mirrors the fields in this order. embedding [vocab, d_model]; norms float32 [d_model]; cos_sin [positions, 2,
// half]; ids [outputs]. For each node of the largest tree, parents before children: parents (-1: the last known token) and ranks
// (index among its siblings). node_cost, min_chance, sizes: see DraftCut in table.py.
template <class T> struct Parts {
    const T* embedding;
    const float* query_norm;
    const float* inner_norm;
    const float* norm;
    const float* cos_sin;
    const token* ids;
    const std::int32_t* parents;
    const std::int32_t* ranks;
    const std::int32_t* sizes;  // [n_sizes]
    IntWeights mix, query, out, gate_up, down, head;
    index d_model, queries, half, d_ff, outputs, gate, n_sizes;
    float eps, offset, node_cost, min_chance;
};

// native_recurrent.py mirrors the order of arguments. hidden [n, d_model]: the target's hidden states from which each row's last
// token was drawn. cache, view: of the layer that the draft attends to. Only the fields of `view` that do not depend on the step
// are set.
template <class T> struct Recurrent {
    State state;
    const Parts<T>* parts;
    const std::int32_t* rows;  // [n]
    const float* temperatures; // of all rows, `stride` apart
    index stride;
    const T* hidden;
    const View* view;
    const T* cache;
    index n, count;
    std::int32_t* worth;  // [n], number of nodes worth verifying

    index known(index row) const { return state.of(rows[row])[KNOWN]; }
    token* tokens(index row) const { return state.tokens + rows[row] * state.width; }
};

// A node with children; node -1 is the last known token. before: index in the previous level of the state from which the node was
// drawn. children: number of children up to its largest rank.
struct Grown {
    index node, before, children;
};

// A child of an expanded node.
struct Child {
    index above, rank, node;
};

struct Level {
    std::vector<Grown> grown;
    std::vector<Child> nodes;
    index most = 0;  // largest number of children of a node
    // Valid during one call. position: of each row's queries. Levels with equally many expanded nodes share a schedule.
    std::vector<std::int32_t> position;
    View view;
    Schedule own;
    const Schedule* schedule;
    Tickets tickets;
};

// Expanded nodes of the first `count` nodes, by level. Cached between calls, because building it takes a dozen allocations with
// cold caches. Key: parents and ranks.
struct Levels {
    std::vector<std::int32_t> parents, ranks;
    std::deque<Level> levels;
};

template <class T> std::deque<Level>& levels_of(const Parts<T>& p, index count) {
    thread_local Levels known;
    const auto are = [&](const std::vector<std::int32_t>& old, const std::int32_t* now) {
        return index(old.size()) == count && std::equal(old.begin(), old.end(), now);
    };
    std::deque<Level>& levels = known.levels;
    if (are(known.parents, p.parents) && are(known.ranks, p.ranks)) return levels;
    known.parents.assign(p.parents, p.parents + count);
    known.ranks.assign(p.ranks, p.ranks + count);
    levels.clear();
    std::vector<index> depth(count), at(count, -1);  // of each node; at: index among the expanded nodes of its level
    index root = -1;
    for (index node = 0; node < count; ++node) {
        const index parent = p.parents[node], rank = p.ranks[node];
        depth[node] = parent < 0 ? 0 : depth[parent] + 1;
        if (index(levels.size()) <= depth[node]) levels.emplace_back();  // holds tickets, so it never moves
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

// Number of rows of `before`, `turned` and `packed` for which every thread has its own copy; see Team::by.
constexpr index OWN_ROWS = 8;

// Memory that a team shares. best: for each thread, expanded node and row, as many candidates as a node has children.
template <class T> struct Room {
    float* stream[2];
    float* before;
    float* inner;
    float* logits;
    float* asked;   // queries, [grown][n][heads, dim]
    float* turned;  // attention results of the queries
    T* packed;      // queries in attention's layout, [n][kv_heads][grown][heads of a KV head, dim]
    T* attended;    // attention results in the same layout
    Partial* partials;
    void* digits;
    Best* best;
    index most;  // largest number of children of a node
    float* weights;  // of each thread, expanded node and row, relative to the thread's best
    float* chances;  // of each thread [n][count], 0 for nodes that are not drafted
    token* said;     // of each thread [n][count], drafted tokens

    // The view of thread `who`, if each thread has its own copy of so many rows.
    Room own(index who, index rows, const Parts<T>& p) const {
        Room one = *this;
        one.before += who * rows * p.d_model;
        one.turned += who * rows * p.queries;
        one.packed += who * rows * p.queries;
        return one;
    }
};

template <class T> void widen_row(const T* from, float* to, index n) {
    for (index at = 0; at < n; at += LANES) {
        const Part kept = first_lanes(n - at);
        store(to + at, load(from + at, kept), kept);
    }
}

// Write the embeddings of a level's tokens, to which the next product adds; each thread writes the part that it will add to. Also
// copy the states from which these tokens were drawn, divided among `fills`. States of a level: [grown][n].
template <class T>
void embed(const Recurrent<T>& c, const Room<T>& room, const Level& level, const float* above, float* to, Team team, Team fills) {
    const Parts<T>& p = *c.parts;
    const index d = p.d_model, all = index(level.grown.size()) * c.n;
    const Range part = share(blocks_of(d), team.who, team.of), own = share(all, fills.who, fills.of);
    const index begin = part.begin * LANES, end = std::min(d, part.end * LANES);
    for (index at = 0; at < all; ++at) {
        const index node = level.grown[at / c.n].node, row = at % c.n;
        const token said = node < 0 ? c.tokens(row)[c.known(row) - 1] : room.said[row * c.count + node];
        widen_row(p.embedding + said * d + begin, to + at * d + begin, end - begin);
    }
    for (index at = own.begin; at < own.end; ++at) {
        const Grown& one = level.grown[at / c.n];
        const index row = at % c.n;
        if (one.node < 0) {
            widen_row(c.hidden + row * d, room.before + at * d, d);
        } else {
            std::memcpy(room.before + at * d, above + (one.before * c.n + row) * d, d * sizeof(float));
        }
    }
    fills.wait();
}

// Visit the heads of a level's queries, one thread's part: index among the queries, and address in attention's layout.
template <class T, class Do> void each_head(const Recurrent<T>& c, const Level& level, Team team, Do&& act) {
    const View& v = level.view;
    const index grown = index(level.grown.size()), heads = c.parts->queries / v.dim, group = heads / v.kv_heads;
    const Range own = share(grown * c.n * heads, team.who, team.of);
    for (index at = own.begin; at < own.end; ++at) {
        const index head = at % heads, row = at / heads % c.n, one = at / heads / c.n;
        act(row, at * v.dim, (((row * v.kv_heads + head / group) * grown + one) * group + head % group) * v.dim);
    }
}

// Attention of the queries in `asked` over the target's keys and values, to `turned`.
template <class T> void read(const Recurrent<T>& c, const Room<T>& room, Level& level, Work<T>& work, Team team, Team fills) {
    const Parts<T>& p = *c.parts;
    const View& v = level.view;
    each_head(c, level, fills, [&](index row, index from, index to) {
        float* query = room.turned + from;
        turn(room.asked + from, query, p.cos_sin + index(v.position[row]) * 2 * p.half, v.dim, p.half);
        for (index at = 0; at < v.dim; at += LANES) {
            const Part kept = first_lanes(v.dim - at);
            store(room.packed + to + at, load(query + at, kept), kept);
        }
    });
    fills.wait();
    const index heads = p.queries / v.dim * index(level.grown.size());
    attend(Call<T>{v, room.packed, room.attended, c.cache, heads, heads * v.dim}, *level.schedule, room.partials, level.tickets,
           work, team);
    team.wait();
    each_head(c, level, fills, [&](index, index to, index from) { widen_row(room.attended + from, room.turned + to, v.dim); });
    fills.wait();
}

// The best of a thread's own logits, with the noise of the position that the tokens would have. Each maximum is removed before the
// next one is searched.
template <class T> void draw(const Recurrent<T>& c, const Room<T>& room, const Level& level, index depth, Team team) {
    const Parts<T>& p = *c.parts;
    const Range own = share(blocks_of(p.outputs), team.who, team.of);
    const index begin = own.begin * LANES, end = std::min(p.outputs, own.end * LANES), all = index(level.grown.size()) * c.n;
    for (index at = 0; at < all; ++at) {
        const index row = at % c.n;
        const Draw wanted = draw_of(c.state.of(c.rows[row]) + KEY, std::int32_t(c.known(row) + depth), 0, c.temperatures[c.rows[row] * c.stride]);
        float* logits = room.logits + at * p.outputs;
        Best* best = room.best + (team.who * all + at) * room.most;
        for (index rank = 0; rank < level.grown[at / c.n].children; ++rank) {
            best[rank] = best_of(logits, p.ids, wanted, begin, end);
            if (!rank) room.weights[team.who * all + at] = weight_of(logits, p.ids, wanted, begin, end, best[0].score);
            if (best[rank].score > -INFINITY) logits[best[rank].token] = -INFINITY;
        }
    }
}

// Combine the candidates of all threads and compute their probabilities, in every thread. Thread 0 writes the tokens after the
// rows' known tokens. Returns whether the next level is drafted.
template <class T> bool say(const Recurrent<T>& c, const Room<T>& room, const Level& level, Team team) {
    const index threads = team.of;
    bool grows = false;
    const index all = index(level.grown.size()) * c.n;
    std::vector<index> taken(threads);
    std::vector<token> best(room.most);
    std::vector<float> chance(room.most);
    for (index at = 0; at < all; ++at) {
        std::fill(taken.begin(), taken.end(), 0);
        float weight = 0, likeliest = 0;
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
            if (!rank)
                for (index who = 0; who < threads; ++who)
                    weight += room.weights[who * all + at] * std::exp(room.best[(who * all + at) * room.most].score - top.score);
            chance[rank] = rank ? chance[0] * std::exp(top.score - likeliest) : 1 / weight;
            if (!rank) likeliest = top.score;
        }
        for (const Child& child : level.nodes) {
            if (child.above != at / c.n) continue;
            const index above = level.grown[child.above].node;
            float& own = room.chances[row * c.count + child.node];
            own = chance[child.rank] * (above < 0 ? 1 : room.chances[row * c.count + above]);
            grows |= own > c.parts->min_chance;
            room.said[row * c.count + child.node] = best[child.rank];
            if (team.who == 0) c.tokens(row)[c.known(row) + child.node] = best[child.rank];
        }
    }
    return grows;
}

template <class T> void run_team(const Recurrent<T>& c, const Room<T>& shared, std::deque<Level>& levels, Team team) {
    const Parts<T>& p = *c.parts;
    const index d = p.d_model;
    const Norm<float> none{nullptr, 0, 0}, query{p.query_norm, p.eps, p.offset}, inner{p.inner_norm, p.eps, p.offset},
        last{p.norm, p.eps, p.offset};
    const TileConfig configured(fits_tiles<T>(*c.view));
    Work<T> work;
    bool grows = true;
    for (index depth = 0; depth < index(levels.size()) && grows; ++depth) {
        Level& level = levels[depth];
        const index n = index(level.grown.size()) * c.n;
        const Team fills = team.by(n, OWN_ROWS);
        Room<T> room = shared.own(team.who - fills.who, n, p);
        room.chances += team.who * c.n * c.count;
        room.said += team.who * c.n * c.count;
        float* stream = room.stream[depth % 2];
        const auto multiply = [&](const float* x, const IntWeights& w, const float* added, float* out, index outputs,
                                  index inputs, Gate gate, const Norm<float>& norm) {
            int_product<1>(Problem<float>{x, nullptr, nullptr, added, out, n, outputs, inputs, gate, norm}, w, room.digits, team);
        };
        embed(c, room, level, room.stream[(depth + 1) % 2], stream, team, fills);
        multiply(room.before, p.mix, stream, stream, d, d, Gate::NONE, depth ? last : none);
        team.wait();
        multiply(stream, p.query, nullptr, room.asked, p.queries, d, Gate::NONE, query);
        team.wait();
        read(c, room, level, work, team, fills);
        multiply(room.turned, p.out, stream, stream, d, p.queries, Gate::NONE, none);
        team.wait();
        multiply(stream, p.gate_up, nullptr, room.inner, 2 * p.d_ff, d, Gate(p.gate), inner);
        team.wait();
        multiply(room.inner, p.down, stream, stream, d, p.d_ff, Gate::NONE, none);
        team.wait();
        multiply(stream, p.head, nullptr, room.logits, p.outputs, d, Gate::NONE, last);
        draw(c, room, level, depth, team);
        team.wait();
        grows = say(c, room, level, team);
    }
}

index lines(index floats) { return (floats + LANES - 1) / LANES * LANES; }

// Inputs of a level's attention: one token per row, which sees all slots that the row holds.
template <class T>
void plan(const Recurrent<T>& c, index depth, const std::int32_t* q_start, const std::int32_t* length,
          std::deque<Level>& levels) {
    Level& level = levels[depth];
    level.position.clear();
    level.tickets.items = level.tickets.merges = 0;
    for (index row = 0; row < c.n; ++row) level.position.push_back(std::int32_t(c.known(row) - 1 + depth));
    level.view = *c.view;
    level.view.rows = c.rows;
    level.view.q_start = q_start;
    level.view.length = length;
    level.view.position = level.position.data();
    level.view.n_rows = level.view.n_tokens = c.n;
    level.schedule = &level.own;
    for (index before = 0; before < depth; ++before)
        if (levels[before].grown.size() == level.grown.size()) level.schedule = levels[before].schedule;
    if (level.schedule == &level.own)
        level.own = schedule<T>(level.view, c.parts->queries / c.view->dim * index(level.grown.size()));
}

// Number of leading nodes whose expected tokens exceed their cost, the same for all rows.
template <class T> std::int32_t worth_of(const Recurrent<T>& c, const std::vector<float>& chances) {
    // longer: time of a step without drafts, in units of one for a single row. It yields a token per row: `price` tokens per unit.
    const Parts<T>& p = *c.parts;
    const float rows = float(c.n), longer = 1 + p.node_cost * (rows - 1), price = rows / longer;
    float promised = 0, most = 0;
    index found = 0;
    for (index node = 0; node < c.count; ++node) {
        promised -= p.node_cost * rows * price;
        for (index row = 0; row < c.n; ++row) promised += chances[row * c.count + node];
        const bool may = node + 1 == c.count || std::find(p.sizes, p.sizes + p.n_sizes, node + 1) != p.sizes + p.n_sizes;
        if (may && promised > most) most = promised, found = node + 1;
    }
    return std::int32_t(found);
}

template <class T> void run(const Recurrent<T>& c) {
    const Parts<T>& p = *c.parts;
    std::deque<Level>& levels = levels_of(p, c.count);
    std::vector<std::int32_t> q_start(c.n + 1), length(c.n);
    for (index row = 0; row < c.n; ++row) {
        q_start[row + 1] = std::int32_t(row + 1);
        length[row] = std::max(1, c.state.of(c.rows[row])[LENGTH]);
    }
    index widest = 0, most = 0, partials = 1, depth = 0;
    for (Level& level : levels) {
        plan(c, depth++, q_start.data(), length.data(), levels);
        widest = std::max(widest, index(level.grown.size()) * c.n);
        most = std::max(most, level.most);
        partials = std::max(partials, level.schedule->room());
    }
    const int threads = threads_for(p.outputs * p.d_model, 1 << 14);
    const index d = p.d_model, own = std::max(widest, OWN_ROWS);
    const index sizes[] = {widest * d,         widest * d,      own * d,         widest * p.d_ff,    widest * p.outputs,
                           widest * p.queries, own * p.queries, own * p.queries, widest * p.queries, partials / 4 + LANES};
    constexpr int PARTS = sizeof(sizes) / sizeof(*sizes);
    index all = 0;
    for (const index size : sizes) all += lines(size);
    const Scratch floats(all * index(sizeof(float))), digits(digits_room(widest, std::max({d, p.d_ff, p.queries})));
    std::vector<Best> best(widest * threads * most);
    std::vector<float> weights(widest * threads), chances(threads * c.n * c.count);
    std::vector<token> said(threads * c.n * c.count);
    float* at[PARTS] = {(float*)floats.memory};
    for (int i = 1; i < PARTS; ++i) at[i] = at[i - 1] + lines(sizes[i - 1]);
    const Room<T> room{{at[0], at[1]}, at[2],         at[3],       at[4], at[5],          at[6],          (T*)at[7], (T*)at[8],
                       (Partial*)at[9], digits.memory, best.data(), most, weights.data(), chances.data(), said.data()};
    Meeting meeting;
#pragma omp parallel num_threads(threads)
    run_team(c, room, levels, Team::here(meeting));
    std::fill_n(c.worth, c.n, worth_of(c, chances));
}

}  // namespace

RIDGELINE_API void rl_recurrent_bf16(const Recurrent<bf16>* c) { run(*c); }
RIDGELINE_API void rl_recurrent_f32(const Recurrent<float>* c) { run(*c); }
RIDGELINE_REPLAYABLE(rl_recurrent_bf16)
RIDGELINE_REPLAYABLE(rl_recurrent_f32)

}  // namespace ridgeline
