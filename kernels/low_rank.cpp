// Products of the matrices of a bucket with thin factors, on the CPU; the specification is in
// low_rank.py.
#include "include/cpu.h"
#include "include/low_rank.h"

namespace {

constexpr int kRows = 4;    // rows of a matrix that meet a right factor, or come of two, together
constexpr int kDeep = 8;    // rows that are added to sums at a time
constexpr int kTile = 512;  // columns whose sums stay in the nearest cache
constexpr int kSlab = 8;    // rows of a left factor that are worked on together
constexpr int kPartials = 256;  // of sums in double precision: entry i in sum i mod 256

int least(i64 a, i64 b) { return (int)(a < b ? a : b); }

// Entries as float32, plus a residual if there is one.
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

// Entries as float32, where they lie or in `copy`.
const float* floats(const float* x, int, float*) { return x; }
template <class T> const float* floats(const T* x, int count, float* copy) {
    gather(x, nullptr, count, copy);
    return copy;
}

template <int ROWS> void dots(const float* const* rows, const float* q, int count, float* sums) {
    float partials[ROWS][kRow];
    const int whole = count / kRow * kRow;
    for (int v = 0; v < kVectors; ++v) {
        Floats sum[ROWS] = {};
        for (int i = v * kWidth; i < whole; i += kRow)
            for (int r = 0; r < ROWS; ++r) sum[r] += load(rows[r] + i) * load(q + i);
        for (int r = 0; r < ROWS; ++r) store_as(partials[r] + v * kWidth, sum[r]);
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int i = whole; i < count; ++i) partials[r][i - whole] += rows[r][i] * q[i];
        for (int half = kRow / 2; half; half /= 2)
            for (int l = 0; l < half; ++l) partials[r][l] += partials[r][l + half];
        sums[r] = partials[r][0];
    }
}

// left = right @ (x + residual)^T; `sum` gets x + residual.
template <class T>
void right_product(const Matrix& one, const T* x, const float* residual, float* sum,
                   const float* right, float* left) {
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
            for (i64 k = 0; k < one.rank; ++k) {
                const float* q = right + k * one.columns + j;
                float sums[kRows], *out = left + k * one.rows + i;
                if (rows == kRows) dots<kRows>(from, q, count, sums);
                else
                    for (int r = 0; r < rows; ++r) dots<1>(from + r, q, count, sums + r);
                for (int r = 0; r < rows; ++r) out[r] = j ? out[r] + sums[r] : sums[r];
            }
        }
    }
}

// Adds `rows` rows of a matrix, each times its entry of p, to `sums`, one after the other.
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

