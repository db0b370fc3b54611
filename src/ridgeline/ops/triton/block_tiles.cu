// out^T = W x^T for weights in blocks (ops.blocks) and up to 64 tokens. ops/triton/block_tiles.py describes the layout and defines
// BITS (of a code), FORM (number of a scaling), TYPE and BRAIN (of x: bfloat16 or float16), COLUMNS (tokens / 8), ACROSS (warps
// with other rows), ALONG (warps with other inputs), SIDES (2: half of a program's rows are of gate, half of up),
// RESIDENT (1: x stays in shared memory, behind the sums), DEPTH (units that a warp has asked for) and EACH (programs of a
// multiprocessor).
//
// A warp multiplies 16 rows. It loads their next 256 inputs into registers, exactly the codes and scales that each of its threads
// multiplies, while it converts and multiplies the last 256. An L1 cache returns loads in order, so that one of x would wait for
// those of weights: x is in shared memory where it fits. Warps along the inputs add their sums in shared memory. Programs are
// persistent, so that the loads of a program's next rows are in flight while the sums of the last ones are added.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr u32 THREADS = 32 * ACROSS * ALONG, ROWS = 16 * ACROSS, TOKENS = 8 * COLUMNS;
constexpr u32 OWN = ROWS / SIDES, APART = ACROSS / SIDES;  // outputs and tiles of a program
static_assert(ACROSS % SIDES == 0, "as many rows of gate as of up");
constexpr u32 PITCH = TOKENS + 1;  // floats from row to row of the sums
constexpr u32 PLAIN = 0, MINIMUM = 1, SUPER_6BIT = 2, SUPER_8BIT = 3, E8M0 = 4;
constexpr u32 UPPER = BITS - 4;
constexpr bool MINIMA = FORM == MINIMUM || FORM == SUPER_6BIT;
// With bfloat16 weights are scaled by 2^-DOWN, so that no scale overflows.
constexpr int DOWN = BRAIN ? 28 : 0;

#ifndef ON_CPU  // a test runs the code below on a CPU, with its own instructions (tests/ops/cuda_on_cpu.h)
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ uint4 stream16(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint2 stream8(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ u32 stream2(const u16* from) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
// x is the previous kernel's result: not read as constant, because this kernel may start before that one ends.
__device__ __forceinline__ uint4 read16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two numbers of TYPE in a register.
__device__ __forceinline__ u32 twice(float x) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %1;" : "=r"(both) : "f"(x));
  return both;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ float from_half(u32 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
  return y;
}
__device__ __forceinline__ float widened(u16 x) {
  float y;
  asm("{\ncvt.f32." TYPE " %0, %1;\n}" : "=f"(y) : "h"(x));
  return y;
}
#endif
__device__ __forceinline__ u16 rounded(float x) { return (u16)twice(x); }
// Byte AT of x as a float, without a conversion: an integer in the low bits of 2^23.
template <u32 AT>
__device__ __forceinline__ float byte_over(u32 x) {
  return __uint_as_float(__byte_perm(x, 0x4B000000, 0x7540 | AT));
}
constexpr float OVER = 8388608.0f;

// 16 rows x 256 inputs, as a thread holds them: rows `lane / 4` and 8 after it.
struct Unit {
  uint4 codes[4];                    // .x, .y: piece 2 i of 32 inputs of both rows; .z, .w: piece 2 i + 1
  uint4 upper[UPPER ? UPPER : 1];    // the bits of codes above the lower four
  uint4 scales[2], extra[2];         // of both rows, as far as FORM has them
};

// units, vectors: of a tile; a vector is 16 bytes for each thread. In four bits the last unit may have fewer.
struct Arrays {
  const uint4* codes;
  const unsigned char *scales, *extra;
  u32 units, vectors;
};

__device__ __forceinline__ Unit load(const Arrays& from, u32 tile, u32 unit, u32 lane) {
  Unit u;
  const uint4* const codes = from.codes + ((u64)tile * from.vectors + unit * BITS) * 32 + lane;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u.codes[i] = {0, 0, 0, 0};
    if (BITS > 4 || unit * 4 + i < from.vectors) u.codes[i] = stream16(codes + i * 32);
  }
#pragma unroll
  for (u32 i = 4; i < BITS; ++i) u.upper[i - 4] = stream16(codes + i * 32);
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u64 row = ((u64)tile * from.units + unit) * 16 + lane / 4 + 8 * r;
    if (FORM == SUPER_8BIT || FORM == E8M0) {
      const uint2 v = stream8((const uint2*)from.scales + (FORM == E8M0 ? row : 2 * row + lane % 4 / 2));
      u.scales[r].x = v.x, u.scales[r].y = v.y;
      if (FORM == SUPER_8BIT) u.extra[r].x = stream2((const u16*)from.extra + row);
    } else {
      u.scales[r] = stream16((const uint4*)from.scales + row);
      if (FORM == MINIMUM) u.extra[r] = stream16((const uint4*)from.extra + row);
    }
  }
  return u;
}

