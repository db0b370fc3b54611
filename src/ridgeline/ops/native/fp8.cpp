// Products with weights in 8 bits (e4m3): y[m, n] = sum_k x8[m, k] w8[n, k] * row_scales[m] * scales[n], x quantized on the way in.
//
// Every e4m3 number is a bfloat16 number too: weights are widened in registers for a few tokens, for more into the thread's
// cache, a few outputs at a time, and multiplied as in bfloat16. Memory gives half the bytes, and the sums are the same.
//
// Packed layout: that of bfloat16, 64 bytes for two of its lines, in the order in which bytes and tables come together below.

#include "product.h"

namespace ridgeline {
namespace {

constexpr index PAIR_OF_LINES = 64;  // bytes that become two lines of bfloat16
constexpr float LARGEST = 448.0f, SMALLEST_AMAX = 1e-12f;
constexpr index GROUP = 4;         // blocks of outputs that are widened together; a pair for tiles

// The upper and lower halves of the bfloat16 numbers that the 128 magnitudes of e4m3 are; the last one is NaN.
struct Tables {
    alignas(64) std::uint8_t high[128], low[128];
    Tables() {
        for (int code = 0; code < 128; ++code) {
            const int exponent = code >> 3, mantissa = code & 7;
            const float value = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(float(mantissa), -9);
            std::uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (code == 127) bits = 0x7fc00000;
            high[code] = std::uint8_t(bits >> 24);
            low[code] = std::uint8_t(bits >> 16);
        }
    }
};
const Tables tables;

// Byte `at` of the two lines that 64 bytes become, in those 64 bytes: each 16 of them hold 8 numbers of the first line and 8
// of the second.
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

#ifdef __AVX512VBMI__
struct Widener {
    const __m512i high[2] = {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)};
    const __m512i low[2] = {_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)};

    void operator()(const std::uint8_t* from, __m512i& first, __m512i& second) const {
        const __m512i codes = _mm512_loadu_si512(from), sign = _mm512_set1_epi8(char(0x80));
        // The tables ignore the sign; 0xea is (a & b) | c, which puts it back.
        const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        const __m512i upper = _mm512_ternarylogic_epi32(codes, sign, magnitude, 0xea);
        const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        first = _mm512_unpacklo_epi8(lower, upper);
        second = _mm512_unpackhi_epi8(lower, upper);
    }
};
#else
// Exponent and mantissa move into place and the exponent by the difference of the biases; numbers below the smallest normal
// one and NaN come from a table.
struct Widener {
    static __m512i wide(__m512i codes) {
        alignas(64) std::uint16_t odd[32];
        for (int code = 0; code < 8; ++code) odd[code] = std::uint16_t(tables.high[code] << 8 | tables.low[code]);
        const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        const __m512i moved = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        const __mmask32 small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
        __m512i bits = _mm512_mask_permutexvar_epi16(moved, small, magnitude, _mm512_load_si512(odd));
        bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
        return _mm512_or_si512(bits, _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8));
    }
    void operator()(const std::uint8_t* from, __m512i& first, __m512i& second) const {
        const __m512i codes = _mm512_loadu_si512(from), none = _mm512_setzero_si512();
        first = wide(_mm512_unpacklo_epi8(codes, none));
        second = wide(_mm512_unpackhi_epi8(codes, none));
    }
};
#endif

// y rounded to e4m3: three bits of mantissa, below 2^-6 multiples of 2^-9 (which is the unit of numbers next to 2^14).
__m512 round_to_e4m3(__m512 y) {
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    const __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(std::int32_t(0xfff00000))));
    const __m512 far = _mm512_set1_ps(24576.0f), small = _mm512_sub_ps(_mm512_add_ps(y, far), far);
    const __mmask16 below = _mm512_cmp_ps_mask(_mm512_abs_ps(y), _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_mask_mov_ps(normal, below, small), nan, y);
}

