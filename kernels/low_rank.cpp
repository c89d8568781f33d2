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

int least(i64 a, i64 b) { return (int)(a < b ? a : b); }

// Converts entries to float32 and adds a residual, if there is one.
template <class T> void gather(const T* x, const float* residual, int count, float* out) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) {
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

// Writes the products of ROWS rows with RANKS rows of `q`, `distance` apart, to sums[rank][row].
template <int ROWS, int RANKS>
void dots(const float* const* rows, const float* q, i64 distance, int count, float* sums) {
    constexpr int kSums = ROWS * RANKS;
    const int whole = count / kRow * kRow;
    Floats rest[ROWS + RANKS][kVectors];  // the ends that fill no row of vectors
    for (int n = 0; n < ROWS + RANKS && whole < count; ++n)
        load_row((n < ROWS ? rows[n] : q + (n - ROWS) * distance) + whole, count - whole, rest[n]);
    Floats partials[kVectors][kSums];
    for (int v = 0; v < kVectors; ++v) {
        Floats sum[kSums];
        for (int n = 0; n < kSums; ++n) sum[n] = Floats{};
        for (int i = v * kWidth; i < whole; i += kRow)
            for (int n = 0; n < kSums; ++n)
                sum[n] += load(rows[n % ROWS] + i) * load(q + n / ROWS * distance + i);
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

// Computes left = right @ (x + residual)^T; `sum` receives x + residual.
template <class T>
void right_product(const Matrix& one, const T* x, const float* residual, float* sum,
                   const float* right, float* left) {
    if (!one.columns) return clear(left, one.rank * one.rows);
    float copy[kRows][kSegment];
    for (i64 i = 0; i < one.rows; i += kRows) {
        const int rows = least(one.rows - i, kRows);
        for (i64 j = 0; j < one.columns; j += kSegment) {
            const int count = least(one.columns - j, kSegment);
            const float* from[kRows];
            for (int r = 0; r < rows; ++r) {
                const i64 at = (i + r) * one.columns + j;
                if (sum) {
                    gather(x + at, residual ? residual + at : nullptr, count, sum + at);
                    from[r] = sum + at;
                } else {
                    from[r] = floats(x + at, count, copy[r]);
                }
            }
            for (int r = 0; r < rows && !sum; ++r)  // while these rows are worked on
                fetch(x + (i + kRows + r) * one.columns + j, count);
            for (i64 k = 0, ranks; k < one.rank; k += ranks) {
                const float* q = right + k * one.columns + j;
                float sums[kRows * kRanks];
                ranks = rows == kRows && k + kRanks <= one.rank ? kRanks : 1;
                if (rows < kRows)
                    for (int r = 0; r < rows; ++r) dots<1, 1>(from + r, q, 0, count, sums + r);
                else if (ranks == 1) dots<kRows, 1>(from, q, 0, count, sums);
                else dots<kRows, kRanks>(from, q, one.columns, count, sums);
                for (int n = 0; n < ranks * rows; ++n) {
                    float* out = left + (k + n / rows) * one.rows + i + n % rows;
                    *out = j ? *out + sums[n] : sums[n];
                }
            }
        }
    }
}

// Adds ROWS rows of a matrix, each times its entry of `p`, to `sums`, in their order.
template <int ROWS> void add_rows(const float* const* x, const float* p, int count, float* sums) {
    int c = 0;
    for (; c + kWidth <= count; c += kWidth) {
        Floats sum = load(sums + c);
        for (int r = 0; r < ROWS; ++r) sum += load(x[r] + c) * p[r];
        store_as(sums + c, sum);
    }
    for (; c < count; ++c)
        for (int r = 0; r < ROWS; ++r) sums[c] += x[r][c] * p[r];
}

// Computes right = left @ (x + residual); `sum` receives x + residual.
template <class T>
void left_product(const Matrix& one, const T* x, const float* residual, float* sum, const float* left,
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
                        if (sum && !slab)
                            gather(x + at, residual ? residual + at : nullptr, count, sum + at);
                        from[r] = sum ? sum + at : floats(x + at, count, copy[r]);
                    }
                    for (int k = 0; k < ranks; ++k) {
                        const float* p = left + (slab + k) * one.rows + i;
                        if (rows == kDeep) add_rows<kDeep>(from, p, count, sums[k]);
                        else
                            for (int r = 0; r < rows; ++r) add_rows<1>(from + r, p + r, count, sums[k]);
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
    T some[kRow];
    store(some, row);
    for (i64 c = 0; c < count; ++c) to[c] = some[c];
}

// Says where a decoded matrix goes, and what the sent factors leave out of it.
template <class T> struct Expansion {
    const float *left, *right;
    T* out;  // receives left^T @ right
    float start;  // of its sums: -0, as -0 + x is x, or NaN
    const float *sent_left, *sent_right, *total;
    float* unsent;  // receives total - sent_left^T @ sent_right; may be `total`, as may `out`
};

template <int ROWS, bool KEEP, bool STREAM, bool WHOLE, class T>
INLINE void expand_part(const Matrix& one, const Expansion<T>& to, i64 i, i64 j, i64 count) {
    Floats sums[ROWS][kVectors];
    if (KEEP) {
        product<ROWS, WHOLE>(one, to.sent_left + i, to.sent_right + j, count, -0.0f, sums);
        for (int r = 0; r < ROWS; ++r) {
            const i64 at = (i + r) * one.columns + j;
            Floats rest[kVectors];
            load_row(to.total + at, WHOLE ? kRow : count, rest);
            for (int v = 0; v < kVectors; ++v) rest[v] -= sums[r][v];
            put<WHOLE, STREAM>(to.unsent + at, count, rest);
        }
    }
    product<ROWS, WHOLE>(one, to.left + i, to.right + j, count, to.start, sums);
    for (int r = 0; r < ROWS; ++r)
        put<WHOLE, STREAM && !KEEP>(to.out + (i + r) * one.columns + j, count, sums[r]);
}

template <int ROWS, bool KEEP, bool STREAM, class T>
void expand_rows(const Matrix& one, const Expansion<T>& to, i64 i, i64 j, i64 end) {
    for (; j + kRow <= end; j += kRow) expand_part<ROWS, KEEP, STREAM, true>(one, to, i, j, kRow);
    if (j < end) expand_part<ROWS, KEEP, STREAM, false>(one, to, i, j, end - j);
}

template <bool KEEP, bool STREAM, class T> void expand(const Matrix& one, const Expansion<T>& to) {
    constexpr int kSome = 8 / kVectors;
    for (i64 first = 0; first < one.rows; first += kDeep)
        for (i64 j = 0; j < one.columns; j += kTile) {
            const i64 columns = j + least(one.columns - j, kTile);
            i64 i = first, rows = first + least(one.rows - first, kDeep);
            for (; i + kSome <= rows; i += kSome) expand_rows<kSome, KEEP, STREAM>(one, to, i, j, columns);
            for (; i < rows; ++i) expand_rows<1, KEEP, STREAM>(one, to, i, j, columns);
        }
    if constexpr (STREAM) end_of_stream();
}

}  // namespace

EXPORT(multiply_right)(i64 dtype, const Matrix* table, i64 count, const void* x, const float* residual,
                       float* sum, const float* right, float* left) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one)
            right_product(*one, (const decltype(type)*)x + one->offset,
                          residual ? residual + one->offset : nullptr, sum ? sum + one->offset : nullptr,
                          right + one->right, left + one->left);
    });
}

