// Packs and counts votes on a GPU; the specification is in votes.py. Blocks of the grid with
// blockIdx.y = r work on row r of a message.
#include "include/blockwise.h"
#include "include/cuda.h"

template <class T> __global__ void pack_votes(const T* x, i64 n, i64 shard, i64 bytes, u8* payload) {
    x += blockIdx.y * shard;
    payload += blockIdx.y * bytes;
    n = entries_of_row(n, shard, blockIdx.y);
    u32 largest = 0;
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        float c[8];
        load_span(x, at, count, c);
        u32 own = 0;  // the word of four bytes that has this lane's byte
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const u32 word = __ballot_sync(kAllLanes, has(k, count) && c[k] >= 0.0f);
            own = lane() / 4 == k ? word : own;
            largest = larger(largest, magnitude(c[k]));
        }
        if (lane() < (count + 7) / 8) payload[at / 8 + lane()] = (u8)(own >> (lane() % 4 * 8));
    }
    if (largest_of_warp(largest) >= kInfinity && lane() == 0) payload[bytes - 1] = 1;
}

template <class T>
__global__ void count_votes(const u8* payloads, i64 count, i64 stride, i64 bytes, i64 n, i64 shard,
                            float scale, T* out) {
    payloads += blockIdx.y * bytes;
    out += blockIdx.y * shard;
    n = entries_of_row(n, shard, blockIdx.y);
    u32 bad = 0;
    for (i64 r = lane(); r < count; r += kLanes) bad |= payloads[r * stride + bytes - 1];
    const bool finite = largest_of_warp(bad) == 0;
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int here = entries_in<256>(at, n);
        const u8* from = payloads + (at + lane()) / 8;
        u32 votes[8] = {};
#pragma unroll 4
        for (i64 r = 0; r < count; ++r, from += stride)
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (has(k, here)) votes[k] += (u32)from[k * 4] >> (lane() % 8) & 1u;
        float c[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            c[k] = finite ? (2 * (i64)votes[k] >= count ? scale : -scale) : float_of(kNaN);
        store_span(out, at, here, c);
    }
}
