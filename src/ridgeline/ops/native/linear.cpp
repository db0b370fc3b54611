// Products with packed weights: y[M, N] = x[M, K] W[N, K]^T + bias.
//
// Packed layout, bfloat16: [N / 16][K / 2][16][2], padded with zeros to whole blocks of 16 outputs and 32 inputs. Read in
// order it is what a matrix-vector product wants, and 16 pairs of it are the second operand of an AMX product.
// float32: [N / 16][K][16], padded to 16 outputs.

#include "common.h"

namespace ridgeline {
namespace {

constexpr index PAIR = 2;
constexpr index TILE_K = 32;
constexpr index PREFETCH_BYTES = 4096;

template <class T> constexpr index padded_k(index k) { return sizeof(T) == 2 ? (k + TILE_K - 1) / TILE_K * TILE_K : k; }
constexpr index blocks_of(index n) { return (n + LANES - 1) / LANES; }

template <class T> struct Problem {
    const T* x;
    const T* packed;
    const T* bias;
    T* out;
    index m, n, k;

    index block() const { return padded_k<T>(k) * LANES; }

    // Row `row` of 16 outputs from `first` on.
    void put(index row, index first, __m512 sum) const {
        const __mmask16 lanes = first_lanes(n - first);
        if (bias) sum = _mm512_add_ps(sum, load(bias + first, lanes));
        store(out + row * n + first, sum, lanes);
    }
};

template <class T> void pack(const T* weight, T* packed, index n, index k) {
    constexpr index pair = sizeof(T) == 2 ? PAIR : 1;
    const index wide = padded_k<T>(k), blocks = blocks_of(n);
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks; ++block) {
        T* to = packed + block * LANES * wide;
        for (index at = 0; at < wide; ++at)
            for (index lane = 0; lane < LANES; ++lane) {
                const index row = block * LANES + lane;
                to[(at / pair * LANES + lane) * pair + at % pair] = row < n && at < k ? weight[row * k + at] : T{};
            }
    }
}

// What one step along K takes: two bfloat16 numbers or one float32 of x, times 64 bytes of weights.
inline __m512 step(__m512 sum, const bf16* x, const bf16* w) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return dot_pairs(sum, _mm512_set1_epi32(both), _mm512_loadu_si512(w));
}
inline __m512 step(__m512 sum, const float* x, const float* w) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*x), _mm512_loadu_ps(w), sum);
}

// ROWS of x times BLOCKS blocks of weights; SPLIT independent sums along K hide the latency of the multiply-adds.
// `wide`: K padded; x must be readable that far.
template <class T, int ROWS, int BLOCKS, int SPLIT>
void stream(const Problem<T>& p, const T* x, index x_stride, index row, index block, index wide) {
    constexpr index each = sizeof(T) == 2 ? PAIR : 1;
    const T* w = p.packed + block * p.block();
    __m512 sum[ROWS][BLOCKS][SPLIT];
    for (auto& of_row : sum)
        for (auto& of_block : of_row)
            for (auto& one : of_block) one = _mm512_setzero_ps();
    index at = 0;
    for (; at + SPLIT * each <= wide; at += SPLIT * each) {
#pragma GCC unroll 8
        for (int part = 0; part < SPLIT; ++part)
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
                const T* from = w + b * p.block() + (at + part * each) * LANES;
                if (ROWS <= 4) _mm_prefetch((const char*)from + PREFETCH_BYTES, _MM_HINT_T0);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    sum[r][b][part] = step(sum[r][b][part], x + r * x_stride + at + part * each, from);
            }
    }
    for (; at < wide; at += each)
        for (int b = 0; b < BLOCKS; ++b)
            for (int r = 0; r < ROWS; ++r)
                sum[r][b][0] = step(sum[r][b][0], x + r * x_stride + at, w + b * p.block() + at * LANES);
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) {
            __m512 total = sum[r][b][0];
            for (int part = 1; part < SPLIT; ++part) total = _mm512_add_ps(total, sum[r][b][part]);
            p.put(row + r, (block + b) * LANES, total);
        }
}

