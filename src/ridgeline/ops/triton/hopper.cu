// Attention of long chunks, for Hopper. ops/triton/hopper.py describes its use and defines DIM (head size), KEYS (slots of a tile),
// WINDOWED, CAPPED and BOUNDED (0 or 1), TYPE (a 16-bit type in PTX syntax) and the operands of both products. SCORE_NAMES and
// similar: pairs.py.
//
// Two programs form a cluster. Each processes 128 packed queries (tokens times heads of a group) of the same row and KV head and
// loads half of each tile of keys and values, which TMA multicast writes to both. A producer warp fills a ring of tiles. Two
// consumer groups of four warps have 64 queries each. One product computes the scores of a tile. A second product computes the
// weighted values; its left operand is in registers, because the first product's accumulators have the layout that it needs. The
// product with a tile's values overlaps the softmax of the next tile (FlashAttention-3, Shah et al. 2024), also across units of
// work, whose queries are loaded one unit ahead.

typedef unsigned short u16;

constexpr u32 GROUPS = 2, HALF = 64, STAGES = 2, ROW = 128;
constexpr u32 PARTS = DIM / 64, SLOTS = KEYS / PAIR, QUERIES = GROUPS * HALF, WARPS = 4 * GROUPS, CHUNKS = DIM / 8;
constexpr u32 SCORES = KEYS / 2, OUTS = DIM / 2;  // accumulators of a thread
constexpr u32 PART_BYTES = KEYS * ROW, TILE_BYTES = PARTS * PART_BYTES, Q_PART = HALF * ROW, Q_BYTES = PARTS * Q_PART;
constexpr float LN2 = 0.6931471805599453f;
#define LOWEST __int_as_float(0xFF800000)
// Initial maximum. With a window a group may begin with a tile that none of its queries sees. Differences to the initial maximum
// must then be finite, and later tiles scale its contribution to zero. Bounded scores need no maximum.
#define NOTHING (BOUNDED ? 0.0f : WINDOWED ? -1e30f : LOWEST)
constexpr u32 QUEUED = DIM < 256 ? 2 : 1;  // units whose queries are in shared memory
constexpr float ROOM = 8.0f;  // weights reach 2^ROOM before the maximum is updated

