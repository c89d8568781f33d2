// The table of a bucket's parts; the specification is in parts.py.
#pragma once
#include "portable.h"

// A row of the table: the first entry, and what is counted before the part. The last row has the ends.
struct Part {
    i64 begin;
    i64 block;  // of 256 entries
    i64 chunk;  // of 2048 entries
    i64 byte;   // of payloads
};

// Returns the row of a table in which a block or a chunk is: the last that begins there or before.
template <class Row> INLINE i64 row_with(const Row* rows, i64 count, i64 Row::*first, i64 task) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        (rows[middle].*first <= task ? low : high) = middle;
    }
    return low;
}

constexpr i64 kBlock = 256, kChunk = 2048;
constexpr int kThreads = 256;  // sums that a part's chunks are added to
