// Many calls in one: each as what it is called by, how many words its arguments are, and these.

#include "again.h"

RIDGELINE_API void rl_again(const std::int64_t* words, std::int64_t calls) {
    for (; calls; --calls, words += 2 + words[1]) reinterpret_cast<void (*)(const std::int64_t*)>(words[0])(words + 2);
}
