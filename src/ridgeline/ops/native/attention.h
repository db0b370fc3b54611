// Attention of ragged rows over a paged cache. Keys and values are read in place.
//
// Work is divided into items: a block of packed queries of one row and KV head over a range of its slots. Few queries over many
// keys are split along the keys, and partial results are combined (Flash-Decoding, Dao et al. 2023).

#pragma once

#include "chunk_tiles.h"

#include <atomic>
#include <vector>

namespace ridgeline {

constexpr index WORK_PER_THREAD = 48;  // products of 16 queries with a key
constexpr index SPLIT_KEYS = 64;

// Partial sums of values, relative to 2^top.
struct Partial {
    alignas(64) float top[LANES];
    float total[LANES];
    float sums[LANES * MAX_DIM];
};

// Whether tiles can be loaded directly from the pages.
template <class T> bool fits_tiles(const View& v) {
    if constexpr (sizeof(T) != 2) return false;
    // A tile product adds 32 keys at once. A fixed order requires the same 32 keys wherever a window begins.
    const bool even = !v.fixed || v.window < 0 || v.page_tokens % 32 == 0;
    return tiles_allowed && v.dim % 32 == 0 && v.page_tokens % LANES == 0 && even;
}

// Index of packed query i of an item among [tokens, heads].
template <class T> index place_of(const Call<T>& c, const Row& row, const Item& item, index i) {
    const index at = item.first + i, group = c.group();
    return (row.first_token + at / group) * c.heads + item.kv_head * group + at % group;
}

// Natural logarithm of the sum of exp(score). total: the sum of 2^score relative to 2^top.
inline float log_sum(float top, float total) { return total > 0.0f ? top / LOG2E + std::log(total) : -INFINITY; }

template <class T> void put(const Call<T>& c, const Row& row, const Item& item, Work<T>& w, Partial* partials) {
    const index dim = c.view.dim;
    alignas(64) float scale[MAX_TILES][LANES];
    for (index tile = 0; tile * LANES < item.count; ++tile) {
        const f32x16 total = load(w.total[tile]);
        store(scale[tile], select(greater(total, zeros()), splat(1.0f) / total, zeros()));
    }
    if (item.partial >= 0) {
        Partial& to = partials[item.partial];
        std::memcpy(to.top, w.top[0], sizeof(to.top));
        std::memcpy(to.total, w.total[0], sizeof(to.total));
        std::memcpy(to.sums, w.sums, item.count * dim * sizeof(float));
        return;
    }
    for (index i = 0; i < item.count; ++i) {
        T* to = c.out + place_of(c, row, item, i) * dim;
        const f32x16 factor = splat(scale[i / LANES][i % LANES]);
        for (index d = 0; d < dim; d += LANES) {
            const Part kept = first_lanes(dim - d);
            store(to + d, load(w.sums + i * dim + d, kept) * factor, kept);
        }
    }
    for (index i = 0; c.lse && i < item.count; ++i)
        c.lse[place_of(c, row, item, i)] = log_sum(w.top[i / LANES][i % LANES], w.total[i / LANES][i % LANES]);
}

// Compute an item, whose first chunk was prefetched. next: the item after it, null for none.
template <class T> void compute(const Call<T>& c, const Item& item, const Item* next, Work<T>& w, Partial* partials) {
    const bool coded = c.view.format != Format::MODEL;
    const View v = coded ? as_decoded(c.view) : c.view;
    const Row row(v, item.row);
    const bool by_tiles = fits_tiles<T>(v);
    const index tiles = (item.count + LANES - 1) / LANES;
    Lanes lanes[MAX_TILES];
    for (index tile = 0; tile < tiles; ++tile) {
        const index left = std::clamp<index>(item.count - tile * LANES, 0, LANES);
        lanes[tile] = lanes_of(v, row, c.group(), item.first + tile * LANES, left);
        store(w.top[tile], splat(-INFINITY));
        store(w.total[tile], zeros());
    }
    std::memset(w.sums, 0, tiles * LANES * v.dim * sizeof(float));
    // Tile rows without a query: their sums are never read, but they are zeroed so that products do not process undefined memory.
    if (by_tiles && item.count <= FEW) std::memset(w.weights, 0, CHUNK * LANES * sizeof(T));
    const bool few = sizeof(T) == 2 && !by_tiles && !v.fixed && item.count <= SOME_VECTORS;
    if (few) {
        list_queries(c, row, item, w);
    } else {
        pack_queries(c, row, item, w);
    }
    for (index begin = item.begin, n; begin < item.end; begin += n) {
        n = w.coming;
        w.coming = 0;
        std::swap(w.keys, w.ahead);
        if (coded) decode_chunk(c, row, item.kv_head, begin, n, w);
        if (begin + n < item.end) {
            foresee(c, row, item.kv_head, begin + n, item.end, w);
        } else if (next) {
            foresee(c, Row(v, next->row), next->kv_head, next->begin, next->end, w);
        }
        if (!coded && (by_tiles || sizeof(T) == 4)) ask_all(v, w);
        if constexpr (sizeof(T) == 2)
            if (by_tiles) {
                chunk_by_tiles(v, row, lanes, item.count, begin, n, w);
                continue;
            }
        if constexpr (sizeof(T) == 2)
            if (few) {
                chunk_of_few(v, row, lanes[0], item.count, begin, n, w);
                continue;
            }
        for (index tile = 0; tile < tiles; ++tile)
            chunk_by_vectors(v, row, lanes[tile], tile, std::min<index>(LANES, item.count - tile * LANES), begin, n, w);
    }
    if constexpr (sizeof(T) == 2)
        if (by_tiles) restore_order(tiles * LANES, v.dim, w.sums);
    put(c, row, item, w, partials);
}

// Combine the partial sums of items[0 .. n - 1], which differ only in their keys.
template <class T> void merge(const Call<T>& c, const Item* items, index n, const Partial* partials) {
    const Item& item = items[0];
    const Row row(c.view, item.row);
    const index dim = c.view.dim;
    const Partial* parts = partials + item.partial;
    std::vector<float> share(n);
    for (index i = 0; i < item.count; ++i) {
        float top = -INFINITY, total = 0.0f;
        for (index part = 0; part < n; ++part) top = std::max(top, parts[part].top[i]);
        const index place = place_of(c, row, item, i);
        T* to = c.out + place * dim;
        for (index part = 0; part < n; ++part) {
            share[part] = parts[part].total[i] > 0.0f ? std::exp2(parts[part].top[i] - top) : 0.0f;
            total += share[part] * parts[part].total[i];
        }
        if (c.lse) c.lse[place] = log_sum(top, total);
        for (index d = 0; d < dim; d += LANES) {
            const Part kept = first_lanes(dim - d);
            f32x16 sum = zeros();
            for (index part = 0; part < n; ++part)
                sum = fma(load(parts[part].sums + i * dim + d, kept), splat(share[part]), sum);
            store(to + d, sum * splat(total > 0.0f ? 1.0f / total : 0.0f), kept);
        }
    }
}

// Tokens without a row get 0 and -inf.
template <class T> void clear_idle(const Call<T>& c) {
    const View& v = c.view;
    const index width = c.heads * v.dim, owned = v.q_start[v.n_rows];
    const auto clear = [&](index token, index count) {
        std::memset(c.out + token * width, 0, count * width * sizeof(T));
        if (c.lse) std::fill_n(c.lse + token * c.heads, count * c.heads, -INFINITY);
    };
    for (index i = 0; i < v.n_rows; ++i) {
        const Row row(v, i);
        if (!row.runs()) clear(row.first_token, std::max<index>(0, row.tokens));
    }
    clear(owned, v.n_tokens - owned);
}

// Blocks of packed queries of every row and KV head, over all of their keys.
template <class T> std::vector<Item> whole_items(const View& v, index heads) {
    const bool by_tiles = fits_tiles<T>(v);
    const index group = heads / v.kv_heads, most = LANES * (by_tiles ? MAX_TILES : 1);
    const index align = v.fixed ? (by_tiles ? 2 * LANES : 2) : by_tiles ? LANES : 1;
    std::vector<Item> items;
    for (index i = 0; i < v.n_rows; ++i) {
        const Row row(v, i);
        if (!row.runs()) continue;
        const index all = row.tokens * group, blocks = (all + most - 1) / most;
        // Blocks of about equal size, where the time of a block depends on its queries and not on complete tiles.
        const bool alike = sizeof(T) == 2 && SOME_VECTORS > FEW_VECTORS && !by_tiles && !v.fixed;
        const index each = alike ? (all + blocks - 1) / blocks : most;
        for (index first = 0; first < all; first += each) {
            const index count = std::min(each, all - first), places = (first + count - 1) / group + 1;
            const index begin = first_seen(v, row, first / group, places, align);
            for (index head = 0; head < v.kv_heads; ++head)
                items.push_back({i, head, first, count, begin, row.start + places, -1});
        }
    }
    return items;
}

// Split the items of one tile along their keys, so that every thread has some.
inline std::vector<Item> split(const std::vector<Item>& items, index work, index threads, index* partials) {
    const index even = (work / (threads * 4) + LANES - 1) / LANES * LANES, most = std::max(SPLIT_KEYS, even);
    std::vector<Item> parts;
    for (const Item& item : items) {
        const index n = item.count > LANES ? 1 : (item.end - item.begin + most - 1) / most;
        if (n <= 1) {
            parts.push_back(item);
            continue;
        }
        for (index begin = item.begin; begin < item.end; begin += most) {
            parts.push_back(item);
            parts.back().begin = begin;
            parts.back().end = std::min(begin + most, item.end);
            parts.back().partial = (*partials)++;
        }
    }
    return parts;
}

inline bool same_queries(const Item& a, const Item& b) { return a.row == b.row && a.kv_head == b.kv_head && a.first == b.first; }

// Whether round-robin assignment gives all threads equal work. Splitting would then only add the cost of combining.
inline bool fair(const std::vector<Item>& items, index threads) {
    const auto alike = [&](const Item& one) {
        return one.end - one.begin == items[0].end - items[0].begin && one.count == items[0].count;
    };
    return index(items.size()) % threads == 0 && std::all_of(items.begin(), items.end(), alike);
}

// Attention work of a step, common to layers of the same kind: items, and the number of threads to use.
struct Schedule {
    std::vector<Item> items;
    index partials = 0;
    int threads = 1;
    bool even = false;  // all items have equal cost: threads take them round-robin, without a shared counter

