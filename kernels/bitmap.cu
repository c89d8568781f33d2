// Packs bitmaps on a GPU; the specification is in bitmap.py. A lane has four bytes under way.
#include "include/bitmap.h"

#include "include/cuda.h"

constexpr int kBytes = 4 * kLanes;  // packed bytes of a span

// Reads and writes eight bytes of which `count` exist, in one access where that is allowed.
INLINE u64 load_eight(const u8* from, i64 count) {
    if (count >= 8 && (u64)from % 8 == 0) return *(const u64*)from;
    u64 bytes = 0;
    for (int i = 0; i < 8 && i < count; ++i) bytes |= (u64)from[i] << (8 * i);
    return bytes;
}
INLINE void store_eight(u8* to, i64 count, u64 bytes) {
    if (count >= 8 && (u64)to % 8 == 0) *(u64*)to = bytes;
    else
        for (int i = 0; i < 8 && i < count; ++i) to[i] = (u8)(bytes >> (8 * i));
}

__global__ void pack_bits(const u8* bits, i64 n, u8* packed) {
    const i64 size = (n + 7) / 8;
    for (i64 at = warp() * kBytes; at < size; at += warps() * kBytes) {
        const int count = entries_in<kBytes>(at, size);
        u64 bytes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const i64 byte = at + k * kLanes + lane();
            bytes[k] = has(k, count) ? load_eight(bits + 8 * byte, n - 8 * byte) : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (has(k, count)) packed[at + k * kLanes + lane()] = packed_of(bytes[k]);
    }
}

__global__ void unpack_bits(const u8* packed, i64 n, u8* bits) {
    const i64 size = (n + 7) / 8;
    for (i64 at = warp() * kBytes; at < size; at += warps() * kBytes) {
        const int count = entries_in<kBytes>(at, size);
        u8 bytes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) bytes[k] = has(k, count) ? packed[at + k * kLanes + lane()] : 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const i64 byte = at + k * kLanes + lane();
            if (has(k, count)) store_eight(bits + 8 * byte, n - 8 * byte, bytes_of(bytes[k]));
        }
    }
}
