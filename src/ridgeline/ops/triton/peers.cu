// x = its sum over the GPUs of one host, in rank order and float32, so that all GPUs get the same bits. Each GPU writes into memory of
// the others over NVLink and waits in its own. Layout and limits: ops/triton/peers.py.
//
// Messages alternate between two halves of the memory. A GPU begins message e + 2, which overwrites message e, after its own message
// e + 1 has ended. That needed data that each other GPU sent in its message e + 1, so after it had read message e, because messages run
// one after the other on a stream. With programmatic dependent launch they still do: a program reads and sends nothing before its wait
// (`message`), which ends when all earlier kernels have ended. The kernel behind a message starts beside it and fetches its weights.
// It cannot keep a message from running: it starts when all programs of the message have started.
//
// Every launch has the same number of programs. A program counts messages in `counts`, so graphs can replay them.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MOST = 8;  // ranks
struct Peers { u64 at[MOST]; };  // this rank's memory as seen by this GPU, by rank

struct __align__(16) Four { u32 a, b, c, d; };
struct __align__(8) Two { u32 a, b; };

__device__ __forceinline__ void store(u64 to, Four v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.a), "r"(v.b), "r"(v.c), "r"(v.d) : "memory");
}
__device__ __forceinline__ Four load(u64 from) {
  Four v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.a), "=r"(v.b), "=r"(v.c), "=r"(v.d) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void release(u64 to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ u32 acquire(u64 from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Whether the host has ended the group: looked up rarely, because it is host memory.
__device__ __forceinline__ bool stopped(u32& tries, const volatile u32* stop) { return (++tries & 1023) == 0 && *stop != 0; }

// Two numbers of 16 bits, or one of 32, in a word.
#if FLOAT32
constexpr u32 NUMBERS = 1;
__device__ __forceinline__ void add(float* sum, u32 word) { sum[0] += __uint_as_float(word); }
__device__ __forceinline__ u32 rounded(const float* sum) { return __float_as_uint(sum[0]); }
#elif BFLOAT16
constexpr u32 NUMBERS = 2;
__device__ __forceinline__ void add(float* sum, u32 word) {
  sum[0] += __uint_as_float(word << 16);
  sum[1] += __uint_as_float(word & 0xFFFF0000);
}
__device__ __forceinline__ u32 rounded(const float* sum) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
  return word;
}
#else
constexpr u32 NUMBERS = 2;
__device__ __forceinline__ void add(float* sum, u32 word) {
  float low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(word));
  sum[0] += low;
  sum[1] += high;
}
__device__ __forceinline__ u32 rounded(const float* sum) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
  return word;
}
#endif

// Let the next kernel start, wait for all earlier kernels, and return the number of this message, the same on all ranks. It is never 0,
// which memory holds at first; its parity alternates.
__device__ __forceinline__ u32 message(const u32* counts) {
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
  const u32 number = counts[blockIdx.x] + 1;
  return number ? number : 2;
}
__device__ __forceinline__ void count(u32* counts, u32 number) {
  __syncthreads();
  if (threadIdx.x == 0) counts[blockIdx.x] = number;
}