    index room() const { return std::max<index>(1, partials) * index(sizeof(Partial)); }
};

template <class T> Schedule schedule(const View& v, index heads) {
    Schedule made;
    made.items = whole_items<T>(v, heads);
    index work = 0;
    for (const Item& item : made.items) work += (item.end - item.begin) * ((item.count + LANES - 1) / LANES);
    made.threads = threads_for(work, WORK_PER_THREAD);
    made.even = made.threads > 1 && fair(made.items, made.threads);
    if (!v.fixed && made.threads > 1 && index(made.items.size()) < 4 * made.threads && !made.even)
        made.items = split(made.items, work, made.threads, &made.partials);
    return made;
}

// Hand out numbers one by one to the next free thread. Each thread starts with one item.
struct Tickets {
    std::atomic<index> items{0}, merges{0};
};

// One thread's part. partials: Schedule::room() bytes that the team shares.
template <class T>
void attend(const Call<T>& c, const Schedule& s, Partial* partials, Tickets& tickets, Work<T>& w, Team team) {
    const index n = index(s.items.size());
    const auto item = [&](index i) { return i < n ? &s.items[n - 1 - i] : nullptr; };
    w.coming = 0;
    if (const Item* first = item(team.who)) {
        foresee(c, Row(c.view, first->row), first->kv_head, first->begin, first->end, w);
        ask_all(c.view, w);
    }
    if (team.who == 0) clear_idle(c);
    // The next item is taken before this one is computed, so that its first keys can be prefetched.
    for (index i = team.who, next; i < n; i = next) {
        next = s.even ? i + team.of : team.of + tickets.items++;
        compute(c, *item(i), item(next), w, partials);
    }
    if (!s.partials) return;
    team.wait();
    for (index i; (i = tickets.merges++) < n;) {
        if (s.items[i].partial < 0 || (i > 0 && same_queries(s.items[i - 1], s.items[i]))) continue;
        index end = i + 1;
        while (end < n && same_queries(s.items[i], s.items[end])) ++end;
        merge(c, &s.items[i], end - i, partials);
    }
}

// Compiled once, in attention.cpp.
extern template void attend(const Call<bf16>&, const Schedule&, Partial*, Tickets&, Work<bf16>&, Team);
extern template void attend(const Call<float>&, const Schedule&, Partial*, Tickets&, Work<float>&, Team);

}  // namespace ridgeline
