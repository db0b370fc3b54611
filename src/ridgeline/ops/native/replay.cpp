// Replay a list of calls. Each entry: address of its NAME_words, number of argument words, argument words.

#include <omp.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "replay.h"

RIDGELINE_API void rl_replay(const std::int64_t* words, std::int64_t calls) {
    for (; calls; --calls, words += 2 + words[1]) reinterpret_cast<void (*)(const std::int64_t*)>(words[0])(words + 2);
}

namespace {

// A thread that makes recorded calls for others. The OpenMP team of a thread ends with it, and a driver may call from new threads.
class Maker {
  public:
    Maker() { std::thread([this] { loop(); }).detach(); }

    // words: number of OpenMP threads, number of calls, calls.
    void make(const std::int64_t* words) {
        const std::lock_guard<std::mutex> one_at_a_time(callers_);
        std::unique_lock<std::mutex> lock(mutex_);
        words_ = words;
        changed_.notify_all();
        changed_.wait(lock, [this] { return words_ == nullptr; });
    }

  private:
    void loop() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return words_ != nullptr; });
            omp_set_num_threads(static_cast<int>(words_[0]));
            rl_replay(words_ + 2, words_[1]);
            words_ = nullptr;
            changed_.notify_all();
        }
    }

    std::mutex callers_, mutex_;
    std::condition_variable changed_;
    const std::int64_t* words_ = nullptr;
};

}  // namespace

// The same by one pointer, from any thread: see Maker::make.
RIDGELINE_API void rl_replay_in(void* recorded) {
    static Maker& maker = *new Maker;  // never destroyed: its thread waits for work until the process ends
    maker.make(static_cast<const std::int64_t*>(recorded));
}
