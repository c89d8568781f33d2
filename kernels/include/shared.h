// Integers of a shared scale, for a number or a vector of numbers; the specification is in shared.py.
#pragma once
#include "portable.h"

struct Scale {
    float level, inverse;
};

INLINE Scale scale_of(u32 magnitude, float levels) {
    if (magnitude >= kInfinity) return {float_of(kNaN), 0.0f};
    const float value = float_of(magnitude);
    return {value / levels, magnitude < kTiny ? 0.0f : levels / value};
}

// Returns entries in units of a level, clipped to the range; NaN becomes the largest.
template <class V> INLINE V units_of(V c, const Scale& scale, float levels) {
    return larger(smaller(V(c * scale.inverse), levels), -levels);
}
