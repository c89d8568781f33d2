// Products of the matrices of a bucket with thin factors, on a GPU; the specification is in
// low_rank.py.
//
// A task is a piece of one matrix: 8 rows by 512 columns, or 64 rows by 64 columns. Its sums go to
// memory; a second kernel adds those of one factor entry in their order.
#include "include/cuda.h"
#include "include/low_rank.h"

constexpr int kRows = 8, kTile = 64;
constexpr int kSlab = 4;        // rows of a factor that are worked on together
constexpr int kThreads = 256;   // of a block, and partial sums in double precision

INLINE i64 pieces(i64 length, i64 size) { return (length + size - 1) / size; }

// The matrix whose `member` is the last that is `value` or less; there is one more than `count`.
INLINE const Matrix& find(const Matrix* table, i64 count, i64 Matrix::* member, i64 value) {
    i64 low = 0;
    while (count - low > 1) {
        const i64 middle = (low + count) / 2;
        if (table[middle].*member <= value) low = middle;
        else count = middle;
    }
    return table[low];
}

template <class T>
__global__ void multiply_right(const Matrix* table, i64 count, i64 tasks, const T* x,
                               const float* residual, float* total, const float* right, float* sums) {
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        const i64 segments = pieces(one.columns, kSegment);
        const i64 block = (task - one.block_task) / segments, segment = (task - one.block_task) % segments;
        const i64 end = one.columns - segment * kSegment < kSegment ? one.columns : (segment + 1) * kSegment;
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            float sum[kRows][kSlab] = {};
            for (i64 j = segment * kSegment + lane(); j < end; j += kLanes) {
                float q[kSlab];
#pragma unroll
                for (int k = 0; k < kSlab; ++k)
                    q[k] = slab + k < one.rank ? right[one.right + (slab + k) * one.columns + j] : 0.0f;
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const i64 i = block * kRows + r, at = one.offset + i * one.columns + j;
                    if (i >= one.rows) continue;
                    float entry;
                    if (total && slab) {
                        entry = total[at];  // written below; `total` may be `residual`
                    } else {
                        entry = to_float(x[at]);
                        if (residual) entry += residual[at];
                        if (total) total[at] = entry;
                    }
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) sum[r][k] += entry * q[k];
                }
            }
            float* out = sums + one.block_sums + segment * one.rank * one.rows;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int k = 0; k < kSlab; ++k) {
                    const float all = sum_of_warp(sum[r][k]);
                    const i64 i = block * kRows + r;
                    if (lane() == 0 && i < one.rows && slab + k < one.rank)
                        out[(slab + k) * one.rows + i] = all;
                }
        }
    }
}

template <class T>
__global__ void multiply_left(const Matrix* table, i64 count, i64 tasks, const T* x, const float* left,
                              float* sums) {
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::chunk_task, task);
        const i64 tiles = pieces(one.columns, kTile);
        const i64 chunk = (task - one.chunk_task) / tiles, tile = (task - one.chunk_task) % tiles;
        const i64 first = chunk * kChunk, end = one.rows - first < kChunk ? one.rows : first + kChunk;
        const i64 j = tile * kTile + lane();
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            float sum[kTile / kLanes][kSlab] = {};
            for (i64 i = first; i < end; ++i) {
                float p[kSlab];
#pragma unroll
                for (int k = 0; k < kSlab; ++k)
                    p[k] = slab + k < one.rank ? left[one.left + (slab + k) * one.rows + i] : 0.0f;
#pragma unroll
                for (int c = 0; c < kTile / kLanes; ++c) {
                    if (j + c * kLanes >= one.columns) continue;
                    const float entry = to_float(x[one.offset + i * one.columns + j + c * kLanes]);
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) sum[c][k] += entry * p[k];
                }
            }
            float* out = sums + one.chunk_sums + chunk * one.rank * one.columns;
#pragma unroll
            for (int c = 0; c < kTile / kLanes; ++c)
#pragma unroll
                for (int k = 0; k < kSlab; ++k)
                    if (j + c * kLanes < one.columns && slab + k < one.rank)
                        out[(slab + k) * one.columns + j + c * kLanes] = sum[c][k];
        }
    }
}

// Entry `i` of a factor of `numel` entries: `parts` sums, `numel` apart.
INLINE float added(const float* sums, i64 i, i64 numel, i64 parts) {
    float total = sums[i];
    for (i64 part = 1; part < parts; ++part) total += sums[part * numel + i];
    return total;
}

__global__ void add_segments(const Matrix* table, i64 count, i64 entries, const float* sums, float* left) {
    for (i64 i = warp() * kLanes + lane(); i < entries; i += warps() * kLanes) {
        const Matrix& one = find(table, count, &Matrix::left, i);
        left[i] = added(sums + one.block_sums, i - one.left, one.rank * one.rows,
                        pieces(one.columns, kSegment));
    }
}

