// out^T = W x^T for integer weights and up to 64 tokens, on Hopper. ops/triton/integer_stream.py describes its use and defines
// BATCH (tokens), GROUPS (consumer groups of four warps), STEP (inputs of a stage), STAGES, SIDES (2: gate and up), EACH (programs
// per SM), BITS, GROUP (inputs per scale; 0: one per row), ZEROS (whether groups have zero points), ZERO (the common one otherwise),
// E4M3 (codes are e4m3 values, with float32 scales) and TYPE. SUM_NAMES and similar: pairs.py.
//
// A program computes ROWS rows of the weight (with an activation half of them of gate, half of up); `split` programs share these
// rows' inputs. A producer warp fills a ring with codes and x. Each consumer group multiplies 64 rows. The 16 bytes that a thread
// loads are exactly the codes of its wgmma fragment (integer.pack). It dequantizes the codes of the next 64 inputs while the
// products of the last 64 run. Both sets of registers are named in the wait that ends their products.

constexpr u32 ROWS = 64 * GROUPS, MULTIPLIERS = 4 * GROUPS, THREADS = 32 * MULTIPLIERS;
constexpr u32 SUMS = BATCH / 2, PITCH = ROWS + 4;  // of a thread, for 64 rows; floats from token to token, without bank conflicts
constexpr u32 LINE = STEP * BITS / 8, PART = BATCH * 128, X_BYTES = STEP / 64 * PART, CODE_BYTES = ROWS * LINE;
constexpr u32 STAGE_BYTES = X_BYTES + CODE_BYTES, CHUNKS = LINE / 64, HALVES = 8 / BITS;  // chunks of 64 bytes, 64 inputs per half
constexpr u32 OWN = ROWS / SIDES, APART = SIDES == 2 ? OWN : 8;  // outputs; distance between the two rows of a thread
static_assert(CHUNKS * HALVES % 2 == 0, "both sets of registers are used alike often");
constexpr u32 ROUND = 64;  // sum of the counter increments of a tile's programs, as in ring.py
constexpr u32 common(u32 a, u32 b) { return b ? common(b, a % b) : a; }
constexpr u32 SPAN = GROUP ? common(GROUP, STEP) : STEP, SPANS = STEP / SPAN;  // inputs with one scale

__device__ __forceinline__ void multiply(float (&d)[SUMS], const u32* a, u64 b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" PRODUCT "k16.f32." TYPE "." TYPE
               " {" SUM_NAMES "}, " LEFT ", " RIGHT ", p, 1, 1, 0;\n}"
               : SUM_REGISTERS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Wait until all but the last REST groups of products are complete. These registers may be read or written only after it.
template <u32 REST>
__device__ __forceinline__ void wait(u32 (&w)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(REST) : "memory");
#pragma unroll
  for (u32 i = 0; i < 16; ++i) asm volatile("" : "+r"(w[i])::"memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ uint4 read(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float from_half(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ float from(unsigned short x) {
  float y;
  asm("{\ncvt.f32." TYPE " %0, %1;\n}" : "=f"(y) : "h"(x));
  return y;
}

// Dequantization. A code in the low mantissa bits of a bfloat16 with exponent field 0 (subnormal) has the value code * 2^-133. This
// also holds for 8 bits, because the exponent field 1 continues the range. One fused multiply-add scales it and subtracts the zero
// point's part, which is exact if the zero point is a power of two. Its result is the weight times 2^-DOWN, so that no scale
// overflows. float16 has too few such bits: there codes are placed above 1,024, which is subtracted before scaling. Parts of an e4m3
// code are moved to their places in the float, and a product with POWER times the scale adds the difference of the exponents' biases.
constexpr bool BRAIN = sizeof(TYPE) == 5;
constexpr u32 DOWN = BRAIN && !E4M3 ? 22 : 0;
constexpr u32 MOVED = BRAIN ? 4 : 7, PARTS = BRAIN ? 0x07F007F0 : 0x3F803F80;
constexpr float POWER = BRAIN ? 0x1p120f : 0x1p8f;
constexpr u32 MAGIC = (BITS == 8 ? 0x00800080 : 0) | (BRAIN ? 0 : 0x64006400);
constexpr bool TWICE = GROUP && (ZEROS || !BRAIN);  // the scale is a separate instruction

#if E4M3
typedef float Scale;
__device__ __forceinline__ float value_of(Scale x) { return x; }
#else
typedef unsigned short Scale;
__device__ __forceinline__ float value_of(Scale x) { return from_half(x); }
#endif

struct Spot {
  u32 factor[2], less, odd, scale;  // for codes in the lower and in the upper half of a byte
};
__device__ __forceinline__ Spot spot(Scale scale_bits, unsigned char zero_bits) {
  const float scale = GROUP ? value_of(scale_bits) : 1.0f, zero = ZEROS ? (float)zero_bits : ZERO;
  Spot s;
  if (E4M3) {
    s.scale = rounded(scale * POWER, scale * POWER);
    return s;
  }
  s.scale = TWICE ? rounded(scale, scale) : 0;
  if (BRAIN) {
    const float up = (TWICE ? 1.0f : scale) * 0x1p111f;
    s.factor[0] = rounded(up, up);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(s.factor[1]) : "r"(s.factor[0]), "r"(0x3D803D80));  // 2^-4
    if (ZEROS) {
      const float less = -zero * 0x1p-22f;
      s.less = rounded(less, less);
    } else {  // from the rounded scale and a subnormal number: -ZERO * 2^-133
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(s.less) : "r"(s.factor[0]), "r"((0x8000 | (u32)ZERO) * 0x10001));
    }
    s.odd = s.less;
  } else {
    s.factor[0] = rounded(1.0f, 1.0f);
    s.factor[1] = rounded(0.0625f, 0.0625f);
    s.less = rounded(-1024.0f - zero, -1024.0f - zero);
    s.odd = rounded(-64.0f - zero, -64.0f - zero);
  }
  return s;
}