// What the codes of a row's piece are multiplied by, and what is added then.
struct Factor {
  u32 scale, odd, less;  // odd: for codes in the upper half of a byte
};

// Scales of a row of a unit, prepared for all pieces.
struct Scales {
  u32 low[2], high[2];  // of SUPER_6BIT: scales and minima of 8 groups, a byte for each
  float scale, minimum;
};

__device__ __forceinline__ Scales prepare(const Unit& u, u32 r) {
  Scales s;
  const uint4 v = u.scales[r];
  if (FORM == SUPER_6BIT) {
    s.low[0] = (v.y & 0x0F0F0F0F) | (v.w << 4 & 0x30303030);
    s.low[1] = (v.z & 0x0F0F0F0F) | (v.w & 0x30303030);
    s.high[0] = (v.y >> 4 & 0x0F0F0F0F) | (v.w << 2 & 0x30303030);
    s.high[1] = (v.z >> 4 & 0x0F0F0F0F) | (v.w >> 2 & 0x30303030);
    s.scale = from_half(v.x & 0xFFFF);
    s.minimum = from_half(v.x >> 16);
  } else if (FORM == SUPER_8BIT) {
    s.low[0] = v.x ^ 0x80808080, s.low[1] = v.y ^ 0x80808080;
    s.scale = from_half(u.extra[r].x);
  }
  return s;
}

__device__ __forceinline__ u32 half_of(const uint4& v, u32 piece) {
  const u32 word = piece / 2 == 0 ? v.x : piece / 2 == 1 ? v.y : piece / 2 == 2 ? v.z : v.w;
  return piece % 2 ? word >> 16 : word & 0xFFFF;
}

// The power of two that codes in the low bits of bfloat16 lack, 2^133, and DOWN.
constexpr float UP = BRAIN ? 0x1p105f : 1.0f, AS_DOWN = BRAIN ? 0x1p-28f : 1.0f;

