// Gather a step's query tokens from the device's rows, and write draws back; see ridgeline.ops.rows and ridgeline.ops.verify.
//
// The arguments of a function are one struct of pointers and sizes, so that Python packs numbers with a single call. The work is
// too short for a second thread.

#include "rows.h"

#include <vector>

namespace ridgeline {
namespace {

// See ridgeline.ops.rows.Drafted. parent null: chains.
struct Verify {
    State state;
    const std::int32_t* rows;     // [n]
    const token* drawn;           // node `node` of row n is at first[n] + node
    const std::int32_t* first;    // [n]
    const std::int32_t* n_draft;  // [n]
    const std::int64_t* parent;   // [n, columns]
    index n, wide;
    std::int32_t* packed;  // [n, 2 + columns], for trees [n, 2 + 3 columns]
    std::int64_t* path;    // [n, columns]

    // Nodes that a row lacks hold the draw after its last node.
    token drawn_of(index row, index node) const { return drawn[first[row] + std::min<index>(node, n_draft[row])]; }
};

int flag_of(const State& s, const std::int32_t* row, index place, token drawn) {
    const index held = place + 1;
    int flag = held >= row[LIMIT] ? FULL : 0;
    if (held - row[PROMPT] <= row[MIN_TOKENS]) return flag;
    bool stop = false;
    for (index at = STOP; at < s.columns; ++at) stop |= row[at] == drawn;
    return stop ? flag | STOPPED : flag;
}

void move(std::int32_t* row, std::int32_t count, std::int32_t flag) {
    for (const Column column : {POSITION, LENGTH, KNOWN}) row[column] += count;
    row[DONE] += flag != 0;
}

// Whether each node and all its ancestors are accepted. Parents precede their children. Without parents nodes form a chain.
void agree(const Verify& v, index n, const token* drafts, std::vector<char>& right) {
    right[0] = 1;
    for (index node = 1; node < v.wide; ++node) {
        const index above = v.parent ? v.parent[n * v.wide + node] : node - 1;
        right[node] = right[above] && node <= v.n_draft[n] && v.drawn_of(n, above) == drafts[node - 1];
    }
}

// Write the accepted tokens of row n to `packed` and `path`.
void judge(const Verify& v, index n, std::vector<char>& right) {
    const std::int32_t* row = v.state.of(v.rows[n]);
    const index known = row[KNOWN];
    agree(v, n, v.state.tokens + v.rows[n] * v.state.width + known, right);
    std::int32_t* packed = v.packed + n * (2 + (v.parent ? 3 : 1) * v.wide);
    std::int32_t* said = packed + 2;
    index nodes = 0;
    if (v.parent) {
        std::int64_t* path = v.path + n * v.wide;
        std::fill(path, path + v.wide, 0);
        for (index node = 0; node < v.wide; ++node)
            if (right[node]) path[nodes++] = node;
        for (index at = 0; at < v.wide; ++at) {
            said[at] = v.drawn_of(n, path[at]);
            said[v.wide + at] = v.drawn_of(n, at);
            said[2 * v.wide + at] = std::int32_t(path[at]);
        }
    } else {
        nodes = std::count(right.begin(), right.end(), 1);
        for (index at = 0; at < v.wide; ++at) said[at] = v.drawn_of(n, at);
    }
    packed[0] = packed[1] = 0;
    if (row[DONE]) return;
    while (packed[0] < nodes && !packed[1]) {
        packed[1] = flag_of(v.state, row, known + packed[0], said[packed[0]]);
        ++packed[0];
    }
}

}  // namespace

void gather(const Gather& g) {
    const State& s = g.state;
    for (index n = 0; n < g.n_rows; ++n) g.length[n] = s.of(g.own[n])[LENGTH] + (g.n_query ? g.n_query[n] : 1);
    for (index at = 0; at < g.n_tokens; ++at) {
        const index row = g.own[g.n_query ? g.row_of[at] : at], place = g.n_query ? g.place[at] : 0;
        const index position = s.of(row)[POSITION] + place, slot = s.of(row)[LENGTH] + place;
        g.position[at] = std::int32_t(position) + (g.shift ? g.shift[at] : 0);
        g.tokens[at] = s.tokens[row * s.width + position];
        for (index group = 0; group < s.groups; ++group) {
            const index page = s.tables[(group * s.rows + row) * s.pages + slot / s.page_tokens];
            g.slots[group * g.n_tokens + at] = page * s.page_tokens + slot % s.page_tokens;
        }
    }
}

void advance(const Advance& a) {
    for (index n = 0; n < a.n; ++n) {
        std::int32_t* row = a.state.of(a.rows[n]);
        const index place = row[KNOWN];
        const bool live = !row[DONE];
        const int flag = live ? flag_of(a.state, row, place, a.drawn[n]) : 0;
        a.state.tokens[a.rows[n] * a.state.width + place] = a.drawn[n];
        move(row, live, flag);
        std::int32_t* said = a.said + 3 * n;
        said[0] = live, said[1] = flag, said[2] = a.drawn[n];
    }
}

namespace {

// Move keys and values of accepted tree nodes to the slots that they would have in a chain, after verification has updated the
// rows. packed: tokens gained by each row; the remainder of its `stride` is not read. run: a group's keys and values, [pages,
// heads, page_tokens] of `bytes` each, with strides in bytes.
struct Keep {
    State state;
    const std::int32_t* rows;    // [n]
    const std::int32_t* packed;  // [n, stride]
    index stride;
    const std::int64_t* path;  // [n, columns]
    index n, wide, group;
    char* run;
    index heads, page_step, head_step, bytes;

