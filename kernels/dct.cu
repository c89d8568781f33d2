// Computes the discrete cosine transform of chunks on a GPU; the specification is in dct.py.
//
// A lane takes a chunk of 64 entries in registers. Entries pass through shared memory, so that a load
// or a store of a warp is a full line. Every 33rd place there is empty, which puts rows and columns of
// 32 into different banks.
#include "include/dct.h"

#include "include/cuda.h"

constexpr int kPitch = kLanes + 1;

// Calls f for each of `count` chunks. All 32 are written out, so that their loads are under way together.
template <class F> INLINE void for_chunks(int count, F f) {
    if (count == kLanes) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) f(k);
    } else {
#pragma unroll 1
        for (int k = 0; k < count; ++k) f(k);
    }
}

template <bool INVERSE> __global__ void dct(const float* x, i64 n, float* out) {
    constexpr int kSpan = kLanes * kCosines;
    __shared__ float rooms[8][kLanes * kPitch];  // of each warp; half of its chunks
    float* room = rooms[threadIdx.x / kLanes];
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        const int count = entries_in<kSpan>(at, n) / kCosines;
        float c[kCosines];
#pragma unroll
        for (int half = 0; half < kCosines; half += kLanes) {
            const float* from = x + at + half + lane();
            __syncwarp();  // what was here before has been read
            for_chunks(count, [=](int k) { room[k * kPitch + lane()] = from[k * kCosines]; });
            __syncwarp();
#pragma unroll
            for (int j = 0; j < kLanes; ++j) c[half + j] = room[lane() * kPitch + j] * kUnit;
        }
        cosines_of<INVERSE>(c);  // of what lies there, in lanes beyond the last chunk
#pragma unroll
        for (int half = 0; half < kCosines; half += kLanes) {
            float* to = out + at + half + lane();
            __syncwarp();
#pragma unroll
            for (int j = 0; j < kLanes; ++j) room[lane() * kPitch + j] = c[half + j];
            __syncwarp();
            for_chunks(count, [=](int k) { to[k * kCosines] = room[k * kPitch + lane()]; });
        }
    }
}
