// Vector functions and thread ranges that all operations use. AMX tiles are used if the compiler targets them.
#pragma once

#include "replay.h"
#include "simd.h"

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RIDGELINE_AMX 1
#else
#define RIDGELINE_AMX 0
#endif

namespace ridgeline {

// x rounded to the type T.
template <class T> inline f32x16 rounded(f32x16 x) {
    if constexpr (sizeof(T) == 2) return widen(narrow(x));
    return x;
}

// 2^x within 2 units in the last place. x = whole + part, |part| <= 1/2, and a Taylor polynomial approximates 2^part. x is bounded
// first, so that infinities are not subtracted from each other. NaN passes as the second operand. Results below the smallest normal
// number are masked to 0, because rounding a subnormal number costs the CPU over 100 cycles.
inline f32x16 exp2(f32x16 x) {
    x = min(splat(128.0f), max(splat(-200.0f), x));
    const f32x16 whole = round(x), part = x - whole;
    f32x16 y = splat(1.5403530393381609954e-4f);
    y = fma(y, part, splat(1.3333558146428443423e-3f));
    y = fma(y, part, splat(9.6181291076284771619e-3f));
    y = fma(y, part, splat(5.5504108664821579953e-2f));
    y = fma(y, part, splat(2.4022650695910071233e-1f));
    y = fma(y, part, splat(6.9314718055994530942e-1f));
    y = fma(y, part, splat(1.0f));
    return scaled(y, whole, not_less(x, splat(-126.0f)));
}

constexpr float LOG2E = 1.44269504088896340736f;

inline f32x16 exp(f32x16 x) { return exp2(x * splat(LOG2E)); }

// 1 / (1 + e^-x)
inline f32x16 sigmoid(f32x16 x) {
    const f32x16 one = splat(1.0f);
    return one / (one + exp(zeros() - x));
}

// tanh x = 2 sigmoid(2 x) - 1, with an absolute (not relative) error of 1e-7.
inline f32x16 tanh(f32x16 x) {
    return fms(splat(2.0f), sigmoid(x + x), splat(1.0f));
}

// Transpose a 16 x 16 matrix of 32-bit elements.
inline void transpose(i32x16 (&r)[16]) {
    i32x16 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = unpack_low_32(r[i], r[i + 1]);
        t[i + 1] = unpack_high_32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = unpack_low_64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = unpack_high_64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            t[8 * j + i] = even_parts(r[8 * j + i], r[8 * j + i + 4]);
            t[8 * j + i + 4] = odd_parts(r[8 * j + i], r[8 * j + i + 4]);
        }
    for (int i = 0; i < 8; ++i) {
        r[i] = even_parts(t[i], t[i + 8]);
        r[i + 8] = odd_parts(t[i], t[i + 8]);
    }
}

// The part of 0 .. n - 1 for thread `who` of `of` threads.
struct Range {
    index begin, end;
};
inline Range share(index n, index who, index of) { return {n * who / of, n * (who + 1) / of}; }

// Barrier for a few threads. Each thread counts its arrivals in a cache line of its own and reads the others' counts. A thread that
// waits long yields its core, because another thread may not be scheduled.
struct Meeting {
    static constexpr int MOST = 8, SPINS = 1 << 14;
    struct alignas(128) Came {
        std::atomic<std::uint32_t> often{0};
    } came[MOST];

    void wait(int who, int of) {
        const std::uint32_t now = came[who].often.load(std::memory_order_relaxed) + 1;
        came[who].often.store(now, std::memory_order_release);
        for (int other = 0, spun = 0; other < of; ++other)
            while (std::int32_t(came[other].often.load(std::memory_order_acquire) - now) < 0)
                if (++spun > SPINS) sched_yield();
    }
};

// A thread of a team that shares an operation's work. All threads must call each `wait`. meeting null: use OpenMP's barrier.
struct Team {
    int who, of;
    Meeting* meeting = nullptr;

    // The calling thread of a parallel region.
    static Team here(Meeting& meeting) {
        const int of = omp_get_num_threads();
        return {omp_get_thread_num(), of, of <= Meeting::MOST ? &meeting : nullptr};
    }
    void wait() const {
        if (of == 1) return;
        if (meeting) return meeting->wait(who, of);
#pragma omp barrier
    }
    // The team that fills so many rows. If `room` holds the rows of all threads, each thread fills its own copy, which is faster
    // than a barrier and reads of the others' parts. Its copy follows those of who - by().who threads, and its `wait` does nothing.
    Team by(index rows, index room) const { return rows * of <= room ? Team{0, 1} : *this; }
};

// Memory of one call, aligned to a cache line.
struct Scratch {
    void* memory;
    explicit Scratch(index bytes) : memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
    ~Scratch() { std::free(memory); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};

inline int threads_for(index work, index least_each) {
    const index most = omp_in_parallel() ? 1 : omp_get_max_threads();
    return int(std::clamp<index>(work / least_each, 1, most));
}

// Whether the kernel allows this process to use AMX tiles. Requested once, when the library is opened.
extern bool tiles_allowed;

// Configure all eight tiles as 16 rows of 64 bytes. The configuration belongs to the thread, and other libraries (oneDNN) change
// it.
struct TileConfig {
    const bool on;
    explicit TileConfig(bool wanted) : on(RIDGELINE_AMX && wanted) {
#if RIDGELINE_AMX
        if (!on) return;
        alignas(64) std::uint8_t bytes[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {
            bytes[16 + 2 * tile] = 64;
            bytes[48 + tile] = 16;
        }
        _tile_loadconfig(bytes);
#endif
    }
    ~TileConfig() {
#if RIDGELINE_AMX
        if (on) _tile_release();
#endif
    }
    TileConfig(const TileConfig&) = delete;
    TileConfig& operator=(const TileConfig&) = delete;
};

}  // namespace ridgeline