// right = left @ x.
template <class T> void left_product(const Matrix& one, const T* x, const float* left, float* right) {
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
                    for (int r = 0; r < rows; ++r)
                        from[r] = floats(x + (i + r) * one.columns + j, count, copy[r]);
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

// out = left^T @ right, or out -= it: ROWS rows from row i on.
template <int ROWS, bool SUBTRACT, bool STREAM, class T>
void expand_rows(const Matrix& one, i64 i, const float* left, const float* right, T* out) {
    const i64 m = one.columns;
    auto products = [&](i64 j, Floats(&sum)[ROWS][kVectors]) __attribute__((always_inline)) {
        for (i64 k = 0; k < one.rank; ++k)
            for (int v = 0; v < kVectors; ++v) {
                const Floats q = load(right + k * m + j + v * kWidth);
                for (int r = 0; r < ROWS; ++r) {
                    const Floats part = q * left[k * one.rows + i + r];
                    sum[r][v] = k ? sum[r][v] + part : part;
                }
            }
    };
    const i64 whole = m / kRow * kRow;
    for (i64 j = 0; j < whole; j += kRow) {
        Floats sum[ROWS][kVectors];
        products(j, sum);
        for (int r = 0; r < ROWS; ++r) {
            T* to = out + (i + r) * m + j;
            for (int v = 0; v < kVectors && SUBTRACT; ++v) sum[r][v] = load(to + v * kWidth) - sum[r][v];
            if constexpr (STREAM) stream(to, sum[r]);
            else store(to, sum[r]);
        }
    }
    for (int r = 0; r < ROWS && whole < m; ++r) {  // a row of vectors that is partly there
        const int count = (int)(m - whole);
        float sums[kRow] = {};
        T some[kRow] = {}, *to = out + (i + r) * m + whole;
        for (int c = 0; c < count; ++c) {
            for (i64 k = 0; k < one.rank; ++k) {
                const float part = right[k * m + whole + c] * left[k * one.rows + i + r];
                sums[c] = k ? sums[c] + part : part;
            }
            some[c] = to[c];
        }
        Floats sum[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            sum[v] = load(sums + v * kWidth);
            if (SUBTRACT) sum[v] = load(some + v * kWidth) - sum[v];
        }
        store(some, sum);
        for (int c = 0; c < count; ++c) to[c] = some[c];
    }
}

template <bool SUBTRACT, bool STREAM, class T>
void expand(const Matrix& one, const float* left, const float* right, T* out) {
    i64 i = 0;
    for (; i + kRows <= one.rows; i += kRows)
        expand_rows<kRows, SUBTRACT, STREAM>(one, i, left, right, out);
    for (; i < one.rows; ++i) expand_rows<1, SUBTRACT, STREAM>(one, i, left, right, out);
    if constexpr (STREAM) end_of_stream();
}

double dot(const float* a, const float* b, i64 n) {
    double partials[kPartials] = {};
    for (i64 at = 0; at < n; at += kPartials)
        for (int l = 0, count = least(n - at, kPartials); l < count; ++l)
            partials[l] += (double)a[at + l] * (double)b[at + l];
    for (int half = kPartials / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) partials[l] += partials[l + half];
    return partials[0];
}

// Gram-Schmidt on `rank` rows of `n` entries, each projected twice.
void orthonormal_rows(float* rows, i64 rank, i64 n) {
    for (i64 j = 0; j < rank; ++j) {
        float* v = rows + j * n;
        const double before = dot(v, v, n);
        for (int round = 0; round < 2; ++round)
            for (i64 i = 0; i < j; ++i) {
                const float* q = rows + i * n;
                const double d = dot(q, v, n);
                for (i64 l = 0; l < n; ++l) v[l] = (float)((double)v[l] - d * (double)q[l]);
            }
        const double norm = dot(v, v, n);
        const double inverse = norm <= before * kVanished ? 0.0 : 1.0 / __builtin_sqrt(norm);
        for (i64 l = 0; l < n; ++l) v[l] = (float)((double)v[l] * inverse);
    }
}

void unit_rows(float* rows, const float* fresh, i64 rank, i64 n) {
    double largest = 0.0;
    for (i64 k = 0; k < rank; ++k) {
        const double norm = dot(rows + k * n, rows + k * n, n);
        largest = norm > largest ? norm : largest;
    }
    for (i64 k = 0; k < rank; ++k) {
        float* v = rows + k * n;
        const double norm = dot(v, v, n);
        const bool dead = norm <= largest * kDead;
        const double inverse = 1.0 / __builtin_sqrt(norm);
        for (i64 l = 0; l < n; ++l) v[l] = dead ? fresh[k * n + l] : (float)((double)v[l] * inverse);
    }
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

EXPORT(multiply_left)(i64 dtype, const Matrix* table, i64 count, const void* x, const float* left,
                      float* right) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one)
            left_product(*one, (const decltype(type)*)x + one->offset, left + one->left,
                         right + one->right);
    });
}

EXPORT(expand)(i64 dtype, const Matrix* table, i64 count, const float* left, const float* right,
               i64 subtract, void* out) {
    with_dtype((int)dtype, [&](auto type) {
        for (const Matrix* one = table; one < table + count; ++one) {
            auto* to = (decltype(type)*)out + one->offset;
            const float *p = left + one->left, *q = right + one->right;
            const bool even = one->columns % kRow == 0;  // every row of it begins at a vector
            if (subtract) expand<true, false>(*one, p, q, to);
            else if (even && worth_streaming(to, one->rows * one->columns))
                expand<false, sizeof(*to) == 4>(*one, p, q, to);
            else expand<false, false>(*one, p, q, to);
        }
    });
}

EXPORT(orthonormalize)(const Matrix* table, i64 count, float* left) {
    for (const Matrix* one = table; one < table + count; ++one)
        orthonormal_rows(left + one->left, one->rank, one->rows);
}

EXPORT(unit_rows)(const Matrix* table, i64 count, const float* fresh, float* right) {
    for (const Matrix* one = table; one < table + count; ++one)
        unit_rows(right + one->right, fresh + one->right, one->rank, one->columns);
}