// Make threads' writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void score(float (&d)[SCORES], u64 a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SCORE_ADD ", 0;\nwgmma.mma_async.sync.aligned." SCORE_SHAPE ".f32." TYPE "." TYPE
               " {" SCORE_NAMES "}, " SCORE_SIDES ", p, 1, 1, 0, 0;\n}"
               : SCORE_REGISTERS
               : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void gather(float (&d)[OUTS], const u32* a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " OUT_ADD ", 0;\nwgmma.mma_async.sync.aligned." OUT_SHAPE ".f32." TYPE "." TYPE
               " {" OUT_NAMES "}, " OUT_SIDES ", p, 1, 1, 1;\n}"
               : OUT_REGISTERS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the last LEFT groups of products are complete. The compiler must not move reads of their sums before it.
template <u32 LEFT, u32 N>
__device__ __forceinline__ void wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// As accurate as exponentials and a reciprocal for 16-bit results, at half the cost
// (docs/log/2026-11-23-chunk-attention-windows-caps-heads.md).
__device__ __forceinline__ float tanh_(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ int larger(int a, int b) {
  int y;
  asm("max.s32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float across(float x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }

// Must equal hopper.py's. Strides: of queries in elements, of the cache in rows, of the table in pages.
struct Sizes {
  u32 q_token, q_head, page_rows, kind_rows, head_rows, table;
  u32 units, kv_heads, group, page, box;
  u32 by_group, by_page;  // 2^31 / group and 2^31 / page, rounded up
  float scale;            // scale of the softmax, times log2(e)
  u32 window;
  float inner;  // scale of a score before tanh, with a cap
};
__device__ __forceinline__ u32 over(u32 x, u32 by) { return (u64)x * by >> 31; }

struct Unit {
  u32 head, row, packed, query, n, start;
};
// A cluster's unit of work number `turn`. n is 0 if there is none, as in all later turns. The order alternates between rounds,
// because the first units of each round are the longest.
__device__ __forceinline__ Unit unit_of(u32 turn, const int* units, const Sizes& sizes) {
  const u32 clusters = gridDim.x / PAIR, own = blockIdx.x / PAIR;
  const u32 work = turn * clusters + (turn & 1 ? clusters - 1 - own : own), behind = work / sizes.kv_heads, n = sizes.units;
  if (behind >= n) return {0, 0, 0, 0, 0, 0};
  const int* at = units + n - 1 - behind;
  return {work - behind * sizes.kv_heads, (u32)at[0], (u32)at[n], (u32)at[2 * n], (u32)at[3 * n], (u32)at[4 * n]};
}
// Number of key tiles that `many` queries from packed query `first` on see.
__device__ __forceinline__ u32 tiles_of(const Unit& unit, u32 first, u32 many, const Sizes& sizes) {
  if (over(first, sizes.by_group) >= unit.n) return 0;
  return (unit.start + min(over(first + many - 1, sizes.by_group), unit.n - 1)) / KEYS + 1;
}
// First tile that packed query `first` sees.
__device__ __forceinline__ u32 seen_from(const Unit& unit, u32 first, const Sizes& sizes) {
  const int slot = WINDOWED ? (int)(unit.start + over(first, sizes.by_group) + 1 - sizes.window) : 0;
  return (u32)larger(slot, 0) / KEYS;
}

// Address of 16 bytes of a group's queries, or of its results.
__device__ __forceinline__ u32 place_of(u32 base, u32 row, u32 chunk) {
  return base + chunk / 8 * Q_PART + row * ROW + ((chunk ^ row) % 8) * 16;
}
// Start the copy of a group's queries.
__device__ __forceinline__ void ask(u32 to, const u16* q, const Unit& unit, u32 first, const Sizes& sizes) {
  const u32 thread = threadIdx.x % 128, chunk = thread % CHUNKS;
  const u16* from = q + (u64)unit.query * sizes.q_token + unit.head * sizes.group * sizes.q_head + chunk * 8;
#pragma unroll
  for (u32 row = thread / CHUNKS; row < HALF; row += 128 / CHUNKS) {
    const u32 packed = first + row, place = over(packed, sizes.by_group);
    const bool real = place < unit.n;
    const u16* at = real ? from + (u64)place * sizes.q_token + (packed - place * sizes.group) * sizes.q_head : q;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place_of(to, row, chunk)), "l"(at), "r"(real ? 16 : 0)
                 : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void arrived(u32 group) {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  fence_async();
  sync_group(group);
}

// State of a thread's two queries: last visible slot, minus the common offset of the thread's columns; reference maximum of the
// weights; the thread's share of the sum of weights.
struct Rows {
  int last[2];
  float best[2], weight[2], shrink[2];
};
// One iteration of online softmax (Milakov and Gimelshein 2018): scores become weights. The maximum is kept as long as no weight
// would exceed 2^ROOM; then no rescaling and no exchange between threads are needed. Returns whether earlier sums must be
// multiplied by `shrink`. HIDE: mask slots after each query's own and before its window; first: first slot of the tile.
template <bool HIDE>
__device__ __forceinline__ bool weigh(float (&s)[SCORES], Rows& rows, u32 first, float scale, float room, u32 window) {
  if (HIDE)
#pragma unroll
    for (u32 i = 0; i < SCORES; ++i) {
      const int column = i / 4 * 8 + i % 2, last = rows.last[i / 2 % 2] - (int)first;
      if (WINDOWED ? (u32)(last - column) >= window : column > last) s[i] = LOWEST;
    }
  bool grown = false;
#if !BOUNDED
  // Compared as integers, three at a time, which orders floats correctly unless both are negative.
  int whole[4];
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    whole[k] = __float_as_int(s[k]);
#pragma unroll
    for (u32 i = 4 + k; i < SCORES - 4; i += 8) whole[k] = larger(larger(whole[k], __float_as_int(s[i])), __float_as_int(s[i + 4]));
    whole[k] = larger(whole[k], __float_as_int(s[SCORES - 4 + k]));
  }
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const float limit = rows.best[r] + room;
    grown |= !(limit >= 0.0f) || __int_as_float(larger(whole[2 * r], whole[2 * r + 1])) > limit;
  }
  grown = __any_sync(~0u, grown);
  if (grown)
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float now = rows.best[r];
#pragma unroll
      for (u32 i = 2 * r; i < SCORES; i += 4) now = larger(now, larger(s[i], s[i + 1]));
      now = larger(now, across(now, 1));
      now = larger(now, across(now, 2));
      rows.shrink[r] = exp2_((rows.best[r] - now) * scale);
      rows.best[r] = now;
      rows.weight[r] *= rows.shrink[r];
    }
#endif
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const float least = BOUNDED ? 0.0f : rows.best[r] * scale;
    float sum[2] = {rows.weight[r], 0.0f};
#pragma unroll
    for (u32 i = 2 * r; i < SCORES; i += 4)
#pragma unroll
      for (u32 c = 0; c < 2; ++c) {
        s[i + c] = exp2_(s[i + c] * scale - least);
        sum[c] += s[i + c];
      }
    rows.weight[r] = sum[0] + sum[1];
  }
  return grown;
}

// Write the outputs of a group's queries and their log-sum-exp. staged: memory of these queries, which are no longer needed.
__device__ __forceinline__ void write(u16* out, float* lse, const Unit& unit, u32 first, const float (&o)[OUTS], const Rows& rows,
                                      u32 staged, u32 group, const Sizes& sizes) {
  const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, heads = sizes.kv_heads * sizes.group;
  float part[2];
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    float sum = rows.weight[r];
    sum += across(sum, 1);
    sum += across(sum, 2);
    part[r] = inverse(sum);
    const u32 packed = first + warp * 16 + lane / 4 + 8 * r, place = over(packed, sizes.by_group);
    if (lane % 4 == 0 && place < unit.n)
      lse[(u64)(unit.query + place) * heads + unit.head * sizes.group + packed - place * sizes.group] =
          (rows.best[r] * sizes.scale + log2_(sum)) * LN2;
  }
  if constexpr (QUEUED == 1) {
    // No staging buffer is available. Four threads exchange their values of a query's 32 results, so that each holds 8 contiguous
    // ones.
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 packed = first + warp * 16 + lane / 4 + 8 * r, place = over(packed, sizes.by_group);
      u16* to = out + ((u64)(unit.query + place) * heads + unit.head * sizes.group + packed - place * sizes.group) * DIM + lane % 4 * 8;
#pragma unroll
      for (u32 i = 0; i < OUTS / 16; ++i) {
        u32 v[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) v[k] = rounded(o[16 * i + 4 * k + 2 * r] * part[r], o[16 * i + 4 * k + 2 * r + 1] * part[r]);
#pragma unroll
        for (u32 bit = 1; bit < 4; bit *= 2)
#pragma unroll
          for (u32 k = 0; k < 4; ++k) {
            if (k & bit) continue;
            const bool high = lane & bit;
            const u32 got = __shfl_xor_sync(~0u, high ? v[k] : v[k + bit], bit);
            if (high)
              v[k] = got;
            else
              v[k + bit] = got;
          }
        if (place < unit.n) *(uint4*)(to + 32 * i) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
    return;
  }
  sync_group(group);
#pragma unroll
  for (u32 i = 0; i < OUTS / 8; ++i) {
    // Four 8 x 8 matrices: two below each other, and two to their right.
    u32 v[4];
#pragma unroll
    for (u32 k = 0; k < 4; ++k) v[k] = rounded(o[8 * i + 2 * k] * part[k % 2], o[8 * i + 2 * k + 1] * part[k % 2]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     place_of(staged, warp * 16 + lane % 16, 2 * i + lane / 16)),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }
  __syncwarp();
  const u32 chunk = lane % CHUNKS;
#pragma unroll
  for (u32 i = 0; i < 16; i += 32 / CHUNKS) {
    const u32 row = warp * 16 + i + lane / CHUNKS, packed = first + row, place = over(packed, sizes.by_group);
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(place_of(staged, row, chunk))
                 : "memory");
    if (place < unit.n)
      *(uint4*)(out + ((u64)(unit.query + place) * heads + unit.head * sizes.group + packed - place * sizes.group) * DIM + chunk * 8) = v;
  }
  sync_group(group);
}

