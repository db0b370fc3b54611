// A product of any size, by vectors or by AMX tiles.
#pragma once

#include "product_tiles.h"
#include "product_vectors.h"

namespace ridgeline {

// How a product reads x. Tiles sum in an order of their own, so with a fixed order they also serve single rows.
template <class T> Form form_of(index m, bool fixed = false) {
    const bool tiles = sizeof(T) == 2 && tiles_allowed;
    if (fixed) return tiles ? Form::TILES : Form::ROWS;
    if (m == 1) return Form::ROWS;
    if (tiles) return Form::TILES;
    return m > FEWER_ROWS && m <= FEW_ROWS ? Form::MIXED : Form::ROWS;
}

// Convert x to the layout that the product reads, in `room` (room_of(m, k) bytes that the team shares), unless it has that layout.
template <class T, class Out> const T* prepare(const Problem<T, Out>& p, Form form, T* room, Team team) {
    if (form == Form::ROWS && !p.norm.weight && padded_k<T>(p.k) == p.k) return p.x;
    const Team fills = form == Form::ROWS ? team.by(p.m, LANES) : team;
    room += (team.who - fills.who) * p.m * padded_k<T>(p.k);
    if (form == Form::MIXED) {
        fill_mixed(p, room, fills);
    } else {
        fill_rows(p, room, form, fills);
    }
    fills.wait();
    return room;
}

// One thread's part of a product.
template <class T> void product(const Problem<T>& p, T* room, Team team) {
    const Form form = form_of<T>(p.m, p.fixed);
    const T* x = prepare(p, form, room, team);
#if RIDGELINE_AMX
    if constexpr (sizeof(T) == 2)
        if (form == Form::TILES) return by_tiles(p, x, team);
#endif
    by_vectors(p, x, share(p.units(), team.who, team.of));
}

// Compiled once, in linear.cpp.
extern template void product(const Problem<bf16>&, bf16*, Team);
extern template void product(const Problem<float>&, float*, Team);

}  // namespace ridgeline
