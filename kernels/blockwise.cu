// Blockwise quantisation on a GPU; the specification is in blockwise.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize(const T* x, i64 n, const float* residual, float* left, const i64* step,
                         i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes) {
    encode<F, BLOCK>(n, residual, left, step, seed, stream, first, payload, codes_at, bytes,
                     [=](i64 row) { return to_float(x[row * kLanes + lane()]); });
}

template <class F, int BLOCK>
__global__ void requantize(const u8* payloads, i64 stride, i64 count, float factor, i64 n,
                           const float* residual, float* left, const i64* step, i64 seed, i64 stream,
                           i64 first, u8* payload, i64 codes_at, i64 bytes) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    encode<F, BLOCK>(n, residual, left, step, seed, stream, first, payload, codes_at, bytes,
                     [=](i64 row) { return sum_of_entries<F>(from, row, BLOCK) * factor; });
}

template <class F, class T>
__global__ void dequantize(const u8* payloads, i64 codes_at, i64 stride, i64 count, i64 n, i64 block,
                           float factor, i64 accumulate, T* out) {
    constexpr int kAtOnce = 8;  // rows whose loads are under way together
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const i64 rows = (n + kLanes - 1) / kLanes;
    for (i64 row = warp() * kAtOnce; row < rows; row += warps() * kAtOnce) {
        float sum[kAtOnce] = {};
        for (int r = 0; r < count; ++r)
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                if (row + k >= rows) break;
                const float one = entry<F>(from, r, row + k, (int)block);
                sum[k] = r ? sum[k] + one : one;
            }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const i64 i = (row + k) * kLanes + lane();
            if (i < n) store(out + i, accumulate ? to_float(out[i]) + sum[k] * factor : sum[k] * factor);
        }
    }
}