template <u32 PIECE>
__device__ __forceinline__ Factor factor(const Unit& u, const Scales& s, u32 r) {
  Factor f;
  if (FORM == E8M0) {
    const u32 exponent = (PIECE / 4 ? u.scales[r].y : u.scales[r].x) >> (8 * (PIECE % 4)) & 0xFF;
    // Codes are numbers of exponent 0, 2^-126 of E2M1.
    f.scale = BRAIN ? (exponent + 126 - DOWN) * 0x00800080 : twice(__uint_as_float(exponent << 23));
    f.odd = f.less = 0;
    return f;
  }
  float scale, less;
  if (FORM == SUPER_6BIT) {
    // Exact: the sum is a byte times a float16.
    scale = __fmaf_rn(byte_over<PIECE % 4>(s.low[PIECE / 4]), s.scale, -OVER * s.scale);
    less = __fmaf_rn(byte_over<PIECE % 4>(s.high[PIECE / 4]), -s.minimum, OVER * s.minimum);
  } else if (FORM == SUPER_8BIT) {
    scale = __fmaf_rn(byte_over<PIECE % 4>(s.low[PIECE / 4]), s.scale, -(OVER + 128.0f) * s.scale);
    less = 0.0f;
  } else {
    scale = from_half(half_of(u.scales[r], PIECE));
    less = FORM == MINIMUM ? -from_half(half_of(u.extra[r], PIECE)) : 0.0f;
  }
  f.scale = twice(scale * UP);
  if (MINIMA) {
    f.less = twice(less * AS_DOWN);
  } else if (BRAIN) {
    f.less = times(f.scale, (0x8000u | 1u << (BITS - 1)) * 0x10001u);  // a subnormal number: minus half the range of codes, 2^-133
  } else {
    f.less = times(f.scale, BITS == 4 ? 0xC800C800u : BITS == 5 ? 0xCC00CC00u : 0xD000D000u);
  }
  f.odd = BITS == 4 && BRAIN ? times(f.scale, 0x3D803D80) : 0;  // 2^-4
  return f;
}

// x shifted to the left by BY, to the right if BY is negative.
template <int BY>
__device__ __forceinline__ u32 shifted(u32 x) {
  return BY >= 0 ? x << (BY & 31) : x >> (-BY & 31);
}

// Two weights: codes J of both halves of `word`. upper: word of the upper bits, of which those of pair PAIR are needed.
template <u32 J, u32 PAIR>
__device__ __forceinline__ u32 weights(u32 word, u32 upper, const Factor& f) {
  constexpr int J4 = 4 * (int)J;
  if (FORM == E8M0) {
    constexpr u32 SIGNS = 0x80008000, MAGNITUDES = BRAIN ? 0x01C001C0 : 0x0E000E00;
    u32 t = (shifted<12 - J4>(word) & SIGNS) | (shifted<(BRAIN ? 6 : 9) - J4>(word) & MAGNITUDES);
    if (!BRAIN) t = times(t, 0x74007400);  // 2^14
    return times(t, f.scale);
  }
  if (BITS == 4 && BRAIN) {
    const u32 c = J < 2 ? word : word >> 8;
    return J % 2 ? fused(c & 0x00F000F0, f.odd, f.less) : fused(c & 0x000F000F, f.scale, f.less);
  }
  u32 t = shifted<-J4>(word) & 0x000F000F;
  if (BITS == 5) t |= shifted<4 - (int)PAIR>(upper) & 0x00100010;
  if (BITS == 6) t |= shifted<4 - 2 * (int)PAIR>(upper) & 0x00300030;
  if (!BRAIN) {
    t |= 0x64006400;
    t = fused(t, 0x3C003C00, 0xE400E400);  // 1,024 + code, minus 1,024
  }
  return fused(t, f.scale, f.less);
}

__device__ __forceinline__ u32 word_of(const uint4& v, u32 at) { return at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w; }

// The eight weights of a row's piece: as pairs 0 to 3.
template <u32 PIECE>
__device__ __forceinline__ void convert(u32 (&w)[4], const Unit& u, const Scales& s, u32 r) {
  const u32 word = word_of(u.codes[PIECE / 2], PIECE % 2 * 2 + r);
  u32 upper = 0;
  if (BITS == 5) upper = word_of(u.upper[0], PIECE / 4 * 2 + r);
  if (BITS == 6) upper = word_of(u.upper[PIECE / 4], PIECE / 2 % 2 * 2 + r);
  constexpr u32 FIRST = BITS == 5 ? PIECE % 4 * 4 : PIECE % 2 * 4;
  const Factor f = factor<PIECE>(u, s, r);
  w[0] = weights<0, FIRST>(word, upper, f);
  w[1] = weights<1, FIRST + 1>(word, upper, f);
  w[2] = weights<2, FIRST + 2>(word, upper, f);
  w[3] = weights<3, FIRST + 3>(word, upper, f);
}

