// Quantises in blocks on the CPU; the specification is in _blockwise_definition.py.
#include "include/blockwise_cpu.h"

EXPORT(quantize)(i64 format, i64 dtype, i64 block, const void* x, const Run* segments, i64 chosen,
                 const float* residual, float* unsent, const i64* step, i64 seed, i64 stream, i64 first,
                 i64 rank, i64 ranks, u8* payload, i64 codes_at, i64 tails_at, i64 bytes) {
    const Random begin = random_of(step, seed, stream, first);
    const Dither shifted = dither_from(begin, rank, ranks);
    const i64 rows = rows_chosen(segments, chosen);
    unsigned shift = 0;  // of the draws for entries of 16 bits
    with_format((int)format, [&](auto f) {
        using F = decltype(f);
        shift = F::is_dithered ? shifted.rank >> 16 : 0u;
        with_dtype((int)dtype, [&](auto number) {
            using T = decltype(number);
            Random random = begin;
            Dither dither = shifted;
            for (i64 place = 0; place < rows; ++place) {
                const Row row = row_of(segments, chosen, place);
                u8* const to = payload + place * bytes;
                clear_padding<F>(segments, row.index, (int)block, false, to, {codes_at, tails_at, bytes});
                const T* from = (const T*)x + row.entry;
                const float* rest = residual ? residual + row.entry : nullptr;
                float* left = unsent ? unsent + row.entry : nullptr;
                const Run *run = runs_of(segments, row.index), *end = runs_of(segments, row.index + 1);
                for (; run < end; ++run) {
                    encode_all<F>(Source<T>{from + run->begin, rest ? rest + run->begin : nullptr},
                                  run->count, (int)block, step ? &random : nullptr,
                                  to + block_of(run->slot, (int)block) * kScaleBytes<F>,
                                  to + codes_at + run->slot / kUnit<F> * kUnitBytes<F>,
                                  left ? left + run->begin : nullptr, run->slot, nullptr, &dither);
                }
                random.first += kRowKeys;
                dither.random.first += kRowKeys;
            }
        });
    });
    // Entries of 16 bits are the same in all formats: in a loop of their own, they are compiled once.
    with_dtype((int)dtype, [&](auto number) {
        using T = decltype(number);
        Random random = begin;
        for (i64 place = 0; place < rows; ++place, random.first += kRowKeys) {
            const Row row = row_of(segments, chosen, place);
            const T* from = (const T*)x + row.entry;
            const float* rest = residual ? residual + row.entry : nullptr;
            float* left = unsent ? unsent + row.entry : nullptr;
            encode_tails(
                segments, row.index, step ? &random : nullptr, shift,
                (BFloat16*)(payload + place * bytes + tails_at),
                [&](i64 entry, i64, int n, float* to) {
                    for (int i = 0; i < n; ++i) to[i] = as_float(from[entry + i]);
                    for (int i = 0; i < n && rest; ++i) to[i] += rest[entry + i];
                },
                [&](i64 entry, int n, const float* errors) {
                    if (left) __builtin_memcpy(left + entry, errors, sizeof(float) * (unsigned)n);
                });
        }
    });
}

EXPORT(dequantize)(i64 format, i64 dtype, const u8* payloads, i64 codes_at, i64 tails_at, i64 bytes,
                   i64 stride, i64 count, const Run* segments, i64 chosen, i64 block, float factor,
                   i64 accumulate, const i64* step, i64 seed, i64 stream, i64 first, void* out) {
    Dither dither = dither_from(random_of(step, seed, stream, first), 0, count);
    const i64 rows = rows_chosen(segments, chosen);
    with_format((int)format, [&](auto f) {
        with_dtype((int)dtype, [&](auto number) {
            using F = decltype(f);
            using T = decltype(number);
            for (i64 place = 0; place < rows; ++place, dither.random.first += kRowKeys) {
                const Row row = row_of(segments, chosen, place);
                const u8* const scales = payloads + place * bytes;
                const Payloads from = {scales, scales + codes_at, stride, (int)count};
                T* to = (T*)out + row.entry;
                const Run *run = runs_of(segments, row.index), *end = runs_of(segments, row.index + 1);
                for (; run < end; ++run) {
                    const Payloads here = from_slot<F>(from, run->slot, (int)block);
                    T* entries = to + run->begin;
                    if (accumulate)
                        add_decoded<F>(from, run->slot, run->count, (int)block, factor, entries, &dither);
                    else if constexpr (sizeof(T) == 4) {
                        // A bucket that is larger than the cache; short runs are not worth a buffer.
                        if (slots_of_row(segments) * rows < kStreamed || run->count < kLongest)
                            decode_all<F, T>(here, run->count, (int)block, factor, entries, &dither);
                        else if ((unsigned long)entries % sizeof(Floats) == 0)
                            decode_all<F, T, true>(here, run->count, (int)block, factor, entries, &dither);
                        else decode_streaming<F>(here, run->count, (int)block, factor, entries, &dither);
                    } else decode_all<F, T>(here, run->count, (int)block, factor, entries, &dither);
                }
            }
        });
    });
    with_dtype((int)dtype, [&](auto number) {
        using T = decltype(number);
        for (i64 place = 0; place < rows; ++place) {
            const Row row = row_of(segments, chosen, place);
            const u8* const tails = payloads + place * bytes + tails_at;
            T* to = (T*)out + row.entry;
            each_tail_run(segments, row.index, [&](const Run& run, i64 first_tail) {
                float sums[kGroup];
                for (i64 at = 0; at < run.count; at += kGroup) {
                    const int n = (int)(run.count - at < kGroup ? run.count - at : kGroup);
                    T* entries = to + run.begin + at;
                    sum_tails(tails, stride, count, first_tail + at, n, sums);
                    for (int i = 0; i < n; ++i) {
                        const float value = sums[i] * factor;
                        put(entries + i, accumulate ? as_float(entries[i]) + value : value);
                    }
                }
            });
        }
    });
}

