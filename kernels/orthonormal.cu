// Makes the rows of factors orthonormal, or unit, on a GPU; the specification is in orthonormal.py.
//
// A block of 1024 threads has a matrix, and thread t entries t, t + 1024 and so on of every row, so that
// no thread reads what another one has written, and a factor of 50,000 rows has many loads under way.
#include "include/cuda.h"
#include "include/low_rank.h"

// Adds up the sums of all threads of a block; each receives the results.
template <int N> INLINE void sum_of_block(double (&sum)[N]) {
    __shared__ double of_warps[N][kLanes];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        for (int half = kLanes / 2; half; half /= 2) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], half);
        if (lane() == 0) of_warps[k][threadIdx.x / kLanes] = sum[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
        sum[k] = of_warps[k][lane()];
        for (int half = kLanes / 2; half; half /= 2) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], half);
    }
    __syncthreads();
}

INLINE int rows_in(i64 first, i64 end) { return end - first < kRowGroup ? (int)(end - first) : kRowGroup; }

// Subtracts `less` rows of `minus`, each times its entry of `d`, from a row: `from`, which may be the row
// `v` that receives the result. `d` receives the products of the result with `more` rows of `times`, and
// with itself.
INLINE void project(const float* from, float* v, i64 n, const float* __restrict__ minus, int less,
                    const float* __restrict__ times, int more, double (&d)[kRowGroup + 1]) {
    double sum[kRowGroup + 1] = {};
    // Pointers that advance: 64 registers are all that each of 1024 threads has.
    const float* const end = from + n;
    from += threadIdx.x, v += threadIdx.x, minus += threadIdx.x, times += threadIdx.x;
#pragma unroll 1
    for (; from < end; from += kSums, v += kSums, minus += kSums, times += kSums) {
        double entry = (double)*from;
        if (less) {
#pragma unroll
            for (int k = 0; k < kRowGroup; ++k)
                if (k < less) entry -= d[k] * (double)minus[k * n];
            const float rounded = (float)entry;
            *v = rounded;
            entry = (double)rounded;
        }
#pragma unroll
        for (int k = 0; k < kRowGroup; ++k)
            if (k < more) sum[k] += entry * (double)times[k * n];
        sum[kRowGroup] += entry * entry;
    }
    sum_of_block(sum);
#pragma unroll
    for (int k = 0; k <= kRowGroup; ++k) d[k] = sum[k];
}

__global__ void __launch_bounds__(kSums, 1)
orthonormalize(const Matrix* table, i64 count, const float* left, float* out) {
    for (i64 b = blockIdx.x; b < count; b += gridDim.x) {
        const i64 n = table[b].rows, rank = table[b].rank;
        float* rows = out + table[b].left;
        for (i64 j = 0; j < rank; ++j) {
            const float* from = left + table[b].left + j * n;
            float* v = rows + j * n;
            // A pass over memory subtracts a group and multiplies with the next one.
            double d[kRowGroup + 1];
            project(from, v, n, rows, 0, rows, rows_in(0, j), d);
            const double before = d[kRowGroup];
            for (int round = 0; round < 2; ++round)
                for (i64 first = 0; first < j; first += kRowGroup, from = v) {
                    const bool ends = first + kRowGroup >= j;
                    const i64 next = ends ? 0 : first + kRowGroup;
                    project(from, v, n, rows + first * n, rows_in(first, j), rows + next * n,
                            ends && round ? 0 : rows_in(next, j), d);
                }
            const double norm = d[kRowGroup];
            const double inverse = norm <= before * kVanished ? 0.0 : 1.0 / sqrt(norm);
            for (i64 l = threadIdx.x; l < n; l += kSums) v[l] = (float)((double)from[l] * inverse);
        }
    }
}

INLINE double squared_norm(const float* row, i64 n) {
    double sum[1] = {};
    for (i64 l = threadIdx.x; l < n; l += kSums) sum[0] += (double)row[l] * (double)row[l];
    sum_of_block(sum);
    return sum[0];
}

__global__ void __launch_bounds__(kSums, 1)
unit_rows(const Matrix* table, i64 count, const float* right, const float* fresh, float* out) {
    for (i64 b = blockIdx.x; b < count; b += gridDim.x) {
        const i64 m = table[b].columns, rank = table[b].rank;
        double largest = 0.0;
        for (i64 k = 0; k < rank; ++k) {
            const double norm = squared_norm(right + table[b].right + k * m, m);
            largest = norm > largest ? norm : largest;
        }
        for (i64 k = 0; k < rank; ++k) {
            const i64 row = table[b].right + k * m;
            const double norm = squared_norm(right + row, m);
            const bool dead = norm <= largest * kDead;
            const double inverse = 1.0 / sqrt(norm);
            for (i64 l = threadIdx.x; l < m; l += kSums)
                out[row + l] = dead ? fresh[row + l] : (float)((double)right[row + l] * inverse);
        }
    }
}
