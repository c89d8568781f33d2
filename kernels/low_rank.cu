// Multiplies the matrices of a bucket with thin factors on a GPU; the specification is in
// _low_rank_definition.py. Its tail, which no matrix has, is worked on in the same launches.
//
// A task is a piece of one matrix: 8 rows by 512 columns, or 64 rows by 64 columns. Its sums go to
// memory, and a second kernel adds the sums of each factor entry in their order, which atomic
// additions would not keep. Places within a piece are 32-bit numbers, whose arithmetic is cheaper.
// Factor entries beyond the rank count as zero, and their results are dropped: loops of a fixed length
// keep sums in registers.
#include "include/low_rank.h"
#include "include/tail.h"

constexpr int kRows = 8, kTile = 64;
constexpr int kSlab = 4;   // rows of a factor in the same loop
constexpr int kTask = 256; // entries of the tail that a warp writes at a time

INLINE i64 pieces(i64 length, i64 size) { return (length + size - 1) / size; }

// Returns the matrix to which a task belongs.
INLINE const Matrix& find(const Matrix* table, i64 count, i64 Matrix::* first, i64 task) {
    return table[row_with(table, count, first, task)];
}

// A piece of 8 rows by 512 columns.
struct Block {
    i64 row, column;     // of its first entry
    i64 at;              // where that lies in the bucket
    int rows, columns;   // of the piece that the matrix has
    int last;            // columns of its last row that exist

    __device__ __forceinline__ int rows_at(int j) const { return rows - (j >= last); }
};

// Returns how many columns of a row exist from `column` on; `end` is that of the bucket's matrices.
INLINE int columns_there(const Matrix& one, i64 row, i64 column, int columns, i64 end) {
    const i64 there = end - one.offset - row * one.columns - column;
    return there < columns ? (int)there : columns;
}

INLINE Block block_of(const Matrix& one, i64 task, i64 end) {
    const i64 segments = pieces(one.columns, kSegment), nth = task - one.block_task;
    const i64 row = nth / segments * kRows, column = nth % segments * kSegment;
    const int rows = one.rows - row < kRows ? (int)(one.rows - row) : kRows;
    const int columns = one.columns - column < kSegment ? (int)(one.columns - column) : kSegment;
    return {row, column, one.offset + row * one.columns + column, rows, columns,
            columns_there(one, row + rows - 1, column, columns, end)};
}

template <class T>
__global__ void multiply_right(const Matrix* table, i64 count, i64 tasks, const T* x,
                               const float* residual, float* total, const float* right, float* sums) {
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        const Block block = block_of(one, task, table[count].offset);
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
                const int rows = block.rows_at(j);
#pragma unroll
                for (int k = 0; k < kSlab; ++k) q[k] = k < ranks ? factor[row[k]] : 0.0f;
                // After the first slab, `total` has the sums; `x` or `residual` may be the same memory.
                if (total && slab) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r) entry[r] = r < rows ? to[row[r]] : 0.0f;
                } else {
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
                        entry[r] = r < rows ? to_float(from[row[r]]) : 0.0f;
                    if (residual) {
#pragma unroll
                        for (int r = 0; r < kRows; ++r)
                            if (r < rows) entry[r] += rest[row[r]];
                    }
                    if (total) {
#pragma unroll
                        for (int r = 0; r < kRows; ++r)
                            if (r < rows) to[row[r]] = entry[r];
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
__global__ void multiply_left(const Matrix* table, i64 count, i64 tasks, const T* x,
                              const float* residual, float* total, const float* left, float* sums) {
    constexpr int kColumns = kTile / kLanes;  // columns of a lane
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix& one = find(table, count, &Matrix::chunk_task, task);
        const i64 tiles = pieces(one.columns, kTile), nth = task - one.chunk_task;
        const i64 chunk = nth / tiles, first = chunk * kChunk, column = nth % tiles * kTile;
        const int rows = one.rows - first < kChunk ? (int)(one.rows - first) : kChunk;
        const int columns = one.columns - column < kTile ? (int)(one.columns - column) : kTile;
        const i64 at = one.offset + first * one.columns + column + lane();
        const int last = columns_there(one, first + rows - 1, column, columns, table[count].offset);
        int rows_at[kColumns];  // rows of this lane's columns that exist
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int j = c * kLanes + lane();
            rows_at[c] = j < last ? rows : j < columns ? rows - 1 : 0;
        }
        u32 row[kRows];  // where it begins
#pragma unroll
        for (int r = 0; r < kRows; ++r) row[r] = (u32)r * (u32)one.columns;
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            const int ranks = one.rank - slab < kSlab ? (int)(one.rank - slab) : kSlab;
            const float* factors[kSlab];  // beyond the rank, the last row again
#pragma unroll
            for (int k = 0; k < kSlab; ++k)
                factors[k] = left + one.left + (slab + (k < ranks ? k : ranks - 1)) * one.rows + first;
            const T* from = x + at;
            const float* rest = residual + at;  // not read without a residual
            float* to = total + at;
            float sum[kColumns][kSlab] = {};
            for (int i = 0; i < rows; i += kRows) {
                float entry[kRows][kColumns];
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        const bool there = i + r < rows_at[c];
                        // After the first slab, `total` has the sums, as in `multiply_right`.
                        if (total && slab) entry[r][c] = there ? to[row[r] + c * kLanes] : 0.0f;
                        else entry[r][c] = there ? to_float(from[row[r] + c * kLanes]) : 0.0f;
                        if (residual && !slab && there) entry[r][c] += rest[row[r] + c * kLanes];
                    }
                if (total && !slab) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
#pragma unroll
                        for (int c = 0; c < kColumns; ++c)
                            if (i + r < rows_at[c])
                                to[row[r] + c * kLanes] = entry[r][c];
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (i + r >= rows) continue;
                    float p[kSlab];
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) p[k] = factors[k][i + r];
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
#pragma unroll
                        for (int k = 0; k < kSlab; ++k) sum[c][k] += entry[r][c] * p[k];
                }
                const i64 step = kRows * one.columns;
                from += step, rest += step, to += step;
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

