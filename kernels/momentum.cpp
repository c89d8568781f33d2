// Adds gradients to momenta on the CPU; the specification is in momentum.py.
#include "include/cpu.h"

EXPORT(add_momentum)(i64 from, i64 to, const void* x, const float* velocity, i64 n, float momentum, float* fresh,
                     void* out) {
    with_dtype((int)from, [&](auto s) {
        with_dtype((int)to, [&](auto t) {
            const auto* source = (const decltype(s)*)x;
            auto* target = (decltype(t)*)out;
            for (i64 at = 0; at < n; at += kRow) {
                const i64 count = n - at < kRow ? n - at : kRow;
                Floats row[kVectors], old[kVectors];
                load_row(source + at, count, row);
                load_row(velocity + at, count, old);
                for (int v = 0; v < kVectors; ++v) row[v] += old[v] * momentum;
                store_row(fresh + at, row, count);
                if (out) store_row(target + at, row, count);
            }
        });
    });
}
