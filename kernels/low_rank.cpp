// Multiplies the matrices of a bucket with thin factors on the CPU; the specification is in
// _low_rank_definition.py.
#include "include/cpu.h"
#include "include/low_rank.h"

namespace {

constexpr int kRows = 4;    // rows of a matrix that are multiplied with a right factor together
constexpr int kRanks = kWidth / kRows;  // rows of a right factor in the same loop
constexpr int kDeep = 8;    // rows added to sums, or computed from two factors, at a time
constexpr int kTile = 512;  // columns whose sums, or factors, fit the nearest cache
constexpr int kSlab = 8;    // rows of a left factor in the same loop
constexpr int kNear = 8192; // columns of which a few rows fit the second cache

int least(i64 a, i64 b) { return (int)(a < b ? a : b); }

// Prefetches what is read next while these entries are worked on, a line of 64 bytes at a time. Fetching
// all lines at once fills the queue of misses, and memory is idle afterwards.
template <class T> INLINE void fetch_line(const T* next, int i) {
    if (next && i % (64 / (int)sizeof(T)) == 0) __builtin_prefetch(next + i);
}

// Converts entries to float32 and adds a residual, if there is one.
template <class T>
void gather(const T* x, const float* residual, int count, float* out, const float* next = nullptr) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        fetch_line(next, i);
        Floats entries = load(x + i);
        if (residual) entries += load(residual + i);
        store_as(out + i, entries);
    }
    if (i == count) return;
    T some[kWidth] = {};
    float entries[kWidth];
    for (int l = 0; l < count - i; ++l) some[l] = x[i + l];
    store_as(entries, load(some));
    for (int l = 0; l < count - i; ++l)
        out[i + l] = residual ? entries[l] + residual[i + l] : entries[l];
}

// Returns float32 entries in place, and others converted in `copy`.
const float* floats(const float* x, int, float*) { return x; }
template <class T> const float* floats(const T* x, int count, float* copy) {
    gather(x, nullptr, count, copy);
    return copy;
}

// Returns `count` entries of x + residual, which are `at` behind the first one of a matrix; `sum` receives
// them. Those from entry `end` of the matrix on do not exist and count as zeros.
template <class T>
[[gnu::noinline]] const float* short_row(const T* x, const float* residual, float* sum, i64 at, int count, i64 end,
                                         float* copy) {
    const int there = (int)(end - at > 0 ? end - at : 0);
    if (sum) gather(x + at, residual ? residual + at : nullptr, there, sum + at);
    if (sum) __builtin_memcpy(copy, sum + at, 4 * (unsigned)there);
    else gather(x + at, nullptr, there, copy);
    for (int i = there; i < count; ++i) copy[i] = 0.0f;
    return copy;
}

// Picks the lower halves of sums of LANES lanes each, or with FROM = LANES / 2 the upper halves.
template <int LANES, int FROM> struct HalfOf {
    static constexpr int entry(int l) { return l / (LANES / 2) * LANES + l % (LANES / 2) + FROM; }
};

// Adds halves to halves in all sums of LANES lanes of `a` and `b`, and packs them into one vector.
// Adding up the partial sums of one product at a time took as long as computing them
// (docs/design/kernels.md).
template <int LANES> Floats fold(Floats a, Floats b) {
    return picked<HalfOf<LANES, 0>>(a, b) + picked<HalfOf<LANES, LANES / 2>>(a, b);
}

// Adds N rows of partial sums, halves to halves; N is a power of two.
template <int N, int LANES = kWidth> void sums_of(Floats* partials, float* sums) {
    if constexpr (LANES == 1) {
        __builtin_memcpy(sums, partials, 4 * N);
    } else {
        constexpr int kBoth = 2 * kWidth / LANES;  // sums of two vectors
        constexpr int kLeft = (N + kBoth - 1) / kBoth;
        for (int n = 0; n < kLeft; ++n) {
            const Floats first = partials[2 * n];
            partials[n] = fold<LANES>(first, N * LANES <= kWidth ? first : partials[2 * n + 1]);
        }
        sums_of<N, LANES / 2>(partials, sums);
    }
}

