// The randomised Hadamard transform on a GPU; the specification is in hadamard.py.
//
// A warp has one block, or 256 entries of several. Entry l + 32 k lies in lane l, register k: the
// first five steps are shuffles, the others are sums of registers.
#include "include/cuda.h"

template <int BLOCK>
__global__ void hadamard(const float* x, i64 n, float scale, i64 inverse, const i64* step, i64 seed,
                         i64 stream, i64 first, float* out) {
    constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK, kRows = kSpan / kLanes;
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        float c[kRows];
        u32 words[4];
        philox(seed, (u64)((first + at) / kSigns) * kLanes + lane(), (u32)*step, stream, words[0],
               words[1], words[2], words[3]);
        const int row = (int)((first + at) % kSigns / kLanes);  // of the first entry among the signs'
        u32 signs[(kRows + 31) / 32];  // bit k: the sign of register k; a span is in one word or more
#pragma unroll
        for (int w = 0; w < (kRows + 31) / 32; ++w)
            signs[w] = (row / 32 + w == 0   ? words[0]
                        : row / 32 + w == 1 ? words[1]
                        : row / 32 + w == 2 ? words[2]
                                            : words[3]) >> (row % 32);
        auto turned = [&](int k, float value) {
            return float_of(bits_of(value) ^ (signs[k / 32] >> (k % 32) & 1u) << 31);
        };
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 i = at + k * kLanes + lane();
            c[k] = i < n ? x[i] : 0.0f;
            if (!inverse) c[k] = turned(k, c[k]);
        }
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            const bool upper = lane() & distance;
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                const float other = __shfl_xor_sync(kAllLanes, c[k], distance);
                c[k] = upper ? other - c[k] : c[k] + other;
            }
        }
#pragma unroll
        for (int distance = 1; distance < BLOCK / kLanes; distance *= 2)
#pragma unroll
            for (int k = 0; k < kRows; ++k)
                if (!(k & distance)) {
                    const float low = c[k], high = c[k + distance];
                    c[k] = low + high;
                    c[k + distance] = low - high;
                }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 i = at + k * kLanes + lane();
            const float value = c[k] * scale;
            if (i < n) out[i] = inverse ? turned(k, value) : value;
        }
    }
}