template <class T> void few_rows(const Problem<T>& p, const T* x, index stride, index row, index block, index wide) {
    switch (p.m - row) {
        case 1: return stream<T, 1, 1, 8>(p, x, stride, row, block, wide);
        case 2: return stream<T, 2, 1, 4>(p, x, stride, row, block, wide);
        case 3: return stream<T, 3, 1, 4>(p, x, stride, row, block, wide);
        case 4: return stream<T, 4, 1, 4>(p, x, stride, row, block, wide);
        case 5: return stream<T, 5, 1, 2>(p, x, stride, row, block, wide);
        default: return stream<T, 6, 1, 2>(p, x, stride, row, block, wide);
    }
}

// Any number of rows without tiles: 6 rows times 4 blocks at a time, x and a few blocks of weights staying in the cache.
template <class T> void by_vectors(const Problem<T>& p, const T* x, index stride) {
    constexpr index ROWS = 6, BLOCKS = 4;
    const index blocks = blocks_of(p.n), wide = padded_k<T>(p.k);
#pragma omp parallel num_threads(threads_for(p.n * p.k, 1 << 14))
    {
        const Range own = share(blocks, omp_get_thread_num(), omp_get_num_threads());
        index block = own.begin;
        if (p.m >= ROWS)
            for (; block + BLOCKS <= own.end; block += BLOCKS) {
                index row = 0;
                for (; row + ROWS <= p.m; row += ROWS)
                    stream<T, ROWS, BLOCKS, 1>(p, x + row * stride, stride, row, block, wide);
                if (row < p.m)
                    for (index b = 0; b < BLOCKS; ++b) few_rows(p, x + row * stride, stride, row, block + b, wide);
            }
        for (; block < own.end; ++block)
            for (index row = 0; row < p.m; row += ROWS) few_rows(p, x + row * stride, stride, row, block, wide);
    }
}

#if RIDGELINE_AMX

// x as tiles [M / 16][K / 32][16][32], zeros behind its end.
void fill_tiles(const Problem<bf16>& p, bf16* tiles, Range blocks) {
    const index wide = padded_k<bf16>(p.k);
    for (index block = blocks.begin; block < blocks.end; ++block)
        for (index at = 0; at < wide; at += TILE_K) {
            bf16* tile = tiles + block * LANES * wide + at * LANES;
            const __mmask32 columns = p.k - at >= TILE_K ? ~0u : (1u << (p.k - at)) - 1;
            for (index r = 0; r < LANES; ++r) {
                const index row = block * LANES + r;
                const __mmask32 kept = row < p.m ? columns : 0;
                _mm512_store_si512(tile + r * TILE_K, _mm512_maskz_loadu_epi16(kept, p.x + row * p.k + at));
            }
        }
}

// Sums of two neighbouring blocks, a whole cache line of outputs at a time where there are 32 of them.
void put_tiles(const Problem<bf16>& p, const float* first, const float* second, index row, index block) {
    const index rows = std::min<index>(LANES, p.m - row), column = block * LANES;
    const bool whole = column + 2 * LANES <= p.n;
    const __m512 low_bias = p.bias && whole ? load(p.bias + column) : _mm512_setzero_ps();
    const __m512 high_bias = p.bias && whole ? load(p.bias + column + LANES) : _mm512_setzero_ps();
    for (index r = 0; r < rows; ++r) {
        const __m512 low = _mm512_load_ps(first + r * LANES), high = _mm512_load_ps(second + r * LANES);
        if (whole) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_add_ps(high, high_bias), _mm512_add_ps(low, low_bias));
            _mm512_storeu_si512(p.out + (row + r) * p.n + column, (__m512i)both);
        } else {
            p.put(row + r, column, low);
            if (column + LANES < p.n) p.put(row + r, column + LANES, high);
        }
    }
}

