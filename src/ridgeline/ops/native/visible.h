// Slots of its row that a query token sees: by slot order, by position (windows) and by ancestors (draft trees).
#pragma once

#include "view.h"

#include <climits>

namespace ridgeline {

constexpr index TREE_BITS = 64;

// A row's query tokens occupy the slots from `start` on.
struct Row {
    index tokens, length, start, first_token, device_row;
    Row(const View& v, index i)
        : tokens(v.q_start[i + 1] - v.q_start[i]),
          length(v.length[i]),
          start(length - tokens),
          first_token(v.q_start[i]),
          device_row(v.rows[i]) {}
    bool runs() const { return tokens > 0 && start >= 0; }
};

// The packed queries of one tile, one per lane.
struct Lanes {
    i32x16 limit;          // slot of the query's token, -1 in idle lanes
    i32x16 behind;         // keys at or before this position are behind the window
    i32x16 place;          // index of the query token in its row
    i32x16 above[2];        // ancestors 0-31 and 32-63
    index lowest, highest;  // minimum and maximum limit of the used lanes
    std::int32_t furthest;  // maximum of `behind`
};

inline Lanes lanes_of(const View& v, const Row& row, index group, index first, index count) {
    alignas(64) std::int32_t limit[LANES], behind[LANES], place[LANES], above[2][LANES];
    Lanes lanes{};
    lanes.furthest = INT_MIN;
    index next = first / group, left = group - first % group;
    for (index lane = 0; lane < LANES; ++lane) {
        const bool used = lane < count;
        const index at = used ? next : 0, token = row.first_token + at;
        if (!--left) ++next, left = group;
        limit[lane] = used ? std::int32_t(row.start + at) : -1;
        place[lane] = std::int32_t(at);
        behind[lane] = v.window < 0 ? INT_MIN : std::int32_t(v.position[token] - v.window);
        const std::int64_t ancestors = v.ancestors ? v.ancestors[token] : -1;
        above[0][lane] = std::int32_t(ancestors);
        above[1][lane] = std::int32_t(ancestors >> 32);
        if (used) lanes.furthest = std::max(lanes.furthest, behind[lane]);
    }
    lanes.lowest = count ? limit[0] : 0;
    lanes.highest = count ? limit[count - 1] : 0;
    lanes.limit = load_bits(limit);
    lanes.behind = load_bits(behind);
    lanes.place = load_bits(place);
    for (int i = 0; i < 2; ++i) lanes.above[i] = load_bits(above[i]);
    return lanes;
}

inline mask16 seen(const View& v, const Row& row, const Lanes& lanes, index slot) {
    mask16 mask = greater(lanes.limit, splat(std::int32_t(slot - 1)));
    const index among = slot - row.start;
    if (v.window >= 0) {
        std::int32_t said = std::int32_t(slot);
        if (among >= 0) {
            said = v.position[row.first_token + among];
        } else if (v.key_positions) {
            said = v.key_positions[row.device_row * v.key_positions_stride + slot];
        }
        mask = mask & greater(splat(said), lanes.behind);
    }
    if (v.ancestors && among >= 0 && among < TREE_BITS) {
        const i32x16 bit = splat(std::int32_t(1u << among % 32));
        mask = mask & (has_bits(lanes.above[among / 32], bit) | equal(lanes.place, splat(std::int32_t(among))));
    }
    return mask;
}

// Whether every used lane sees all slots begin .. end - 1.
inline bool all_seen(const View& v, const Row& row, const Lanes& lanes, index begin, index end) {
    if (end - 1 > lanes.lowest || (v.ancestors && end > row.start)) return false;
    return v.window < 0 || (!v.key_positions && end <= row.start && begin > lanes.furthest);
}

// Number of slots, from `begin` on among begin .. end - 1, that every used lane is known to see.
inline index surely_seen(const View& v, const Row& row, const Lanes& lanes, index begin, index end) {
    if (all_seen(v, row, lanes, begin, end)) return end - begin;
    return v.window < 0 ? std::clamp<index>(std::min(row.start, lanes.lowest + 1) - begin, 0, end - begin) : 0;
}

// First slot that any of the queries may see, rounded down to a multiple of `align`, which divides the tokens of a page. Earlier
// pages may belong to other rows by now.
inline index first_seen(const View& v, const Row& row, index first_place, index end_place, index align) {
    if (v.window < 0 || v.key_positions) return 0;
    std::int32_t said = INT_MAX;
    for (index at = first_place; at < end_place; ++at) said = std::min(said, v.position[row.first_token + at]);
    return std::max<index>(0, said - v.window + 1) / align * align;
}

}  // namespace ridgeline
