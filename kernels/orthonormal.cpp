// Makes the rows of factors orthonormal, or unit, on the CPU; the specification is in orthonormal.py.
#include "include/cpu.h"
#include "include/low_rank.h"

namespace {

constexpr int kHalf = 32;  // partial sums that are added up together

double sum_of(double* sums) {
    for (int half = kHalf / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    return sums[0];
}

double dot(const float* a, const float* b, i64 n) {
    double partials[kSums] = {}, sums[kHalf] = {};
    for (i64 at = 0; at < n; at += kSums)
        for (int l = 0, count = n - at < kSums ? (int)(n - at) : kSums; l < count; ++l)
            partials[l] += (double)a[at + l] * (double)b[at + l];
    // Of sums without entries, nothing is added up: they are zero.
    for (int i = 0; i < kHalf && i * kHalf < n; ++i) sums[i] = sum_of(partials + i * kHalf);
    return sum_of(sums);
}

// Writes `from` less `count` rows of `q`, each times its entry of `d`, to `v`, which may be `from`.
void subtract(const float* from, const float* q, i64 n, int count, const double* d, float* v) {
    constexpr int kSome = 256;
    double entries[kSome];
    for (i64 at = 0; at < n; at += kSome) {
        const int some = n - at < kSome ? (int)(n - at) : kSome;
        for (int l = 0; l < some; ++l) entries[l] = (double)from[at + l];
        for (int k = 0; k < count; ++k) {
            const float* row = q + k * n + at;
            for (int l = 0; l < some; ++l) entries[l] -= d[k] * (double)row[l];
        }
        for (int l = 0; l < some; ++l) v[at + l] = (float)entries[l];
    }
}

void orthonormalize(const float* left, float* rows, i64 rank, i64 n) {
    for (i64 j = 0; j < rank; ++j) {
        const float* from = left + j * n;
        float* v = rows + j * n;
        const double before = dot(from, from, n);
        for (int round = 0; round < 2; ++round)
            for (i64 first = 0; first < j; first += kRowGroup, from = v) {
                const float* q = rows + first * n;
                const int count = j - first < kRowGroup ? (int)(j - first) : kRowGroup;
                double d[kRowGroup];
                for (int k = 0; k < count; ++k) d[k] = dot(q + k * n, from, n);
                subtract(from, q, n, count, d, v);
            }
        const double norm = j ? dot(v, v, n) : before;
        const double inverse = norm <= before * kVanished ? 0.0 : 1.0 / __builtin_sqrt(norm);
        for (i64 l = 0; l < n; ++l) v[l] = (float)((double)from[l] * inverse);
    }
}

void unit_rows(const float* right, const float* fresh, float* out, i64 rank, i64 n) {
    double largest = 0.0;
    for (i64 k = 0; k < rank; ++k) {
        const double norm = dot(right + k * n, right + k * n, n);
        largest = norm > largest ? norm : largest;
    }
    for (i64 k = 0; k < rank; ++k) {
        const float* v = right + k * n;
        const double norm = dot(v, v, n);
        const bool dead = norm <= largest * kDead;
        const double inverse = 1.0 / __builtin_sqrt(norm);
        for (i64 l = 0; l < n; ++l)
            out[k * n + l] = dead ? fresh[k * n + l] : (float)((double)v[l] * inverse);
    }
}

}  // namespace

EXPORT(orthonormalize)(const Matrix* table, i64 count, const float* left, float* out) {
    for (const Matrix* one = table; one < table + count; ++one)
        orthonormalize(left + one->left, out + one->left, one->rank, one->rows);
}

EXPORT(unit_rows)(const Matrix* table, i64 count, const float* right, const float* fresh, float* out) {
    for (const Matrix* one = table; one < table + count; ++one)
        unit_rows(right + one->right, fresh + one->right, out + one->right, one->rank, one->columns);
}
