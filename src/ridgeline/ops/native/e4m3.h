// Numbers of three mantissa and four exponent bits.
#pragma once

#include "common.h"

namespace ridgeline {

// Round y to e4m3: three mantissa bits; below 2^-6 multiples of 2^-9 (the unit in the last place of float32 near 2^14).
inline f32x16 round_to_e4m3(f32x16 y) {
    const i32x16 bits = bits_of(y), odd = shift_right(bits, 20) & splat(1);
    const i32x16 up = add(bits, add(odd, splat(0x7ffff)));
    const f32x16 normal = floats_of(up & splat(std::int32_t(0xfff00000)));
    const f32x16 far = splat(24576.0f), small = (y + far) - far;
    return select(is_nan(y), y, select(less(abs(y), splat(0x1p-6f)), small, normal));
}

// Bits of e4m3 numbers, in the lowest byte of each lane.
inline i32x16 bits_of_e4m3(f32x16 y) {
    const i32x16 bits = bits_of(y), sign = shift_right(bits, 24) & splat(0x80);
    const f32x16 size = abs(y);
    const i32x16 normal = sub(shift_right(bits_of(size), 20), splat(120 << 3)), small = to_int(size * splat(0x1p9f));
    const f32x16 chosen = select(less(size, splat(0x1p-6f)), floats_of(small), floats_of(normal));
    return bits_of(chosen) | sign;
}

inline f32x16 from_e4m3(i32x16 bits) {
    const i32x16 size = bits & splat(0x7f), sign = shift_left(bits & splat(0x80), 24);
    const f32x16 normal = floats_of(add(shift_left(size, 20), splat(120 << 23))), small = to_float(size) * splat(0x1p-9f);
    return floats_of(bits_of(select(less(to_float(size), splat(8.0f)), small, normal)) | sign);
}

}  // namespace ridgeline