// Convert two codes to floats: code J of both halves of c.
template <u32 J>
__device__ __forceinline__ u32 widened(u32 c, const Spot& s, u32 magic) {
  u32 t;
  if (E4M3) {
    t = (J ? c >> (8 - MOVED) : c << MOVED) & PARTS;
    t |= (J ? c : c << 8) & 0x80008000;
    asm("mul.rn." TYPE "x2 %0, %0, %1;" : "+r"(t) : "r"(s.scale));
    return t;
  }
  constexpr u32 ODD = BITS == 4 ? J % 2 : 0;
  constexpr u32 MASK = BITS == 8 ? 0x00FF00FF : ODD ? 0x00F000F0 : 0x000F000F;
  if (BITS * J / 8) c >>= 8;
  if (MAGIC)
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(t) : "r"(c), "n"(MASK), "r"(magic));
  else
    t = c & MASK;
  asm("fma.rn." TYPE "x2 %0, %0, %1, %2;" : "+r"(t) : "r"(s.factor[ODD]), "r"(ODD ? s.odd : s.less));
  if (TWICE) asm("mul.rn." TYPE "x2 %0, %0, %1;" : "+r"(t) : "r"(s.scale));
  return t;
}

// Scales and zero points of a row's spans in a block, as stored. LAST: a block that may extend past the row's end.
struct Factors {
  Scale scale[GROUP ? SPANS : 1];
  unsigned char zero[ZEROS ? SPANS : 1];
};
template <bool LAST>
__device__ __forceinline__ Factors factors(const Scale* scales, const unsigned char* zeros, u32 groups, u32 block) {
  Factors f;
  constexpr u32 BY = GROUP ? GROUP : 1;
  const u32 first = !GROUP || LAST ? 0 : SPAN == GROUP ? block * SPANS : block * STEP / BY;
  const Scale* scale = scales + first;
  const unsigned char* zero = zeros + first;
#pragma unroll
  for (u32 i = 0; i < SPANS; ++i) {
    const u32 group = (block * STEP + i * SPAN) / BY, at = !GROUP ? 0 : LAST ? min(group, groups - 1) : SPAN == GROUP ? i : group - first;
    if (GROUP) f.scale[i] = __ldg(scale + at);
    if (ZEROS) f.zero[i] = __ldg(zero + at);
  }
  return f;
}

