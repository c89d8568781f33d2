// Checks for finite entries on a GPU; the specification is in finite.py.
#include "include/tickets.h"

template <class T> __global__ void finite(const T* x, i64 n, u8* answer, u32* counters) {
    constexpr int kRows = 8;  // rows whose loads are under way together
    u32 largest = 0;
    for (i64 at = warp() * kRows * kLanes; at < n; at += warps() * kRows * kLanes)
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const i64 i = at + row * kLanes + lane();
            largest = larger(largest, i < n ? magnitude(to_float(x[i])) : 0u);
        }
    write_verdict(largest_of_warp(largest) >= kInfinity, counters, answer);
}
