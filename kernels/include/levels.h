// Levels and codes, for a number or a vector of numbers; the specification is in levels.py.
#pragma once
#include "portable.h"

template <int BITS> constexpr int kLevels = 1 << BITS;

// Returns the nearest level and its number by comparisons with the bounds: a search would need loads
// from changing places, which vectors do slowly.
template <int BITS, class V, class W> INLINE V nearest_level(V z, const float* table, W& code) {
    V value = V{} + table[0];
    code = W{};
    for (int j = 1; j < kLevels<BITS>; ++j) {
        const float bound = table[kLevels<BITS> + j - 1];
        value = z > bound ? V{} + table[j] : value;
        code = z > bound ? W{} + (u32)j : code;
    }
    return value;
}

template <int BITS, class V, class W> INLINE V level_of(W code, const float* table) {
    V value = V{} + table[0];
    for (int j = 1; j < kLevels<BITS>; ++j) value = code >= (u32)j ? V{} + table[j] : value;
    return value;
}

// Tells whether a block is coded: its entries are finite and not all tiny.
INLINE bool good_block(u32 largest) { return largest >= kTiny && largest < kInfinity; }
INLINE float scale_of_block(u32 largest, float square, float product) {
    if (largest >= kInfinity) return float_of(kNaN);
    return good_block(largest) ? float_of(largest) * (square / product) : 0.0f;
}
