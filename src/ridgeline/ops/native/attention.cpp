// Attention of ragged rows over a paged cache, keys and values read where they lie.
//
// Work is cut into items: a block of packed queries of one row and KV head over a range of its slots. Few queries over
// many keys are split along the keys and merged by their maxima (flash decoding, Dao et al. 2023).

#include "chunk_tiles.h"

#include <vector>

namespace ridgeline {
namespace {

constexpr index WORK_PER_THREAD = 48;  // 16 queries times one key each
constexpr index SPLIT_KEYS = 64;

// Unfinished: sums of values are relative to 2^top.
struct Partial {
    alignas(64) float top[LANES];
    float total[LANES];
    float sums[LANES * MAX_DIM];
};

// Whether tiles can be loaded straight from the pages.
template <class T> bool fits_tiles(const View& v) {
    if constexpr (sizeof(T) != 2) return false;
    return tiles_allowed && v.dim % 32 == 0 && v.page_tokens % LANES == 0;
}

template <class T> void put(const Call<T>& c, const Row& row, const Item& item, Work<T>& w, Partial* partials) {
    const index dim = c.view.dim, group = c.group();
    alignas(64) float scale[MAX_TILES][LANES];
    for (index tile = 0; tile < MAX_TILES; ++tile) {
        const __m512 total = _mm512_load_ps(w.total[tile]);
        const __mmask16 any = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_GT_OQ);
        _mm512_store_ps(scale[tile], _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), total));
    }
    if (item.partial >= 0) {
        Partial& to = partials[item.partial];
        std::memcpy(to.top, w.top[0], sizeof(to.top));
        std::memcpy(to.total, w.total[0], sizeof(to.total));
        std::memcpy(to.sums, w.sums, item.count * dim * sizeof(float));
        return;
    }
    for (index i = 0; i < item.count; ++i) {
        const index at = item.first + i;
        T* to = c.out + ((row.first_token + at / group) * c.heads + item.kv_head * group + at % group) * dim;
        const __m512 factor = _mm512_set1_ps(scale[i / LANES][i % LANES]);
        for (index d = 0; d < dim; d += LANES) {
            const __mmask16 kept = first_lanes(dim - d);
            store(to + d, _mm512_mul_ps(load(w.sums + i * dim + d, kept), factor), kept);
        }
    }
}

template <class T> void compute(const Call<T>& c, const Item& item, Work<T>& w, Partial* partials) {
    const View& v = c.view;
    const Row row(v, item.row);
    const bool by_tiles = fits_tiles<T>(v);
    const index tiles = (item.count + LANES - 1) / LANES;
    Lanes lanes[MAX_TILES];
    for (index tile = 0; tile < MAX_TILES; ++tile) {
        const index left = std::clamp<index>(item.count - tile * LANES, 0, LANES);
        lanes[tile] = lanes_of(v, row, c.group(), item.first + tile * LANES, left);
        _mm512_store_ps(w.top[tile], _mm512_set1_ps(-INFINITY));
        _mm512_store_ps(w.total[tile], _mm512_setzero_ps());
    }
    fetch(c, row, item.kv_head, item.begin, std::min(item.begin + CHUNK, item.end));
    std::memset(w.sums, 0, tiles * LANES * v.dim * sizeof(float));
    // Rows of tiles without a query: their sums are never read, but no product should run over what memory held before.
    if (by_tiles && item.count <= FEW) std::memset(w.weights, 0, CHUNK * LANES * sizeof(T));
    pack_queries(c, row, item, w);
    for (index begin = item.begin; begin < item.end; begin += CHUNK) {
        const index n = std::min(CHUNK, item.end - begin);
        find_keys(c, row, item.kv_head, begin, n, w);
        fetch(c, row, item.kv_head, begin + n, std::min(begin + n + CHUNK, item.end));
        if constexpr (sizeof(T) == 2)
            if (by_tiles) {
                chunk_by_tiles(v, row, lanes, item.count, begin, n, w);
                continue;
            }
        for (index tile = 0; tile < tiles; ++tile) {
            const index count = std::min<index>(LANES, item.count - tile * LANES);
            score_vectors(v, tile, n, w);
            soften(v, row, lanes[tile], tile, begin, n, w);
            fade_sums(tile, count, v.dim, w);
            add_values(v, tile, count, n, w);
        }
    }
    if constexpr (sizeof(T) == 2)
        if (by_tiles) restore_order(tiles * LANES, v.dim, w.sums);
    put(c, row, item, w, partials);
}

