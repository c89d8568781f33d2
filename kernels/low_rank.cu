// Multiplies the matrices of a bucket with thin factors on a GPU; the specification is in
// _low_rank_definition.py.
//
// A task is a piece of one matrix: 8 rows by 512 columns, or 64 rows by 128 columns. Its sums go to
// memory, and a second kernel adds the sums of each factor entry in their order, which atomic
// additions would not keep. Places within a piece are 32-bit numbers, whose arithmetic is cheaper.
// Factor entries beyond the rank count as zero, and their results are dropped: loops of a fixed length
// keep sums in registers.
#include "include/cuda.h"
#include "include/low_rank.h"

constexpr int kRows = 8, kTile = 128;
constexpr int kSlab = 4;        // rows of a factor in the same loop
constexpr int kThreads = 256;   // threads of a block, and partial sums of a sum in double precision

INLINE i64 pieces(i64 length, i64 size) { return (length + size - 1) / size; }

// Returns the last matrix whose `member` is `value` or less, by binary search in `count` matrices.
INLINE const Matrix& find(const Matrix* table, i64 count, i64 Matrix::* member, i64 value) {
    i64 low = 0;
    while (count - low > 1) {
        const i64 middle = (low + count) / 2;
        if (table[middle].*member <= value) low = middle;
        else count = middle;
    }
    return table[low];
}

// A piece of 8 rows by 512 columns.
struct Block {
    i64 row, column;     // of its first entry
    i64 at;              // where that lies in the bucket
    int rows, columns;   // of the piece that the matrix has
};

INLINE Block block_of(const Matrix& one, i64 task) {
    const i64 segments = pieces(one.columns, kSegment), nth = task - one.block_task;
    const i64 row = nth / segments * kRows, column = nth % segments * kSegment;
    return {row, column, one.offset + row * one.columns + column,
            one.rows - row < kRows ? (int)(one.rows - row) : kRows,
            one.columns - column < kSegment ? (int)(one.columns - column) : kSegment};
}

template <class T>
__global__ void multiply_right(const Matrix* table, i64 count, i64 tasks, const T* x,
                               const float* residual, float* total, const float* right, float* sums) {
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        const Block block = block_of(one, task);
        u32 row[kRows];  // where it begins
#pragma unroll
        for (int r = 0; r < kRows; ++r) row[r] = (u32)r * (u32)one.columns;
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            const int ranks = one.rank - slab < kSlab ? (int)(one.rank - slab) : kSlab;
            const float* factor = right + one.right + slab * one.columns + block.column + lane();
            const T* from = x + block.at + lane();
            const float* rest = residual + block.at + lane();  // not read without a residual
            float* to = total + block.at + lane();
            float sum[kRows][kSlab] = {};
            for (int j = lane(); j < block.columns; j += kLanes) {
                float q[kSlab], entry[kRows];
#pragma unroll
                for (int k = 0; k < kSlab; ++k) q[k] = k < ranks ? factor[row[k]] : 0.0f;
                // After the first slab, `total` has the sums; `x` or `residual` may be the same memory.
                if (total && slab) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r) entry[r] = r < block.rows ? to[row[r]] : 0.0f;
                } else {
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
                        entry[r] = r < block.rows ? to_float(from[row[r]]) : 0.0f;
                    if (residual) {
#pragma unroll
                        for (int r = 0; r < kRows; ++r)
                            if (r < block.rows) entry[r] += rest[row[r]];
                    }
                    if (total) {
#pragma unroll
                        for (int r = 0; r < kRows; ++r)
                            if (r < block.rows) to[row[r]] = entry[r];
                    }
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) sum[r][k] += entry[r] * q[k];
                factor += kLanes, from += kLanes, rest += kLanes, to += kLanes;
            }
            float* out = sums + one.block_sums + block.column / kSegment * one.rank * one.rows +
                         slab * one.rows + block.row;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int k = 0; k < kSlab; ++k) {
                    const float all = sum_of_warp(sum[r][k]);
                    if (lane() == 0 && r < block.rows && k < ranks) out[k * one.rows + r] = all;
                }
        }
    }
}

