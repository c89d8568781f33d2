// Blockwise quantisation of rotated entries on a GPU; the specification is in rotated.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize_rotated(const T* x, i64 n, float scale, const i64* turn, i64 turn_seed,
                                 i64 turn_stream, i64 turn_first, const float* residual, float* left,
                                 const i64* step, i64 seed, i64 stream, i64 first, u8* payload,
                                 i64 codes_at, i64 bytes) {
    encode<F, BLOCK, true>(n, residual, left, step, seed, stream, first, payload, codes_at, bytes,
                           [=](i64 row) { return to_float(x[row * kLanes + lane()]); },
                           Rotation{turn, turn_seed, turn_stream, turn_first, scale});
}

template <class F, class T, int BLOCK>
__global__ void dequantize_rotated(const u8* payloads, i64 codes_at, i64 stride, i64 count, i64 n,
                                   float factor, i64 accumulate, float scale, const i64* turn,
                                   i64 turn_seed, i64 turn_stream, i64 turn_first, T* out) {
    constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK, kRows = kSpan / kLanes;
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const Rotation rotation = {turn, turn_seed, turn_stream, turn_first, scale};
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        float c[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            c[k] = at + k * kLanes < n ? sum_of_entries<F>(from, at / kLanes + k, BLOCK) : 0.0f;
        turn_back<BLOCK>(rotation, at, c);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 i = at + k * kLanes + lane();
            if (i < n) store(out + i, accumulate ? to_float(out[i]) + c[k] * factor : c[k] * factor);
        }
    }
}
