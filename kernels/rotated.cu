// Rotates and quantises in blocks on a GPU; the specification is in rotated.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize_rotated(const T* x, i64 n, i64 shard, float scale, const i64* turn,
                                 i64 turn_seed, i64 turn_stream, i64 turn_first, const float* residual,
                                 float* unsent, const i64* step, i64 seed, i64 stream, i64 first,
                                 u8* payload, i64 codes_at, i64 bytes) {
    const i64 begin = row() * shard, key = row() * kRowKeys;
    x += begin;
    if (residual) residual += begin;
    if (unsent) unsent += begin;
    encode<F, BLOCK, true>(entries_of_row(n, shard, row()), residual, {unsent}, step, seed, stream,
                           first + key, payload + row() * bytes, codes_at, bytes,
                           [=](i64 at, int count, Entries<BLOCK, true>& c) { load_span(x, at, count, c); },
                           Rotation{turn, turn_seed, turn_stream, turn_first + key, scale});
}

template <class F, class T, int BLOCK>
__global__ void dequantize_rotated(const u8* payloads, i64 codes_at, i64 bytes, i64 stride, i64 count,
                                   i64 n, i64 shard, float factor, i64 accumulate, float scale,
                                   const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first,
                                   T* out) {
    payloads += row() * bytes;
    out += row() * shard;
    n = entries_of_row(n, shard, row());
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const Rotation rotation = {turn, turn_seed, turn_stream, turn_first + row() * kRowKeys, scale};
    const i64 coded = whole_blocks<BLOCK>(n);
    for (i64 at = warp() * kSpan<BLOCK, true>; at < n; at += warps() * kSpan<BLOCK, true>) {
        Entries<BLOCK, true> c;
        sum_payloads<F, kLogRows<BLOCK>>(from, at, entries_in_blocks<BLOCK>(at, coded), 0, c);
        turn_back<BLOCK>(rotation, at, c);
        store_span(out, at, entries_in<kSpan<BLOCK, true>>(at, n), factor, accumulate, c);
    }
}
