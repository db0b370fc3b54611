// Replay a list of calls. Each entry: address of its NAME_words, number of argument words, argument words.

#include "replay.h"

RIDGELINE_API void rl_replay(const std::int64_t* words, std::int64_t calls) {
    for (; calls; --calls, words += 2 + words[1]) reinterpret_cast<void (*)(const std::int64_t*)>(words[0])(words + 2);
}
