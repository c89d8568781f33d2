// Adds squares of parts of a bucket on the CPU; the specification is in parts.py.
#include "include/parts.h"

#include "include/cpu.h"

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