__global__ void add_chunks(const Matrix* table, i64 count, i64 entries, const float* sums, float* right) {
    for (i64 i = warp() * kLanes + lane(); i < entries; i += warps() * kLanes) {
        const Matrix& one = find(table, count, &Matrix::right, i);
        right[i] = added(sums + one.chunk_sums, i - one.right, one.rank * one.columns,
                         pieces(one.rows, kChunk));
    }
}

template <class T>
__global__ void expand(const Matrix* table, i64 count, i64 tasks, const float* left, const float* right,
                       const float* sent_left, const float* sent_right, const float* total,
                       float* unsent, T* out) {
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        const i64 segments = pieces(one.columns, kSegment);
        const i64 block = (task - one.block_task) / segments, segment = (task - one.block_task) % segments;
        const i64 end = one.columns - segment * kSegment < kSegment ? one.columns : (segment + 1) * kSegment;
        for (i64 j = segment * kSegment + lane(); j < end; j += kLanes) {
            float sum[kRows], sent[kRows], rest[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const i64 i = block * kRows + r;
                rest[r] = unsent && i < one.rows ? total[one.offset + i * one.columns + j] : 0.0f;
            }
            for (i64 k = 0; k < one.rank; ++k) {
                const i64 at = one.right + k * one.columns + j;
                const float q = right[at], sent_q = unsent ? sent_right[at] : 0.0f;
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const i64 i = block * kRows + r, from = one.left + k * one.rows + i;
                    const float part = i < one.rows ? q * left[from] : 0.0f;
                    const float sent_part = unsent && i < one.rows ? sent_q * sent_left[from] : 0.0f;
                    sum[r] = k ? sum[r] + part : part;
                    sent[r] = k ? sent[r] + sent_part : sent_part;
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const i64 i = block * kRows + r, at = one.offset + i * one.columns + j;
                if (i >= one.rows) continue;
                if (unsent) unsent[at] = rest[r] - sent[r];
                store(out + at, sum[r]);
            }
        }
    }
}

// By all threads of a block: thread t sums entries t, t + 256 and so on, then halves are added.
INLINE double dot(const float* a, const float* b, i64 n, double* partials) {
    const int t = (int)threadIdx.x;
    double sum = 0.0;
    for (i64 l = t; l < n; l += kThreads) sum += (double)a[l] * (double)b[l];
    partials[t] = sum;
    __syncthreads();
    for (int half = kThreads / 2; half; half /= 2) {
        if (t < half) partials[t] += partials[t + half];
        __syncthreads();
    }
    const double all = partials[0];
    __syncthreads();
    return all;
}

__global__ void orthonormalize(const Matrix* table, i64 count, float* left) {
    __shared__ double partials[kThreads];
    for (i64 b = blockIdx.x; b < count; b += gridDim.x) {
        const i64 n = table[b].rows, rank = table[b].rank;
        float* rows = left + table[b].left;
        for (i64 j = 0; j < rank; ++j) {
            float* v = rows + j * n;
            const double before = dot(v, v, n, partials);
            for (i64 i = 0; i < 2 * j; ++i) {
                const float* q = rows + i % j * n;
                const double d = dot(q, v, n, partials);
                for (i64 l = threadIdx.x; l < n; l += kThreads) v[l] = (float)((double)v[l] - d * (double)q[l]);
            }
            const double norm = dot(v, v, n, partials);
            const double inverse = norm <= before * kVanished ? 0.0 : 1.0 / sqrt(norm);
            for (i64 l = threadIdx.x; l < n; l += kThreads) v[l] = (float)((double)v[l] * inverse);
        }
    }
}

__global__ void unit_rows(const Matrix* table, i64 count, const float* fresh, float* right) {
    __shared__ double partials[kThreads];
    for (i64 b = blockIdx.x; b < count; b += gridDim.x) {
        const i64 m = table[b].columns, rank = table[b].rank;
        float* rows = right + table[b].right;
        double largest = 0.0;
        for (i64 k = 0; k < rank; ++k) {
            const double norm = dot(rows + k * m, rows + k * m, m, partials);
            largest = norm > largest ? norm : largest;
        }
        for (i64 k = 0; k < rank; ++k) {
            float* v = rows + k * m;
            const double norm = dot(v, v, m, partials);
            const bool dead = norm <= largest * kDead;
            const double inverse = 1.0 / sqrt(norm);
            for (i64 l = threadIdx.x; l < m; l += kThreads)
                v[l] = dead ? fresh[table[b].right + k * m + l] : (float)((double)v[l] * inverse);
        }
    }
}
