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
constexpr int kThreads = 128;  // of a block, as in low_rank.py
constexpr int kSlab = 4;   // rows of a factor in the same loop
constexpr int kTask = 256; // entries of the tail that a warp writes at a time

INLINE i64 pieces(i64 length, i64 size) { return (length + size - 1) / size; }

// Returns the matrix to which a task belongs: a copy, since a number in memory would be loaded again behind
// every store.
INLINE Matrix find(const Matrix* table, i64 count, i64 Matrix::* first, i64 task) {
    return table[row_with(table, count, first, task)];
}

// A piece of 8 rows by 512 columns.
struct Block {
    i64 row, column;     // of its first entry
    i64 at;              // where that lies in the bucket
    int rows, columns;   // of the piece that the matrix has
    int last;            // columns of its last row that exist

    __device__ __forceinline__ int rows_at(int j) const { return j < last ? rows : j < columns ? rows - 1 : 0; }
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

struct alignas(16) Ranks { float of[kSlab]; };  // entries of a factor that one access loads

// What is multiplied: x + residual, which `total` receives; the last two may be null.
template <class T> struct Source {
    const T* x;
    const float* residual;
    float* total;
};

// Calls f(entry, whether it exists, its place) for rows of this lane's columns, which have `rows[c]` entries.
template <int ROWS, int COLUMNS, class F>
INLINE void each_entry(float (&entry)[ROWS][COLUMNS], const u32 (&row)[ROWS], const int (&rows)[COLUMNS], F f) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) f(entry[r][c], r < rows[c], (i64)row[r] + c * kLanes);
}

