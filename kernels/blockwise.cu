// Quantises in blocks on a GPU; the specification is in _blockwise_definition.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize(const T* x, i64 n, i64 shard, const float* residual, float* unsent,
                         const i64* step, i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at,
                         i64 bytes) {
    const i64 begin = row() * shard;
    x += begin;
    if (residual) residual += begin;
    if (unsent) unsent += begin;
    encode<F, BLOCK>(entries_of_row(n, shard, row()), residual, {unsent}, step, seed, stream,
                     first + row() * kRowKeys, payload + row() * bytes, codes_at, bytes,
                     [=](i64 at, int count, Entries<BLOCK>& c) { load_span(x, at, count, c); });
}

template <class F, int BLOCK>
__global__ void requantize(const u8* payloads, i64 stride, i64 payload_count, float factor, i64 n,
                           float* unsent, float weight, i64 accumulate, const i64* step, i64 seed,
                           i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    encode<F, BLOCK, false, true>(
        n, nullptr, {unsent, weight, accumulate != 0}, step, seed, stream, first, payload, codes_at,
        bytes, [=](i64 at, int count, Entries<BLOCK>& c) {
            sum_payloads<F, kLogRows<BLOCK>>(from, at, count, 0, c);
#pragma unroll
            for (int k = 0; k < kSpan<BLOCK> / kLanes; ++k) c[k] = has(k, count) ? c[k] * factor : 0.0f;
        });
}

template <class F, class T>
__global__ void dequantize(const u8* payloads, i64 codes_at, i64 bytes, i64 stride, i64 payload_count,
                           i64 n, i64 shard, i64 block, float factor, i64 accumulate, T* out) {
    payloads += row() * bytes;
    out += row() * shard;
    n = entries_of_row(n, shard, row());
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    const int log = 26 - __clz((int)block);  // log2 of the rows of 32 entries in a block
    for (i64 at = warp() * kSpan<256>; at < n; at += warps() * kSpan<256>) {
        const int count = entries_in<kSpan<256>>(at, n);
        Entries<256> sum;  // a copy per span, so that its loads are under way together
        sum_payloads<F, -1>(from, at, count, log, sum);
        store_span(out, at, count, factor, accumulate, sum);
    }
}