// Weights after the last input are 0: x is read within its rows there.
template <u32 PIECE>
__device__ __forceinline__ void add_piece(float (&sums)[COLUMNS][4], const Unit& u, const Scales (&s)[2], const u16* const (&x)[COLUMNS],
                                          u32 first, u32 inputs) {
  u32 low[4], high[4];
  convert<PIECE>(low, u, s[0], 0);
  convert<PIECE>(high, u, s[1], 1);
  const u32 at = min(first + 32 * PIECE, inputs - 32);
#pragma unroll
  for (u32 n = 0; n < COLUMNS; ++n) {
    const uint4 b = RESIDENT ? *(const uint4*)(x[n] + at) : read16(x[n] + at);
    multiply(sums[n], low[0], high[0], low[1], high[1], b.x, b.y);
    multiply(sums[n], low[2], high[2], low[3], high[3], b.z, b.w);
  }
}

__device__ __forceinline__ void add_unit(float (&sums)[COLUMNS][4], const Unit& u, const u16* const (&x)[COLUMNS], u32 first, u32 inputs) {
  const Scales s[2] = {prepare(u, 0), prepare(u, 1)};
  add_piece<0>(sums, u, s, x, first, inputs);
  add_piece<1>(sums, u, s, x, first, inputs);
  add_piece<2>(sums, u, s, x, first, inputs);
  add_piece<3>(sums, u, s, x, first, inputs);
  add_piece<4>(sums, u, s, x, first, inputs);
  add_piece<5>(sums, u, s, x, first, inputs);
  add_piece<6>(sums, u, s, x, first, inputs);
  add_piece<7>(sums, u, s, x, first, inputs);
}

