// Adds gradients to momenta on a GPU; the specification is in momentum.py.
#include "include/cuda.h"

template <class T, class U>
__global__ void add_momentum(const T* x, const float* velocity, i64 n, float momentum, float* fresh, U* out) {
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        float c[8], old[8];
        load_span(x, at, count, c);
        load_span(velocity, at, count, old);
#pragma unroll
        for (int k = 0; k < 8; ++k) c[k] += old[k] * momentum;
        store_span(fresh, at, count, c);
        if (out) store_span(out, at, count, c);
    }
}