// Writes the products of ROWS rows with RANKS rows of `q` to sums[rank][row]. Also fetches as many
// entries of ROWS rows from `next` on. Rows of `q` and of `next` are `columns` apart.
template <int ROWS, int RANKS, class T>
void dots(const float* const* rows, const float* q, i64 columns, int count, float* sums, const T* next) {
    constexpr int kSums = ROWS * RANKS;
    const int whole = count / kRow * kRow;
    Floats rest[ROWS + RANKS][kVectors];  // the ends that fill no row of vectors
    for (int n = 0; n < ROWS + RANKS && whole < count; ++n)
        load_row((n < ROWS ? rows[n] : q + (n - ROWS) * columns) + whole, count - whole, rest[n]);
    Floats partials[kVectors][kSums];
    for (int v = 0; v < kVectors; ++v) {
        Floats sum[kSums];
        for (int n = 0; n < kSums; ++n) sum[n] = Floats{};
        for (int i = v * kWidth; i < whole; i += kRow) {
            for (int r = 0; r < ROWS && next; ++r) fetch_line(next + r * columns, i);
            for (int n = 0; n < kSums; ++n)
                sum[n] += load(rows[n % ROWS] + i) * load(q + n / ROWS * columns + i);
        }
        if (whole < count)
            for (int n = 0; n < kSums; ++n) sum[n] += rest[n % ROWS][v] * rest[ROWS + n / ROWS][v];
        for (int n = 0; n < kSums; ++n) partials[v][n] = sum[n];
    }
    for (int half = kVectors / 2; half; half /= 2)
        for (int v = 0; v < half; ++v)
            for (int n = 0; n < kSums; ++n) partials[v][n] += partials[v + half][n];
    sums_of<kSums>(partials[0], sums);
}

// Writes a factor of a matrix without entries, to which the loops below do not come.
void clear(float* factor, i64 n) {
    for (i64 i = 0; i < n; ++i) factor[i] = 0.0f;
}

// Computes left = right @ (x + residual)^T; `sum` receives x + residual. The matrix has its first `end`
// entries.
template <class T>
void right_product(const Matrix& one, i64 end, const T* x, const float* residual, float* sum,
                   const float* right, float* left) {
    if (!one.columns) return clear(left, one.rank * one.rows);
    float copy[kRows][kSegment];
    // What is fetched ahead: the next rows, or columns where rows would not stay in the cache. Those of
    // `x` beside the first loop over ranks, those of `residual` beside the second if there is one.
    const i64 ahead = one.columns <= kNear ? kRows * one.columns : kSegment;
    const bool one_loop = one.rank <= kRanks;
    for (i64 i = 0; i < one.rows; i += kRows) {
        const int rows = least(one.rows - i, kRows);
        for (i64 j = 0; j < one.columns; j += kSegment) {
            const int count = least(one.columns - j, kSegment);
            const i64 first = i * one.columns + j;
            const float* from[kRows];
            for (int r = 0; r < rows; ++r) {
                const i64 at = first + r * one.columns;
                if (at + count > end) {
                    from[r] = short_row(x, residual, sum, at, count, end, copy[r]);
                    continue;
                }
                const float* rest = residual ? residual + at : nullptr;
                if (sum) gather(x + at, rest, count, sum + at, rest && one_loop ? rest + ahead : nullptr);
                from[r] = sum ? sum + at : floats(x + at, count, copy[r]);
            }
            for (i64 k = 0, ranks; k < one.rank; k += ranks) {
                const float* q = right + k * one.columns + j;
                float sums[kRows * kRanks];
                ranks = rows == kRows && k + kRanks <= one.rank ? kRanks : 1;
                const T* next = k == 0 ? x + first + ahead : nullptr;
                const float* rest = k == kRanks && residual ? residual + first + ahead : nullptr;
                if (rows < kRows)
                    for (int r = 0; r < rows; ++r)
                        dots<1, 1>(from + r, q, 0, count, sums + r, (const T*)nullptr);
                else if (rest && ranks == 1) dots<kRows, 1>(from, q, one.columns, count, sums, rest);
                else if (rest) dots<kRows, kRanks>(from, q, one.columns, count, sums, rest);
                else if (ranks == 1) dots<kRows, 1>(from, q, one.columns, count, sums, next);
                else dots<kRows, kRanks>(from, q, one.columns, count, sums, next);
                for (int n = 0; n < ranks * rows; ++n) {
                    float* out = left + (k + n / rows) * one.rows + i + n % rows;
                    *out = j ? *out + sums[n] : sums[n];
                }
            }
        }
    }
}