__device__ __forceinline__ float activated(float gate, float up, u32 kind) {
  const float inner = kind == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * sigmoid(inner) * up;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, EACH)
    integer_product(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const Scale* scales,
                    const unsigned char* zeros, const unsigned short* bias, const unsigned short* stream, unsigned short* out,
                    float* parts, u32* arrivals, u32 tokens, u32 features, u32 inputs, u32 groups, u32 batches, u32 split, u32 kind) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const u32 base = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 rank = blockIdx.x % split, tile = blockIdx.x / split, first = tile / batches * OWN, token = tile % batches * BATCH;
  const u32 blocks = (inputs + STEP - 1) / STEP, begin = rank * blocks / split, run = (rank + 1) * blocks / split - begin;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      init(full + 8 * i, 1);
      init(empty + 8 * i, MULTIPLIERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == MULTIPLIERS) {
    if (lane == 0) {
      auto codes = [&](u32 at, u32 stage) {
        const u32 barrier = full + 8 * stage, to = base + stage * STAGE_BYTES + X_BYTES;
        expect(barrier, STAGE_BYTES);
#pragma unroll
        for (u32 side = 0; side < SIDES; ++side)
          load(to + side * OWN * LINE, &weight, barrier, (begin + at) * (LINE / 2), side * features + first);
      };
      auto values = [&](u32 at, u32 stage) {
#pragma unroll
        for (u32 part = 0; part < STEP / 64; ++part)
          load(base + stage * STAGE_BYTES + part * PART, &x, full + 8 * stage, (begin + at) * STEP + part * 64, token);
      };
      const u32 early = min(run, STAGES);
      for (u32 at = 0; at < early; ++at) codes(at, at);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (u32 at = 0; at < early; ++at) values(at, at);
      for (u32 at = early, stage = 0, parity = 0; at < run; ++at) {
        await(empty + 8 * stage, parity);
        codes(at, stage);
        values(at, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  const u32 quad = lane % 4, eighth = lane / 4;
  // Rows of 128 bytes are swizzled. Rows 0 and 4 are then read together, so that eight threads have no bank conflicts.
  const u32 line = LINE == 128 ? eighth % 2 * 4 + eighth / 2 : eighth;
  // A thread has two of 64 rows: 8 apart, or one of gate and one of up.
  const u32 own = warp * (16 / SIDES) + line;
  const Scale* scales_of[2];
  const unsigned char* zeros_of[2];
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u64 row = min(first + own + r * (SIDES == 2 ? features : 8), SIDES * features - 1);
    scales_of[r] = scales + row * groups;
    zeros_of[r] = zeros + row * groups;
    // Kept in registers; the compiler would recompute the addresses in each iteration.
    if (GROUP) asm volatile("" : "+l"(scales_of[r]));
    if (ZEROS) asm volatile("" : "+l"(zeros_of[r]));
  }

  float sums[SUMS];
#pragma unroll
  for (u32 i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  u32 w[2][16];
#pragma unroll
  for (u32 i = 0; i < 32; ++i) w[i / 16][i % 16] = 0;
  // Factors of the next block. Blocks before `whole` lie completely within a row.
  Factors ahead[2];
  const u32 whole = GROUP ? (u64)groups * GROUP / STEP : ~0u;
  auto ask = [&](u32 block) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r)
      ahead[r] = block < whole ? factors<false>(scales_of[r], zeros_of[r], groups, block)
                               : factors<true>(scales_of[r], zeros_of[r], groups, block);
  };
  if (run) ask(begin);
  const u32 from_here = base + X_BYTES + own * LINE;
  u32 pieces[CHUNKS];
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; ++chunk) pieces[chunk] = from_here + (LINE == 128 ? (chunk * 4 + quad) ^ line : quad) * 16;
  u32 stage = 0, parity = 0, before = 0, magic;
  asm volatile("mov.b32 %0, %1;" : "=r"(magic) : "n"(MAGIC));  // in a register, because an instruction takes one constant
#pragma unroll 1
  for (u32 at = 0; at < run; ++at) {
    Spot spots[2][SPANS];
#pragma unroll
    for (u32 i = 0; i < 2 * SPANS; ++i)
      spots[i % 2][i / 2] = spot(ahead[i % 2].scale[GROUP ? i / 2 : 0], ahead[i % 2].zero[ZEROS ? i / 2 : 0]);
    if (GROUP && at + 1 < run) ask(begin + at + 1);
    await(full + 8 * stage, parity);
    const u32 ring = stage * STAGE_BYTES;
    const u64 right = matrix(base) + (ring >> 4);
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      const u32 place = pieces[chunk] + ring;
      const uint4 low = read(place), high = read(place + APART * LINE);
      const u32 c[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
      for (u32 half = 0; half < HALVES; ++half) {
        constexpr u32 PIECES = 4 / HALVES;  // registers per row for 64 inputs
        u32(&left)[16] = w[(chunk * HALVES + half) % 2];
        u32(&other)[16] = w[(chunk * HALVES + half + 1) % 2];
#pragma unroll
        for (u32 p = 0; p < PIECES; ++p)
#pragma unroll
          for (u32 r = 0; r < 2; ++r) {
            const u32 code = c[r][half * PIECES + p], span = ((chunk * HALVES + half) * 64 + p * (64 / PIECES)) / SPAN;
            const Spot& here = spots[r][span];
            u32* to = left + p * (16 / PIECES) + r;
            to[0] = widened<0>(code, here, magic);
            to[2] = widened<1>(code, here, magic);
#if BITS == 4
            to[4] = widened<2>(code, here, magic);
            to[6] = widened<3>(code, here, magic);
#endif
          }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < 4; ++i) multiply(sums, left + 4 * i, right + (chunk * HALVES + half) * (PART >> 4) + 2 * i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait<1>(other);
        if (chunk == 0 && half == 0 && at && lane == 0) arrive(empty + 8 * before);
      }
    }
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wait<0>(w[1]);
#pragma unroll
  for (u32 i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");

  asm volatile("griddepcontrol.wait;" ::: "memory");
  constexpr u32 LINES = OWN / 4, AT_ONCE = 4 / SIDES;
  const u32 many = min(tokens - token, BATCH);
  float* const part = parts + (u64)tile * split * (BATCH * ROWS);
  if (split == 1) {
    // The sums reuse the ring's memory once all threads are done with it.
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) {
      const u32 at = base + ((i / 4 * 8 + quad * 2 + i % 2) * PITCH + own + i / 2 % 2 * APART) * 4;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(sums[i]) : "memory");
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
  } else {
    float* const to = part + rank * (BATCH * ROWS) + own;
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) {
      const u32 line = i / 4 * 8 + quad * 2 + i % 2;
      if (line < many) __stcg(to + line * ROWS + i / 2 % 2 * APART, sums[i]);
    }
    // All threads must have stored their parts before one increments the counter. Counters are multiples of ROUND before and after.
    __threadfence();
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    if (threadIdx.x == 0) {
      u32 arrived;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(arrived) : "l"(arrivals + tile), "r"(ROUND / split) : "memory");
      const u32 goal = (arrived | (ROUND - 1)) + 1;
      arrived += ROUND / split;
      while ((int)(arrived - goal) < 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(arrivals + tile) : "memory");
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
  }
  const bool fours = features % 4 == 0;
#pragma unroll 1
  for (u32 i = rank * THREADS + threadIdx.x; i < LINES * many; i += split * AT_ONCE * THREADS) {
    float v[AT_ONCE][SIDES][4];
    uint2 held[AT_ONCE];
    u32 line[AT_ONCE], from_row[AT_ONCE];
    bool real[AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) {
      const u32 one = i + j * split * THREADS;
      line[j] = one / LINES;
      from_row[j] = one % LINES * 4;
      real[j] = line[j] < many && first + from_row[j] < features;
      if (fours && stream && real[j]) held[j] = *(const uint2*)(stream + (u64)(token + line[j]) * features + first + from_row[j]);
    }
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j)
      if (real[j]) {
#pragma unroll
        for (u32 side = 0; side < SIDES; ++side) {
          float4 sum;
          if (split == 1) {
            const uint4 bits = read(base + (line[j] * PITCH + from_row[j] + side * OWN) * 4);
            sum = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
          } else {
            const float* const of = part + line[j] * ROWS + from_row[j] + side * OWN;
            sum = __ldcg((const float4*)of);
            for (u32 other = 1; other < split; ++other) {
              const float4 more = __ldcg((const float4*)(of + other * (BATCH * ROWS)));
              sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
          }
          v[j][side][0] = sum.x, v[j][side][1] = sum.y, v[j][side][2] = sum.z, v[j][side][3] = sum.w;
        }
      }
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j)
      if (real[j]) {
        const u64 to = (u64)(token + line[j]) * features + first + from_row[j];
        float r[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
          const u32 feature = min(first + from_row[j] + k, features - 1);
#pragma unroll
          for (u32 side = 0; side < SIDES; ++side) {
            v[j][side][k] *= (float)(1 << DOWN);
            const u32 row = side * features + feature;
            if (!GROUP) v[j][side][k] *= value_of(__ldg(scales + row));
            if (bias) v[j][side][k] += from(__ldg(bias + side * features + feature));
          }
          r[k] = SIDES == 2 ? activated(v[j][0][k], v[j][SIDES - 1][k], kind) : v[j][0][k];
        }
        if (fours) {
          if (stream)
            r[0] += from(held[j].x & 0xFFFF), r[1] += from(held[j].x >> 16), r[2] += from(held[j].y & 0xFFFF), r[3] += from(held[j].y >> 16);
          *(uint2*)(out + to) = {rounded(r[0], r[1]), rounded(r[2], r[3])};
        } else {
          for (u32 k = 0; k < 4; ++k)
            if (first + from_row[j] + k < features)
              out[to + k] = (unsigned short)rounded(stream ? r[k] + from(stream[to + k]) : r[k], 0.0f);
        }
      }
  }
}