// One shot: each rank sends all of x to every other one. 8 bytes travel with two copies of the number of the message in 16 bytes, of
// which NVLink keeps every 8 together: their arrival needs neither a flag nor a fence (protocol LL of NCCL).
// x: `units` of 8 bytes. room: units of a slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    one_shot(const __grid_constant__ Peers peers, u64 x, u64 counts_at, u64 stop_at, u32 units, u32 room, u32 rank, u32 size) {
  u32* counts = (u32*)counts_at;
  const volatile u32* stop = (const volatile u32*)stop_at;
  const u32 number = message(counts), first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
  const u32 half = (number & 1) * size;
  Two* data = (Two*)x;
  for (u32 i = first; i < units; i += all) {
    const Two mine = data[i];
    const Four sent = {mine.a, number, mine.b, number};
    for (u32 r = 0; r < size; ++r)
      if (r != rank) store(peers.at[r] + 16ull * ((u64)(half + rank) * room + i), sent);
  }
  u32 tries = 0;
  for (u32 i = first; i < units; i += all) {
    const Two mine = data[i];
    float sum[2][NUMBERS] = {};
    for (u32 r = 0; r < size; ++r) {
      Two part = mine;
      if (r != rank) {
        const u64 at = peers.at[rank] + 16ull * ((u64)(half + r) * room + i);
        Four received = load(at);
        while ((received.b != number || received.d != number) && !stopped(tries, stop)) received = load(at);
        part = {received.a, received.c};
      }
      add(sum[0], part.a);
      add(sum[1], part.b);
    }
    data[i] = {rounded(sum[0]), rounded(sum[1])};
  }
  count(counts, number);
}

// Tell all ranks that this program has written what they wait for, and wait until all have told it. flags: of this phase, at `offset`.
__device__ __forceinline__ void meet(const Peers& peers, u64 offset, u32 number, u32 rank, u32 size, const volatile u32* stop) {
  __syncthreads();
  const u32 r = threadIdx.x;
  if (r < size && r != rank) {
    __threadfence_system();
    release(peers.at[r] + offset + 4 * (blockIdx.x * MOST + rank), number);
    const u64 at = peers.at[rank] + offset + 4 * (blockIdx.x * MOST + r);
    u32 tries = 0;
    // Another rank may be one message ahead already.
    while ((int)(acquire(at) - number) < 0 && !stopped(tries, stop));
  }
  __syncthreads();
}

// Two shots: each rank sums a part of x and sends the sum to every other one.
// x: `size` parts of `units` of 16 bytes. room: units of a slot. parts, sums: offsets of slots, flags: of flags.
extern "C" __global__ void __launch_bounds__(THREADS)
    two_shot(const __grid_constant__ Peers peers, u64 x, u64 counts_at, u64 stop_at, u64 parts, u64 sums, u64 flags, u32 units, u32 room,
             u32 rank, u32 size) {
  u32* counts = (u32*)counts_at;
  const volatile u32* stop = (const volatile u32*)stop_at;
  const u32 number = message(counts), first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
  const u32 half = (number & 1) * size;
  Four* data = (Four*)x;
  for (u32 step = 1; step < size; ++step) {
    const u32 r = (rank + step) % size;
    for (u32 i = first; i < units; i += all)
      store(peers.at[r] + parts + 16ull * ((u64)(half + rank) * room + i), data[(u64)r * units + i]);
  }
  meet(peers, flags, number, rank, size, stop);
  for (u32 i = first; i < units; i += all) {
    const Four mine = data[(u64)rank * units + i];
    float sum[4][NUMBERS] = {};
    for (u32 r = 0; r < size; ++r) {
      const Four part = r == rank ? mine : load(peers.at[rank] + parts + 16ull * ((u64)(half + r) * room + i));
      add(sum[0], part.a);
      add(sum[1], part.b);
      add(sum[2], part.c);
      add(sum[3], part.d);
    }
    const Four total = {rounded(sum[0]), rounded(sum[1]), rounded(sum[2]), rounded(sum[3])};
    data[(u64)rank * units + i] = total;
    for (u32 step = 1; step < size; ++step)
      store(peers.at[(rank + step) % size] + sums + 16ull * ((u64)(half + rank) * room + i), total);
  }
  meet(peers, flags + 4ull * MOST * gridDim.x, number, rank, size, stop);
  for (u32 step = 1; step < size; ++step) {
    const u32 r = (rank + step) % size;
    for (u32 i = first; i < units; i += all)
      data[(u64)r * units + i] = load(peers.at[rank] + sums + 16ull * ((u64)(half + r) * room + i));
  }
  count(counts, number);
}
