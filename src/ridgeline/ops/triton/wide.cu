// out [tokens, n] += x w^T, or act(gate) * up, all bfloat16 with float32 sums, for steps of 17 to 256 tokens on Hopper.
// ops/triton/wide.py describes its use and defines BATCH (tokens of a tile) and the names of operands. SUM_NAMES and SUM_REGISTERS:
// pairs.py.
//
// The weight's rows are on the long side of the matrix unit (out^T = w x^T), so that tokens come in multiples of 16. Two programs
// form a cluster with different rows and the same tokens. Each loads half of the tokens, and TMA multicast writes them to both.
// Weights are loaded before the previous kernel has ended (PDL). A producer warp fills a ring of steps of 64 inputs. Two consumer
// groups of four warps multiply 64 rows each.
//
// The steps of all tiles form one sequence, which is divided among clusters in one of three ways. Split-K: equal parts of each
// tile, whose programs end at about the same time and reduce their own tokens. Complete tiles. Stream-K: equal shares of the
// sequence. There a tile's last steps are the first of a cluster's share, and the cluster that began the tile finds their sums in
// memory. The order of sums never depends on timing.

constexpr u32 GROUPS = 2, HIGH = 64, ROWS = GROUPS * HIGH, STEP = 64, MOST_STAGES = 8;
constexpr u32 GELU = 2;                           // of activation.KINDS; 1: SiLU
constexpr u32 CHUNK = 16, STAGED = 4, ROUND = 64;  // tokens of a chunk; chunks staged at a time; a full count of a tile's parts
constexpr u32 ROW = 2 * STEP, X_BYTES = BATCH * ROW, SLICE = BATCH / PAIR, SUMS = BATCH / 2, CHUNKS = BATCH / CHUNK;
constexpr u32 PITCH = 2 * ROWS + 16;              // bytes of a staged token, such that eight tokens lie in different banks
constexpr u32 OWN = CHUNKS * 2 * 128;             // sums of a consumer group, in float4

__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" SUM_NAMES "}, " LEFT_NAME ", " RIGHT_NAME ", 1, 1, 1, 0, 0;"
               : SUM_REGISTERS
               : "l"(a), "l"(b));
}
// Data that is not read again is the first to be evicted from L2 (the cache policy that createpolicy yields for evict_first).
__device__ __forceinline__ void load_once(u32 to, const TensorMap* from, u32 barrier, u32 column, u32 row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(from), "r"(barrier), "r"(column), "r"(row), "l"(0x12F0000000000000ull)
      : "memory");
}
// Bitwise equal to the separate kernels (activation.py): both products have 16 bits.
__device__ __forceinline__ float gated(float gate, float up, u32 kind) {
  const float inner = kind == GELU ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * sigmoid(inner) * up;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000); }
__device__ __forceinline__ u32 gated(u32 gates, u32 ups, u32 kind) {
  return pair(gated(low(gates), low(ups), kind), gated(high(gates), high(ups), kind));
}
__device__ __forceinline__ void sync_all() { asm volatile("bar.sync %0, %1;" ::"n"(1 + GROUPS), "n"(128 * GROUPS) : "memory"); }

