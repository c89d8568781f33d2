// Works on the parts of a bucket on the CPU; the specification is in parts.py.
#include "include/parts.h"

#include "include/blockwise_cpu.h"

namespace {

// Adds halves to halves.
template <int N> double folded(double (&sums)[N]) {
    for (int half = N / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    return sums[0];
}

template <class T> double squares_of(const T* x, i64 n) {
    double sums[kRow] = {};
    for (i64 i = 0; i < n; i += kRow) {
        Floats row[kVectors];
        float entries[kRow];
        load_row(x + i, n - i, row);
        store(entries, row);
        for (int l = 0; l < kRow; ++l) sums[l] += (double)entries[l] * (double)entries[l];
    }
    return folded(sums);
}

}  // namespace

EXPORT(squared_norms)(i64 dtype, const void* x, const Part* parts, i64 count, double* out) {
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        for (i64 p = 0; p < count; ++p) {
            double sums[kThreads] = {};
            const i64 n = parts[p + 1].begin - parts[p].begin;
            for (i64 at = 0; at < n; at += kChunk)
                sums[at / kChunk % kThreads] +=
                    squares_of(from + parts[p].begin + at, n - at < kChunk ? n - at : kChunk);
            out[p] = folded(sums);
        }
    });
}

namespace {

// Calls f(number of entries, first entry, payload, position of its codes) for the parts of a bucket.
template <class U, class Call> void each_part(const Part* parts, i64 count, U* payloads, Call call) {
    for (i64 p = 0; p < count; ++p) {
        const i64 n = parts[p + 1].begin - parts[p].begin, blocks = parts[p + 1].block - parts[p].block;
        call(n, parts[p].begin, payloads + parts[p].byte, (4 * blocks + 15) / 16 * 16);
    }
}

}  // namespace

EXPORT(quantize_parts)(const float* x, const Part* parts, i64 count, u8* payloads) {
    each_part(parts, count, payloads, [&](i64 n, i64 begin, u8* payload, i64 codes_at) {
        clear(payload, end_of_scales<Int8>(n, kBlock), codes_at);  // codes end at a multiple of 32
        encode_all<Int8>(Source<float>{x + begin, nullptr}, n, kBlock, nullptr, payload, payload + codes_at,
                         nullptr);
    });
}

EXPORT(dequantize_parts)(const u8* payloads, const Part* parts, i64 count, float* out) {
    each_part(parts, count, payloads, [&](i64 n, i64 begin, const u8* payload, i64 codes_at) {
        decode_all<Int8, float>({payload, payload + codes_at, 0, 1}, n, kBlock, 1.0f, out + begin);
    });
}
