// The tiles of a bucket, as `Tiles` of _tiles.py lists them in a table of int64.
#pragma once
#include "portable.h"

constexpr int kSide = 64, kTile = kSide * kSide;

// A matrix that is cut into squares, or a piece of the line, which has one row.
struct Run {
    i64 begin, rows, columns;  // in the bucket
    i64 first;                 // its first tile, or its first place in the line
};

// The first row of the table.
struct Tiles {
    i64 matrices, pieces, squares, count;
};

// Returns the run to which a tile, or a place in the line, belongs.
INLINE const Run* run_at(const Run* runs, i64 count, i64 value) {
    return runs + row_with(runs, count, &Run::first, value);
}

// A square of a matrix: its first entry in the bucket, the rows and columns that exist, and how far rows
// are apart.
struct Square {
    i64 at;
    int rows, columns;
    i64 stride;
};
INLINE Square square_of(const Tiles* table, i64 tile) {
    const Run& one = *run_at((const Run*)(table + 1), table->matrices, tile);
    const i64 across = (one.columns + kSide - 1) / kSide, nth = tile - one.first;
    const i64 row = nth / across * kSide, column = nth % across * kSide;
    return {one.begin + row * one.columns + column, one.rows - row < kSide ? (int)(one.rows - row) : kSide,
            one.columns - column < kSide ? (int)(one.columns - column) : kSide, one.columns};
}

// Returns the magnitude of a number as an integer that orders as magnitudes do. NaN is largest, and all
// kinds of it are equal.
INLINE u32 magnitude_bits(float x) {
    const u32 bits = magnitude(x);
    return bits > kInfinity ? kNaN : bits;
}
