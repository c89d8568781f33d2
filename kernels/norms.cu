// Norms and finite checks on a GPU; the specification is in norms.py.
#include "include/norms.h"

#include "include/cuda.h"

template <class T> __global__ void finite(const T* x, i64 n, u8* answer) {
    constexpr int kRows = 8;  // whose loads are under way together
    u32 largest = 0;
    for (i64 at = warp() * kRows * kLanes; at < n; at += warps() * kRows * kLanes)
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const i64 i = at + row * kLanes + lane();
            largest = larger(largest, i < n ? magnitude(to_float(x[i])) : 0u);
        }
    if (largest_of_warp(largest) >= kInfinity && lane() == 0) *answer = 0;
}

INLINE double sum_of_lanes(double x) {
    for (int half = kLanes / 2; half; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
    return x;
}

template <class T> __global__ void norms(const T* x, i64 n, double* sums) {
    constexpr int kRows = 8;
    for (i64 chunk = warp(); chunk * kChunk < n; chunk += warps()) {
        double one = 0.0, two = 0.0;
        u32 largest = 0;
        for (i64 at = chunk * kChunk; at < (chunk + 1) * kChunk; at += kRows * kLanes)
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                const i64 i = at + row * kLanes + lane();
                const u32 size = i < n ? magnitude(to_float(x[i])) : 0u;
                largest = larger(largest, size);
                one += value_of(size);
                two += value_of(size) * value_of(size);
            }
        one = sum_of_lanes(one);
        two = sum_of_lanes(two);
        largest = largest_of_warp(largest);
        if (lane() == 0) {
            sums[3 * chunk] = one;
            sums[3 * chunk + 1] = two;
            sums[3 * chunk + 2] = value_of(largest);
        }
    }
}

// One block.
__global__ void add_norms(const double* sums, i64 chunks, double* out) {
    __shared__ double totals[3][kTotals];
    const int t = (int)threadIdx.x;
    double one = 0.0, two = 0.0, largest = 0.0;
    for (i64 chunk = t; chunk < chunks; chunk += kTotals) {
        one += sums[3 * chunk];
        two += sums[3 * chunk + 1];
        const double size = sums[3 * chunk + 2];
        largest = size <= largest ? largest : size;  // NaN stays
        if (largest != largest) break;
    }
    totals[0][t] = one, totals[1][t] = two, totals[2][t] = largest;
    __syncthreads();
    for (int half = kTotals / 2; half; half /= 2) {
        if (t < half) {
            totals[0][t] += totals[0][t + half];
            totals[1][t] += totals[1][t + half];
            const double a = totals[2][t], b = totals[2][t + half];
            totals[2][t] = a != a || a >= b ? a : b;
        }
        __syncthreads();
    }
    if (t < 3) out[t] = totals[t][0];
}
