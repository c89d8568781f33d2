// Rotates and quantises in blocks on a GPU; the specification is in rotated.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize_rotated(const T* x, i64 n, float scale, const i64* turn, i64 turn_seed,
                                 i64 turn_stream, i64 turn_first, const float* residual, float* unsent,
                                 const i64* step, i64 seed, i64 stream, i64 first, u8* payload,
                                 i64 codes_at, i64 bytes) {
    encode<F, BLOCK, true>(n, residual, unsent, step, seed, stream, first, payload, codes_at, bytes,
                           [=](i64 at, int count, Entries<BLOCK>& c) { load_span(x, at, count, c); },
                           Rotation{turn, turn_seed, turn_stream, turn_first, scale});
}

template <class F, class T, int BLOCK>
__global__ void dequantize_rotated(const u8* payloads, i64 codes_at, i64 stride, i64 count, i64 n,
                                   float factor, i64 accumulate, float scale, const i64* turn,
                                   i64 turn_seed, i64 turn_stream, i64 turn_first, T* out) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const Rotation rotation = {turn, turn_seed, turn_stream, turn_first, scale};
    for (i64 at = warp() * kSpan<BLOCK>; at < n; at += warps() * kSpan<BLOCK>) {
        const int count = entries_in<kSpan<BLOCK>>(at, n);
        Entries<BLOCK> c;
        sum_payloads<F, kLogRows<BLOCK>>(from, at, count, 0, c);
        turn_back<BLOCK>(rotation, at, c);
        store_span(out, at, count, factor, accumulate, c);
    }
}
