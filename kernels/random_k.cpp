// Selects random entries on the CPU; the specification is in random_k.py.
#include "include/cpu.h"

namespace {

// Calls f(stratum, place) for each stratum.
template <class F> void for_places(i64 n, i64 k, const Random& random, F f) {
    u32 words[4 * kCalls];
    for (i64 at = 0; at < k; at += 4 * kCalls) {
        fill_words(random, at / (4 * kCalls), words);
        const i64 end = k - at < 4 * kCalls ? k - at : 4 * kCalls;
        for (i64 i = 0; i < end; ++i)
            f(at + i, random_place(at + i, n, k, words[i]));
    }
}

template <class T> float one(const T* x) {
    T some[kWidth] = {*x};
    return load(some)[0];
}

}  // namespace

EXPORT(gather_random)(i64 dtype, const void* x, i64 n, const float* residual, float* unsent,
                      const i64* step, i64 seed, i64 stream, float* values, i64 k) {
    const Random random = random_of(step, seed, stream, 0);
    with_dtype((int)dtype, [&](auto number) {
        const auto* entries = (const decltype(number)*)x;
        if (unsent) {
            i64 i = 0;
            for (; i + kWidth <= n; i += kWidth) {
                Floats sum = load(entries + i);
                if (residual) sum += load(residual + i);
                store_as(unsent + i, sum);
            }
            for (; i < n; ++i) unsent[i] = residual ? one(entries + i) + residual[i] : one(entries + i);
        }
        for_places(n, k, random, [&](i64 j, i64 place) {
            values[j] = unsent ? unsent[place] : one(entries + place);
            if (unsent) unsent[place] = 0.0f;
        });
    });
}

EXPORT(scatter_random)(const float* values, i64 k, float factor, const i64* step, i64 seed, i64 stream,
                       float* out, i64 n) {
    const Random random = random_of(step, seed, stream, 0);
    __builtin_memset(out, 0, (unsigned long)n * 4);
    for_places(n, k, random, [&](i64 j, i64 place) { out[place] = values[j] * factor; });
}
