// Products with e4m3 weights: y[m, n] = sum_k x8[m, k] w8[n, k] * row_scales[m] * scales[n]; x is quantized while it is read. With
// groups y[m, n] = sum_k x[m, k] w8[n, k] scales[n, k / group].
//
// Every e4m3 number is also a bfloat16 number, to which weights are converted (converted.h). With groups the sums of a few tokens are
// scaled, and for more tokens the weights, which are rounded to bfloat16 once more.
//
// Packed layout: that of bfloat16, with 64 bytes for two of its lines, in the byte order that Widener needs.

#include "converted.h"
#include "e4m3.h"

namespace ridgeline {
namespace {

constexpr index PAIR_OF_LINES = 64;  // bytes that convert to two lines of bfloat16
constexpr float LARGEST = 448.0f, SMALLEST_AMAX = 1e-12f;

// Position within 64 bytes of number `at` of the two lines to which they convert. Each 16 bytes hold 8 numbers of the first line
// and 8 of the second.
index place_in_pair(index number) { return number % 32 / 8 * 16 + number / 32 * 8 + number % 8; }

void pack(const std::uint8_t* values, std::uint8_t* packed, index n, index k) {
    const index wide = padded_k<bf16>(k), blocks = blocks_of(n);
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks; ++block) {
        std::uint8_t* to = packed + block * LANES * wide;
        for (index at = 0; at < wide; ++at)
            for (index lane = 0; lane < LANES; ++lane) {
                const index row = block * LANES + lane, number = (at / PAIR * LANES + lane) * PAIR + at % PAIR;
                to[number / PAIR_OF_LINES * PAIR_OF_LINES + place_in_pair(number % PAIR_OF_LINES)] =
                    row < n && at < k ? values[row * k + at] : 0;
            }
    }
}

// Quantize a row of x to e4m3, after its norm if there is one, to `out`, padded with zeros. Returns its scale. See Fp8Ops.
template <class T> float quantize_row(const T* x, bf16* out, index k, const Norm<T>& norm) {
    const f32x16 scale = norm.weight ? norm_scale(x, k, norm.eps) : zeros();
    const auto part = [&](index at) {
        const Part kept = first_lanes(k - at);
        return norm.weight ? rounded<T>(normed(x, at, kept, scale, norm)) : load(x + at, kept);
    };
    f32x16 most = zeros();
    for (index at = 0; at < k; at += LANES) most = max(most, abs(part(at)));
    const float amax = std::max(SMALLEST_AMAX, max_of(most));
    const f32x16 factor = splat(LARGEST / amax);
    const index wide = padded_k<bf16>(k);
    for (index at = 0; at < wide; at += LANES)
        store(out + at, at < k ? round_to_e4m3(part(at) * factor) : zeros());
    return amax / LARGEST;
}

// The same row in bfloat16, unquantized.
template <class T> float narrow_row(const T* x, bf16* out, index k, const Norm<T>& norm) {
    const f32x16 scale = norm.weight ? norm_scale(x, k, norm.eps) : zeros();
    for (index at = 0; at < padded_k<bf16>(k); at += LANES) {
        const Part kept = first_lanes(std::max<index>(0, k - at));
        store(out + at, norm.weight ? normed(x, at, kept, scale, norm) : load(x + at, kept));
    }
    return 1.0f;
}

// Scales of groups of inputs, a multiple of 32. For each block of 16 outputs, of which the last may have fewer: [groups][outputs].
struct Groups {
    const float* scales;
    index group, n, k;