// Adds the `parts` sums of entry `i` of a factor, which are `numel` apart; a matrix without entries
// has none.
INLINE float added(const float* sums, i64 i, i64 numel, i64 parts) {
    float total = parts ? sums[i] : 0.0f;
    for (i64 part = 1; part < parts; ++part) total += sums[part * numel + i];
    return total;
}

// Both kernels below write the `entries` of all factors, to `local_copy` as well if it is given, and then
// gather the tail of x + residual, which has `length` entries.
template <class T>
__global__ void add_segments(const Matrix* table, i64 count, i64 entries, const float* sums, float* left,
                             float* local_copy, const Piece* tails, i64 tail_count, i64 length, const T* x,
                             const float* residual, float* total, float* tail) {
    for (i64 i = warp() * kLanes + lane(); i < entries + length; i += warps() * kLanes) {
        if (i >= entries) {
            gather_entry(tails, tail_count, i - entries, x, residual, total, tail);
            continue;
        }
        const Matrix& one = find(table, count, &Matrix::left, i);
        const float all = added(sums + one.block_sums, i - one.left, one.rank * one.rows,
                                pieces(one.columns, kSegment));
        left[i] = all;
        if (local_copy) local_copy[i] = all;
    }
}

template <class T>
__global__ void add_chunks(const Matrix* table, i64 count, i64 entries, const float* sums, float* right,
                           float* local_copy, const Piece* tails, i64 tail_count, i64 length, const T* x,
                           const float* residual, float* total, float* tail) {
    for (i64 i = warp() * kLanes + lane(); i < entries + length; i += warps() * kLanes) {
        if (i >= entries) {
            gather_entry(tails, tail_count, i - entries, x, residual, total, tail);
            continue;
        }
        const Matrix& one = find(table, count, &Matrix::right, i);
        const float all = added(sums + one.chunk_sums, i - one.right, one.rank * one.columns,
                                pieces(one.rows, kChunk));
        right[i] = all;
        if (local_copy) local_copy[i] = all;
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
        const int rows = block.rows_at(j);
        if (REST) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) entry[r] = r < rows ? total[row[r]] : 0.0f;
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
            if (r < rows) store(out + row[r], REST ? entry[r] - sum[r] : sum[r]);
    }
}

// Calls on_block(matrix, its piece) and on_entry(place in the tail) for what this warp has to write.
template <class OnBlock, class OnEntry>
INLINE void each_task(const Matrix* table, i64 count, i64 tasks, i64 length, OnBlock on_block, OnEntry on_entry) {
    for (i64 task = warp(); task < tasks + pieces(length, kTask); task += warps()) {
        if (task >= tasks) {
            const i64 begin = (task - tasks) * kTask, end = begin + kTask < length ? begin + kTask : length;
            for (i64 i = begin + lane(); i < end; i += kLanes) on_entry(i);
            continue;
        }
        const Matrix& one = find(table, count, &Matrix::block_task, task);
        on_block(one, block_of(one, task, table[count].offset));
    }
}

template <class T>
__global__ void expand(const Matrix* table, i64 count, i64 tasks, const float* left, const float* right,
                       T* out, const u8* finite, const Piece* tails, i64 tail_count, i64 length,
                       const float* tail) {
    const float start = finite && !*finite ? float_of(kNaN) : -0.0f;  // -0 + x is x
    each_task(
        table, count, tasks, length,
        [&](const Matrix& one, const Block& block) {
            expand_block<false>(one, block, left, right, nullptr, start, out);
        },
        [&](i64 i) { scatter_entry(tails, tail_count, i, tail, out); });
}

__global__ void subtract_low_rank(const Matrix* table, i64 count, i64 tasks, const float* total, const float* left,
                         const float* right, float* unsent, const Piece* tails, i64 tail_count, i64 length,
                         const float* sent) {
    each_task(
        table, count, tasks, length,
        [&](const Matrix& one, const Block& block) {
            expand_block<true>(one, block, left, right, total, -0.0f, unsent);
        },
        [&](i64 i) { subtract_entry(tails, tail_count, i, sent, total, unsent); });
}