// Sums of a warp to shared memory [ALONG][ROWS][PITCH], where `total` adds those of a row's warps.
__device__ __forceinline__ void put_sums(float* parts, const float (&sums)[COLUMNS][4], u32 along, u32 across, u32 lane) {
  float* const part = parts + (along * ROWS + across * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
  for (u32 n = 0; n < COLUMNS; ++n) {
    part[8 * n] = sums[n][0], part[8 * n + 1] = sums[n][1];
    part[8 * n + 8 * PITCH] = sums[n][2], part[8 * n + 8 * PITCH + 1] = sums[n][3];
  }
}
__device__ __forceinline__ float total(const float* parts, u32 row, u32 token) {
  float sum = 0.0f;
#pragma unroll
  for (u32 j = 0; j < ALONG; ++j) sum += parts[(j * ROWS + row) * PITCH + token];
  return BRAIN ? sum * (float)(1 << DOWN) : sum;
}

// The row of x at `from` to shared memory, as row `place` there.
constexpr u32 PARTS = (ALONG * ROWS * PITCH + 3) / 4 * 4, APART_X = 32;  // floats; numbers between rows of x, for other banks
__device__ __forceinline__ void keep(float* parts, const u16* from, u32 place, u32 inputs) {
  u16* const to = (u16*)(parts + PARTS) + (u64)place * (inputs + APART_X);
  for (u32 i = threadIdx.x * 8; i < inputs; i += THREADS * 8) *(uint4*)(to + i) = read16(from + i);
}
__device__ __forceinline__ const u16* kept(const float* parts, u32 place, u32 inputs) {
  return (const u16*)(parts + PARTS) + place * (inputs + APART_X);
}

// See activation.gated.
__device__ __forceinline__ float activated(float gate, float up, u32 kind) {
  if (kind == 3) gate = fminf(gate, 7.0f), up = fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f;
  const float inner = kind == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : kind == 3 ? 1.702f * gate : gate;
  return gate * sigmoid(inner) * up;
}

extern "C" __global__ void __launch_bounds__(THREADS, EACH)
    block_product(const Arrays from, const u16* x, const u16* bias, const u16* stream, u16* out, u32 tokens, u32 rows, u32 inputs,
                  u32 units, u32 kind, u32 pitch) {
  extern __shared__ float parts[];  // [ALONG][ROWS][PITCH]
  start_next();
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = warp % ACROSS, along = warp / ACROSS;
  const u32 begin = along * units / ALONG, end = (along + 1) * units / ALONG;
  const u32 features = rows / SIDES, tiles = (features + 15) / 16, groups = (tiles + APART - 1) / APART;
  auto tile_of = [&](u32 group) { return across / APART * tiles + min(group * APART + across % APART, tiles - 1); };
  u32 at_group = begin < end ? blockIdx.x : groups, at_unit = begin;
  auto ask = [&] {
    Unit u;
    if (at_group < groups) u = load(from, tile_of(at_group), at_unit, lane);
    if (++at_unit == end) at_unit = begin, at_group += gridDim.x;
    return u;
  };
  Unit ahead[DEPTH + 1];
#pragma unroll
  for (u32 i = 0; i < DEPTH; ++i) ahead[i] = ask();
  await_previous();
  const u16* of[COLUMNS];
#pragma unroll
  for (u32 n = 0; n < COLUMNS; ++n) {
    const u32 token = min(8 * n + lane / 4, tokens - 1);
    of[n] = (RESIDENT ? kept(parts, token, inputs) : x + (u64)token * inputs) + lane % 4 * 8;
  }
  if (RESIDENT) {
    for (u32 token = 0; token < tokens; ++token) keep(parts, x + (u64)token * inputs, token, inputs);
    __syncthreads();
  }
  for (u32 group = blockIdx.x; group < groups; group += gridDim.x) {
    float sums[COLUMNS][4] = {};
    for (u32 unit = begin; unit < end; ++unit) {
      ahead[DEPTH] = ask();
      const Unit now = ahead[0];
#pragma unroll
      for (u32 i = 0; i < DEPTH; ++i) ahead[i] = ahead[i + 1];
      add_unit(sums, now, of, unit * 256, inputs);
    }
    put_sums(parts, sums, along, across, lane);
    __syncthreads();
    for (u32 i = threadIdx.x; i < OWN * tokens; i += THREADS) {
      const u32 row = i % OWN, token = i / OWN, output = group * OWN + row;
      if (output >= features) continue;
      float sum[SIDES];
#pragma unroll
      for (u32 side = 0; side < SIDES; ++side) {
        sum[side] = total(parts, side * OWN + row, token);
        if (bias) sum[side] += widened(bias[side * features + output]);
      }
      const u64 to = (u64)token * pitch + output;
      float result = SIDES == 2 ? activated(sum[0], sum[SIDES - 1], kind) : sum[0];
      if (stream) result += widened(stream[to]);
      out[to] = rounded(result);
    }
    __syncthreads();
  }
}

// Products of experts, for a tile of ops/triton/experts.py: pairs `tile_first` to `tile_end` in `order`, or one pair without an order.
// from: of all experts, each of `rows` rows. x: row pair / per_row of a pair. Two sides: out [pairs, features] of x's type is activated.
// One side: float32 [pairs, rows], multiplied by the pair's share if there are shares.
struct Pairs {
  const int *chosen, *order, *tile_expert, *tile_first, *tile_end;
};
extern "C" __global__ void __launch_bounds__(THREADS, EACH)
    block_experts(const Arrays from, const Pairs pairs, const u16* x, const u16* bias, const float* shares, void* out, u32 rows,
                  u32 inputs, u32 units, u32 kind, u32 sorted, u32 per_row, u32 held) {
  extern __shared__ float parts[];
  start_next();
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = warp % ACROSS, along = warp / ACROSS;
  const u32 begin = along * units / ALONG, end = (along + 1) * units / ALONG;
  const u32 features = rows / SIDES, tiles = (features + 15) / 16, groups = (tiles + APART - 1) / APART;
  const u32 group = blockIdx.x % groups, number = blockIdx.x / groups;
  await_previous();
  const int expert = sorted ? pairs.tile_expert[number] : pairs.chosen[number];
  if (expert < 0 || expert >= (int)held) return;
  const u32 first = sorted ? pairs.tile_first[number] : number, count = sorted ? pairs.tile_end[number] - first : 1;
  auto pair_of = [&](u32 token) { return sorted ? (u32)pairs.order[first + token] : number; };
  const u32 own = (expert * SIDES + across / APART) * tiles + min(group * APART + across % APART, tiles - 1);
  Unit next;
  if (begin < end) next = load(from, own, begin, lane);
  const u16* of[COLUMNS];
#pragma unroll
  for (u32 n = 0; n < COLUMNS; ++n) {
    const u32 token = min(8 * n + lane / 4, count - 1);
    of[n] = (RESIDENT ? kept(parts, token, inputs) : x + (u64)(pair_of(token) / per_row) * inputs) + lane % 4 * 8;
  }
  if (RESIDENT) {
    for (u32 token = 0; token < min(count, TOKENS); ++token) keep(parts, x + (u64)(pair_of(token) / per_row) * inputs, token, inputs);
    __syncthreads();
  }
  float sums[COLUMNS][4] = {};
  for (u32 unit = begin; unit < end; ++unit) {
    const Unit now = next;
    if (unit + 1 < end) next = load(from, own, unit + 1, lane);
    add_unit(sums, now, of, unit * 256, inputs);
  }
  put_sums(parts, sums, along, across, lane);
  __syncthreads();
  for (u32 i = threadIdx.x; i < OWN * min(count, TOKENS); i += THREADS) {
    const u32 row = i % OWN, token = i / OWN, output = group * OWN + row, pair = pair_of(token);
    if (output >= features) continue;
    float sum[SIDES];
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side) {
      sum[side] = total(parts, side * OWN + row, token);
      if (bias) sum[side] += widened(bias[(u64)expert * rows + side * features + output]);
    }
    const u64 to = (u64)pair * features + output;
    if (SIDES == 2)
      ((u16*)out)[to] = rounded(activated(sum[0], sum[SIDES - 1], kind));
    else
      ((float*)out)[to] = shares ? sum[0] * shares[pair] : sum[0];
  }
}

