// Common parts of kernels that run as clusters of two programs: loads of shared operands use TMA multicast. A kernel's source
// follows.

typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) TensorMap { u64 words[16]; };

constexpr u32 PAIR = 2;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory (PTX ISA, mbarrier).
__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// No scope is given: with cluster scope the compiler would insert a device-wide fence before it.
__device__ __forceinline__ void release(u32 barrier, u32 program) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier),
      "r"(program)
      : "memory");
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void sync_group(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// TMA copies. Elements outside a matrix read as zeros and are not written.
__device__ __forceinline__ void load(u32 to, const TensorMap* from, u32 barrier, u32 column, u32 row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(from), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* from, u32 barrier, u32 column, u32 row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(from), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)((1 << PAIR) - 1))
      : "memory");
}
__device__ __forceinline__ void store(const TensorMap* to, u32 from, u32 column, u32 row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(to), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}
// wgmma matrix descriptor of rows of 128 bytes with 128-byte swizzle; eight rows take 1,024 bytes. apart: bytes to the next 64
// columns if the sum runs over rows. The mask removes the bits of a cluster address that identify the program, which wgmma would
// interpret otherwise.
__device__ __forceinline__ u64 matrix(u32 address, u32 apart = 16) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Bitwise equal to activation.py's.
__device__ __forceinline__ float sigmoid(float x) {
  float s;
  asm("{\n.reg .f32 t;\nmul.f32 t, %1, 0fBFB8AA3B;\nex2.approx.ftz.f32 t, t;\nadd.f32 t, t, 0f3F800000;\n"
      "rcp.approx.ftz.f32 %0, t;\n}"
      : "=f"(s)
      : "f"(x));
  return s;
}

struct Place {
  u32 token, feature;
};
// Order of tiles: clusters take adjacent tiles, all features of a group of tokens before the next group, so that the group's inputs
// stay in L2.
template <u32 TOKENS, u32 WIDTH>
struct Walk {
  u32 pairs, wide, group;
  __device__ __forceinline__ Place operator()(u32 tile, u32 rank) const {
    const u32 of_group = group * wide, first = tile / of_group * group, rows = min(pairs - first, group), rest = tile % of_group;
    return {((first + rest % rows) * PAIR + rank) * TOKENS, rest / rows * WIDTH};
  }
};
