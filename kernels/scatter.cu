// Adds up sparse payloads on a GPU; the specification is in scatter.py.
#include "include/tickets.h"

constexpr int kRange = 8192;  // places of a block
constexpr int kThreads = 256;

// Returns the first of k ascending indices that is at least `least`; -1 counts as largest.
INLINE i64 first_from(const int* indices, i64 k, u64 least) {
    i64 low = 0, high = k;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if ((u32)indices[middle] < least) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Adds up payloads for a range of places in shared memory, payload after payload, and writes the range.
template <class T>
__global__ void scatter_sum(const int* indices, i64 indices_stride, const float* values, i64 values_stride,
                            i64 payloads, i64 k, float factor, T* out, i64 n, u8* finite, u32* counters) {
    constexpr int kTogether = kThreads / 2, kAhead = 8;
    __shared__ float sums[kRange];
    __shared__ i64 bounds[kThreads];  // of the range in each of some payloads: begin and end
    const int thread = (int)threadIdx.x;
    u32 largest = 0;
    for (i64 begin = (i64)blockIdx.x * kRange; begin < n; begin += (i64)gridDim.x * kRange) {
        const u32 count = n - begin < kRange ? (u32)(n - begin) : (u32)kRange;
        // A thread clears what it writes to `out`, so that no other one waits for either.
        for (int i = thread; i < kRange; i += kThreads) sums[i] = 0.0f;
        for (i64 first = 0; first < payloads; first += kTogether) {
            const i64 some = payloads - first < kTogether ? payloads - first : kTogether;
            if (thread < 2 * some)
                bounds[thread] = first_from(indices + (first + thread / 2) * indices_stride, k,
                                            (u64)begin + (thread % 2 ? count : 0));
            __syncthreads();
            for (i64 p = 0; p < some; p += kAhead) {
                u32 places[kAhead];  // within the range
                float entries[kAhead];
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    places[a] = kRange;
                    if (p + a >= some || bounds[2 * (p + a)] + thread >= bounds[2 * (p + a) + 1]) continue;
                    const i64 i = bounds[2 * (p + a)] + thread;
                    places[a] = (u32)indices[(first + p + a) * indices_stride + i] - (u32)begin;
                    entries[a] = values[(first + p + a) * values_stride + i] * factor;
                }
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    if (p + a >= some) break;
                    // The places of one payload differ. Damaged ones may not ascend.
                    if (places[a] < count) sums[places[a]] += entries[a];
                    const i64 row = first + p + a;
                    for (i64 i = bounds[2 * (p + a)] + thread + kThreads; i < bounds[2 * (p + a) + 1]; i += kThreads) {
                        const u32 place = (u32)indices[row * indices_stride + i] - (u32)begin;
                        if (place < count) sums[place] += values[row * values_stride + i] * factor;
                    }
                    __syncthreads();  // behind the last one nobody reads `bounds`
                }
            }
        }
        for (u32 i = (u32)thread; i < count; i += kThreads) {
            store(out + begin + i, sums[i]);
            largest = larger(largest, magnitude(rounded_to(T{}, sums[i])));
        }
    }
    if (finite) write_verdict(largest_of_warp(largest) >= kInfinity, counters, finite);
}