// 32 rows times 32 outputs in four tiles of sums.
void four_tiles(const Problem<bf16>& p, const bf16* tiles, index row, index block) {
    constexpr index TILE = LANES * TILE_K;
    const index wide = padded_k<bf16>(p.k), steps = wide / TILE_K, panel = wide * LANES;
    const bf16* x = tiles + row * wide;
    const bf16* w = p.packed + block * panel;
    const index second = block + 1 < blocks_of(p.n) ? panel : 0;
    alignas(64) float sums[4][LANES * LANES];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (index at = 0; at < steps; ++at, x += TILE, w += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + panel, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    put_tiles(p, sums[0], sums[1], row, block);
    put_tiles(p, sums[2], sums[3], row + LANES, block);
}

// 16 rows times 32 outputs.
void two_tiles(const Problem<bf16>& p, const bf16* tiles, index row, index block) {
    constexpr index TILE = LANES * TILE_K;
    const index wide = padded_k<bf16>(p.k), steps = wide / TILE_K, panel = wide * LANES;
    const bf16* x = tiles + row * wide;
    const bf16* w = p.packed + block * panel;
    const index second = block + 1 < blocks_of(p.n) ? panel : 0;
    alignas(64) float sums[2][LANES * LANES];
    _tile_zero(0);
    _tile_zero(1);
    for (index at = 0; at < steps; ++at, x += TILE, w += TILE) {
        for (index line = 0; line < TILE; line += TILE_K) {
            _mm_prefetch((const char*)(w + line) + PREFETCH_BYTES, _MM_HINT_T0);
            _mm_prefetch((const char*)(w + second + line) + PREFETCH_BYTES, _MM_HINT_T0);
        }
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    put_tiles(p, sums[0], sums[1], row, block);
}

// Threads form a grid: as many columns as there are pairs of weight blocks, the rest split the rows. Each goes over its
// weights once per chunk of rows, which stays in the cache meanwhile.
void own_part(const Problem<bf16>& p, const bf16* tiles, int who, int of) {
    constexpr index CACHED = 1 << 20;
    const index halves = blocks_of(p.m), pairs = (blocks_of(p.n) + 1) / 2;
    const index columns = std::min<index>(of, pairs), rows = of / columns;
    if (who >= columns * rows) return;
    const Range own = share(pairs, who % columns, columns), own_rows = share(halves / 2, who / columns, rows);
    const index chunk = std::max<index>(1, CACHED / (2 * LANES * padded_k<bf16>(p.k) * index(sizeof(bf16))));
    for (index first = own_rows.begin; first < own_rows.end; first += chunk)
        for (index pair = own.begin; pair < own.end; ++pair)
            for (index row = first; row < std::min(first + chunk, own_rows.end); ++row)
                four_tiles(p, tiles, row * 2 * LANES, pair * 2);
    if (halves % 2 && who / columns == rows - 1)
        for (index pair = own.begin; pair < own.end; ++pair) two_tiles(p, tiles, (halves - 1) * LANES, pair * 2);
}

void by_tiles(const Problem<bf16>& p, bf16* tiles) {
#pragma omp parallel num_threads(threads_for(p.n * p.k, 1 << 14))
    {
        const int who = omp_get_thread_num(), of = omp_get_num_threads();
        fill_tiles(p, tiles, share(blocks_of(p.m), who, of));
#pragma omp barrier
        const TileConfig configured(true);
        own_part(p, tiles, who, of);
    }
}

#endif

// Rows of x with K padded to what the packed weights were padded to.
template <class T> const T* padded_rows(const Problem<T>& p, T* scratch) {
    const index wide = padded_k<T>(p.k);
    for (index row = 0; row < p.m; ++row) {
        std::memcpy(scratch + row * wide, p.x + row * p.k, p.k * sizeof(T));
        std::memset(scratch + row * wide + p.k, 0, (wide - p.k) * sizeof(T));
    }
    return scratch;
}

}  // namespace

RIDGELINE_API void rl_pack_bf16(const bf16* weight, bf16* packed, index n, index k) { pack(weight, packed, n, k); }
RIDGELINE_API void rl_pack_f32(const float* weight, float* packed, index n, index k) { pack(weight, packed, n, k); }

RIDGELINE_API void rl_linear_bf16(
    const bf16* x, const bf16* packed, const bf16* bias, bf16* out, index m, index n, index k) {
    const Problem<bf16> p{x, packed, bias, out, m, n, k};
    const index wide = padded_k<bf16>(k);
#if RIDGELINE_AMX
    if (m > 1 && tiles_allowed) {
        const Scratch tiles((m + LANES - 1) / LANES * LANES * wide * sizeof(bf16));
        return by_tiles(p, (bf16*)tiles.memory);
    }
#endif
    if (wide == k) return by_vectors(p, x, k);
    const Scratch rows(m * wide * sizeof(bf16));
    by_vectors(p, padded_rows(p, (bf16*)rows.memory), wide);
}

RIDGELINE_API void rl_linear_f32(
    const float* x, const float* packed, const float* bias, float* out, index m, index n, index k) {
    by_vectors(Problem<float>{x, packed, bias, out, m, n, k}, x, k);
}

}  // namespace ridgeline
