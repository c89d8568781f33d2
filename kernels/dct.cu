// Computes the discrete cosine transform of chunks on a GPU; the specification is in dct.py.
//
// A warp takes a chunk of 64 entries, two per lane. Shuffles pass entries between lanes, and the matrix
// is in shared memory.
#include "include/cuda.h"

__global__ void dct(const float* x, i64 n, const float* columns, float* out) {
    constexpr int kChunk = 64;
    __shared__ float table[kChunk * kChunk];
    for (int i = (int)threadIdx.x; i < kChunk * kChunk; i += (int)blockDim.x) table[i] = columns[i];
    __syncthreads();
    for (i64 at = warp() * kChunk; at < n; at += warps() * kChunk) {
        const float low = x[at + lane()], high = x[at + kLanes + lane()];
        float a = 0.0f, b = 0.0f;
#pragma unroll 8
        for (int i = 0; i < kChunk; ++i) {
            const float entry = __shfl_sync(kAllLanes, i < kLanes ? low : high, i % kLanes);
            const float p = table[i * kChunk + lane()] * entry;
            const float q = table[i * kChunk + kLanes + lane()] * entry;
            a = i ? a + p : p;
            b = i ? b + q : q;
        }
        out[at + lane()] = a;
        out[at + kLanes + lane()] = b;
    }
}
