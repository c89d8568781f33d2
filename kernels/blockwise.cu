// Quantises in blocks on a GPU; the specification is in _blockwise_definition.py.
#include "include/blockwise_cuda.h"

// Blocks of 256 threads per multiprocessor: four where that spills no register, else kResident.
template <class F, class T, int BLOCK>
constexpr int kBlocks = sizeof(T) == 4 && !F::is_sign && !F::is_mx ? 4 : kResident<kSpan<BLOCK>>;

template <class F, class T, int BLOCK>
__global__ void __launch_bounds__(256, kBlocks<F, T, BLOCK>)
    quantize(const T* x, Segments table, i64 chosen, const float* residual, float* unsent, const i64* step,
             i64 seed, i64 stream, i64 first, i64 rank, i64 ranks, u8* payload, i64 codes_at, i64 tails_at,
             i64 bytes) {
    const Row row = row_here(table, chosen);
    x += row.entry;
    if (residual) residual += row.entry;
    if (unsent) unsent += row.entry;
    encode<F, BLOCK>(
        table, row.index, residual, {unsent}, step, seed, stream, first + blockIdx.y * kRowKeys,
        payload + blockIdx.y * bytes, {codes_at, tails_at, bytes},
        [=](i64, i64 entry, int count, Entries<BLOCK>& c) { load_span(x, entry, count, c); },
        [=](i64 entry, i64) {
            const float one = to_float(x[entry]);
            return residual ? one + residual[entry] : one;
        },
        (u32)rank * dither_step(ranks));
}

template <class F, int BLOCK>
__global__ void requantize(const u8* payloads, i64 stride, i64 payload_count, float factor, Segments table,
                           i64 row, float* unsent, float weight, i64 accumulate, const i64* received_step,
                           i64 received_seed, i64 received_stream, i64 received_first, const i64* step,
                           i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at, i64 tails_at,
                           i64 bytes) {
    const Dither received = {received_step, received_seed, received_stream, received_first, 0,
                             dither_step(payload_count)};
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    encode<F, BLOCK, false, true>(
        table, row, nullptr, {unsent, weight, accumulate != 0}, step, seed, stream, first, payload,
        {codes_at, tails_at, bytes},
        [=](i64 at, i64, int count, Entries<BLOCK>& c) {
            sum_payloads<F>(from, at, count, kLog<BLOCK>, received, c);
#pragma unroll
            for (int k = 0; k < kSpan<BLOCK> / kLanes; ++k) c[k] = has(k, count) ? c[k] * factor : 0.0f;
        },
        [=](i64, i64 place) { return sum_of_tails(payloads + tails_at, stride, from.count, place) * factor; });
}

template <class F, class T>
__global__ void __launch_bounds__(256, kResident<256>)
    dequantize(const u8* payloads, i64 codes_at, i64 tails_at, i64 bytes, i64 stride, i64 payload_count,
               Segments table, i64 chosen, i64 block, float factor, i64 accumulate, const i64* step, i64 seed,
               i64 stream, i64 first, T* out) {
    const Dither dither = {step, seed, stream, first + blockIdx.y * kRowKeys, 0, dither_step(payload_count)};
    const Row row = row_here(table, chosen);
    payloads += blockIdx.y * bytes;
    out += row.entry;
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    const int log = 31 - __clz((int)block);
    const i64 slots = slots_of_row(table);
    const Segments runs = runs_of(table, row.index), end = runs_of(table, row.index + 1);
    for (i64 at = warp() * kSpan<256>; at < slots; at += warps() * kSpan<256>) {
        const Place place = place_of(runs, end, at);
        const int count = entries_at<kSpan<256>>(place);
        Entries<256> sum;
        sum_payloads<F>(from, at, count, log, dither, sum);
        store_span(out, place.entry, count, factor, accumulate, sum);
    }
    each_tail(table, row.index, nullptr, 0, 0, 0, [=](i64 entry, i64 place, u32) {
        const float value = sum_of_tails(payloads + tails_at, stride, from.count, place) * factor;
        store(out + entry, accumulate ? to_float(out[entry]) + value : value);
    });
}
