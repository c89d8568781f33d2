// Norms and finite checks on the CPU; the specification is in norms.py.
#include "include/norms.h"

#include "include/cpu.h"

namespace {

// Calls f(row, entries that are there) for rows of 32 entries; what is not there is zero.
template <class T, class F> __attribute__((always_inline)) inline void each_row(const T* x, i64 n, F f) {
    Floats row[kVectors];
    i64 i = 0;
    for (; i + kRow <= n; i += kRow) {
        for (int v = 0; v < kVectors; ++v) row[v] = load(x + i + v * kWidth);
        f(row);
    }
    if (i == n) return;
    T some[kRow] = {};
    for (int l = 0; l < n - i; ++l) some[l] = x[i + l];
    for (int v = 0; v < kVectors; ++v) row[v] = load(some + v * kWidth);
    f(row);
}

u32 most(const Words (&words)[kVectors]) {
    u32 each[kRow], most = 0;
    store_as(each, words);
    for (u32 one : each) most = larger(most, one);
    return most;
}

template <class T> bool finite(const T* x, i64 n) {
    Words largest[kVectors] = {};
    each_row(x, n, [&](const Floats(&row)[kVectors]) {
        for (int v = 0; v < kVectors; ++v) largest[v] = larger(largest[v], magnitude(row[v]));
    });
    return most(largest) < kInfinity;
}

template <int COUNT> double halved(double* sums) {
    for (int half = COUNT / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    return sums[0];
}

template <class T> void norms(const T* x, i64 n, double* out) {
    double totals[2][kTotals] = {};
    Words largest[kVectors] = {};
    for (i64 at = 0; at < n; at += kChunk) {
        double sums[2][kRow] = {};
        each_row(x + at, n - at < kChunk ? n - at : kChunk, [&](const Floats(&row)[kVectors]) {
            float entries[kRow];
            for (int v = 0; v < kVectors; ++v) {
                const Words size = magnitude(row[v]);
                largest[v] = larger(largest[v], size);
                store_as(entries + v * kWidth, size);
            }
            for (int l = 0; l < kRow; ++l) {
                const double one = (double)entries[l];
                sums[0][l] += one;
                sums[1][l] += one * one;
            }
        });
        for (int i = 0; i < 2; ++i) totals[i][at / kChunk % kTotals] += halved<kRow>(sums[i]);
    }
    for (int i = 0; i < 2; ++i) out[i] = halved<kTotals>(totals[i]);
    out[2] = value_of(most(largest));
}

}  // namespace

EXPORT(finite)(i64 dtype, const void* x, i64 n, u8* answer) {
    with_dtype((int)dtype, [&](auto number) { *answer = finite((const decltype(number)*)x, n); });
}

EXPORT(norms)(i64 dtype, const void* x, i64 n, double* out) {
    with_dtype((int)dtype, [&](auto number) { norms((const decltype(number)*)x, n, out); });
}
