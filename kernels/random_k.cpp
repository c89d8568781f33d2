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

float as(float, float x) { return x; }
Half as(Half, float x) { return {(u16)to_half(x)}; }
BFloat16 as(BFloat16, float x) { return {(u16)to_bfloat16(x)}; }

template <class T> bool finite(const T* x, i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i)
        if (magnitude(one(x + i)) >= kInfinity) return false;
    return true;
}

// Writes x + residual to `unsent` if that is given; returns whether all of it is finite.
template <class T> bool correct(const T* x, i64 n, const float* residual, float* unsent) {
    Words largest[kVectors] = {};
    i64 i = 0;
    for (; i + kRow <= n; i += kRow)
        for (int v = 0; v < kVectors; ++v) {
            const i64 j = i + v * kWidth;
            Floats sum = load(x + j);
            if (residual) sum += load(residual + j);
            if (unsent) store_as(unsent + j, sum);
            largest[v] = larger(largest[v], magnitude(sum));
        }
    u32 each[kRow], most = 0;
    store_as(each, largest);
    for (u32 one : each) most = larger(most, one);
    for (; i < n; ++i) {
        const float sum = residual ? one(x + i) + residual[i] : one(x + i);
        if (unsent) unsent[i] = sum;
        most = larger(most, magnitude(sum));
    }
    return most < kInfinity;
}

}  // namespace

EXPORT(gather_random)(i64 dtype, const void* x, i64 n, const float* residual, float* unsent,
                      const i64* step, i64 seed, i64 stream, float* values, i64 k) {
    const Random random = random_of(step, seed, stream, 0);
    with_dtype((int)dtype, [&](auto number) {
        const auto* entries = (const decltype(number)*)x;
        const bool fits = correct(entries, n, residual, unsent);
        for_places(n, k, random, [&](i64 j, i64 place) {
            const i64 begin = j * n / k, end = (j + 1) * n / k;
            const bool all = fits || (unsent ? finite(unsent, begin, end) : finite(entries, begin, end));
            const float drawn = unsent ? unsent[place] : one(entries + place);
            values[j] = all ? drawn : float_of(kNaN);
            if (unsent) unsent[place] = 0.0f;
        });
    });
}

EXPORT(scatter_random)(const float* values, i64 k, float factor, const u8* finite, const i64* step,
                       i64 seed, i64 stream, i64 dtype, void* out, i64 n) {
    const Random random = random_of(step, seed, stream, 0);
    with_dtype((int)dtype, [&](auto number) {
        auto* to = (decltype(number)*)out;
        if (finite && !*finite) {
            for (i64 i = 0; i < n; ++i) to[i] = as(number, float_of(kNaN));
            return;
        }
        __builtin_memset(out, 0, (unsigned long)n * sizeof(number));
        for_places(n, k, random, [&](i64 j, i64 place) { to[place] = as(number, values[j] * factor); });
    });
}