// Adds ROWS rows of a matrix, each times its entries of RANKS rows of `p`, to as many rows of `sums`, in
// their order. Also fetches as many entries of `fetched` rows of `next` and `rest`, `columns` apart.
template <int ROWS, int RANKS, class T>
void add_rows(const float* const* x, const float* p, i64 distance, int count, float (*sums)[kTile],
              const T* next, const float* rest, int fetched, i64 columns) {
    int c = 0;
    for (; c + kWidth <= count; c += kWidth) {
        for (int r = 0; r < fetched; ++r) fetch_line(next + r * columns, c);
        for (int r = 0; r < fetched && rest; ++r) fetch_line(rest + r * columns, c);
        Floats sum[RANKS];
        for (int k = 0; k < RANKS; ++k) sum[k] = load(sums[k] + c);
        for (int r = 0; r < ROWS; ++r) {
            const Floats row = load(x[r] + c);
            for (int k = 0; k < RANKS; ++k) sum[k] += row * p[k * distance + r];
        }
        for (int k = 0; k < RANKS; ++k) store_as(sums[k] + c, sum[k]);
    }
    for (; c < count; ++c)
        for (int r = 0; r < ROWS; ++r)
            for (int k = 0; k < RANKS; ++k) sums[k][c] += x[r][c] * p[k * distance + r];
}

// Computes right = left @ (x + residual); `sum` receives x + residual. The matrix has its first `there`
// entries.
template <class T>
void left_product(const Matrix& one, i64 there, const T* x, const float* residual, float* sum, const float* left,
                  float* right) {
    if (!one.rows) return clear(right, one.rank * one.columns);
    float sums[kSlab][kTile], copy[kDeep][kTile];
    for (i64 chunk = 0; chunk < one.rows; chunk += kChunk)
        for (i64 j = 0; j < one.columns; j += kTile)
            for (i64 slab = 0; slab < one.rank; slab += kSlab) {
                const int count = least(one.columns - j, kTile), ranks = least(one.rank - slab, kSlab);
                const i64 end = chunk + least(one.rows - chunk, kChunk);
                for (int k = 0; k < ranks; ++k)
                    for (int c = 0; c < count; ++c) sums[k][c] = 0.0f;
                for (i64 i = chunk; i < end; i += kDeep) {
                    const int rows = least(end - i, kDeep);
                    const float* from[kDeep];
                    for (int r = 0; r < rows; ++r) {
                        const i64 at = (i + r) * one.columns + j;
                        if (at + count > there) {  // after the first slab, `sum` has the sums
                            from[r] = sum && slab ? short_row(sum, nullptr, nullptr, at, count, there, copy[r])
                                                  : short_row(x, residual, sum, at, count, there, copy[r]);
                            continue;
                        }
                        if (sum && !slab)
                            gather(x + at, residual ? residual + at : nullptr, count, sum + at);
                        from[r] = sum ? sum + at : floats(x + at, count, copy[r]);
                    }
                    // The next rows of this tile, else the next tile's, else the next chunk's.
                    const i64 next = i + kDeep < end           ? (i + kDeep) * one.columns + j
                                     : j + kTile < one.columns ? chunk * one.columns + j + kTile
                                                               : end * one.columns;
                    for (int k = 0, some; k < ranks; k += some) {
                        some = rows == kDeep && k + kRanks <= ranks ? kRanks : 1;
                        const float* p = left + (slab + k) * one.rows + i;
                        if (rows < kDeep) {
                            for (int r = 0; r < rows; ++r)
                                add_rows<1, 1>(from + r, p + r, 0, count, sums + k, x, residual, 0, 0);
                            continue;
                        }
                        // Each of these loops fetches its share of the next rows.
                        const int row = kDeep * k / ranks, end_row = kDeep * (k + some) / ranks;
                        const i64 at = next + row * one.columns;
                        const float* rest = residual ? residual + at : nullptr;
                        auto add = some == 1 ? add_rows<kDeep, 1, T> : add_rows<kDeep, kRanks, T>;
                        add(from, p, one.rows, count, sums + k, x + at, rest, slab ? 0 : end_row - row,
                            one.columns);
                    }
                }
                for (int k = 0; k < ranks; ++k) {
                    float* out = right + (slab + k) * one.columns + j;
                    for (int c = 0; c < count; ++c) out[c] = chunk ? out[c] + sums[k][c] : sums[k][c];
                }
            }
}

