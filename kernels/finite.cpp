// Checks for finite entries on the CPU; the specification is in finite.py.
#include "include/cpu.h"

namespace {

// Calls f(row) for rows of 32 entries; what is not there is zero.
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

}  // namespace

EXPORT(finite)(i64 dtype, const void* x, i64 n, u8* answer) {
    with_dtype((int)dtype, [&](auto number) { *answer = finite((const decltype(number)*)x, n); });
}