template <class T>
__global__ void multiply_left(const Matrix* table, i64 count, i64 tasks, const T* x, const float* left,
                              float* sums) {
    constexpr int kColumns = kTile / kLanes;  // columns of a lane
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::chunk_task, task);
        const i64 tiles = pieces(one.columns, kTile), nth = task - one.chunk_task;
        const i64 chunk = nth / tiles, first = chunk * kChunk, column = nth % tiles * kTile;
        const int rows = one.rows - first < kChunk ? (int)(one.rows - first) : kChunk;
        const int columns = one.columns - column < kTile ? (int)(one.columns - column) : kTile;
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            const int ranks = one.rank - slab < kSlab ? (int)(one.rank - slab) : kSlab;
            const float* factors[kSlab];  // beyond the rank, the last row again
#pragma unroll
            for (int k = 0; k < kSlab; ++k)
                factors[k] = left + one.left + (slab + (k < ranks ? k : ranks - 1)) * one.rows + first;
            const T* from = x + one.offset + first * one.columns + column + lane();
            float sum[kColumns][kSlab] = {};
#pragma unroll 4
            for (int i = 0; i < rows; ++i, from += one.columns) {
                float p[kSlab];
#pragma unroll
                for (int k = 0; k < kSlab; ++k) p[k] = factors[k][i];
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const bool there = c * kLanes + lane() < columns;
                    const float entry = there ? to_float(from[c * kLanes]) : 0.0f;
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) sum[c][k] += entry * p[k];
                }
            }
            float* out = sums + one.chunk_sums + (chunk * one.rank + slab) * one.columns + column + lane();
#pragma unroll
            for (int k = 0; k < kSlab; ++k)
#pragma unroll
                for (int c = 0; c < kColumns; ++c)
                    if (c * kLanes + lane() < columns && k < ranks)
                        out[k * one.columns + c * kLanes] = sum[c][k];
        }
    }
}

// Adds the `parts` sums of entry `i` of a factor, which are `numel` apart.
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

// Writes left^T @ right of a block to `out`, or with REST `total` minus that.
template <bool REST, class T>
INLINE void expand_block(const Matrix& one, const Block& block, const float* left, const float* right,
                         const float* total, float start, T* out) {
    const float* p = left + one.left + block.row;
    const float* q = right + one.right + block.column + lane();
    if (REST) total += block.at + lane();
    out += block.at + lane();
    u32 row[kRows];  // where it begins
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = (u32)r * (u32)one.columns;
    float few[kRows][kSlab];  // the first ranks of `p`; for most matrices all
#pragma unroll
    for (int k = 0; k < kSlab; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            few[r][k] = k < one.rank && r < block.rows ? p[k * one.rows + r] : 0.0f;
    for (int j = lane(); j < block.columns; j += kLanes, q += kLanes, out += kLanes) {
        float sum[kRows], entry[kRows];
        if (REST) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) entry[r] = r < block.rows ? total[row[r]] : 0.0f;
            total += kLanes;
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] = start;
#pragma unroll
        for (int k = 0; k < kSlab; ++k) {
            if (k >= one.rank) continue;
            const float factor = q[row[k]];
#pragma unroll
            for (int r = 0; r < kRows; ++r) sum[r] += factor * few[r][k];
        }
#pragma unroll 1
        for (i64 k = kSlab; k < one.rank; ++k) {
            const float factor = q[k * one.columns];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                sum[r] += factor * (r < block.rows ? p[k * one.rows + r] : 0.0f);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (r < block.rows) store(out + row[r], REST ? entry[r] - sum[r] : sum[r]);
    }
}

template <class T>
__global__ void expand(const Matrix* table, i64 count, i64 tasks, const float* left, const float* right,
                       const float* sent_left, const float* sent_right, const float* total,
                       float* unsent, T* out, const u8* finite) {
    const float start = finite && !*finite ? float_of(kNaN) : -0.0f;  // -0 + x is x
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        const Block block = block_of(one, task);
        // First `unsent`: `out` may be `total`.
        if (unsent) expand_block<true>(one, block, sent_left, sent_right, total, -0.0f, unsent);
        expand_block<false>(one, block, left, right, nullptr, start, out);
    }
}

// Computes a dot product with all threads of a block: thread t sums entries t, t + 256 and so on, then
// halves are added to halves, as on the CPU.
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
