// What kernels of pairs of programs share: a pair fetches what both multiply once (multicast). Behind this text stands a kernel's own.

typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) TensorMap { u64 words[16]; };

constexpr u32 PAIR = 2;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers of shared memory (PTX ISA, mbarrier).
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
// Without a scope: with the cluster's, a fence of the whole device stands before it.
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

// The copy engine; what lies outside a matrix reads as zeros and is not written.
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
// Rows of 128 bytes, swizzled, as wgmma is told of them: eight take 1,024 bytes. apart: bytes to the next 64 columns where the sum
// is over rows. The mask: in a cluster an address also says whose memory it is, in bits that wgmma would take for other things.
__device__ __forceinline__ u64 matrix(u32 address, u32 apart = 16) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// As activation.py's, to the bit.
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
// Clusters take tiles side by side: all features of a group of tokens, whose inputs stay in the L2 cache, before the next group.
template <u32 TOKENS, u32 WIDTH>
struct Walk {
  u32 pairs, wide, group;
  __device__ __forceinline__ Place operator()(u32 tile, u32 rank) const {
    const u32 of_group = group * wide, first = tile / of_group * group, rows = min(pairs - first, group), rest = tile % of_group;
    return {((first + rest % rows) * PAIR + rank) * TOKENS, rest / rows * WIDTH};
  }
};
