// Computes the discrete cosine transform of chunks on the CPU; the specification is in dct.py.
#include "include/cpu.h"

EXPORT(dct)(const float* x, i64 n, const float* columns, float* out) {
    constexpr int kChunk = 64, kCount = kChunk / kWidth;
    for (i64 at = 0; at < n; at += kChunk) {
        float entries[kChunk];  // a copy, as `out` may be `x`
        __builtin_memcpy(entries, x + at, sizeof entries);
        Floats sums[kCount];
        for (int v = 0; v < kCount; ++v) sums[v] = load(columns + v * kWidth) * entries[0];
        for (int i = 1; i < kChunk; ++i)
            for (int v = 0; v < kCount; ++v)
                sums[v] += load(columns + i * kChunk + v * kWidth) * entries[i];
        for (int v = 0; v < kCount; ++v) store_as(out + at + v * kWidth, sums[v]);
    }
}
