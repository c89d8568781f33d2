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

constexpr i64 kBlock = 256, kChunk = 2048;
constexpr int kThreads = 256;  // sums that a part's chunks are added to
