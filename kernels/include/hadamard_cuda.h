// Computes the randomised Hadamard transform of the registers of a warp.
//
// A warp has one block, or 256 entries of several blocks. Entry l + 32 k lies in register k of lane l:
// the first five steps are shuffles, and the others are sums of registers.
#pragma once
#include "cuda.h"

struct Rotation {
    const i64* step;
    i64 seed, stream, first;
    float scale;  // 1 / sqrt(block)
};

// The random signs of the entries of a span.
template <int ROWS> struct Signs {
    u32 words[(ROWS + 31) / 32];  // bit k is the sign of register k

    __device__ __forceinline__ Signs(const Rotation& from, i64 at) {
        u32 all[4];
        philox(from.seed, (u64)((from.first + at) / kSigns) * kLanes + lane(), (u32)*from.step,
               from.stream, all[0], all[1], all[2], all[3]);
        const int row = (int)((from.first + at) % kSigns / kLanes);  // of the first entry
#pragma unroll
        for (int w = 0; w < (ROWS + 31) / 32; ++w)
            words[w] = (row / 32 + w == 0   ? all[0]
                        : row / 32 + w == 1 ? all[1]
                        : row / 32 + w == 2 ? all[2]
                                            : all[3]) >> (row % 32);
    }
    __device__ __forceinline__ void flip(float (&c)[ROWS]) const {
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            c[k] = float_of(bits_of(c[k]) ^ (words[k / 32] >> (k % 32) & 1u) << 31);
    }
};

template <int BLOCK, int ROWS> INLINE void transform(float (&c)[ROWS]) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const float sign = lane() & distance ? -1.0f : 1.0f;  // exact, so that the fused multiply-add rounds as a sum does
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            c[k] = fmaf(c[k], sign, __shfl_xor_sync(kAllLanes, c[k], distance));
    }
#pragma unroll
    for (int distance = 1; distance < BLOCK / kLanes; distance *= 2)
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            if (!(k & distance)) {
                const float low = c[k], high = c[k + distance];
                c[k] = low + high;
                c[k + distance] = low - high;
            }
}

// Rotate the span at `at` in place, and back.
template <int BLOCK, int ROWS> INLINE void turn(const Rotation& by, i64 at, float (&c)[ROWS]) {
    Signs<ROWS>(by, at).flip(c);
    transform<BLOCK>(c);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) c[k] *= by.scale;
}
template <int BLOCK, int ROWS> INLINE void turn_back(const Rotation& by, i64 at, float (&c)[ROWS]) {
    transform<BLOCK>(c);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) c[k] *= by.scale;
    Signs<ROWS>(by, at).flip(c);
}
