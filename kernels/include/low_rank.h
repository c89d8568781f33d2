// The matrices of a bucket, as `Matrices` of _matrices.py lists them in a table of int64.
#pragma once
#include "portable.h"

// The order of sums, the same on every device. Products with a right factor are sums over 512 columns
// each, added in their order; each is 32 partial sums, column j in sum j mod 32, and then halves are
// added to halves. Products with a left factor are sums over 64 rows each, added in their order.
constexpr int kSegment = 512, kChunk = 64;

// Sums in double precision are 1024 partial sums, entry i in sum i mod 1024. Of each 32 consecutive
// ones, halves are added to halves, and then of the 32 results. A row of a factor is projected on the
// rows before it in groups of 4: all dot products with a group, then one subtraction, rounded once.
constexpr int kSums = 1024, kRowGroup = 4;

struct Matrix {
    i64 offset, rows, columns, rank;  // place in the bucket, row by row; rows of its factors
    i64 left, right;                  // places of its factors: (rank, rows), (rank, columns)
    i64 block_task, block_sums;       // CUDA: its first task and partial sum in products with `right`,
    i64 chunk_task, chunk_sums;       // and in those with `left`
};

// Shares of squared norms. A row of which projections leave less than 2^-32 cancels; a row below 2^-19
// of the largest of its matrix (16 roundings of float32) is nothing but rounding errors.
constexpr double kVanished = 1.0 / (1ull << 32) / (1ull << 32), kDead = 1.0 / (1ull << 38);
