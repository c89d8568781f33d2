// Affine levels, for a number or a vector of numbers; the specification is in affine.py.
#pragma once
#include "portable.h"

// The range of a block, which includes zero, and the bits of its largest magnitude.
struct Range {
    float low, high;
    u32 largest;
};

struct Levels {
    float scale;    // NaN if an entry is not finite, 0 if all are tiny
    float inverse;  // of the scale; 0 in both cases, where all levels are 0
    float zero;     // the level of zero
};

INLINE Levels levels_of(const Range& range) {
    if (range.largest >= kInfinity) return {float_of(kNaN), 0.0f, 0.0f};
    const float scale = range.high / 255.0f - range.low / 255.0f;
    if (scale < float_of(kTiny)) return {0.0f, 0.0f, 0.0f};  // the inverse could overflow
    const float inverse = 1.0f / scale, zero = (-range.low * inverse + kRound) - kRound;
    return {scale, inverse, zero > 255.0f ? 255.0f : zero};
}

// Returns the level of an entry in the low bits of a word.
template <class V> INLINE auto level_of(V x, const Levels& levels) {
    V rounded = (x * levels.inverse + kRound) - kRound;
    V inside = larger(smaller(rounded + levels.zero, 255.0f), 0.0f);
    return bits_of(inside + kRound) & 0xffu;
}
