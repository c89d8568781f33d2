// Gathers and scatters the tail of a bucket on the CPU; the specification is in _tail.py.
#include "include/cpu.h"

namespace {

// Calls f(at, place, count) for rows of at most 32 entries of each piece: places in bucket and tail.
template <class F> INLINE void each_row(const i64* table, i64 pieces, F f) {
    for (i64 p = 0; p < pieces; ++p) {
        const i64 at = table[2 * p], place = table[2 * p + 1], n = table[2 * p + 3] - place;
        for (i64 i = 0; i < n; i += kRow) f(at + i, place + i, n - i < kRow ? (int)(n - i) : kRow);
    }
}

}  // namespace

EXPORT(gather_tail)(i64 dtype, const i64* table, i64 pieces, const void* x, const float* residual,
                    float* total, float* tail) {
    with_dtype((int)dtype, [&](auto number) {
        each_row(table, pieces, [&](i64 at, i64 place, int count) {
            Floats row[kVectors], more[kVectors];
            load_row((const decltype(number)*)x + at, count, row);
            if (residual) {
                load_row(residual + at, count, more);
                for (int v = 0; v < kVectors; ++v) row[v] += more[v];
            }
            store_row(tail + place, row, count);
            if (total) store_row(total + at, row, count);
        });
    });
}

EXPORT(scatter_tail)(i64 dtype, const i64* table, i64 pieces, const float* tail, void* out) {
    with_dtype((int)dtype, [&](auto number) {
        each_row(table, pieces, [&](i64 at, i64 place, int count) {
            Floats row[kVectors];
            load_row(tail + place, count, row);
            store_row((decltype(number)*)out + at, row, count);
        });
    });
}

EXPORT(subtract_tail)(const i64* table, i64 pieces, const float* total, const float* sent, float* unsent) {
    each_row(table, pieces, [&](i64 at, i64 place, int count) {
        Floats row[kVectors], rest[kVectors] = {};
        if (sent) {
            load_row(total + at, count, rest);
            load_row(sent + place, count, row);
            for (int v = 0; v < kVectors; ++v) rest[v] -= row[v];
        }
        store_row(unsent + at, rest, count);
    });
}
