// The table of a message's blocks; the specification is in segments.py.
#pragma once
#include "portable.h"

// `count` entries of a row from `begin` on, in the slots (or the places of 16 bits) from `slot` on.
struct Run {
    i64 slot, begin, count, unused;
};

// What lies before a row of the message: runs, runs of 16 bits, and entries.
struct Before {
    i64 runs, tail_runs, entries, segments;
};

using Segments = const Run*;

INLINE i64 row_count(Segments table) { return table[0].slot; }
INLINE i64 slots_of_row(Segments table) { return table[0].unused; }
INLINE Before before(Segments table, i64 row) { return ((const Before*)table)[1 + row]; }
INLINE Segments runs_of(Segments table, i64 row) { return table + 2 + row_count(table) + before(table, row).runs; }
INLINE Segments tail_runs_of(Segments table, i64 row) {
    return runs_of(table, row_count(table)) + before(table, row).tail_runs;
}
INLINE i64 tails_of_row(Segments table, i64 row) {
    i64 count = 0;
    for (Segments run = tail_runs_of(table, row); run < tail_runs_of(table, row + 1); ++run) count += run->count;
    return count;
}

// Where an op finds a row, of one or of all: its number, and its first entry in the op's tensors.
struct Row {
    i64 index, entry;
};
INLINE Row row_of(Segments table, i64 chosen, i64 place) {
    if (chosen >= 0) return {chosen, 0};
    return {place, before(table, place).entries};
}
INLINE i64 rows_chosen(Segments table, i64 chosen) { return chosen >= 0 ? 1 : row_count(table); }
