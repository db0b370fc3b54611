// Exported products with pruned weights, and packing; see sparse.h.

#include "sparse.h"

#include <vector>

namespace ridgeline {
namespace {

bool kept(bf16 number) { return number.bits & 0x7fff; }

// A number of a block in the order of the packed layout, 0 outside the matrix.
bf16 number_at(const bf16* weight, index block, index line, index place, index n, index k) {
    const index row = block * LANES + place / PAIR, at = line * PAIR + place % PAIR;
    return row < n && at < k ? weight[row * k + at] : bf16{};
}

index pack(const bf16* weight, std::uint8_t* packed, index n, index k) {
    const index blocks = blocks_of(n), lines = padded_k<bf16>(k) / PAIR;
    std::vector<std::int64_t> starts(blocks + 1);
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks; ++block) {
        const bf16* rows = weight + block * LANES * k;
        starts[block + 1] = std::count_if(rows, rows + std::min(LANES + index(0), n - block * LANES) * k, kept);
    }
    for (index block = 0; block < blocks; ++block) starts[block + 1] += starts[block];
    const index size = index(starts.size()) * 8 + blocks * lines * 4 + (starts[blocks] + 2 * LANES) * 2;
    if (!packed) return size;
    std::memcpy(packed, starts.data(), starts.size() * 8);
    const SparseLines to = sparse_lines(packed, n, k);
#pragma omp parallel for num_threads(threads_for(n * k, 1 << 16))
    for (index block = 0; block < blocks; ++block) {
        bf16* values = (bf16*)to.values + starts[block];
        for (index line = 0; line < lines; ++line) {
            std::uint32_t mask = 0;
            for (index place = 0; place < PAIR * LANES; ++place) {
                const bf16 number = number_at(weight, block, line, place, n, k);
                if (!kept(number)) continue;
                mask |= 1u << place;
                *values++ = number;
            }
            ((std::uint32_t*)to.masks)[block * lines + line] = mask;
        }
    }
    std::memset((bf16*)to.values + starts[blocks], 0, 2 * LANES * sizeof(bf16));
    return size;
}

void linear(const Problem<bf16>& p, const void* packed) {
    const Scratch room(room_of<bf16>(p.m, p.k));
#pragma omp parallel num_threads(threads_for(p.n * p.k, 1 << 14))
    {
        const TileConfig configured(sparse_form(p.m, p.fixed) == Form::TILES);
        sparse_product(p, packed, (bf16*)room.memory, Team{omp_get_thread_num(), omp_get_num_threads()});
    }
}

}  // namespace

// Bytes of the packed matrix; packed null: nothing is written.
RIDGELINE_API index rl_sparse_pack(const bf16* weight, std::uint8_t* packed, index n, index k) {
    return pack(weight, packed, n, k);
}

// Whether this CPU expands lines in one instruction.
RIDGELINE_API int rl_expands() { return RIDGELINE_EXPANDS; }

RIDGELINE_API void rl_sparse_linear(const bf16* x, const void* packed, const bf16* bias, const bf16* added, bf16* out, index m,
                                    index n, index k, int gate, const bf16* norm, float eps, float offset, int fixed) {
    linear(Problem<bf16>{x, nullptr, bias, added, out, m, n, k, Gate(gate), {norm, eps, offset}, fixed != 0}, packed);
}
RIDGELINE_REPLAYABLE(rl_sparse_linear)

}  // namespace ridgeline
