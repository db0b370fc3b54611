// out [tokens, features] = silu(x gate^T) * (x up^T), all bfloat16 with float32 sums: a product with a fused activation, for
// Hopper. Choice of tiles: ops/triton/gated.py. SUM_NAMES and SUM_REGISTERS: pairs.py.
//
// A program computes tiles of 128 tokens by 176 features. Two programs form a cluster with the same features: one loads gate's
// rows, the other up's, and TMA multicast writes each to both. A producer warp fills a ring of stages. Two consumer groups of four
// warps multiply 64 tokens each, and hold gate and up of the same features in the same threads.

constexpr u32 TOKENS = 128, FEATURES = 88, SIDES = 2, STEP = 64, STAGES = 3;
constexpr u32 WIDTH = SIDES * FEATURES, SUMS = FEATURES;  // accumulators of a thread for gate and up of a side
constexpr u32 ROW = 2 * STEP, X_BYTES = TOKENS * ROW, HALF_BYTES = FEATURES * ROW, SIDE_BYTES = 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + SIDES * SIDE_BYTES, OUT_BYTES = TOKENS / 2 * FEATURES * 2;
constexpr u32 MULTIPLIERS = 8;  // warps

__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {" SUM_NAMES "}, %88, %89, p, 1, 1, 0, 0;\n}"
      : SUM_REGISTERS
      : "l"(a), "l"(b), "r"(add));
}

// Bitwise equal to the separate kernels (activation.py): both products are rounded to 16 bits first.
__device__ __forceinline__ float gated(float gate, float up) {
  const u32 both = pair(gate, up);
  const float g = __uint_as_float(both << 16);
  return g * sigmoid(g) * __uint_as_float(both & 0xFFFF0000);
}

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(384, 1)
    gated_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                  const __grid_constant__ TensorMap out, u32 tokens, u32 features, u32 inputs, u32 group) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 base = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * STAGES;
  const u32 which = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const Walk<TOKENS, WIDTH> walk{(tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS), (features + WIDTH - 1) / WIDTH, group};
  const u32 tiles = walk.pairs * walk.wide, clusters = gridDim.x / PAIR, steps = (inputs + STEP - 1) / STEP;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      init(full + 8 * i, 1);
      init(empty + 8 * i, PAIR * MULTIPLIERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sync_cluster();
  u32 stage = 0, parity = 0;
  if (which == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0)
      for (u32 tile = blockIdx.x / PAIR; tile < tiles; tile += clusters) {
        const Place place = walk(tile, rank);
#pragma unroll 1
        for (u32 k = 0; k < inputs; k += STEP) {
          const u32 barrier = full + 8 * stage, to = base + stage * STAGE_BYTES;
          await(empty + 8 * stage, parity ^ 1);
          expect(barrier, STAGE_BYTES);
          load(to, &x, barrier, k, place.token);
#pragma unroll
          for (u32 side = 0; side < SIDES; ++side)
            load_for_all(to + X_BYTES + side * SIDE_BYTES + rank * HALF_BYTES, &weight, barrier, k,
                         rank * features + place.feature + side * FEATURES);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 mine = which - 1, staged = base + STAGES * STAGE_BYTES + mine * SIDES * OUT_BYTES;
    const u64 left = matrix(base + mine * 64 * ROW), right = matrix(base + X_BYTES);
    const bool first = warp == 0 && lane == 0;
    for (u32 tile = blockIdx.x / PAIR; tile < tiles; tile += clusters) {
      const Place place = walk(tile, rank);
      float sums[SIDES][SUMS];
      u32 before = 0;
#pragma unroll 1
      for (u32 k = 0; k < steps; ++k) {
        await(full + 8 * stage, parity);
        const u64 at = stage * (STAGE_BYTES >> 4);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < STEP / 16; ++i)
#pragma unroll
          for (u32 side = 0; side < SIDES; ++side)
            multiply(sums[side], left + at + 2 * i, right + at + side * (SIDE_BYTES >> 4) + 2 * i, k | i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products of the previous stage are complete, so both programs may overwrite it.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k && lane < PAIR) release(empty + 8 * before, lane);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      // Keep the compiler from moving reads of the sums before the wait.
#pragma unroll
      for (u32 i = 0; i < SIDES * SUMS; ++i) asm volatile("" : "+f"(sums[i / SUMS][i % SUMS])::"memory");
      if (lane < PAIR) release(empty + 8 * before, lane);

      // Earlier stores must have read the staging buffer.
      if (first) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      sync_group(mine);
#pragma unroll
      for (u32 side = 0; side < SIDES; ++side)
#pragma unroll
        for (u32 j = 0; j < FEATURES / 8; j += 2) {
          // Four 8 x 8 matrices: two below each other, and two to their right. Rows of 176 bytes need no swizzle.
          const u32 row = warp * 16 + lane % 16, address = staged + side * OUT_BYTES + row * FEATURES * 2 + (j + lane / 16) * 16;
          u32 r[4] = {0, 0, 0, 0};
#pragma unroll
          for (u32 i = 0; i < 4; ++i)
            if (j + i / 2 < FEATURES / 8) {
              const u32 gate = (j + i / 2) * 4 + i % 2 * 2, up = gate + SUMS / 2;
              r[i] = pair(gated(sums[side][gate], sums[side][up]), gated(sums[side][gate + 1], sums[side][up + 1]));
            }
          if (j + 1 < FEATURES / 8)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                         "r"(r[2]), "r"(r[3])
                         : "memory");
          else
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1]) : "memory");
        }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      sync_group(mine);
      if (first) {
#pragma unroll
        for (u32 side = 0; side < SIDES; ++side)
          store(&out, staged + side * OUT_BYTES, place.feature + side * FEATURES, place.token + mine * 64);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      __syncwarp();
    }
    if (first) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  // A program must not exit while the other one writes to its shared memory.
  sync_cluster();
}
