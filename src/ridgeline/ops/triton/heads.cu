// q, k and v of many tokens, all bfloat16, sums in float32: x weight^T, with q's and k's heads turned (rotate-half), q to its
// tensor and k and v to the pages of the cache: a product and what follows it, in one kernel for Hopper. ops/triton/heads.py says
// what HEAD_SIZE is, pairs.py what WIDE_NAMES and its like are.
//
// A program makes tiles of 128 tokens by 384 features, whole heads. Two of them are a cluster with the same features: each fetches
// a half of these, and the copy engine writes it into both. A warp keeps a ring of stages filled; behind a tile's inputs a stage
// holds cosines and sines of its tokens. Two groups of four warps multiply 64 tokens each. A thread that holds a column of a head's
// first half holds the one of the second half that it turns with.

constexpr u32 TOKENS = 128, WIDE = 256, NARROW = 128, WIDTH = WIDE + NARROW, STEP = 64, STAGES = 3;
constexpr u32 HEAD = HEAD_SIZE, HALF = HEAD / 2;
constexpr u32 ROW = 2 * STEP, X_BYTES = TOKENS * ROW, WEIGHT_BYTES = WIDTH * ROW, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr u32 ANGLE_BYTES = HEAD * 4, LINE = HEAD * 2, STAGED_LINE = LINE + 16, STAGED_BYTES = 16 * STAGED_LINE;
constexpr u32 MULTIPLIERS = 8;  // warps
static_assert(TOKENS * ANGLE_BYTES <= STAGE_BYTES, "");

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[WIDE / 2], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WIDE_NAMES "}, %128, %129, p, 1, 1, 0, 0;\n}"
      : WIDE_REGISTERS
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply(float (&d)[NARROW / 2], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NARROW_NAMES "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : NARROW_REGISTERS
      : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000); }
__device__ __forceinline__ float2 two(u32 address) {
  float2 found;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(address));
  return found;
}
// As two kernels do it, to the bit (qkv.py): the product is rounded to 16 bits first.
__device__ __forceinline__ void turn(u32& first, u32& second, float2 cos, float2 sin) {
  const float a = low(first), b = high(first), c = low(second), d = high(second);
  first = pair(__fmaf_rn(a, cos.x, -__fmul_rn(c, sin.x)), __fmaf_rn(b, cos.y, -__fmul_rn(d, sin.y)));
  second = pair(__fmaf_rn(c, cos.x, __fmul_rn(a, sin.x)), __fmaf_rn(d, cos.y, __fmul_rn(b, sin.y)));
}

// Rows of a warp in shared memory, of one head: eight columns of its first half and the eight that they turn with. Four matrices of
// 8 x 8, two of them below each other.
__device__ __forceinline__ void stage_columns(u32 room, u32 j, const u32 (&of)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(room + j * 16), "r"(of[0]), "r"(of[1]),
               "r"(of[2]), "r"(of[3])
               : "memory");
}
// Heads of sums, `turning` of them turned, all in 16 bits: the first into shared memory, the others into registers.
template <u32 SUMS>
__device__ __forceinline__ void finish(u32 room, u32 (&others)[SUMS * 2 / HEAD][HALF / 8][4], float (&sums)[SUMS], int turning, u32 angle, u32 odd) {
#pragma unroll
  for (u32 j = 0; j < HALF / 8; ++j) {
    const u32 at = angle + (j * 32 ^ odd);
    const float2 cos[2] = {two(at), two(at + 8 * ANGLE_BYTES)}, sin[2] = {two(at + HALF * 4), two(at + 8 * ANGLE_BYTES + HALF * 4)};
#pragma unroll
    for (u32 h = 0; h < SUMS * 2 / HEAD; ++h) {
      u32 result[4];
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        const u32 one = (h * (HEAD / 8) + j) * 4 + r * 2, other = one + HALF / 8 * 4;
        const u32 a = pair(sums[one], sums[one + 1]), b = pair(sums[other], sums[other + 1]);
        u32 first = a, second = b;
        turn(first, second, cos[r], sin[r]);
        result[r] = (int)h < turning ? first : a;
        result[2 + r] = (int)h < turning ? second : b;
      }
      if (h == 0) stage_columns(room, j, result);
      else
#pragma unroll
        for (u32 i = 0; i < 4; ++i) others[h][j][i] = result[i];
    }
  }
}