// out [rows, inputs]: a warp for each unit.
extern "C" __global__ void __launch_bounds__(256) block_weights(const Arrays from, u16* out, u32 rows, u32 inputs, u32 units) {
  start_next();
  const u32 lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32, tile = at / units, unit = at % units;
  if (tile * 16 >= rows) return;
  const Unit u = load(from, tile, unit, lane);
  await_previous();
  const u32 up = BRAIN ? (127 + DOWN) << 7 | (127 + DOWN) << 23 : 0x3C003C00;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const Scales s = prepare(u, r);
    const u32 row = tile * 16 + lane / 4 + 8 * r, first = unit * 256 + lane % 4 * 8;
    auto put = [&](const u32(&w)[4], u32 piece) {
      const uint4 v = {times(w[0], up), times(w[1], up), times(w[2], up), times(w[3], up)};
      if (row < rows && first + 32 * piece < inputs) *(uint4*)(out + (u64)row * inputs + first + 32 * piece) = v;
    };
    u32 w[4];
    convert<0>(w, u, s, r), put(w, 0);
    convert<1>(w, u, s, r), put(w, 1);
    convert<2>(w, u, s, r), put(w, 2);
    convert<3>(w, u, s, r), put(w, 3);
    convert<4>(w, u, s, r), put(w, 4);
    convert<5>(w, u, s, r), put(w, 5);
    convert<6>(w, u, s, r), put(w, 6);
    convert<7>(w, u, s, r), put(w, 7);
  }
}
