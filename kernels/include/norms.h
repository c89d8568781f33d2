// Levels of a block's Euclidean norm, for a number or a vector; the specification is in norms.py.
#pragma once
#include "portable.h"

struct Norm {
    float scale;    // of a code: the norm over the number of levels
    float inverse;  // of the largest magnitude; 0 makes all codes 0
    float units;    // factor of entries over the largest magnitude
};

// Tells whether a block is coded: its entries are finite and not all tiny.
INLINE bool is_coded(u32 largest) { return largest >= kTiny && largest < kInfinity; }
INLINE float inverse_of(u32 largest) { return is_coded(largest) ? 1.0f / float_of(largest) : 0.0f; }

// Takes the root of the sum of squares of entries over the largest magnitude.
INLINE Norm norm_of(u32 largest, float root, float levels) {
    if (largest >= kInfinity) return {float_of(kNaN), 0.0f, 0.0f};
    if (largest < kTiny) return {0.0f, 0.0f, 0.0f};
    return {float_of(largest) * (root / levels), inverse_of(largest), levels / root};
}

// Returns the code in the low bits of a word; `y` is an entry times `inverse`.
template <class V, class W> INLINE auto code_of(V y, const Norm& norm, float levels, W random) {
    V inside = larger(smaller(V(y * norm.units), levels), -levels);
    return bits_of(inside + centred(random) + kRound) & 0xffu;
}