// Computes left^T @ right in ROWS rows, from entry `p` of `left` on, and `count` columns, from entry
// `q` of `right` on; 32 columns if WHOLE.
template <int ROWS, bool WHOLE>
INLINE void product(const Matrix& one, const float* p, const float* q, i64 count, float start,
                    Floats (&sums)[ROWS][kVectors]) {
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = -Floats{} + start;
    for (i64 k = 0; k < one.rank; ++k, p += one.rows, q += one.columns) {
        Floats row[kVectors];
        load_row(q, WHOLE ? kRow : count, row);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < kVectors; ++v) sums[r][v] += row[v] * p[r];
    }
}

template <bool WHOLE, bool STREAM, class T>
INLINE void put(T* to, i64 count, const Floats (&row)[kVectors]) {
    if (WHOLE) return STREAM ? stream(to, row) : store(to, row);
    store_row(to, row, count);
}

// Says where the product of two factors goes, and what it is subtracted from.
template <class T> struct Expansion {
    const float *left, *right;
    float start;  // of its sums: -0, as -0 + x is x, or NaN
    const float* total;  // REST: `out` receives `total` minus the product; may be `out`
    T* out;
};

// `ahead`: from these entries to the next ones of `total`.
template <int ROWS, bool REST, bool STREAM, bool WHOLE, class T>
INLINE void expand_part(const Matrix& one, const Expansion<T>& to, i64 i, i64 j, i64 count, i64 ahead) {
    Floats sums[ROWS][kVectors];
    for (int r = 0; r < ROWS && REST; ++r) fetch(to.total + (i + r) * one.columns + j + ahead, kRow);
    product<ROWS, WHOLE>(one, to.left + i, to.right + j, count, to.start, sums);
    for (int r = 0; r < ROWS; ++r) {
        const i64 at = (i + r) * one.columns + j;
        if (REST) {
            Floats total[kVectors];
            load_row(to.total + at, WHOLE ? kRow : count, total);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = total[v] - sums[r][v];
        }
        put<WHOLE, STREAM>(to.out + at, count, sums[r]);
    }
}

// `head`: entries before the first whole vector in memory.
template <int ROWS, bool REST, bool STREAM, class T>
void expand_rows(const Matrix& one, const Expansion<T>& to, i64 i, i64 j, i64 end, i64 head, i64 ahead) {
    if (head) expand_part<ROWS, REST, STREAM, false>(one, to, i, j, head, ahead), j += head;
    for (; j + kRow <= end; j += kRow) expand_part<ROWS, REST, STREAM, true>(one, to, i, j, kRow, ahead);
    if (j < end) expand_part<ROWS, REST, STREAM, false>(one, to, i, j, end - j, ahead);
}

