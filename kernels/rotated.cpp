// Rotates and quantises in blocks on the CPU; the specification is in rotated.py.
#include "include/blockwise_cpu.h"

// Formats of few, even steps gain from a rotation; 8-bit floats gain little.
template <class Call> static void with_even_format(i64 format, Call call) {
    if (format == 0) call(Int8{});
    else if (format == 1) call(Int4{});
    else if (format == 2) call(Int2{});
    else call(Sign{});
}

EXPORT(quantize_rotated)(i64 format, i64 dtype, i64 block, const void* x, i64 n, float scale,
                         const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first,
                         const float* residual, float* unsent, const i64* step, i64 seed, i64 stream,
                         i64 first, u8* payload, i64 codes_at, i64 bytes) {
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    const Random random = random_of(step, seed, stream, first);
    with_even_format(format, [&](auto f) {
        clear_padding<decltype(f)>(n, (int)block, payload, codes_at, bytes);
        with_dtype((int)dtype, [&](auto number) {
            Source<decltype(number)> from = {(const decltype(number)*)x, residual};
            encode_all<decltype(f)>(from, n, (int)block, step ? &random : nullptr, payload,
                                    payload + codes_at, unsent, &rotation);
        });
    });
}

EXPORT(dequantize_rotated)(i64 format, i64 dtype, i64 block_size, const u8* payloads, i64 codes_at,
                           i64 stride, i64 count, i64 n, float factor, i64 accumulate, float scale,
                           const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first, void* out) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
    const int block = (int)block_size;
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    float sums[kLongest];
    with_even_format(format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            auto* to = (decltype(number)*)out;
            for (i64 at = 0; at < n; at += block, to += block) {
                sum_block<decltype(f)>(from, at / block, block, block,
                                       [&](int i, const Floats(&sum)[kVectors]) { store(sums + i, sum); });
                rotation.turn_back(at, block, sums);
                for (int i = 0; i < block; i += kRow) {
                    Floats row[kVectors];
                    for (int v = 0; v < kVectors; ++v) {
                        row[v] = load(sums + i + v * kWidth) * factor;
                        if (accumulate) row[v] += load(to + i + v * kWidth);
                    }
                    store(to + i, row);
                }
            }
        });
    });
}