    f32x16 factors(index block, index number) const {
        const index outputs = std::min<index>(LANES, n - block * LANES), groups = (k + group - 1) / group;
        return load(scales + block * LANES * groups + number * outputs, first_lanes(outputs));
    }
};

// Arguments of a call. T: type of x and y. plain: x is not quantized. groups.group 0: outputs have one scale, in `problem`.
template <class T> struct Call8 {
    const T* x;
    const std::uint8_t* packed;
    Problem<bf16, T> problem;
    Norm<T> norm;
    bool plain;
    Groups groups;
};

template <bool GROUPED> struct Fp8Lines {
    static constexpr bool SCALED = GROUPED;
    const std::uint8_t* packed;
    index panel;
    Groups groups;
    Widener widen;

    struct Reader {
        const std::uint8_t* from;
        const Widener& widen;
        void operator()(i32x16 (&line)[LINES]) {
            widen(from, line[0], line[1]);
            widen(from + PAIR_OF_LINES, line[2], line[3]);
            _mm_prefetch((const char*)from + PREFETCH_BYTES, _MM_HINT_T0);
            _mm_prefetch((const char*)from + PREFETCH_BYTES + PAIR_OF_LINES, _MM_HINT_T0);
            from += 2 * PAIR_OF_LINES;
        }
    };
    Reader of(index block) const { return {packed + block * panel, widen}; }
    index span(index wide) const { return GROUPED ? groups.group : wide; }
    f32x16 factors(index block, index number) const {
        if constexpr (GROUPED) return groups.factors(block, number);
        return zeros();
    }
};

template <class T> void linear(const Call8<T>& given) {
    const index m = given.problem.m, n = given.problem.n, k = given.problem.k, wide = padded_k<bf16>(k);
    const Form form = form_of<bf16>(m, given.problem.fixed);
    const int threads = threads_for(n * k, 1 << 14);
    const Scratch rows(m * wide * index(sizeof(bf16))), room(room_of<bf16>(m, k)), scales(m * index(sizeof(float)));
    const index each = converted_room(k);
    const Scratch weights(threads * each);
    Call8<T> c = given;
    c.problem.x = (bf16*)rows.memory;
    c.problem.row_scales = (float*)scales.memory;
#pragma omp parallel num_threads(threads)
    {
        const TileConfig configured(form == Form::TILES);
        const Team team{omp_get_thread_num(), omp_get_num_threads()};
        const Range own = share(m, team.who, team.of);
        for (index row = own.begin; row < own.end; ++row)
            ((float*)scales.memory)[row] = (c.plain ? narrow_row<T> : quantize_row<T>)(c.x + row * k, (bf16*)rows.memory + row * wide, k, c.norm);
        team.wait();
        Problem<bf16, T> filled = c.problem;
        filled.k = wide;  // rows are padded already
        const bf16* x = prepare(filled, form, (bf16*)room.memory, team);
        bf16* const converted = (bf16*)((char*)weights.memory + team.who * each);
        if (c.groups.group)
            converted_product(c.problem, Fp8Lines<true>{c.packed, c.problem.panel(), c.groups, {}}, x, form, converted, team);
        else
            converted_product(c.problem, Fp8Lines<false>{c.packed, c.problem.panel(), {}, {}}, x, form, converted, team);
    }
}

}  // namespace

RIDGELINE_API void rl_fp8_pack(const std::uint8_t* values, std::uint8_t* packed, index n, index k) { pack(values, packed, n, k); }

#define RIDGELINE_FP8(T, SUFFIX)                                                                                         \
    RIDGELINE_API void rl_fp8_linear_##SUFFIX(const T* x, const std::uint8_t* packed, const float* scales, const T* bias, \
                                              const T* added, T* out, index m, index n, index k, const T* norm,          \
                                              float eps, float offset, int fixed, int plain, index group) {              \
        const Problem<bf16, T> p{nullptr, nullptr, bias, added, out, m, n, k, Gate::NONE, {nullptr, 0, 0}, fixed != 0,    \
                                 group ? nullptr : scales, nullptr, 0};                                                  \
        linear(Call8<T>{x, packed, p, {norm, eps, offset}, plain != 0, {scales, group, n, k}});                          \
    }

RIDGELINE_FP8(bf16, bf16)
RIDGELINE_FP8(float, f32)
RIDGELINE_REPLAYABLE(rl_fp8_linear_bf16)
RIDGELINE_REPLAYABLE(rl_fp8_linear_f32)

}  // namespace ridgeline