// Merge the partial sums of items[0 .. n - 1], which differ in their keys only.
template <class T> void merge(const Call<T>& c, const Item* items, index n, const Partial* partials) {
    const Item& item = items[0];
    const Row row(c.view, item.row);
    const index dim = c.view.dim, group = c.group();
    const Partial* parts = partials + item.partial;
    std::vector<float> share(n);
    for (index i = 0; i < item.count; ++i) {
        float top = -INFINITY, total = 0.0f;
        for (index part = 0; part < n; ++part) top = std::max(top, parts[part].top[i]);
        const index at = item.first + i;
        T* to = c.out + ((row.first_token + at / group) * c.heads + item.kv_head * group + at % group) * dim;
        for (index part = 0; part < n; ++part) {
            share[part] = parts[part].total[i] > 0.0f ? std::exp2(parts[part].top[i] - top) : 0.0f;
            total += share[part] * parts[part].total[i];
        }
        for (index d = 0; d < dim; d += LANES) {
            const __mmask16 kept = first_lanes(dim - d);
            __m512 sum = _mm512_setzero_ps();
            for (index part = 0; part < n; ++part)
                sum = _mm512_fmadd_ps(load(parts[part].sums + i * dim + d, kept), _mm512_set1_ps(share[part]), sum);
            store(to + d, _mm512_mul_ps(sum, _mm512_set1_ps(total > 0.0f ? 1.0f / total : 0.0f)), kept);
        }
    }
}

// Blocks of packed queries of every row and KV head, whole; tokens that no row runs are set to 0.
template <class T> std::vector<Item> plan(const Call<T>& c) {
    const View& v = c.view;
    const bool by_tiles = fits_tiles<T>(v);
    const index group = c.group(), width = c.heads * v.dim, most = LANES * (by_tiles ? MAX_TILES : 1);
    std::vector<Item> items;
    for (index i = 0; i < v.n_rows; ++i) {
        const Row row(v, i);
        if (!row.runs()) {
            std::memset(c.out + row.first_token * width, 0, std::max<index>(0, row.tokens) * width * sizeof(T));
            continue;
        }
        for (index first = 0; first < row.tokens * group; first += most) {
            const index count = std::min(most, row.tokens * group - first), places = (first + count - 1) / group + 1;
            const index begin = first_seen(v, row, first / group, places, by_tiles ? LANES : 1);
            for (index head = 0; head < v.kv_heads; ++head)
                items.push_back({i, head, first, count, begin, row.start + places, -1});
        }
    }
    const index owned = v.q_start[v.n_rows];
    std::memset(c.out + owned * width, 0, (v.n_tokens - owned) * width * sizeof(T));
    return items;
}

// Items of one tile cut along their keys, so that every thread finds some.
std::vector<Item> split(const std::vector<Item>& items, index work, index threads, index* partials) {
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

bool same_queries(const Item& a, const Item& b) { return a.row == b.row && a.kv_head == b.kv_head && a.first == b.first; }

template <class T> void attention(const Call<T>& c) {
    std::vector<Item> items = plan(c);
    index work = 0, partials = 0;
    for (const Item& item : items) work += (item.end - item.begin) * ((item.count + LANES - 1) / LANES);
    const int threads = threads_for(work, WORK_PER_THREAD);
    if (threads > 1 && index(items.size()) < 4 * threads) items = split(items, work, threads, &partials);
    const Scratch memory(std::max<index>(1, partials) * index(sizeof(Partial)));
    Partial* const room = static_cast<Partial*>(memory.memory);
    const index n = index(items.size());
#pragma omp parallel num_threads(threads)
    {
#if RIDGELINE_AMX
        const TileConfig configured(fits_tiles<T>(c.view));
#endif
        Work<T> w;
#pragma omp for schedule(dynamic)
        for (index i = n - 1; i >= 0; --i) compute(c, items[i], w, room);
#pragma omp for schedule(dynamic)
        for (index i = 0; i < n; ++i) {
            if (items[i].partial < 0 || (i > 0 && same_queries(items[i - 1], items[i]))) continue;
            index end = i + 1;
            while (end < n && same_queries(items[i], items[end])) ++end;
            merge(c, &items[i], end - i, room);
        }
    }
}

}  // namespace

RIDGELINE_API void rl_attention_bf16(const View* view, const bf16* q, bf16* out, const bf16* cache, index heads,
                                     index q_stride) {
    attention(Call<bf16>{*view, q, out, cache, heads, q_stride});
}
RIDGELINE_API void rl_attention_f32(const View* view, const float* q, float* out, const float* cache, index heads,
                                    index q_stride) {
    attention(Call<float>{*view, q, out, cache, heads, q_stride});
}

}  // namespace ridgeline
