// Adds up sparse payloads on a GPU; the specification is in scatter.py.
#include "include/tickets.h"

constexpr int kRange = 8192;  // places of a block
constexpr int kThreads = 256;
constexpr int kSeekers = 16;  // lanes that search together

// Returns the first of k ascending indices that is at least `least`; -1 counts as largest. Each half of a warp
// searches for its own `least`, with 16 probes at once: each turn leaves a 17th.
INLINE i64 first_from(const int* indices, i64 k, u64 least) {
    i64 low = 0;
    for (i64 left = k; left > 0; left /= kSeekers + 1) {
        const i64 step = left / (kSeekers + 1) + 1, at = low + (lane() % kSeekers + 1) * step - 1;
        const u32 less = __ballot_sync(kAllLanes, at < k && (u32)indices[at] < least);
        low += __popc(less >> (lane() & kSeekers) & 0xffffu) * step;
    }
    return low;
}

// Adds up payloads for a range of places in shared memory, payload after payload, and writes the range.
template <class T>
__global__ void scatter_sum(const int* indices, i64 indices_stride, const float* values, i64 values_stride,
                            i64 payloads, i64 k, float factor, T* out, i64 n, u8* finite, u32* counters) {
    constexpr int kTogether = kThreads / 2, kAhead = 8;
    static_assert(kTogether % kAhead == 0);  // bounds are read before it is known whether they are there
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
            for (int b = thread / kSeekers; b < 2 * some; b += kThreads / kSeekers) {  // whole warps
                const int* row = indices + (first + b / 2) * indices_stride;
                const i64 bound = first_from(row, k, (u64)begin + (b % 2 ? count : 0));
                if (thread % kSeekers == 0) bounds[b] = bound;
            }
            __syncthreads();
            for (i64 p = 0; p < some; p += kAhead) {
                int places[kAhead];
                float entries[kAhead];
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    const i64 i = bounds[2 * (p + a)] + thread, row = first + p + a;
                    const bool there = p + a < some && i < bounds[2 * (p + a) + 1];
                    places[a] = there ? indices[row * indices_stride + i] : -1;  // above every range
                    entries[a] = there ? values[row * values_stride + i] : 0.0f;
                }
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    if (p + a >= some) break;
                    // The places of one payload differ. Damaged ones may not ascend.
                    if ((u32)places[a] - (u32)begin < count) sums[(u32)places[a] - (u32)begin] += entries[a] * factor;
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
