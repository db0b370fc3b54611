// One layer's part of the paged cache and the step's rows; see ridgeline.ops.step.
#pragma once

#include "common.h"

namespace ridgeline {

// How the cache stores numbers (stored.h). MODEL: in the model's type.
enum class Format : index { MODEL, FP8, INT8, INT4 };

// binding.py mirrors the fields in this order. Strides count elements. window < 0: none. softcap 0: none. fixed: a query's sums are
// added in one order, independent of other queries. to_scales: bytes from a layer's first element in a page to its first scale.
struct View {
    const std::int32_t* table;
    const std::int64_t* slots;
    const std::int32_t* rows;
    const std::int32_t* q_start;
    const std::int32_t* length;
    const std::int32_t* position;
    const std::int64_t* ancestors;
    const std::int32_t* key_positions;
    index table_stride, key_positions_stride, n_rows, n_tokens;
    index page_stride, kind_stride, head_stride, place_stride, page_tokens;
    index kv_heads, dim, window;
    float softcap, scale;
    index fixed;
    Format format;
    index to_scales;
};

}  // namespace ridgeline
