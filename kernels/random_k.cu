// Selects random entries on a GPU; the specification is in random_k.py.
#include "include/cuda.h"

template <class T>
__global__ void add(const T* x, i64 n, const float* residual, float* unsent) {
    correct(x, residual, unsent, n);
}

// Calls f(stratum, place) for each stratum; a lane takes four of 128.
template <class F>
INLINE void for_places(i64 n, i64 k, const i64* step, i64 seed, i64 stream, F f) {
    for (i64 at = warp() * 128; at < k; at += warps() * 128) {
        u32 words[4];
        philox(seed, (u64)(at / 128) * kLanes + lane(), (u32)*step, stream, words[0], words[1],
               words[2], words[3]);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const i64 j = at + w * kLanes + lane();
            if (j < k) f(j, random_place(j, n, k, words[w]));
        }
    }
}

template <class T>
__global__ void gather_random(const T* x, i64 n, float* unsent, const i64* step, i64 seed, i64 stream,
                              float* values, i64 k) {
    for_places(n, k, step, seed, stream, [=](i64 j, i64 place) {
        values[j] = unsent ? unsent[place] : to_float(x[place]);
        if (unsent) unsent[place] = 0.0f;
    });
}

__global__ void scatter_random(const float* values, i64 k, float factor, const i64* step, i64 seed,
                               i64 stream, float* out, i64 n) {
    for_places(n, k, step, seed, stream,
               [=](i64 j, i64 place) { out[place] = values[j] * factor; });
}
