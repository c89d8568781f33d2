// The tail of a bucket on a GPU, as `tail_table` of _tail.py lists its pieces in a table of int64.
#pragma once
#include "cuda.h"

struct Piece { i64 begin, place; };  // in the bucket and in the tail

// Returns the place in the bucket of entry `i` of the tail.
INLINE i64 place_of(const Piece* pieces, i64 count, i64 i) {
    const Piece& piece = pieces[row_with(pieces, count, &Piece::place, i)];
    return piece.begin + (i - piece.place);
}

// Writes entry `i` of the tail of x + residual to `tail`, and to its place in `total`.
template <class T>
INLINE void gather_entry(const Piece* pieces, i64 count, i64 i, const T* x, const float* residual,
                         float* total, float* tail) {
    const i64 at = place_of(pieces, count, i);
    const float entry = to_float(x[at]) + (residual ? residual[at] : -0.0f);  // x + -0 is x
    tail[i] = entry;
    if (total) total[at] = entry;
}

// Writes entry `i` of a tail to its place in `out`.
template <class T>
INLINE void scatter_entry(const Piece* pieces, i64 count, i64 i, const float* tail, T* out) {
    store(out + place_of(pieces, count, i), tail[i]);
}

// Writes what `sent` leaves out of entry `i` of the tail of `total` to its place in `unsent`.
INLINE void subtract_entry(const Piece* pieces, i64 count, i64 i, const float* sent, const float* total,
                           float* unsent) {
    const i64 at = place_of(pieces, count, i);
    unsent[at] = sent ? total[at] - sent[i] : 0.0f;
}
