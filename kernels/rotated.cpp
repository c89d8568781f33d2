// Rotates and quantises in blocks on the CPU; the specification is in rotated.py.
#include "include/blockwise_cpu.h"

// Formats of few, even steps gain from a rotation; 8-bit floats gain little.
template <class Call> static void with_even_format(i64 format, Call call) {
    if (format == 0) call(Int8{});
    else if (format == 1) call(Int4{});
    else if (format == 2) call(Int2{});
    else call(Sign{});
}

EXPORT(quantize_rotated)(i64 format, i64 dtype, i64 block, const void* x, const Run* table, i64 chosen,
                         float scale, const i64* turn, i64 turn_seed, i64 turn_stream, i64 turn_first,
                         const float* residual, float* unsent, const i64* step, i64 seed, i64 stream,
                         i64 first, u8* payload, i64 codes_at, i64 tails_at, i64 bytes) {
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    Random random = random_of(step, seed, stream, first);
    with_even_format(format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using F = decltype(f);
            using T = decltype(number);
            for (i64 place = 0; place < rows_chosen(table, chosen); ++place, payload += bytes) {
                const Row row = row_of(table, chosen, place);
                clear_padding<F>(table, row.index, (int)block, true, payload, {codes_at, tails_at, bytes});
                for (Segments run = runs_of(table, row.index); run < runs_of(table, row.index + 1); ++run) {
                    const i64 begin = row.entry + run->begin;
                    encode_all<F>(Source<T>{(const T*)x + begin, residual ? residual + begin : nullptr},
                                  run->count, (int)block, step ? &random : nullptr,
                                  payload + block_of(run->slot, (int)block) * kScaleBytes<F>,
                                  payload + codes_at + run->slot / kUnit<F> * kUnitBytes<F>,
                                  unsent ? unsent + begin : nullptr, run->slot, &rotation);
                }
                random.first += kRowKeys;
                rotation.random.first += kRowKeys;
            }
        });
    });
}

EXPORT(dequantize_rotated)(i64 format, i64 dtype, i64 block_size, const u8* payloads, i64 codes_at,
                           i64 tails_at, i64 bytes, i64 stride, i64 count, const Run* table, i64 chosen,
                           float factor, i64 accumulate, float scale, const i64* turn, i64 turn_seed,
                           i64 turn_stream, i64 turn_first, void* out) {
    const int block = (int)block_size;
    Rotation rotation = {random_of(turn, turn_seed, turn_stream, turn_first), scale};
    float sums[kLongest];
    with_even_format(format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using F = decltype(f);
            using T = decltype(number);
            auto put = [&](const float* from, T* to) {  // one row of 32 entries
                Floats row[kVectors];
                for (int v = 0; v < kVectors; ++v) {
                    row[v] = load(from + v * kWidth) * factor;
                    if (accumulate) row[v] += load(to + v * kWidth);
                }
                store(to, row);
            };
            for (i64 place = 0; place < rows_chosen(table, chosen);
                 ++place, payloads += bytes, rotation.random.first += kRowKeys) {
                const Row row = row_of(table, chosen, place);
                const Payloads all = {payloads, payloads + codes_at, stride, (int)count};
                for (Segments run = runs_of(table, row.index); run < runs_of(table, row.index + 1); ++run) {
                    const Payloads from = from_slot<F>(all, run->slot, block);
                    T* to = (T*)out + row.entry + run->begin;
                    for (i64 at = 0, b = 0; at < run->count; at += block, to += block, ++b) {
                        sum_block<F>(from, b, block, block, nullptr,
                                     [&](int i, const Floats(&sum)[kVectors]) { store(sums + i, sum); });
                        rotation.turn_back(run->slot + at, block, sums);
                        const int rest = (int)(run->count - at < block ? run->count - at : block);
                        int i = 0;
                        for (; i + kRow <= rest; i += kRow) put(sums + i, to + i);
                        if (i == rest) continue;
                        alignas(Floats) T some[kRow] = {};  // the last row, which is not whole
                        for (int l = 0; l < rest - i; ++l) some[l] = to[i + l];
                        put(sums + i, some);
                        for (int l = 0; l < rest - i; ++l) to[i + l] = some[l];
                    }
                }
            }
        });
    });
}
