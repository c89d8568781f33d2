// Packs bitmaps on a GPU; the specification is in bitmap.py. A warp packs
// 32 bits by a ballot.
#include "include/cuda.h"

__global__ void pack_bits(const u8* bits, i64 n, u8* packed) {
    const i64 bytes = (n + 7) / 8;
    for (i64 at = warp() * kLanes; at < n; at += warps() * kLanes) {
        const u32 word = __ballot_sync(kAllLanes, at + lane() < n && bits[at + lane()]);
        const i64 byte = at / 8 + lane();
        if (lane() < 4 && byte < bytes) packed[byte] = (u8)(word >> (8 * lane()));
    }
}

__global__ void unpack_bits(const u8* packed, i64 n, u8* bits) {
    for (i64 i = warp() * kLanes + lane(); i < n; i += warps() * kLanes)
        bits[i] = packed[i / 8] >> (i % 8) & 1;
}
