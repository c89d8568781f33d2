// Casts on the CPU; the specification is in cast.py.
#include "include/cpu.h"

namespace {

template <bool NOISE, class S, class T>
void cast_row(const S* x, float scale, const u16* noise, T* out) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = rounded_to(S{}, load(x + v * kWidth) * scale);
    if constexpr (NOISE) store(out, row, noise);
    else store(out, row);
}

template <bool NOISE, class S, class T>
void cast_all(const S* x, i64 n, float scale, const Random& random, T* out) {
    u16 noise[kGroup] = {};
    for (i64 at = 0; at < n; at += kRow) {
        if (NOISE && at % kGroup == 0) fill_noise(random, (random.first + at) / kGroup, noise);
        if (at + kRow <= n) {
            cast_row<NOISE>(x + at, scale, noise + at % kGroup, out + at);
        } else {
            S some[kRow] = {};
            T narrow[kRow];
            for (i64 i = at; i < n; ++i) some[i - at] = x[i];
            cast_row<NOISE>(some, scale, noise + at % kGroup, narrow);
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