namespace {

// Sums at most 2048 entries at a time, so that the sum stays in the nearest cache.
template <class F>
void requantize_run(const Payloads& from, i64 n, int block, float factor, float* unsent, float weight,
                    bool accumulate, const Random* random, u8* scales, u8* codes, Dither* received,
                    Dither* dither) {
    float sums[kLongest], errors[kLongest];
    for (i64 at = 0; at < n; at += kLongest) {
        const i64 b = block_of(at, block);
        const int count = (int)(n - at < kLongest ? n - at : kLongest);
        for (int i = 0; i < count; i += block)
            sum_block<F>(from, b + block_of(i, block), block,
                         rounded_up(count - i < block ? count - i : block, kUnit<F>), received,
                         [&](int j, const Floats(&sum)[kVectors]) {
                             for (int v = 0; v < kVectors; ++v)
                                 store_as(sums + i + j + v * kWidth, sum[v] * factor);
                         });
        encode_all<F>(Source<float>{sums, nullptr}, count, block, random,
                      scales + b * kScaleBytes<F>, codes + at / kUnit<F> * kUnitBytes<F>,
                      unsent ? errors : nullptr, from.slot + at, nullptr, dither);
        for (int i = 0; unsent && i < count; ++i) {
            const float error = errors[i] * weight;
            unsent[at + i] = accumulate ? unsent[at + i] + error : error;
        }
    }
}

}  // namespace

EXPORT(requantize)(i64 format, i64 blocks_of, const u8* payloads, i64 stride, i64 payload_count,
                   float factor, const Run* segments, i64 row, float* unsent, float weight, i64 accumulate,
                   const i64* received_step, i64 received_seed, i64 received_stream, i64 received_first,
                   const i64* step, i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at,
                   i64 tails_at, i64 bytes) {
    const Payloads from = {payloads, payloads + codes_at, stride, (int)payload_count};
    const Random random = random_of(step, seed, stream, first);
    Dither received = dither_from(
        random_of(received_step, received_seed, received_stream, received_first), 0, payload_count);
    Dither dither = dither_from(random, 0, 1);
    const int block = (int)blocks_of;
    with_format((int)format, [&](auto f) {
        using F = decltype(f);
        clear_padding<F>(segments, row, block, false, payload, {codes_at, tails_at, bytes});
        for (const Run *run = runs_of(segments, row), *end = runs_of(segments, row + 1); run < end; ++run) {
            requantize_run<F>(from_slot<F>(from, run->slot, block), run->count, block, factor,
                              unsent ? unsent + run->begin : nullptr, weight, accumulate,
                              step ? &random : nullptr, payload + block_of(run->slot, (int)block) * kScaleBytes<F>,
                              payload + codes_at + run->slot / kUnit<F> * kUnitBytes<F>, &received, &dither);
        }
    });
    encode_tails(
        segments, row, step ? &random : nullptr, 0u, (BFloat16*)(payload + tails_at),
        [&](i64, i64 place, int n, float* to) {
            sum_tails(payloads + tails_at, stride, payload_count, place, n, to);
            for (int i = 0; i < n; ++i) to[i] *= factor;
        },
        [&](i64 entry, int n, const float* errors) {
            for (int i = 0; i < n && unsent; ++i) {
                const float error = errors[i] * weight;
                unsent[entry + i] = accumulate ? unsent[entry + i] + error : error;
            }
        });
}
