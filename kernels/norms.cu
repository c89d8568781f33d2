// Quantises to levels of norms on a GPU; the specification is in norms.py.
//
// A warp takes a span of 256 entries, or of one block if that is longer, in registers.
#include "include/norms.h"

#include "include/blockwise.h"
#include "include/cuda.h"

template <class T, int BLOCK>
__global__ void quantize_norms(const T* x, i64 n, float levels, const i64* step, i64 seed, i64 stream,
                               i64 first, u8* payload, i64 codes_at, i64 bytes) {
    if (warp() == 0) {
        for (i64 i = end_of_scales<Int8>(n, BLOCK) + lane(); i < codes_at; i += kLanes) payload[i] = 0;
        for (i64 i = codes_at + n + lane(); i < bytes; i += kLanes) payload[i] = 0;
    }
    constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK, kRows = kSpan / kLanes, kPerBlock = BLOCK / kLanes;
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        const int count = entries_in<kSpan>(at, n);
        float c[kRows];
        load_span(x, at, count, c);
        u8* codes = payload + codes_at + at + lane();
        float* scales = (float*)payload + at / BLOCK;
        Norm norm = {};
        u32 random[4];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            if (k % kPerBlock == 0) {
                u32 largest = 0;
#pragma unroll
                for (int j = k; j < k + kPerBlock; ++j) largest = larger(largest, magnitude(c[j]));
                largest = largest_of_warp(largest);
                const float inverse = inverse_of(largest);
                float square = 0.0f;
#pragma unroll
                for (int j = k; j < k + kPerBlock; ++j) {
                    c[j] = inverse != 0.0f ? c[j] * inverse : 0.0f;
                    square += c[j] * c[j];
                }
                norm = norm_of(largest, sqrtf(sum_of_warp(square)), levels);
                if (lane() == 0 && k * kLanes < count) scales[k / kPerBlock] = norm.scale;
            }
            if (k % 8 == 0)
                philox(seed, (((u64)(first + at) >> 8) + k / 8) * kLanes + lane(), (u32)*step, stream,
                       random[0], random[1], random[2], random[3]);
            const u32 bits = random[k % 8 / 2] >> (k % 2 * 16) & 0xffffu;
            if (has(k, count)) codes[k * kLanes] = (u8)code_of(c[k], norm, levels, bits);
        }
    }
}