// Ring of tiles. `at` counts all tiles; it determines the stage and the parity of the phase.
struct Ring {
  u32 tiles, full, free;
  __device__ __forceinline__ void fetched(u32 at) const { await(full + 8 * (at % STAGES), at / STAGES & 1); }
  __device__ __forceinline__ void done(u32 at, u32 lane) const {
    if (lane < PAIR) release(free + 8 * (at % STAGES), lane);
  }
  __device__ __forceinline__ u32 tile(u32 at) const { return tiles + at % STAGES * TILE_BYTES; }
  __device__ __forceinline__ void fetch(const TensorMap* cache, u32 at, u32 own, bool busy, u32 row) const {
    const u32 stage = at % STAGES, barrier = full + 8 * stage;
    await(free + 8 * stage, (at / STAGES & 1) ^ 1);
    if (threadIdx.x == 0) expect(barrier, TILE_BYTES);
    if (busy)
#pragma unroll
      for (u32 part = 0; part < PARTS; ++part)
        load_for_all(tile(at) + part * PART_BYTES + own * ROW, cache, barrier, part * 64, row);
    __syncwarp();
  }
};

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(384, 1)
    attend_chunks(const __grid_constant__ TensorMap cache, const u16* q, u16* out, float* lse, const int* table, const int* units,
                  const __grid_constant__ Sizes sizes) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 * STAGES];
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
  const u32 base = (shared(memory) + 1023) & ~1023u, tiles = base + QUEUED * GROUPS * Q_BYTES, first_barrier = shared(barriers);
  const Ring keys{tiles, first_barrier, first_barrier + 8 * STAGES};
  const Ring values{tiles + STAGES * TILE_BYTES, first_barrier + 16 * STAGES, first_barrier + 24 * STAGES};
  const u32 which = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      init(keys.full + 8 * i, 1);
      init(values.full + 8 * i, 1);
      init(keys.free + 8 * i, PAIR * WARPS);
      init(values.free + 8 * i, PAIR * WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sync_cluster();
  if (which == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 0) {
      // One lane per copy of `box` slots, which lie in one page.
      const u32 own = rank * SLOTS + lane * sizes.box;
      const bool busy = lane * sizes.box < SLOTS;
      u32 at = 0;
      Unit unit = unit_of(0, units, sizes);
      for (u32 turn = 1; unit.n; ++turn) {
        const Unit next = unit_of(turn, units, sizes);
        const u32 many = tiles_of(unit, unit.packed, PAIR * QUERIES, sizes), held = unit.start + unit.n;
        const int* pages = table + (u64)unit.row * sizes.table;
#pragma unroll 1
        for (u32 tile = seen_from(unit, unit.packed, sizes); tile < many; ++tile, ++at) {
          // The page number is loaded before the wait for a free stage, which hides its latency.
          const u32 slot = tile * KEYS + own, number = over(slot, sizes.by_page);
          const u32 page = busy && slot < held ? (u32)pages[number] : 0;
          const u32 row = page * sizes.page_rows + unit.head * sizes.head_rows + slot - number * sizes.page;
          keys.fetch(&cache, at, own, busy, row);
          values.fetch(&cache, at, own, busy, row + sizes.kind_rows);
        }
        unit = next;
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 group = which - 1, mine_at = rank * QUERIES + group * HALF;
    const float scale = sizes.scale, room = ROOM / scale;
    u32 turn = 0, at = 0;  // current unit; the ring's tile whose weights are in p
    Unit unit = unit_of(0, units, sizes), next = unit_of(1, units, sizes);
    auto queries = [&](u32 turn) { return base + turn % QUEUED * GROUPS * Q_BYTES + group * Q_BYTES; };
    ask(queries(0), q, unit, unit.packed + mine_at, sizes);
    if (QUEUED == 2) ask(queries(1), q, next, next.packed + mine_at, sizes);

    float s[SCORES], o[OUTS];
    u32 p[SCORES / 2];
    Rows rows;
    // Tile ranges. all, mine: end for the cluster's and for this group's queries. plain: end of the tiles that all queries see to
    // their ends. low, own: begin for the cluster and for this group. whole: begin of the tiles that all queries see from their
    // beginnings. Slots below `stale` are seen by none of the row's queries.
    u32 all, mine, plain, low, own, whole = 0, stale = 0;
    auto enter = [&]() {
      const u32 first = unit.packed + mine_at, line = first + warp * 16 + lane / 4;
      all = tiles_of(unit, unit.packed, PAIR * QUERIES, sizes);
      mine = tiles_of(unit, first, HALF, sizes);
      plain = (unit.start + over(first, sizes.by_group) + 1) / KEYS;
      low = seen_from(unit, unit.packed, sizes);
      own = seen_from(unit, first, sizes);
      if (WINDOWED) {
        whole = (u32)larger((int)(unit.start + over(first + HALF - 1, sizes.by_group) + KEYS - sizes.window), 0) / KEYS;
        stale = larger((int)(unit.start + 1 - sizes.window), 0);
      }
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        rows.last[r] = unit.start + over(line + 8 * r, sizes.by_group) - lane % 4 * 2;
        rows.best[r] = NOTHING;
        rows.weight[r] = 0.0f;
      }
    };
    auto leave = [&]() {
      unit = next;
      ++turn;
      next = unit_of(turn + 1, units, sizes);
    };
    auto ask_next = [&]() { ask(queries(turn + 1), q, next, next.packed + mine_at, sizes); };
    // If shared memory holds the queries of one unit only, the next unit's are loaded once this unit's last scores are computed.
    auto ask_late = [&]() {
      if (QUEUED == 2) return;
      sync_group(group);
      ask_next();
    };
    // Tiles that only other groups of the cluster see. Every phase of a barrier must be waited for.
    auto skip = [&](u32 many) {
#pragma unroll 1
      for (; many; --many, ++at) {
        keys.fetched(at);
        keys.done(at, lane);
        values.fetched(at);
        values.done(at, lane);
      }
    };
    auto multiply_keys = [&](u32 at) {
      const u64 left = matrix(queries(turn)), right = matrix(keys.tile(at));
#pragma unroll
      for (u32 i = 0; i < DIM / 16; ++i)
        score(s, left + i / 4 * (Q_PART >> 4) + i % 4 * 2, right + i / 4 * (PART_BYTES >> 4) + i % 4 * 2, i);
      end_products();
    };
    auto multiply_values = [&](u32 add) {
      const u64 right = matrix(values.tile(at), PART_BYTES);
#pragma unroll
      for (u32 i = 0; i < KEYS / 16; ++i) gather(o, p + 4 * i, right + i * (16 * ROW >> 4), add | i);
      end_products();
    };
    auto cap = [&]() {
      if (CAPPED)
#pragma unroll
        for (u32 i = 0; i < SCORES; ++i) s[i] = tanh_(s[i] * sizes.inner);
    };
    auto pack = [&]() {
#pragma unroll
      for (u32 i = 0; i < SCORES / 2; ++i) p[i] = rounded(s[2 * i], s[2 * i + 1]);
    };
    // Values of slots past the row's end, or seen by none of its queries, are undefined and may be NaN, which a zero weight would
    // not remove. Both groups write the same zeros, each before its own product.
    auto clear = [&](u32 tile) {
      const u32 held = unit.start + unit.n, stop = (tile + 1) * KEYS;
      if (stop <= held && tile * KEYS >= stale) return;
      auto zero = [&](u32 slot, u32 i) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values.tile(at) + i / 8 % PARTS * PART_BYTES + slot * ROW +
                                                                      i % 8 * 16),
                     "r"(0)
                     : "memory");
      };
      if (stop > held)
        for (u32 i = threadIdx.x % 128; i < PARTS * (stop - held) * 8; i += 128) zero(KEYS - 1 - i / 8 / PARTS, i);
      if (WINDOWED && tile * KEYS < stale)
        for (u32 i = threadIdx.x % 128; i < PARTS * (stale - tile * KEYS) * 8; i += 128) zero(i / 8 / PARTS, i);
      fence_async();
      sync_group(group);
    };