EXPORT(multiply_left)(i64 dtype, const Matrix* table, i64 count, const void* x, const float* residual,
                      float* sum, const float* left, float* right) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one)
            left_product(*one, (const decltype(type)*)x + one->offset,
                         residual ? residual + one->offset : nullptr, sum ? sum + one->offset : nullptr,
                         left + one->left, right + one->right);
    });
}

EXPORT(expand)(i64 dtype, const Matrix* table, i64 count, const float* left, const float* right,
               const float* sent_left, const float* sent_right, const float* total, float* unsent,
               void* out, const u8* finite) {
    i64 n = 0;
    for (i64 i = 0; i < count; ++i) n += table[i].rows * table[i].columns;
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one) {
            using T = decltype(type);
            const i64 at = one->offset;
            const bool even = one->columns % kRow == 0;  // every row is whole vectors, as stores past the cache need
            Expansion<T> to = {};
            to.left = left + one->left, to.right = right + one->right, to.out = (T*)out + at;
            to.start = finite && !*finite ? float_of(kNaN) : -0.0f;
            if (unsent) {
                to.sent_left = sent_left + one->left, to.sent_right = sent_right + one->right;
                to.total = total + at, to.unsent = unsent + at;
            }
            if (unsent && unsent != total && even && worth_streaming(to.unsent, n))
                expand<true, true>(*one, to);
            else if (unsent) expand<true, false>(*one, to);
            else if (even && worth_streaming(to.out, n)) expand<false, sizeof(T) == 4>(*one, to);
            else expand<false, false>(*one, to);
        }
    });
}
