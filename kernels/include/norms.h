// The order of sums in norms.py: chunks of 4096 entries have 32 partial sums, entry j in sum j mod 32;
// chunk c goes to total c mod 256. Halves are added to halves.
#pragma once
#include "portable.h"

constexpr int kChunk = 4096, kTotals = 256;

INLINE double value_of(u32 magnitude) { return (double)float_of(magnitude); }