// Where heads go. Rows of a head's size each: q [tokens, queries]; of the cache, those of pages, of keys and values, of heads.
struct Target {
  unsigned char *q, *cache;
  const long long* slots;
  u32 queries, keys, page_tokens, page_rows, kind_rows, head_rows;
};

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(384, 1)
    turned_heads(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ Target target,
                 const unsigned char* angles, const int* positions, u32 tokens, u32 features, u32 inputs, u32 group) {
  extern __shared__ unsigned char memory[];
  const u32 base = shared(memory), staged = base + STAGES * STAGE_BYTES;
  const u32 full = staged + MULTIPLIERS * STAGED_BYTES, empty = full + 8 * STAGES;
  const u32 which = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const Walk<TOKENS, WIDTH> walk{(tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS), (features + WIDTH - 1) / WIDTH, group};
  const u32 tiles = walk.pairs * walk.wide, clusters = gridDim.x / PAIR, steps = (inputs + STEP - 1) / STEP;
  if (threadIdx.x == 0) {
    if (base % 1024) asm volatile("trap;");
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
    if (warp == 0)
      for (u32 tile = blockIdx.x / PAIR; tile < tiles; tile += clusters) {
        const Place place = walk(tile, rank);
#pragma unroll 1
        for (u32 k = 0; k < inputs; k += STEP) {
          const u32 barrier = full + 8 * stage, to = base + stage * STAGE_BYTES;
          if (lane == 0) {
            await(empty + 8 * stage, parity ^ 1);
            expect(barrier, STAGE_BYTES);
            load(to, &x, barrier, k, place.token);
            load_for_all(to + X_BYTES + rank * (WEIGHT_BYTES / PAIR), &weight, barrier, k, place.feature + rank * (WIDTH / PAIR));
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // Angles, once there is room: it is this tile's products and what follows them that they have time for.
        constexpr u32 LANES = ANGLE_BYTES / 16, EACH = 32 / LANES;
        const u32 to = base + stage * STAGE_BYTES;
        u32 position[TOKENS / 32];
#pragma unroll
        for (u32 i = 0; i < TOKENS / 32; ++i) position[i] = positions[min(place.token + i * 32 + lane, tokens - 1)];
        __syncwarp();
        await(empty + 8 * stage, parity ^ 1);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < TOKENS / 32; ++i)
#pragma unroll 4
          for (u32 j = 0; j < 32; j += EACH) {
            const u32 row = j + lane / LANES, part = lane % LANES;
            const unsigned char* from = angles + (u64)__shfl_sync(~0u, position[i], row) * ANGLE_BYTES + part * 16;
            // Eight rows of which a warp reads the same columns at once lie in different banks.
            const u32 into = to + (i * 32 + row) * ANGLE_BYTES + (part ^ row % 4 * 2) * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(into), "l"(from) : "memory");
          }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(full + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 mine = which - 1, room = staged + (mine * 4 + warp) * STAGED_BYTES;
    const u64 left = matrix(base + mine * 64 * ROW), right = matrix(base + X_BYTES);
    for (u32 tile = blockIdx.x / PAIR; tile < tiles; tile += clusters) {
      const Place place = walk(tile, rank);
      float wide[WIDE / 2], narrow[NARROW / 2];
      u32 before = 0;
#pragma unroll 1
      for (u32 k = 0; k < steps; ++k) {
        await(full + 8 * stage, parity);
        const u64 at = stage * (STAGE_BYTES >> 4);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < STEP / 16; ++i) {
          multiply(narrow, left + at + 2 * i, right + at + (WIDE * ROW >> 4) + 2 * i, k | i);
          multiply(wide, left + at + 2 * i, right + at + 2 * i, k | i);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // While this stage is multiplied, that before it is done and both programs may overwrite it.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k && lane < PAIR) release(empty + 8 * before, lane);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      // Nothing that reads a sum may move before the wait.
#pragma unroll
      for (u32 i = 0; i < NARROW / 2; ++i) asm volatile("" : "+f"(narrow[i])::"memory");
#pragma unroll
      for (u32 i = 0; i < WIDE / 2; ++i) asm volatile("" : "+f"(wide[i])::"memory");
      if (lane < PAIR) release(empty + 8 * before, lane);

      const u32 row = mine * 64 + warp * 16, head = place.feature / HEAD, token = place.token + row + lane % 16;
      const u32 slot = (u32)target.slots[min(token, tokens - 1)], line = slot / target.page_tokens * target.page_rows + slot % target.page_tokens;
      const u32 angle = base + stage * STAGE_BYTES + (row + lane / 4) * ANGLE_BYTES + lane % 4 * 8, odd = lane / 4 % 4 * 32;
      const int turning = target.queries + target.keys - head;
      const u32 into = room + lane % 16 * STAGED_LINE + lane / 16 * HALF * 2;
      auto write = [&](u32 number) {
        const u32 cached = number - target.queries, value = cached >= target.keys, of_kind = cached - value * target.keys;
        const bool query = number < target.queries, real = token < tokens && (of_kind < target.keys | query);
        const u32 line_of_head = query ? token * target.queries + number : line + value * target.kind_rows + of_kind * target.head_rows;
        unsigned char* const to = query ? target.q : target.cache;
        __syncwarp();
        constexpr u32 LANES = LINE / 16, EACH = 32 / LANES;
        const u32 where = real ? line_of_head : ~0u;
#pragma unroll
        for (u32 i = 0; i < 16; i += EACH) {
          const u32 row = i + lane / LANES, at = __shfl_sync(~0u, where, row), from = room + row * STAGED_LINE + lane % LANES * 16;
          uint4 part;
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
                       : "r"(from)
                       : "memory");
          if (at != ~0u) *(uint4*)(to + (u64)at * LINE + lane % LANES * 16) = part;
        }
        __syncwarp();
      };
      auto spread = [&](auto& sums, u32 first) {
        constexpr u32 COUNT = sizeof(sums) / 2 / HEAD;
        u32 others[COUNT][HALF / 8][4];
        finish(into, others, sums, turning - (int)first, angle, odd);
        write(head + first);
#pragma unroll
        for (u32 h = 1; h < COUNT; ++h) {
#pragma unroll
          for (u32 j = 0; j < HALF / 8; ++j) stage_columns(into, j, others[h][j]);
          write(head + first + h);
        }
      };
      await(full + 8 * stage, parity);
      spread(narrow, WIDE / HEAD);
      spread(wide, 0);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane < PAIR) release(empty + 8 * stage, lane);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  // Neither may end while the other still writes to it.
  sync_cluster();
}
