// Quantises in blocks on the CPU; the specification is in _blockwise_definition.py.
#include "include/blockwise_cpu.h"

EXPORT(quantize)(i64 format, i64 dtype, i64 block, const void* x, i64 n, const float* residual,
                 float* unsent, const i64* step, i64 seed, i64 stream, i64 first, u8* payload,
                 i64 codes_at, i64 bytes) {
    const Random random = random_of(step, seed, stream, first);
    with_format((int)format, [&](auto f) {
        clear_padding<decltype(f)>(n, (int)block, payload, codes_at, bytes);
        with_dtype((int)dtype, [&](auto number) {
            Source<decltype(number)> from = {(const decltype(number)*)x, residual};
            encode_all<decltype(f)>(from, n, (int)block, step ? &random : nullptr, payload,
                                    payload + codes_at, unsent);
        });
    });
}

EXPORT(dequantize)(i64 format, i64 dtype, const u8* payloads, i64 codes_at, i64 stride, i64 count,
                   i64 n, i64 block, float factor, i64 accumulate, void* out) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    with_format((int)format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using F = decltype(f);
            using T = decltype(number);
            if (accumulate) decode_all<F, T, true>(from, n, (int)block, factor, (T*)out);
            else if (worth_streaming((const T*)out, n))
                decode_all<F, T, false, sizeof(T) == 4>(from, n, (int)block, factor, (T*)out);
            else decode_all<F, T, false>(from, n, (int)block, factor, (T*)out);
        });
    });
}

// Sums at most 2048 entries at a time, so that the sum stays in the nearest cache.
EXPORT(requantize)(i64 format, i64 blocks_of, const u8* payloads, i64 stride, i64 payload_count,
                   float factor, i64 n, const float* residual, float* unsent, const i64* step, i64 seed,
                   i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    const Random random = random_of(step, seed, stream, first);
    const int block = (int)blocks_of;
    with_format((int)format, [&](auto f) {
        using F = decltype(f);
        clear_padding<F>(n, block, payload, codes_at, bytes);
        float sums[kLongest];
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
            Source<float> source = {sums, residual ? residual + at : nullptr};
            encode_all<F>(source, count, block, step ? &here : nullptr,
                          payload + b * kScaleBytes<F>,
                          payload + codes_at + at / kUnit<F> * kUnitBytes<F>,
                          unsent ? unsent + at : nullptr);
        }
    });
}