// Must equal wide.py's. half: half of a tile's rows; it may be less than the rows multiplied, and results of the rows after it are
// dropped. steps: per tile. units: granularity of shares in steps. split: parts per tile; 0: shares of the sequence.
struct Sizes {
  u32 tokens, features, half, stages, steps, tiles, wide, units, split;
};
// A cluster's share of the sequence of steps.
struct Share {
  u32 at, end;
};
__device__ __forceinline__ Share share_of(const Sizes& sizes, u32 cluster, u32 clusters) {
  if (sizes.split) {
    const u32 tile = cluster / sizes.split, part = cluster % sizes.split;
    return {tile * sizes.steps + part * sizes.steps / sizes.split, tile * sizes.steps + (part + 1) * sizes.steps / sizes.split};
  }
  const u32 all = sizes.tiles * sizes.steps / sizes.units;
  return {cluster * all / clusters * sizes.units, (cluster + 1) * all / clusters * sizes.units};
}
// Publish a part; the counter increases by `by` of ROUND.
__device__ __forceinline__ u32 arrive(u32* counter, u32 by) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}
__device__ __forceinline__ void await_round(const u32* counter, u32 before) {
  const u32 goal = (before | (ROUND - 1)) + 1;
  u32 now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  while ((int)(now - goal) < 0);
}

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(128 * (1 + GROUPS), 1)
    wide_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, unsigned short* out, float4* parts,
                 u32* counters, u32 gate, const Sizes sizes) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
  const u32 base = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * MOST_STAGES;
  const u32 which = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const u32 cluster = blockIdx.x / PAIR, clusters = gridDim.x / PAIR;
  const Share share = share_of(sizes, cluster, clusters);
  // With a gate, a tile has half of its rows from gate and half from up, of the same features.
  const u32 half = sizes.half, span = gate ? half : 2 * half, apart = gate ? sizes.features : half, stages = sizes.stages;
  const u32 w_bytes = 2 * half * ROW, stage_bytes = w_bytes + X_BYTES;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < stages; ++i) {
      init(full + 8 * i, 1);
      init(empty + 8 * i, PAIR * 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  const u32 early = min(share.end - share.at, stages);
  // Tile and step of the producer's next copy.
  struct Next {
    u32 tile, step;
  } next = {share.at / sizes.steps, share.at % sizes.steps};
  auto after = [&](Next& one) {
    if (++one.step == sizes.steps) one.step = 0, ++one.tile;
  };
  auto weights = [&](const Next& one, u32 stage) {
    const u32 row = (one.tile / sizes.wide * PAIR + rank) * span, barrier = full + 8 * stage, to = base + stage * stage_bytes;
    expect(barrier, stage_bytes);
    load_once(to, &weight, barrier, one.step * STEP, row);
    load_once(to + half * ROW, &weight, barrier, one.step * STEP, row + apart);
  };
  auto inputs = [&](const Next& one, u32 stage) {
    const u32 token = one.tile % sizes.wide * BATCH + rank * SLICE, to = base + stage * stage_bytes + w_bytes + rank * SLICE * ROW;
    load_for_all(to, &x, full + 8 * stage, one.step * STEP, token);
  };
  if (threadIdx.x == 0) {
    Next one = next;
    for (u32 i = 0; i < early; ++i, after(one)) weights(one, i);
  }
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (which == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      for (u32 i = 0; i < early; ++i, after(next)) inputs(next, i);
      u32 stage = early % stages, parity = early / stages;
#pragma unroll 1
      for (u32 at = share.at + early; at < share.end; ++at) {
        await(empty + 8 * stage, parity ^ 1);
        weights(next, stage);
        inputs(next, stage);
        after(next);
        if (++stage == stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 mine = which - 1, thread = threadIdx.x % 128;
    const u64 left = matrix(base + mine * HIGH * ROW), right = matrix(base + w_bytes);
    const u32 staging = base + stages * stage_bytes;
    auto own = [&](u32 of) { return (of * PAIR + rank) * GROUPS + mine; };
    auto part_of = [&](u32 of) { return parts + own(of) * OWN + thread; };
    auto counter_of = [&](u32 of) { return counters + own(of); };
    u32 stage = 0, parity = 0, at = share.at;
    while (at < share.end) {
      const u32 tile = at / sizes.steps, first = at % sizes.steps, steps = min(sizes.steps - first, share.end - at);
      const u32 row = (tile / sizes.wide * PAIR + rank) * span, token = tile % sizes.wide * BATCH;
      float sums[SUMS];
      // Zeroed here and not by the first product, because ptxas would otherwise serialize all products.
#pragma unroll
      for (u32 i = 0; i < SUMS; ++i) sums[i] = 0.0f;
      u32 before = 0;
#pragma unroll 1
      for (u32 k = 0; k < steps; ++k) {
        await(full + 8 * stage, parity);
        const u64 place = stage * (stage_bytes >> 4);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < STEP / 16; ++i) multiply(sums, left + place + 2 * i, right + place + 2 * i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products of the previous stage are complete, so it may be overwritten.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k && lane < PAIR) release(empty + 8 * before, lane);
        before = stage;
        if (++stage == stages) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      // Keep the compiler from moving reads of the sums before the wait.
#pragma unroll
      for (u32 i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
      if (lane < PAIR) release(empty + 8 * before, lane);
      at += steps;

      // Write `many` staged chunks of tokens, from token `from` of the tile on.
      auto flush = [&](u32 from, u32 many) {
        if (gate) {
          sync_all();
          for (u32 i = mine * 128 + thread; i < many * CHUNK * (ROWS / 16); i += GROUPS * 128) {
            const u32 t = i / (ROWS / 16), f = i % (ROWS / 16) * 8;
            const u32 address = staging + t * PITCH + 2 * f;
            uint4 g, u;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(g.x), "=r"(g.y), "=r"(g.z), "=r"(g.w) : "r"(address));
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "r"(address + 2 * half));
            if (token + from + t < sizes.tokens && f < half && row + f < sizes.features)
              *(uint4*)(out + (u64)(token + from + t) * sizes.features + row + f) =
                  make_uint4(gated(g.x, u.x, gate), gated(g.y, u.y, gate), gated(g.z, u.z, gate), gated(g.w, u.w, gate));
          }
          sync_all();
          return;
        }
        sync_group(mine);
        for (u32 i = thread; i < many * CHUNK * (HIGH / 8); i += 128) {
          const u32 t = i / (HIGH / 8), f = mine * HIGH + i % (HIGH / 8) * 8;
          uint4 r;
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                       : "r"(staging + t * PITCH + 2 * f));
          if (token + from + t < sizes.tokens && f < span && row + f < sizes.features)
            *(uint4*)(out + (u64)(token + from + t) * sizes.features + row + f) = r;
        }
        sync_group(mine);
      };
      // Load the residuals into the staging buffer.
      auto fetch = [&](u32 from, u32 many) {
        for (u32 i = thread; i < many * CHUNK * (HIGH / 8); i += 128) {
          const u32 t = i / (HIGH / 8), f = mine * HIGH + i % (HIGH / 8) * 8;
          const bool real = token + from + t < sizes.tokens && f < span && row + f < sizes.features;
          const unsigned short* source = real ? out + (u64)(token + from + t) * sizes.features + row + f : out;
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(staging + t * PITCH + 2 * f), "l"(source), "r"(real ? 16 : 0)
                       : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
      };
      auto fetched = [&] {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        sync_group(mine);
      };
      // Stage sums of 16 tokens by 16 rows: four values of the first eight tokens, then four of the others.
      auto put = [&](const float* v, u32 slot) {
        const u32 below = mine * HIGH + warp * 16;
        const u32 address = staging + (slot * CHUNK + lane / 16 * 8 + lane % 8) * PITCH + 2 * (below + lane / 8 % 2 * 8);
        float s[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) s[i] = v[i];
        if (!gate) {
          u32 r[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                       : "r"(address)
                       : "memory");
#pragma unroll
          for (u32 i = 0; i < 4; ++i) s[2 * i] += low(r[i]), s[2 * i + 1] += high(r[i]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pair(s[0], s[1])),
                     "r"(pair(s[2], s[3])), "r"(pair(s[4], s[5])), "r"(pair(s[6], s[7]))
                     : "memory");
      };
      auto write = [&](float4* to) {
#pragma unroll
        for (u32 i = 0; i < CHUNKS * 2; ++i) to[i * 128] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      };
      if (sizes.split > 1) {
        // All parts end at about the same time. Each program reduces its share of the tokens.
        const u32 part = cluster % sizes.split, leader = cluster - part;
        const u32 from = part * CHUNKS / sizes.split, to = (part + 1) * CHUNKS / sizes.split;
        if (!gate) fetch(from * CHUNK, min(to - from, STAGED));
        write(part_of(cluster));
        sync_group(mine);
        if (thread == 0) {
          const u32 by = ROUND / sizes.split + (part ? 0 : ROUND % sizes.split);
          await_round(counter_of(leader), arrive(counter_of(leader), by));
        }
        sync_group(mine);
        for (u32 chunk = from; chunk < to; chunk += STAGED) {
          const u32 many = min(to - chunk, STAGED);
          if (!gate && chunk > from) fetch(chunk * CHUNK, many);
          if (!gate) fetched();
#pragma unroll
          for (u32 i = 0; i < STAGED; i += 2)
            if (i < many) {
              // Two chunks at a time keep enough loads in flight. The second one may repeat the first.
              float v[2][8] = {};
              const u32 where = (chunk + i) * 2 * 128, next = i + 1 < many ? 2 * 128 : 0;
#pragma unroll 4
              for (u32 other = 0; other < sizes.split; ++other) {
                const float4* from = part_of(leader + other) + where;
                const float4 a[4] = {__ldcg(from), __ldcg(from + 128), __ldcg(from + next), __ldcg(from + next + 128)};
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                  float* sum = &v[j / 2][j % 2 * 4];
                  sum[0] += a[j].x, sum[1] += a[j].y, sum[2] += a[j].z, sum[3] += a[j].w;
                }
              }
              put(v[0], i);
              if (next) put(v[1], i + 1);
            }
          flush(chunk * CHUNK, many);
        }
      } else if (first) {
        // The tile's last part is the first of this cluster's share. The cluster with the tile's beginning reads it from memory.
        write(part_of(cluster));
        sync_group(mine);
        if (thread == 0) arrive(counter_of(cluster), ROUND / 2);
        __syncwarp();
      } else {
        if (steps < sizes.steps) {
          if (thread == 0) await_round(counter_of(cluster + 1), arrive(counter_of(cluster + 1), ROUND / 2));
          sync_group(mine);
          const float4* from = part_of(cluster + 1);
#pragma unroll
          for (u32 i = 0; i < CHUNKS * 2; ++i) {
            const float4 v = __ldcg(from + i * 128);
            sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
          }
        }
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk += STAGED) {
          const u32 many = CHUNKS - chunk < STAGED ? CHUNKS - chunk : STAGED;
          if (!gate) fetch(chunk * CHUNK, many), fetched();
#pragma unroll
          for (u32 i = 0; i < STAGED; ++i)
            if (chunk + i < CHUNKS) put(&sums[(chunk + i) * 8], i);
          flush(chunk * CHUNK, many);
        }
      }
    }
  }
  // A program must not exit while the other one writes to its shared memory.
  sync_cluster();
}
