// The matrices of a bucket, as low_rank.py describes them in a table of int64.
#pragma once
#include "portable.h"

// Products with a right factor are sums over 512 columns each, added in their order; within them
// there are 32 partial sums, column j in sum j mod 32, then halves are added to halves. Products with
// a left factor are sums over 64 rows each, taken and added in their order.
constexpr int kSegment = 512, kChunk = 64;

struct Matrix {
    i64 offset, rows, columns, rank;  // where it lies in the bucket, row by row; rows of its factors
    i64 left, right;                  // where its factors lie among all: (rank, rows), (rank, columns)
    i64 block_task, block_sums;       // CUDA: its first task and partial sum in products with `right`,
    i64 chunk_task, chunk_sums;       // and in those with `left`
};

// Squared norms. A row of which projections leave less than 2^-32 is a combination of those before
// it; one below 2^-19 of its matrix's largest (16 float32 roundings) is rounding errors.
constexpr double kVanished = 1.0 / (1ull << 32) / (1ull << 32), kDead = 1.0 / (1ull << 38);
