// Rotates and quantises in blocks on a GPU; the specification is in rotated.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void quantize_rotated(const T* x, i64 n, i64 shard, i64 rows, float scale, const i64* turn,
                                 i64 turn_seed, i64 turn_stream, i64 turn_first, const float* residual,
                                 float* unsent, const i64* step, i64 seed, i64 stream, i64 first,
                                 u8* payload, i64 codes_at, i64 bytes) {
    encode<F, BLOCK, true>({n, shard, rows}, residual, {unsent}, step, seed, stream, first, payload,
                           codes_at, bytes,
                           [=](i64 at, int count, Entries<BLOCK>& c) { load_span(x, at, count, c); },
                           Rotation{turn, turn_seed, turn_stream, turn_first, scale});
}

template <class F, class T, int BLOCK>
__global__ void dequantize_rotated(const u8* payloads, i64 codes_at, i64 bytes, i64 stride, i64 count,
                                   i64 n, i64 shard, i64 rows, float factor, i64 accumulate, float scale,
                                   const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first,
                                   T* out) {
    const Rows message = {n, shard, rows};
    const Rotation rotation = {turn, turn_seed, turn_stream, turn_first, scale};
    for EACH_ROW(row, message) {
        const Payloads from = row_of(payloads, codes_at, bytes, stride, count, row);
        const i64 here = message.entries(row), coded = (here + BLOCK - 1) / BLOCK * BLOCK;
        for (i64 at = warp() * kSpan<BLOCK>; at < here; at += warps() * kSpan<BLOCK>) {
            Entries<BLOCK> c;
            sum_payloads<F, kLogRows<BLOCK>>(from, at, entries_in<kSpan<BLOCK>>(at, coded), 0, c);
            turn_back<BLOCK>(rotation, row * kRowKeys + at, c);
            store_span(out, row * shard + at, entries_in<kSpan<BLOCK>>(at, here), factor, accumulate, c);
        }
    }
}