// Loads rows of this lane's columns, from `at` on; beyond them are zeros. All loads are under way together:
// behind none comes a branch, or a use of its result, before the last has begun.
template <class T, int ROWS, int COLUMNS>
INLINE void load_rows(const Source<T>& from, i64 at, bool first, const u32 (&row)[ROWS],
                      const int (&rows)[COLUMNS], float (&entry)[ROWS][COLUMNS]) {
    const T* x = from.x + at;
    const float* residual = from.residual + at;
    float* total = from.total + at;
    // After the first slab, `total` has the sums; `x` or `residual` may be the same memory.
    if (from.total && !first) {
        each_entry(entry, row, rows, [&](float& one, bool there, i64 i) { one = there ? total[i] : 0.0f; });
        return;
    }
    each_entry(entry, row, rows, [&](float& one, bool there, i64 i) { one = there ? to_float(x[i]) : 0.0f; });
    if (from.residual)
        each_entry(entry, row, rows, [&](float& one, bool there, i64 i) { one += there ? residual[i] : 0.0f; });
    if (from.total)
        each_entry(entry, row, rows, [&](float& one, bool there, i64 i) {
            if (there) total[i] = one;
        });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    multiply_right(const Matrix* table, i64 count, i64 tasks, const T* x, const float* residual, float* total,
                   const float* right, float* sums) {
    constexpr int kHalf = kRows / 2, kColumns = 4;  // rows and columns of a lane that are loaded together
    const Source<T> from = {x, residual, total};
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix one = find(table, count, &Matrix::block_task, task);
        const Block block = block_of(one, task, table[count].offset);
        float* part = sums + one.block_sums + block.column / kSegment * one.rank * one.rows + block.row;
        static_assert(kHalf >= kSlab);
        u32 row[kHalf];  // where it begins
#pragma unroll
        for (int r = 0; r < kHalf; ++r) row[r] = (u32)r * (u32)one.columns;
#pragma unroll 1
        for (int half = 0; half < block.rows; half += kHalf) {
            const i64 at = block.at + half * one.columns;
            for (i64 slab = 0; slab < one.rank; slab += kSlab) {
                const int ranks = one.rank - slab < kSlab ? (int)(one.rank - slab) : kSlab;
                const float* factor = right + one.right + slab * one.columns + block.column;
                float sum[kHalf][kSlab] = {};
                for (int j = lane(); j < block.columns; j += kColumns * kLanes) {
                    // Columns beyond the last add zeros, which change no sum: none is -0.
                    float q[kSlab][kColumns], entry[kHalf][kColumns];
                    int rows[kColumns];
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) rows[c] = block.rows_at(j + c * kLanes) - half;
                    load_rows(from, at + j, slab == 0, row, rows, entry);
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
#pragma unroll
                        for (int k = 0; k < kSlab; ++k) {
                            const bool there = j + c * kLanes < block.columns && k < ranks;
                            q[k][c] = there ? (factor + j + row[k])[c * kLanes] : 0.0f;
                        }
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
#pragma unroll
                        for (int r = 0; r < kHalf; ++r)
#pragma unroll
                            for (int k = 0; k < kSlab; ++k) sum[r][k] += entry[r][c] * q[k][c];
                }
                float* out = part + slab * one.rows + half;
#pragma unroll
                for (int r = 0; r < kHalf; ++r)
#pragma unroll
                    for (int k = 0; k < kSlab; ++k) {
                        const float all = sum_of_warp(sum[r][k]);
                        if (lane() == 0 && half + r < block.rows && k < ranks) out[k * one.rows + r] = all;
                    }
            }
        }
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    multiply_left(const Matrix* table, i64 count, i64 tasks, const T* x, const float* residual, float* total,
                  const float* left, float* sums) {
    constexpr int kColumns = kTile / kLanes;  // of a lane
    __shared__ Ranks factors[kThreads / kLanes][kChunk];
    Ranks* factor = factors[threadIdx.x / kLanes];
    const Source<T> from = {x, residual, total};
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Matrix one = find(table, count, &Matrix::chunk_task, task);
        const i64 tiles = pieces(one.columns, kTile), nth = task - one.chunk_task;
        const i64 chunk = nth / tiles, first = chunk * kChunk, column = nth % tiles * kTile;
        const int rows = one.rows - first < kChunk ? (int)(one.rows - first) : kChunk;
        const int columns = one.columns - column < kTile ? (int)(one.columns - column) : kTile;
        const int last = columns_there(one, first + rows - 1, column, columns, table[count].offset);
        u32 row[kRows];  // where it begins
#pragma unroll
        for (int r = 0; r < kRows; ++r) row[r] = (u32)r * (u32)one.columns;
        for (i64 slab = 0; slab < one.rank; slab += kSlab) {
            const int ranks = one.rank - slab < kSlab ? (int)(one.rank - slab) : kSlab;
            const float* p = left + one.left + slab * one.rows + first;
            __syncwarp();
            // Rows beyond the last add zeros, which change no sum: none is -0.
#pragma unroll
            for (int i = lane(); i < kChunk; i += kLanes)
#pragma unroll
                for (int k = 0; k < kSlab; ++k)
                    factor[i].of[k] = i < rows && k < ranks ? p[k * one.rows + i] : 0.0f;
            i64 at = one.offset + first * one.columns + column + lane();
            float sum[kColumns][kSlab] = {};
            for (int i = 0; i < rows; i += kRows, at += kRows * one.columns) {
                float entry[kRows][kColumns];
                int there[kColumns];  // rows of this lane's columns that exist
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const int j = c * kLanes + lane();
                    there[c] = (j < last ? rows : j < columns ? rows - 1 : 0) - i;
                }
                load_rows(from, at, slab == 0, row, there, entry);
                // `factor` is written; in the loop, so that the compiler loads it here and not before.
                __syncwarp();
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const Ranks here = factor[i + r];
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
#pragma unroll
                        for (int k = 0; k < kSlab; ++k) sum[c][k] += entry[r][c] * here.of[k];
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

// Adds the `parts` sums of entry `i` of a factor, which are `numel` apart; a matrix without entries
// has none.
INLINE float added(const float* sums, i64 i, i64 numel, i64 parts) {
    constexpr int kTogether = 8;  // loads that are under way together
    float total = parts ? -0.0f : 0.0f;  // -0 + x is x
    sums += i;
    for (i64 part = 0; part < parts; part += kTogether) {
        float some[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) some[j] = part + j < parts ? sums[(part + j) * numel] : -0.0f;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) total += some[j];
    }
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
        const Matrix one = find(table, count, &Matrix::left, i);
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
        const Matrix one = find(table, count, &Matrix::right, i);
        const float all = added(sums + one.chunk_sums, i - one.right, one.rank * one.columns,
                                pieces(one.rows, kChunk));
        right[i] = all;
        if (local_copy) local_copy[i] = all;
    }
}

// Writes left^T @ right of a block to `out`, or with REST `total` minus that. COLUMNS of a lane are worked
// on together, so that a warp writes COLUMNS lines of a row one after the other.
template <bool REST, int COLUMNS, class T>
INLINE void expand_block(const Matrix& one, const Block& block, const float* left, const float* right,
                         const float* total, float start, T* out) {
    const float* p = left + one.left + block.row;
    const float* q = right + one.right + block.column;
    if (REST) total += block.at;
    out += block.at;
    u32 row[kRows];  // where it begins
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = (u32)r * (u32)one.columns;
    // The first ranks of `p`; for most matrices all. Beyond the rank products are -0: x + -0 is x.
    __shared__ Ranks factors[kThreads / kLanes][kRows];
    Ranks* few = factors[threadIdx.x / kLanes];
    const int ranks = one.rank < kSlab ? (int)one.rank : kSlab, r = lane() / kSlab, k = lane() % kSlab;
    static_assert(kRows * kSlab == kLanes);
    __syncwarp();
    few[r].of[k] = k < ranks && r < block.rows ? p[k * one.rows + r] : -0.0f;
    for (int first = 0; first < block.columns; first += COLUMNS * kLanes) {
        const int j = first + lane();
        // `few` is written; in the loop, as the compiler would otherwise keep it in 32 registers.
        __syncwarp();
        float sum[kRows][COLUMNS], entry[kRows][COLUMNS], factor[kSlab][COLUMNS];
        int rows[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int i = j + c * kLanes;
            const bool there = i < block.columns;
            rows[c] = block.rows_at(i);
#pragma unroll
            for (int k = 0; k < kSlab; ++k) factor[k][c] = there && k < ranks ? (q + j + row[k])[c * kLanes] : 0.0f;
            if (REST) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) entry[r][c] = r < rows[c] ? (total + j + row[r])[c * kLanes] : 0.0f;
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Ranks here = few[r];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                sum[r][c] = start;
#pragma unroll
                for (int k = 0; k < kSlab; ++k) sum[r][c] += factor[k][c] * here.of[k];
            }
        }
#pragma unroll 1
        for (i64 k = kSlab; k < one.rank; ++k)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const float more = rows[c] ? q[k * one.columns + j + c * kLanes] : 0.0f;
#pragma unroll
                for (int r = 0; r < kRows; ++r)
                    sum[r][c] += more * (r < block.rows ? p[k * one.rows + r] : 0.0f);
            }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (r < rows[c]) store(out + j + row[r] + c * kLanes, REST ? entry[r][c] - sum[r][c] : sum[r][c]);
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
        const Matrix one = find(table, count, &Matrix::block_task, task);
        on_block(one, block_of(one, task, table[count].offset));
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) expand(const Matrix* table, i64 count, i64 tasks, const float* left, const float* right,
                       T* out, const u8* finite, const Piece* tails, i64 tail_count, i64 length,
                       const float* tail) {
    const float start = finite && !*finite ? float_of(kNaN) : -0.0f;  // -0 + x is x
    each_task(
        table, count, tasks, length,
        [&](const Matrix& one, const Block& block) {
            expand_block<false, 4>(one, block, left, right, nullptr, start, out);
        },
        [&](i64 i) { scatter_entry(tails, tail_count, i, tail, out); });
}

__global__ void __launch_bounds__(kThreads, 4) subtract_low_rank(const Matrix* table, i64 count, i64 tasks, const float* total, const float* left,
                         const float* right, float* unsent, const Piece* tails, i64 tail_count, i64 length,
                         const float* sent) {
    each_task(
        table, count, tasks, length,
        [&](const Matrix& one, const Block& block) {
            expand_block<true, 2>(one, block, left, right, total, -0.0f, unsent);
        },
        [&](i64 i) { subtract_entry(tails, tail_count, i, sent, total, unsent); });
}
