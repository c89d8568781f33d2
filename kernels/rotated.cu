// Rotates and quantises in blocks on a GPU; the specification is in rotated.py.
#include "include/blockwise_cuda.h"

template <class F, class T, int BLOCK>
__global__ void __launch_bounds__(256, kResident<BLOCK>)
    quantize_rotated(const T* x, Segments table, i64 chosen, float scale, const i64* turn, i64 turn_seed,
                     i64 turn_stream, i64 turn_first, const float* residual, float* unsent, const i64* step,
                     i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at, i64 tails_at, i64 bytes) {
    const Row row = row_here(table, chosen);
    const i64 key = blockIdx.y * kRowKeys;
    x += row.entry;
    if (residual) residual += row.entry;
    if (unsent) unsent += row.entry;
    encode<F, BLOCK, true>(
        table, row.index, residual, {unsent}, step, seed, stream, first + key, payload + blockIdx.y * bytes,
        {codes_at, tails_at, bytes},
        [=](i64, i64 entry, int count, Entries<BLOCK, true>& c) { load_span(x, entry, count, c); },
        [](i64, i64) { return 0.0f; }, 0, Rotation{turn, turn_seed, turn_stream, turn_first + key, scale});
}

template <class F, class T, int BLOCK>
__global__ void dequantize_rotated(const u8* payloads, i64 codes_at, i64 tails_at, i64 bytes, i64 stride,
                                   i64 count, Segments table, i64 chosen, float factor, i64 accumulate,
                                   float scale, const i64* turn, i64 turn_seed, i64 turn_stream,
                                   i64 turn_first, T* out) {
    constexpr int SPAN = kSpan<BLOCK, true>;
    const Row row = row_here(table, chosen);
    payloads += blockIdx.y * bytes;
    out += row.entry;
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const Rotation rotation = {turn, turn_seed, turn_stream, turn_first + blockIdx.y * kRowKeys, scale};
    const i64 slots = slots_of_row(table);
    for (i64 at = warp() * SPAN; at < slots; at += warps() * SPAN) {
        const Place place = coded_place(table, row.index, at);
        Entries<BLOCK, true> c;
        sum_payloads<F>(from, at, SPAN, kLog<BLOCK>, Dither{}, c);
        turn_back<BLOCK>(rotation, at, c);
        store_span(out, place.entry, entries_at<SPAN>(place), factor, accumulate, c);
    }
}
