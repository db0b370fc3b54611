// Replay a list of calls. Each entry: address of its NAME_words, number of argument words, argument words.

#include <omp.h>

#include "replay.h"

RIDGELINE_API void rl_replay(const std::int64_t* words, std::int64_t calls) {
    for (; calls; --calls, words += 2 + words[1]) reinterpret_cast<void (*)(const std::int64_t*)>(words[0])(words + 2);
}

// The same by one pointer, for threads that are not ours: number of OpenMP threads, number of calls, calls.
RIDGELINE_API void rl_replay_in(void* recorded) {
    const std::int64_t* words = static_cast<const std::int64_t*>(recorded);
    omp_set_num_threads(static_cast<int>(words[0]));
    rl_replay(words + 2, words[1]);
}