// `whole`: the rows that have all columns.
template <bool REST, bool STREAM, class T>
void expand(const Matrix& one, i64 whole, const Expansion<T>& to, int head) {
    constexpr int kSome = 8 / kVectors;
    for (i64 first = 0; first < whole; first += kDeep)
        for (i64 j = 0, end; j < one.columns; j = end) {
            end = j + least(one.columns - j, j ? kTile : kTile + head);
            i64 i = first, rows = first + least(whole - first, kDeep);
            for (; i + kSome <= rows; i += kSome) {
                // The next rows of this tile, else the next tile's, else those below.
                const i64 next = i + kSome < rows    ? (i + kSome) * one.columns + j
                                 : end < one.columns ? first * one.columns + end
                                                     : rows * one.columns;
                const i64 ahead = next - i * one.columns - j;
                expand_rows<kSome, REST, STREAM>(one, to, i, j, end, j ? 0 : head, ahead);
            }
            for (; i < rows; ++i)
                expand_rows<1, REST, STREAM>(one, to, i, j, end, j ? 0 : head, one.columns);
        }
    if constexpr (STREAM) end_of_stream();
}

// Counts the entries from `out` on to where a vector in memory begins.
template <class T> int entries_before_vector(const T* out) {
    return (int)(-(unsigned long)out % sizeof(Floats) / sizeof(T));
}

// Writes the products of all matrices of a bucket, or with REST `total` minus these.
template <bool REST, class T>
void expand_all(const Matrix* table, i64 count, const float* left, const float* right, const float* total,
                float start, T* out) {
    i64 n = 0;
    for (i64 i = 0; i < count; ++i) n += table[i].rows * table[i].columns;
    for (const Matrix* one = table; one < table + count; ++one) {
        const i64 at = one->offset;
        const Expansion<T> to = {left + one->left, right + one->right, start, REST ? total + at : nullptr,
                                 out + at};
        // Vectors are written past the cache where they begin at the same place in every row.
        const int head = entries_before_vector(to.out);
        const bool even = one->columns % kWidth == 0 && one->columns >= kRow + head;
        const bool in_place = REST && (const void*)total == (const void*)out;
        const i64 there = table[count].offset - at;  // entries of the matrix, or more
        const i64 whole = there < one->rows * one->columns ? one->rows - 1 : one->rows;
        if (even && !in_place && worth_streaming(to.out + head, n))
            expand<REST, sizeof(T) == 4>(*one, whole, to, head);
        else expand<REST, false>(*one, whole, to, 0);
        if (whole < one->rows)
            expand_rows<1, REST, false>(*one, to, whole, 0, there - whole * one->columns, 0, 0);
    }
}

}  // namespace

EXPORT(multiply_right)(i64 dtype, const Matrix* table, i64 count, const void* x, const float* residual,
                       float* sum, const float* right, float* left) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one)
            right_product(*one, table[count].offset - one->offset, (const decltype(type)*)x + one->offset,
                          residual ? residual + one->offset : nullptr, sum ? sum + one->offset : nullptr,
                          right + one->right, left + one->left);
    });
}

EXPORT(multiply_left)(i64 dtype, const Matrix* table, i64 count, const void* x, const float* residual,
                      float* sum, const float* left, float* right) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one)
            left_product(*one, table[count].offset - one->offset, (const decltype(type)*)x + one->offset,
                         residual ? residual + one->offset : nullptr, sum ? sum + one->offset : nullptr,
                         left + one->left, right + one->right);
    });
}

EXPORT(expand)(i64 dtype, const Matrix* table, i64 count, const float* left, const float* right, void* out,
               const u8* finite) {
    with_dtype((int)dtype, [&](auto type) {
        expand_all<false>(table, count, left, right, nullptr, finite && !*finite ? float_of(kNaN) : -0.0f,
                          (decltype(type)*)out);
    });
}

EXPORT(subtract_low_rank)(const Matrix* table, i64 count, const float* total, const float* left,
                          const float* right, float* unsent) {
    expand_all<true>(table, count, left, right, total, -0.0f, unsent);
}
