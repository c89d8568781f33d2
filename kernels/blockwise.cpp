// Quantises in blocks on the CPU; the specification is in _blockwise_definition.py.
#include "include/blockwise_cpu.h"

EXPORT(quantize)(i64 format, i64 dtype, i64 block, const void* x, i64 n, i64 shard, i64 rows,
                 const float* residual, float* unsent, const i64* step, i64 seed, i64 stream, i64 first,
                 u8* payload, i64 codes_at, i64 bytes) {
    Random random = random_of(step, seed, stream, first);
    with_format((int)format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            for (i64 row = 0; row < rows; ++row, payload += bytes, random.first += kRowKeys) {
                const i64 begin = row * shard, here = entries_of_row(n, shard, row);
                clear_padding<decltype(f)>(here, (int)block, payload, codes_at, bytes);
                Source<decltype(number)> from = {(const decltype(number)*)x + begin,
                                                 residual ? residual + begin : nullptr};
                encode_all<decltype(f)>(from, here, (int)block, step ? &random : nullptr, payload,
                                        payload + codes_at, unsent ? unsent + begin : nullptr);
            }
        });
    });
}

EXPORT(dequantize)(i64 format, i64 dtype, const u8* payloads, i64 codes_at, i64 bytes, i64 stride,
                   i64 count, i64 n, i64 shard, i64 rows, i64 block, float factor, i64 accumulate,
                   void* out) {
    with_format((int)format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using F = decltype(f);
            using T = decltype(number);
            const bool streams = worth_streaming((const T*)out, n);
            for (i64 row = 0; row < rows; ++row, payloads += bytes) {
                const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
                const i64 here = entries_of_row(n, shard, row);
                T* to = (T*)out + row * shard;
                if (accumulate) decode_all<F, T, true>(from, here, (int)block, factor, to);
                else if (streams) decode_all<F, T, false, sizeof(T) == 4>(from, here, (int)block, factor, to);
                else decode_all<F, T, false>(from, here, (int)block, factor, to);
            }
        });
    });
}

// Sums at most 2048 entries at a time, so that the sum stays in the nearest cache.
EXPORT(requantize)(i64 format, i64 blocks_of, const u8* payloads, i64 stride, i64 payload_count,
                   float factor, i64 n, float* unsent, float weight, i64 accumulate, const i64* step,
                   i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    const Random random = random_of(step, seed, stream, first);
    const int block = (int)blocks_of;
    with_format((int)format, [&](auto f) {
        using F = decltype(f);
        clear_padding<F>(n, block, payload, codes_at, bytes);
        float sums[kLongest], errors[kLongest];
        for (i64 at = 0; at < n; at += kLongest) {
            const i64 b = at / block;
            const int count = (int)(n - at < kLongest ? n - at : kLongest);
            for (int i = 0; i < count; i += block)
                sum_block<F>(from, b + i / block, block,
                             rounded_up(count - i < block ? count - i : block, kUnit<F>),
                             [&](int j, const Floats(&sum)[kVectors]) {
                                 for (int v = 0; v < kVectors; ++v)
                                     store_as(sums + i + j + v * kWidth, sum[v] * factor);
                             });
            Random here = random;
            here.first += at;
            Source<float> source = {sums, nullptr};
            encode_all<F>(source, count, block, step ? &here : nullptr,
                          payload + b * kScaleBytes<F>,
                          payload + codes_at + at / kUnit<F> * kUnitBytes<F>,
                          unsent ? errors : nullptr);
            for (int i = 0; unsent && i < count; ++i) {
                const float error = errors[i] * weight;
                unsent[at + i] = accumulate ? unsent[at + i] + error : error;
            }
        }
    });
}
