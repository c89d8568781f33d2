// Computes the discrete cosine transform of chunks on the CPU; the specification is in dct.py.
//
// A vector has the same entry of several chunks.
#include "include/dct.h"

#include "include/cpu.h"

namespace {

// Takes entries of two vectors in turn, from the lower or the upper halves of both.
template <bool UPPER> struct InTurn {
    static constexpr int entry(int l) { return l % 2 * kWidth + l / 2 + (UPPER ? kWidth / 2 : 0); }
};

// Transposes a square: each step takes the upper and the lower half of its rows in turn.
INLINE void transpose(Floats (&square)[kWidth]) {
    UNROLL
    for (int step = 1; step < kWidth; step *= 2) {
        Floats next[kWidth];
        UNROLL
        for (int i = 0; i < kWidth / 2; ++i) {
            next[2 * i] = picked<InTurn<false>>(square[i], square[i + kWidth / 2]);
            next[2 * i + 1] = picked<InTurn<true>>(square[i], square[i + kWidth / 2]);
        }
        UNROLL
        for (int i = 0; i < kWidth; ++i) square[i] = next[i];
    }
}

// Transforms kWidth chunks.
template <bool INVERSE> void transform(const float* x, float* out) {
    Floats entries[kCosines], square[kWidth];
    UNROLL
    for (int i = 0; i < kCosines; i += kWidth) {
        UNROLL
        for (int l = 0; l < kWidth; ++l) square[l] = load(x + l * kCosines + i) * kUnit;
        transpose(square);
        UNROLL
        for (int l = 0; l < kWidth; ++l) entries[i + l] = square[l];
    }
    cosines_of<INVERSE>(entries);
    UNROLL
    for (int i = 0; i < kCosines; i += kWidth) {
        UNROLL
        for (int l = 0; l < kWidth; ++l) square[l] = entries[i + l];
        transpose(square);
        UNROLL
        for (int l = 0; l < kWidth; ++l) store_as(out + l * kCosines + i, square[l]);
    }
}

template <bool INVERSE> void transform_all(const float* x, i64 n, float* out) {
    constexpr int kSpan = kWidth * kCosines;
    i64 at = 0;
    for (; at + kSpan <= n; at += kSpan) transform<INVERSE>(x + at, out + at);
    if (at == n) return;
    float some[kSpan] = {};
    __builtin_memcpy(some, x + at, (unsigned long)(n - at) * 4);
    transform<INVERSE>(some, some);
    __builtin_memcpy(out + at, some, (unsigned long)(n - at) * 4);
}

}  // namespace

EXPORT(dct)(const float* x, i64 n, i64 inverse, float* out) {
    inverse ? transform_all<true>(x, n, out) : transform_all<false>(x, n, out);
}
