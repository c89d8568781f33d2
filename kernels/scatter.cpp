// Adds up sparse payloads on the CPU; the specification is in scatter.py.
#include "include/cpu.h"

// Adds up payloads for a range of places in the cache, payload after payload, and writes the range.
// `state` begins as zeros: where the next entry of each payload is, and the number of wrong places.
EXPORT(scatter_sum)(const int* indices, i64 indices_stride, const float* values, i64 values_stride,
                    i64 payloads, i64 k, float factor, i64 dtype, void* out, i64 n, u8* finite, i64* state) {
    constexpr i64 kRange = 4096;
    u32 most = 0;  // magnitude in the result
    with_dtype((int)dtype, [&](auto number) {
        auto* to = (decltype(number)*)out;
        float sums[kRange];
        Words largest[kVectors] = {};
        for (i64 begin = 0; begin < n; begin += kRange) {
            const i64 end = begin + kRange < n ? begin + kRange : n;
            for (float& one : sums) one = 0.0f;
            for (i64 p = 0; p < payloads; ++p) {
                const int* places = indices + p * indices_stride;
                const float* entries = values + p * values_stride;
                i64 i = state[p];
                for (; i < k && (u32)places[i] < (u64)end; ++i) {
                    // A place that does not ascend may lie before the range.
                    if (places[i] < begin || (i && places[i] <= places[i - 1])) ++state[payloads];
                    else sums[places[i] - begin] += entries[i] * factor;
                }
                state[p] = i;
            }
            i64 i = begin;
            for (; i + kRow <= end; i += kRow) {
                Floats row[kVectors];
                for (int v = 0; v < kVectors; ++v) {
                    row[v] = load(sums + (i - begin) + v * kWidth);
                    largest[v] = larger(largest[v], magnitude(rounded_to(number, row[v])));
                }
                store(to + i, row);
            }
            if (i == end) continue;
            Floats row[kVectors];  // zeros beyond the end
            for (int v = 0; v < kVectors; ++v) {
                row[v] = load(sums + (i - begin) + v * kWidth);
                largest[v] = larger(largest[v], magnitude(rounded_to(number, row[v])));
            }
            store_row(to + i, row, end - i);
        }
        u32 each[kRow];
        store_as(each, largest);
        for (u32 one : each) most = larger(most, one);
    });
    if (finite) *finite = most < kInfinity;
    // Only -1 is left over.
    for (i64 p = 0; p < payloads; ++p)
        for (i64 i = state[p]; i < k; ++i) state[payloads] += indices[p * indices_stride + i] != -1;
}
