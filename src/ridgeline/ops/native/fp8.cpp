// Products with e4m3 weights: y[m, n] = sum_k x8[m, k] w8[n, k] * row_scales[m] * scales[n]; x is quantized while it is read.
//
// Every e4m3 number is also a bfloat16 number. For a few tokens weights are converted in registers, for more tokens into the
// thread's cache, a few outputs at a time, and multiplied as bfloat16. Memory traffic is half that of bfloat16, and the sums are
// the same.
//
// Packed layout: that of bfloat16, with 64 bytes for two of its lines, in the byte order that Widener needs.

#include "product.h"

namespace ridgeline {
namespace {

constexpr index PAIR_OF_LINES = 64;  // bytes that convert to two lines of bfloat16
constexpr float LARGEST = 448.0f, SMALLEST_AMAX = 1e-12f;
constexpr index GROUP = 4;         // blocks of outputs that are converted together; a pair for tiles

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

// Round y to e4m3: three mantissa bits; below 2^-6 multiples of 2^-9 (the unit in the last place of float32 near 2^14).
f32x16 round_to_e4m3(f32x16 y) {
    const i32x16 bits = bits_of(y), odd = shift_right(bits, 20) & splat(1);
    const i32x16 up = add(bits, add(odd, splat(0x7ffff)));
    const f32x16 normal = floats_of(up & splat(std::int32_t(0xfff00000)));
    const f32x16 far = splat(24576.0f), small = (y + far) - far;
    return select(is_nan(y), y, select(less(abs(y), splat(0x1p-6f)), small, normal));
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

// Arguments of a call. T: type of x and y. plain: x is not quantized.
template <class T> struct Call8 {
    const T* x;
    const std::uint8_t* packed;
    Problem<bf16, T> problem;
    Norm<T> norm;
    bool plain;
};

// Up to ROWS of x times one block, with weights converted in registers. Up to MOST_SPLIT sums along K hide the latency of
// multiply-adds.
template <int ROWS, int MOST_SPLIT, Form FORM, class T>
void stream8(const Call8<T>& c, const bf16* x, const Widener& widen, index block) {
    constexpr int SPLIT = std::clamp(SUMS / ROWS, 1, MOST_SPLIT);
    const Problem<bf16, T>& p = c.problem;
    const index wide = padded_k<bf16>(p.k);
    const bf16* rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = x + std::min<index>(r, p.m - 1) * wide;
    const std::uint8_t* from = c.packed + block * p.panel();
    f32x16 sum[ROWS][SPLIT];
    for (auto& of_row : sum)
        for (auto& one : of_row) one = zeros();
    for (index at = 0; at < wide; at += 4 * PAIR, from += 2 * PAIR_OF_LINES) {
        i32x16 line[4];
        widen(from, line[0], line[1]);
        widen(from + PAIR_OF_LINES, line[2], line[3]);
        _mm_prefetch((const char*)from + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char*)from + PREFETCH_BYTES + PAIR_OF_LINES, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const index k = at + i * PAIR;
                const bf16* numbers = FORM == Form::MIXED ? x + k * LANES + r * PAIR : rows[r] + k;
                sum[r][i % SPLIT] = step(sum[r][i % SPLIT], spread(numbers), line[i]);
            }
    }
    for (int r = 0; r < ROWS && r < p.m; ++r) {
        for (int part = 1; part < SPLIT; ++part) sum[r][0] = sum[r][0] + sum[r][part];
        p.put(r, block * LANES, sum[r][0]);
    }
}

template <class T> void in_registers(const Call8<T>& c, const bf16* x, Range own) {
    const Widener widen;
    const index m = c.problem.m;
    for (index block = own.begin; block < own.end; ++block) {
        if (m == 1) stream8<1, 4, Form::ROWS>(c, x, widen, block);
        else if (m == 2) stream8<2, 4, Form::ROWS>(c, x, widen, block);
        else if (m <= 4) stream8<4, 2, Form::ROWS>(c, x, widen, block);
        else if (m <= 6) stream8<6, 2, Form::ROWS>(c, x, widen, block);
        else if (m <= FEWER_ROWS) stream8<8, 2, Form::ROWS>(c, x, widen, block);
        else if (m <= 12) stream8<12, 1, Form::MIXED>(c, x, widen, block);
        else stream8<16, 1, Form::MIXED>(c, x, widen, block);
    }
}

// The blocks `own`, converted a few at a time.
template <class T> void multiply(const Call8<T>& c, const bf16* x, Form form, bf16* weights, Range own) {
    const Problem<bf16, T>& p = c.problem;
    const index panel = p.panel(), group = form == Form::TILES ? 2 : GROUP;
    const Widener widen;
    for (index first = own.begin; first < own.end; first += group) {
        const index end = std::min(first + group, own.end);
        const std::uint8_t* from = c.packed + first * panel;
        for (index at = 0; at < (end - first) * panel; at += PAIR_OF_LINES) {
            _mm_prefetch((const char*)from + at + PREFETCH_BYTES, _MM_HINT_T0);
            i32x16 first_line, second_line;
            widen(from + at, first_line, second_line);
            store_bits(weights + at, first_line);
            store_bits(weights + at + PAIR_OF_LINES / 2, second_line);
        }
        Problem<bf16, T> part = p;
        part.packed = weights;
        part.from_block = first;
#if RIDGELINE_AMX
        if (form == Form::TILES) {
            pair_by_tiles(part, x, first / 2);
            continue;
        }
#endif
        in_any_number<false>(part, x, {first, end});
    }
}

template <class T> void linear(const Call8<T>& given) {
    const index m = given.problem.m, n = given.problem.n, k = given.problem.k, wide = padded_k<bf16>(k);
    const Form form = form_of<bf16>(m, given.problem.fixed);
    const int threads = threads_for(n * k, 1 << 14);
    const Scratch rows(m * wide * index(sizeof(bf16))), room(room_of<bf16>(m, k)), scales(m * index(sizeof(float)));
    const index each = GROUP * LANES * wide;
    const Scratch weights(threads * each * index(sizeof(bf16)));
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
        const index group = form == Form::TILES ? 2 : 1, units = (blocks_of(n) + group - 1) / group;
        const Range mine = share(units, team.who, team.of);
        const Range blocks{mine.begin * group, std::min(mine.end * group, blocks_of(n))};
        if (form != Form::TILES && m <= FEW_ROWS && !c.problem.fixed) {
            in_registers(c, x, blocks);
        } else {
            multiply(c, x, form, (bf16*)weights.memory + team.who * each, blocks);
        }
    }
}

}  // namespace

RIDGELINE_API void rl_fp8_pack(const std::uint8_t* values, std::uint8_t* packed, index n, index k) { pack(values, packed, n, k); }

#define RIDGELINE_FP8(T, SUFFIX)                                                                                         \
    RIDGELINE_API void rl_fp8_linear_##SUFFIX(const T* x, const std::uint8_t* packed, const float* scales, const T* bias, \
                                              const T* added, T* out, index m, index n, index k, const T* norm,          \
                                              float eps, float offset, int fixed, int plain) {                           \
        const Problem<bf16, T> p{nullptr, nullptr, bias, added, out, m, n, k, Gate::NONE, {nullptr, 0, 0}, fixed != 0,    \
                                 scales, nullptr, 0};                                                                    \
        linear(Call8<T>{x, packed, p, {norm, eps, offset}, plain != 0});                                                             \
    }

RIDGELINE_FP8(bf16, bf16)
RIDGELINE_FP8(float, f32)
RIDGELINE_REPLAYABLE(rl_fp8_linear_bf16)
RIDGELINE_REPLAYABLE(rl_fp8_linear_f32)

}  // namespace ridgeline
