// Levels and codes, for a number or a vector of them; the specification is in levels.py.
#pragma once
#include "portable.h"

template <int BITS> constexpr int kLevels = 1 << BITS;

// The nearest level and its number; bounds are halfway.
template <int BITS, class V, class W> INLINE V nearest_level(V z, const float* table, W& code) {
    V value = V{} + table[0];
    code = W{};
#if defined(__CUDACC_RTC__)
#pragma unroll
#endif
    for (int j = 1; j < kLevels<BITS>; ++j) {
        const float bound = table[kLevels<BITS> + j - 1];
        value = z > bound ? V{} + table[j] : value;
        code = z > bound ? W{} + (u32)j : code;
    }
    return value;
}

template <int BITS, class V, class W> INLINE V level_of(W code, const float* table) {
    V value = V{} + table[0];
#if defined(__CUDACC_RTC__)
#pragma unroll
#endif
    for (int j = 1; j < kLevels<BITS>; ++j) value = code >= (u32)j ? V{} + table[j] : value;
    return value;
}

// What a block is measured in, and whether it is worth coding.
INLINE bool good_block(u32 largest) { return largest >= kTiny && largest < kInfinity; }
INLINE float scale_of_block(u32 largest, float square, float product) {
    if (largest >= kInfinity) return float_of(kNaN);
    return good_block(largest) ? float_of(largest) * (square / product) : 0.0f;
}
