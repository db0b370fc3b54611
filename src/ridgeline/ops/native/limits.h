// Sampling limits (top-k, top-p and min-p, as in ops.sample.within) without sorting.
//
// Noise belongs to a token, so the token drawn among all tokens is also drawn among the allowed ones, if it is allowed. Its logit's
// rank and the mass above it decide this, which takes two more passes: the maximum, then the logits above. If it is not allowed, no
// smaller logit is allowed either, and the draw is repeated among the larger logits. The largest is always allowed. A confident
// model takes 1.05 to 1.5 draws.
//
// One thread adds a row's numbers in a fixed order, so that they do not depend on other rows.
#pragma once

#include "draw.h"

#include <functional>
#include <vector>

namespace ridgeline {

// Limits of one row; mirrors ops.sample.Limits.
struct Limits {
    std::int32_t top_k = 0;
    float top_p = 1, min_p = 0;

    bool few(index vocab) const { return top_k > 0 && top_k < vocab; }
    bool any(index vocab) const { return few(vocab) || top_p < 1 || min_p > 0; }
};

// Logits whose probabilities are added in float32, 64 per lane. Such sums are added in float64.
constexpr index PIECE = 64 * LANES;
// As in ops.sample.
constexpr float SMALLEST = 1e-5f;

// 16 logits; -inf for lanes past the end and for NaN.
template <class T> f32x16 logits_at(const T* logits, index at, index n) {
    const Part inside = first_lanes(n - at);
    const f32x16 never = splat(-INFINITY);
    return max(select(mask_of(inside), load(logits + at, inside), never), never);
}

template <class T> float largest_of(const T* logits, index n) {
    f32x16 top = splat(-INFINITY);
    for (index at = 0; at < n; at += LANES) top = max(logits_at(logits, at, n), top);
    return max_of(top);
}

// Call act(logit, index) for logits above `bound`, which may increase meanwhile.
template <class T, class Do> void each_above(const T* logits, index n, const float& bound, Do&& act) {
    for (index at = 0; at < n; at += LANES) {
        const f32x16 x = logits_at(logits, at, n);
        std::uint32_t found = word_of(greater(x, splat(bound)));
        if (!found) continue;
        float lanes[LANES];
        store(lanes, x);
        for (; found; found &= found - 1) act(lanes[__builtin_ctz(found)], at + __builtin_ctz(found));
    }
}

// Probabilities relative to that of the largest logit.
struct Scale {
    float top, per;  // per: log2(e) / temperature

    f32x16 operator()(f32x16 logits) const { return exp2((logits - splat(top)) * splat(per)); }
    double operator()(float logit) const { return std::exp2((double(logit) - top) * per); }
};

// Number and mass of the logits above a given one, and the mass of all logits.
struct Above {
    index count = 0;
    double chances = 0, all = 0;
};

template <bool CHANCES, class T> Above above(const T* logits, index n, float bound, const Scale& scale) {
    Above found;
    for (index begin = 0; begin < n; begin += PIECE) {
        f32x16 more = zeros(), all = zeros();
        for (index at = begin; at < std::min(n, begin + PIECE); at += LANES) {
            const f32x16 x = logits_at(logits, at, n);
            const mask16 is_more = greater(x, splat(bound));
            found.count += __builtin_popcount(word_of(is_more));
            if (!CHANCES) continue;
            const f32x16 chance = scale(x);
            more = more + select(is_more, chance, zeros());
            all = all + chance;
        }
        found.chances += sum_of(more), found.all += sum_of(all);
    }
    return found;
}

// The `count` largest logits above -inf. The smallest of them is last; the order of the others is undefined.
template <class T> std::vector<float> largest_of(const T* logits, index n, index count) {
    std::vector<float> held;
    float least = -INFINITY;
    const auto drop = [&] {
        const index last = std::min(count, index(held.size())) - 1;
        std::nth_element(held.begin(), held.begin() + last, held.end(), std::greater<float>());
        held.resize(last + 1);
        if (last + 1 == count) least = held.back();
    };
    each_above(logits, n, least, [&](float logit, index) {
        held.push_back(logit);
        if (index(held.size()) == 2 * count + 4 * LANES) drop();
    });
    if (!held.empty()) drop();
    return held;
}

// The largest number below a given one that is at least `bound`.
inline float just_below(double bound) {
    const float found = float(bound);
    return found < bound ? found : std::nextafter(found, -INFINITY);
}

// The draw of one row with limits.
template <class T> struct Limited {
    const T* logits;
    index vocab;
    const Draw& draw;
    const Limits& limits;
    const Scale scale;
    const double least;  // smallest logit that min_p allows
    const bool few;
    double all = 0;           // mass of all logits
    std::vector<float> most;  // the top_k largest logits, filled when needed
    double most_chances = 0;

    Limited(const T* row, index n, const Draw& how, const Limits& what)
        : logits(row), vocab(n), draw(how), limits(what),
          scale{largest_of(row, n), LOG2E / std::max(how.temperature, SMALLEST)},
          least(scale.top + std::max(how.temperature, SMALLEST) * std::log(double(what.min_p))), few(what.few(n)) {}

    void rank() {
        if (!most.empty()) return;
        most = largest_of(logits, vocab, limits.top_k);
        if (limits.top_p < 1) most_chances = above<true>(most.data(), index(most.size()), scale.top, scale).all;
    }

    template <class U> Above above_of(const U* from, index n, float x) const {
        return limits.top_p < 1 ? above<true>(from, n, x, scale) : above<false>(from, n, x, scale);
    }

    // x: the drawn logit. above: number and mass of larger logits.
    bool allows(float x, const Above& more) {
        if (few && more.count >= limits.top_k) return false;
        if (limits.top_p >= 1) return true;
        // The mass of the top_k largest is at least that of x and all larger logits, and at most that of all logits.
        const double share = limits.top_p;
        if (more.chances >= share * all) return false;
        if (!few || more.chances < share * (more.chances + scale(x))) return true;
        rank();
        return more.chances < share * most_chances;
    }

    // best: the draw among all tokens.
    std::int32_t operator()(Best best) {
        if (!(best.score > -INFINITY)) return best.token;
        float x = first_of(load(logits + best.token, first_lanes(1)));
        if (x >= scale.top) return best.token;
        float bound = std::max(x, just_below(least));
        if (x >= least || limits.top_p < 1) {
            const Above more = above_of(logits, vocab, x);
            all = more.all;
            if (x >= least && allows(x, more)) return best.token;
            if (few && more.count >= limits.top_k) rank(), bound = std::max(bound, just_below(most.back()));
        }
        std::vector<float> left;
        std::vector<std::int32_t> tokens;
        each_above(logits, vocab, bound, [&](float logit, index at) {
            left.push_back(logit);
            tokens.push_back(std::int32_t(at));
        });
        while (true) {
            const index n = index(left.size());
            best = best_of(left.data(), tokens.data(), draw, 0, n);
            x = left[best.token];
            if (x >= scale.top || allows(x, above_of(left.data(), n, x))) return tokens[best.token];
            index kept = 0;
            for (index at = 0; at < n; ++at)
                if (left[at] > x) left[kept] = left[at], tokens[kept++] = tokens[at];
            left.resize(kept);
            tokens.resize(kept);
        }
    }
};

}  // namespace ridgeline