// One row of x as e4m3 numbers, normed before where asked for: to out, padded with zeros; -> its scale. See Fp8Ops.
template <class T> float quantize_row(const T* x, bf16* out, index k, const Norm<T>& norm) {
    const __m512 scale = norm.weight ? norm_scale(x, k, norm.eps) : _mm512_setzero_ps();
    const auto part = [&](index at) {
        const __mmask16 kept = first_lanes(k - at);
        return norm.weight ? rounded<T>(normed(x, at, kept, scale, norm)) : load(x + at, kept);
    };
    __m512 most = _mm512_setzero_ps();
    for (index at = 0; at < k; at += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(part(at)));
    const float amax = std::max(SMALLEST_AMAX, _mm512_reduce_max_ps(most));
    const __m512 factor = _mm512_set1_ps(LARGEST / amax);
    const index wide = padded_k<bf16>(k);
    for (index at = 0; at < wide; at += LANES)
        store(out + at, at < k ? round_to_e4m3(_mm512_mul_ps(part(at), factor)) : _mm512_setzero_ps());
    return amax / LARGEST;
}

// The same row in bfloat16, not quantized.
template <class T> float narrow_row(const T* x, bf16* out, index k, const Norm<T>& norm) {
    const __m512 scale = norm.weight ? norm_scale(x, k, norm.eps) : _mm512_setzero_ps();
    for (index at = 0; at < padded_k<bf16>(k); at += LANES) {
        const __mmask16 kept = first_lanes(std::max<index>(0, k - at));
        store(out + at, norm.weight ? normed(x, at, kept, scale, norm) : load(x + at, kept));
    }
    return 1.0f;
}

// Everything of one call; T: what x and y are. plain: x is not quantized.
template <class T> struct Call8 {
    const T* x;
    const std::uint8_t* packed;
    Problem<bf16, T> problem;
    Norm<T> norm;
    bool plain;
};

// Up to ROWS of x times one block, weights widened in registers; SPLIT sums along K hide the latency of the multiply-adds.
template <int ROWS, int SPLIT, Form FORM, class T>
void stream8(const Call8<T>& c, const bf16* x, const Widener& widen, index block) {
    const Problem<bf16, T>& p = c.problem;
    const index wide = padded_k<bf16>(p.k);
    const bf16* rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = x + std::min<index>(r, p.m - 1) * wide;
    const std::uint8_t* from = c.packed + block * p.panel();
    __m512 sum[ROWS][SPLIT];
    for (auto& of_row : sum)
        for (auto& one : of_row) one = _mm512_setzero_ps();
    for (index at = 0; at < wide; at += 4 * PAIR, from += 2 * PAIR_OF_LINES) {
        __m512i line[4];
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
                sum[r][i % SPLIT] = step(sum[r][i % SPLIT], numbers, line[i]);
            }
    }
    for (int r = 0; r < ROWS && r < p.m; ++r) {
        for (int part = 1; part < SPLIT; ++part) sum[r][0] = _mm512_add_ps(sum[r][0], sum[r][part]);
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
        else if (m <= FEWER_ROWS) stream8<6, 2, Form::ROWS>(c, x, widen, block);
        else if (m <= 12) stream8<12, 1, Form::MIXED>(c, x, widen, block);
        else stream8<16, 1, Form::MIXED>(c, x, widen, block);
    }
}

// The blocks `own`, widened a few at a time.
template <class T> void multiply(const Call8<T>& c, const bf16* x, Form form, bf16* weights, Range own) {
    const Problem<bf16, T>& p = c.problem;
    const index panel = p.panel(), group = form == Form::TILES ? 2 : GROUP;
    const Widener widen;
    for (index first = own.begin; first < own.end; first += group) {
        const index end = std::min(first + group, own.end);
        const std::uint8_t* from = c.packed + first * panel;
        for (index at = 0; at < (end - first) * panel; at += PAIR_OF_LINES) {
            _mm_prefetch((const char*)from + at + PREFETCH_BYTES, _MM_HINT_T0);
            __m512i first_line, second_line;
            widen(from + at, first_line, second_line);
            _mm512_store_si512(weights + at, first_line);
            _mm512_store_si512(weights + at + PAIR_OF_LINES / 2, second_line);
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
        by_vectors(part, x, {first, end});
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

}  // namespace ridgeline
