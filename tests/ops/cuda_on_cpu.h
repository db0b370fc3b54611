// CUDA C++ on a CPU: a thread for each of a program's threads, programs one after the other. A kernel's source is compiled between
// this file and the test's code, with ON_CPU and BRAIN (bfloat16 or float16) defined; it leaves out what is defined here.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { u32 x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
float parts[1 << 16];  // dynamic shared memory

static std::unique_ptr<std::barrier<>> all;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
struct Fragment { u32 a[4], b[2]; };
static std::vector<Fragment> fragments;

inline void __syncthreads() { all->arrive_and_wait(); }
inline void start_next() {}
inline void await_previous() {}
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline u32 __byte_perm(u32 a, u32 b, u32 order) {
  const u64 both = (u64)b << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) result |= (u32)(both >> 8 * (order >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline uint4 stream16(const uint4* from) { return *from; }
inline uint2 stream8(const uint2* from) { return *from; }
inline u32 stream2(const u16* from) { return *from; }
inline uint4 read16(const void* from) { return *(const uint4*)from; }

inline float from_half(u32 x) { const u16 bits = (u16)x; _Float16 y; memcpy(&y, &bits, 2); return (float)y; }
inline float widened(u16 x) { return BRAIN ? __uint_as_float((u32)x << 16) : from_half(x); }
// To nearest, ties to even, of a number that a double holds exactly.
inline u16 narrowed(double x) {
  if (!BRAIN) { const _Float16 y = (_Float16)x; u16 bits; memcpy(&bits, &y, 2); return bits; }
  u32 bits = __float_as_uint((float)x);
  if ((double)__uint_as_float(bits) != x) bits = (bits - (std::fabs((double)__uint_as_float(bits)) > std::fabs(x))) | 1;
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline u32 twice(float x) { return narrowed(x) * 0x10001u; }
inline u32 fused(u32 a, u32 b, u32 c) {
  auto one = [&](u32 at) { return (u32)narrowed((double)widened(a >> at) * widened(b >> at) + widened(c >> at)) << at; };
  return one(0) | one(16);
}
inline u32 times(u32 a, u32 b) { return fused(a, b, 0x80008000); }
// mma.m16n8k16 (PTX ISA): all threads of a warp show their registers, then each computes its four sums.
inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Fragment* const of = &fragments[32 * warp];
  of[lane] = {{a0, a1, a2, a3}, {b0, b1}};
  warps[warp]->arrive_and_wait();
  for (u32 i = 0; i < 4; ++i)
    for (u32 k = 0; k < 16; ++k) {
      const float a = widened(of[lane / 4 * 4 + k % 8 / 2].a[i / 2 + k / 8 * 2] >> 16 * (k % 2));
      d[i] += a * widened(of[(2 * (lane % 4) + i % 2) * 4 + k % 8 / 2].b[k / 8] >> 16 * (k % 2));
    }
  warps[warp]->arrive_and_wait();
}
template <class Kernel>
void launch(u32 programs, u32 threads, Kernel kernel) {
  gridDim.x = programs;
  fragments.assign(threads, {});
  for (u32 program = 0; program < programs; ++program) {
    all = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (u32 i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> running;
    for (u32 i = 0; i < threads; ++i)
      running.emplace_back([=] { threadIdx.x = i, blockIdx.x = program, kernel(); });
    for (auto& thread : running) thread.join();
  }
}
