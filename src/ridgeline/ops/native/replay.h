// Recorded calls: NAME_words takes the arguments of NAME as 64-bit words, so that one loop can make any list of calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define RIDGELINE_API extern "C" __attribute__((visibility("default")))

// Exports NAME_words.
#define RIDGELINE_REPLAYABLE(NAME) \
    RIDGELINE_API void NAME##_words(const std::int64_t* words) { ridgeline::by_words(NAME, words); }

namespace ridgeline {

// A float is in the lower half of its word.
template <class T> inline T from_word(std::int64_t word) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(word);
    if constexpr (std::is_integral_v<T>) return static_cast<T>(word);
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

template <class... A, std::size_t... I>
inline void by_words(void (*function)(A...), const std::int64_t* words, std::index_sequence<I...>) {
    function(from_word<A>(words[I])...);
}

template <class... A> inline void by_words(void (*function)(A...), const std::int64_t* words) {
    by_words(function, words, std::index_sequence_for<A...>());
}

}  // namespace ridgeline
