// Scales and casts on the CPU; the specification is in cast.py.
#include "include/cpu.h"

namespace {

template <bool NOISE, class S, class T>
void cast_row(const S* x, float scale, const u32* noise, i64 at, T* out) {
    Floats row[kVectors];
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        row[v] = rounded_to(S{}, load(x + v * kWidth) * scale);
        if (NOISE) bits[v] = random_bits(noise, at % kGroup / kRow, v);
    }
    if constexpr (NOISE) store(out, row, bits);
    else store(out, row);
}

template <bool NOISE, class S, class T>
void cast_all(const S* x, i64 n, float scale, const Random& random, T* out) {
    u32 noise[kGroup / 2] = {};
    for (i64 at = 0; at < n; at += kRow) {
        if (NOISE && at % kGroup == 0) {
            fetch(x + at + kGroup, kGroup);
            fill_words(random, (random.first + at) / kGroup, noise);
        }
        if (at + kRow <= n) {
            cast_row<NOISE>(x + at, scale, noise, at, out + at);
        } else {
            S some[kRow] = {};
            T narrow[kRow];
            for (i64 i = at; i < n; ++i) some[i - at] = x[i];
            cast_row<NOISE>(some, scale, noise, at, narrow);
            for (i64 i = at; i < n; ++i) out[i] = narrow[i - at];
        }
    }
}

}  // namespace

EXPORT(cast)(i64 from, i64 to, const void* x, i64 n, float scale, const i64* step, i64 seed,
             i64 stream, i64 first, void* out) {
    const Random random = random_of(step, seed, stream, first);
    with_dtype((int)from, [&](auto s) {
        with_dtype((int)to, [&](auto t) {
            using S = decltype(s);
            using T = decltype(t);
            if constexpr (sizeof(S) == 4 && sizeof(T) == 2)
                if (step) return cast_all<true>((const S*)x, n, scale, random, (T*)out);
            cast_all<false>((const S*)x, n, scale, random, (T*)out);
        });
    });
}
