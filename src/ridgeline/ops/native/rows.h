// State of the device's rows; see ridgeline.ops.rows.
#pragma once

#include "common.h"

namespace ridgeline {

using token = std::int32_t;

// Columns of `ints`: ridgeline.ops.rows.Int.
enum Column { POSITION, LENGTH, KNOWN, DONE, LIMIT, PROMPT, MIN_TOKENS, TOP_K, KEY, ADAPTER = 10, RANK, STOP };
// Columns of `knobs`: ridgeline.ops.rows.Knob.
enum Knob { TEMPERATURE, TOP_P, MIN_P };
// Flags: ridgeline.core.plan.Flag.
enum Flag { STOPPED = 1, FULL = 2 };

// tokens [rows, width], ints [rows, columns], tables [groups, rows, pages], all contiguous.
struct State {
    token* tokens;
    std::int32_t* ints;
    const std::int32_t* tables;
    index rows, width, columns, groups, pages, page_tokens;

    std::int32_t* of(index row) const { return ints + row * columns; }
};

// native_rows.py mirrors the order of arguments. n_query null: one query token per row.
struct Gather {
    State state;
    const std::int32_t* own;      // [n_rows]
    const std::int32_t* n_query;  // [n_rows]
    const std::int32_t* row_of;   // [n_tokens]
    const std::int32_t* place;    // [n_tokens]
    const std::int32_t* shift;    // [n_tokens], null: zeros
    index n_rows, n_tokens;
    std::int32_t* position;  // [n_tokens], like the tokens
    token* tokens;
    std::int32_t* length;  // [n_rows]
    std::int64_t* slots;   // [groups, n_tokens]
};

struct Advance {
    State state;
    const std::int32_t* rows;  // [n]
    const token* drawn;        // [n]
    index n;
    std::int32_t* said;  // [n, 3]: tokens gained, flag, token
};

void gather(const Gather& g);
void advance(const Advance& a);

}  // namespace ridgeline
