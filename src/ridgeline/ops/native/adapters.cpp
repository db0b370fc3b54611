// Exported operations of LoRA adapters: grouping of a step's tokens, and what adapters add to a linear.

#include "adapters.h"

#include <vector>

namespace ridgeline {
namespace {

template <class T> void adapt(const Groups& groups, const Adapters<T>& w, const T* x, T* y) {
    if (!groups.size()) return;
    const Scratch inner(groups.tokens() * w.width() * index(sizeof(T)));
    const index work = groups.size() * w.most_rank * (w.inputs * w.parts + w.outputs());
#pragma omp parallel num_threads(threads_for(work, 1 << 14))
    {
        const Team team{omp_get_thread_num(), omp_get_num_threads()};
        add_up(groups, w, x, false, (T*)inner.memory, team);
        team.wait();
        add_adapted(groups, w, (const T*)inner.memory, y, team);
    }
}

}  // namespace

// Group the tokens of a step by slot. adapters: slot of device row i at i * stride, 0 for none. rows: device rows. row_of [tokens]:
// index into rows. selected [n]: the tokens; null: all n in order. words: 2 + 2 min(slots, n) + n, see Groups.
RIDGELINE_API void rl_adapter_groups(const std::int32_t* adapters, index stride, const std::int32_t* rows,
                                     const std::int32_t* row_of, const std::int32_t* selected, index n, index slots,
                                     std::int32_t* words) {
    const auto slot_of = [&](index token) { return adapters[rows[row_of[selected ? selected[token] : token]] * stride]; };
    std::vector<std::int32_t> place(slots + 2);  // of the next token of each slot
    for (index token = 0; token < n; ++token) ++place[slot_of(token) + 1];
    words[0] = 0;
    words[1] = std::int32_t(2 + 2 * std::min(slots, n));
    place[1] = 0;  // tokens without an adapter
    for (index slot = 1; slot <= slots; ++slot) {
        place[slot + 1] += place[slot];
        if (place[slot + 1] == place[slot]) continue;
        words[2 + 2 * words[0]] = std::int32_t(slot);
        words[3 + 2 * words[0]++] = place[slot + 1];
    }
    for (index token = 0; token < n; ++token)
        if (const std::int32_t slot = slot_of(token)) words[words[1] + place[slot]++] = std::int32_t(token);
}

RIDGELINE_API void rl_adapt_bf16(const std::int32_t* groups, const Adapters<bf16>* w, const bf16* x, bf16* y) {
    adapt(Groups{groups}, *w, x, y);
}
RIDGELINE_API void rl_adapt_f32(const std::int32_t* groups, const Adapters<float>* w, const float* x, float* y) {
    adapt(Groups{groups}, *w, x, y);
}
RIDGELINE_REPLAYABLE(rl_adapter_groups)
RIDGELINE_REPLAYABLE(rl_adapt_bf16)
RIDGELINE_REPLAYABLE(rl_adapt_f32)

}  // namespace ridgeline