#pragma unroll 1
    while (unit.n) {
      enter();
      arrived(group);
      if (mine == 0) {
        skip(all - low);
        ask_late();
        leave();
        if (QUEUED == 2) ask_next();
        continue;
      }
      if (WINDOWED) skip(own - low);
      keys.fetched(at);
      begin_products();
      multiply_keys(at);
      wait<0>(s);
      keys.done(at, lane);
      cap();
      weigh<true>(s, rows, own * KEYS, scale, room, sizes.window);
      pack();
      u32 tile = own, add = 0;
#pragma unroll 1
      for (;;) {
        const bool last = tile + 1 == mine;
        u32 k = at + 1, rest = 0, early = 0;
        Unit old;
        Rows old_rows;
        if (WINDOWED && !last && tile * KEYS < stale) {
          values.fetched(at);
          clear(tile);
        }
        if (QUEUED == 1 && last) break;
        if (last) {
          // Continue with the next unit, whose first scores overlap the last values of this one. At most one tile may be skipped in
          // between.
          rest = all - mine;
          if (rest > 1 || tiles_of(next, next.packed + mine_at, HALF, sizes) == 0) break;
          if (WINDOWED && !rest)
            early = rest = seen_from(next, next.packed + mine_at, sizes) > seen_from(next, next.packed, sizes);
          if (rest) {
            keys.fetched(k);
            keys.done(k++, lane);
          }
          values.fetched(at);
          clear(tile);
          old = unit;
          old_rows = rows;
          leave();
          enter();
          arrived(group);
        }
        keys.fetched(k);
        begin_products();
        multiply_keys(k);
        values.fetched(at);
        multiply_values(add);
        wait<1>(s);
        keys.done(k, lane);
        cap();
        tile = last ? low + early : tile + 1;
        // Duplicated in each branch, because ptxas moves the wait for values to the start of its block.
        bool grown;
        if (tile >= plain || tile < whole)
          grown = weigh<true>(s, rows, tile * KEYS, scale, room, sizes.window);
        else
          grown = weigh<false>(s, rows, 0, scale, room, 0);
        wait<0>(o);
        values.done(at, lane);
        pack();
        if (last) {
          if (rest) {
            values.fetched(at + 1);
            values.done(at + 1, lane);
          }
          write(out, lse, old, old.packed + mine_at, o, old_rows, queries(turn + 1), group, sizes);
          ask_next();
          add = 0;
        } else {
          if (grown)
#pragma unroll
            for (u32 i = 0; i < OUTS; ++i) o[i] *= rows.shrink[i / 2 % 2];
          add = 1;
        }
        at = k;
      }
      ask_late();
      values.fetched(at);
      clear(tile);
      begin_products();
      multiply_values(add);
      wait<0>(o);
      values.done(at, lane);
      write(out, lse, unit, unit.packed + mine_at, o, rows, queries(turn), group, sizes);
      ++at;
      skip(all - mine);
      leave();
      if (QUEUED == 2) ask_next();
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  // A program must not exit while the other one writes to its shared memory.
  sync_cluster();
}