    char* slot(index row, index at) const {
        const index page = state.tables[(group * state.rows + row) * state.pages + at / state.page_tokens];
        return run + page * page_step + at % state.page_tokens * bytes;
    }
};

// A path's nodes ascend, and no node precedes its place in the path. In path order, no slot is read after it was written.
void keep(const Keep& k) {
    for (index n = 0; n < k.n; ++n) {
        const index row = k.rows[n], gained = k.packed[n * k.stride], root = k.state.of(row)[LENGTH] - gained;
        for (index depth = 1; depth < gained; ++depth) {
            const index node = k.path[n * k.wide + depth];
            if (node == depth) continue;
            const char* from = k.slot(row, root + node);
            char* to = k.slot(row, root + depth);
            for (index head = 0; head < k.heads; ++head)
                std::memcpy(to + head * k.head_step, from + head * k.head_step, k.bytes);
        }
    }
}

// Select the hidden state from which each row's last token was drawn. packed: tokens gained by each row; the remainder of its
// `stride` is not read. path null: chains. hidden: `bytes` per state, node `node` of row n at first[n] + node; out [n].
struct Last {
    const std::int32_t* packed;
    const std::int64_t* path;   // [n, columns]
    const std::int32_t* first;  // [n]
    const char* hidden;
    char* out;
    index n, wide, stride, bytes;
};

void last(const Last& l) {
    for (index n = 0; n < l.n; ++n) {
        const index depth = std::max(0, l.packed[n * l.stride] - 1), node = l.path ? l.path[n * l.wide + depth] : depth;
        std::memcpy(l.out + n * l.bytes, l.hidden + (l.first[n] + node) * l.bytes, l.bytes);
    }
}

}  // namespace

RIDGELINE_API void rl_rows_last(const Last* l) { last(*l); }
RIDGELINE_API void rl_rows_keep(const Keep* k) { keep(*k); }
RIDGELINE_API void rl_rows_gather(const Gather* g) { gather(*g); }
RIDGELINE_API void rl_rows_advance(const Advance* a) { advance(*a); }

// All rows are verified before any is written: drafts and drawn tokens use the same places, and row 0 may occur more than once.
RIDGELINE_API void rl_rows_verify(const Verify* v) {
    std::vector<char> right(v->wide);
    for (index n = 0; n < v->n; ++n) judge(*v, n, right);
    for (index n = 0; n < v->n; ++n) {
        const std::int32_t* packed = v->packed + n * (2 + (v->parent ? 3 : 1) * v->wide);
        std::int32_t* row = v->state.of(v->rows[n]);
        std::copy(packed + 2, packed + 2 + v->wide, v->state.tokens + v->rows[n] * v->state.width + row[KNOWN]);
        move(row, packed[0], packed[1]);
    }
}

RIDGELINE_REPLAYABLE(rl_rows_last)
RIDGELINE_REPLAYABLE(rl_rows_keep)
RIDGELINE_REPLAYABLE(rl_rows_gather)
RIDGELINE_REPLAYABLE(rl_rows_advance)
RIDGELINE_REPLAYABLE(rl_rows_verify)

}  // namespace ridgeline
