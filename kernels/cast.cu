// Scales and casts on a GPU; the specification is in cast.py.
#include "include/cuda.h"

template <class S, class T>
__global__ void cast(const S* x, i64 n, float scale, const i64* step, i64 seed, i64 stream, i64 first,
                     T* out) {
    // A warp takes 256 entries in eight rows, whose loads are under way together.
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        float rows[8];
        load_span(x, at, count, rows);
        u32 random[4] = {};
        if (step)
            philox(seed, ((u64)(first + at) >> 8) * kLanes + lane(), (u32)*step, stream, random[0],
                   random[1], random[2], random[3]);
        T* to = out + at + lane();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (!has(k, count)) continue;
            const float entry = rounded_to(S{}, rows[k] * scale);
            if constexpr (sizeof(T) == 2) {
                if (step) {
                    store(to + k * kLanes, entry, random[k / 2] >> (k % 2 * 16) & 0xffffu);
                    continue;
                }
            }
            store(to + k * kLanes, entry);
        }
    }
}
