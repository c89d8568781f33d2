// Rotates and quantises in blocks on the CPU; the specification is in rotated.py.
#include "include/blockwise_cpu.h"

// Formats of few, even steps gain from a rotation; 8-bit floats gain little.
template <class Call> static void with_even_format(i64 format, Call call) {
    if (format == 0) call(Int8{});
    else if (format == 1) call(Int4{});
    else if (format == 2) call(Int2{});
    else call(Sign{});
}

EXPORT(quantize_rotated)(i64 format, i64 dtype, i64 block, const void* x, i64 n, i64 shard, i64 rows,
                         float scale, const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first,
                         const float* residual, float* unsent, const i64* step, i64 seed, i64 stream,
                         i64 first, u8* payload, i64 codes_at, i64 bytes) {
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    Random random = random_of(step, seed, stream, first);
    with_even_format(format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            for (i64 row = 0; row < rows; ++row, payload += bytes) {
                const i64 begin = row * shard, here = entries_of_row(n, shard, row);
                clear_padding<decltype(f)>((here + block - 1) / block * block, (int)block, payload,
                                           codes_at, bytes);
                Source<decltype(number)> from = {(const decltype(number)*)x + begin,
                                                 residual ? residual + begin : nullptr};
                encode_all<decltype(f)>(from, here, (int)block, step ? &random : nullptr, payload,
                                        payload + codes_at, unsent ? unsent + begin : nullptr, &rotation);
                random.first += kRowKeys;
                rotation.random.first += kRowKeys;
            }
        });
    });
}

EXPORT(dequantize_rotated)(i64 format, i64 dtype, i64 block_size, const u8* payloads, i64 codes_at,
                           i64 bytes, i64 stride, i64 count, i64 n, i64 shard, i64 rows, float factor,
                           i64 accumulate, float scale, const i64* turn, i64 turn_seed, i64 turn_stream,
                           i64 turn_first, void* out) {
    const int block = (int)block_size;
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    float sums[kLongest];
    with_even_format(format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using T = decltype(number);
            auto put = [&](const float* from, T* to) {  // one row of 32 entries
                Floats row[kVectors];
                for (int v = 0; v < kVectors; ++v) {
                    row[v] = load(from + v * kWidth) * factor;
                    if (accumulate) row[v] += load(to + v * kWidth);
                }
                store(to, row);
            };
            for (i64 r = 0; r < rows; ++r, payloads += bytes, rotation.random.first += kRowKeys) {
                const Payloads from = {payloads, payloads + codes_at, stride, (int)count};
                const i64 here = entries_of_row(n, shard, r);
                T* to = (T*)out + r * shard;
                for (i64 at = 0; at < here; at += block, to += block) {
                    sum_block<decltype(f)>(from, at / block, block, block,
                                           [&](int i, const Floats(&sum)[kVectors]) { store(sums + i, sum); });
                    rotation.turn_back(at, block, sums);
                    const int rest = (int)(here - at < block ? here - at : block);
                    int i = 0;
                    for (; i + kRow <= rest; i += kRow) put(sums + i, to + i);
                    if (i == rest) continue;
                    alignas(Floats) T some[kRow] = {};  // the last row, which is not whole
                    for (int l = 0; l < rest - i; ++l) some[l] = to[i + l];
                    put(sums + i, some);
                    for (int l = 0; l < rest - i; ++l) to[i + l] = some[l];
                }
            }
        });
    });
}
