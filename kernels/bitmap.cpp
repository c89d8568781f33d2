// Packs bitmaps on the CPU; the specification is in bitmap.py. Eight bits
// are computed in one word of eight bytes.
#include "include/cpu.h"

namespace {

constexpr u64 kEach = 0x0101010101010101u;

// Packs bytes of 0 or 1: the product moves byte i to bit 56 + i.
u8 packed_of(u64 bytes) { return (u8)(bytes * 0x0102040810204080u >> 56); }
// Unpacks: the mask leaves bit i alone in byte i, and adding 0x7f carries any bit to the byte's top.
u64 bytes_of(u8 packed) { return ((packed * kEach & 0x8040201008040201u) + 0x7f * kEach) >> 7 & kEach; }

}  // namespace

EXPORT(pack_bits)(const u8* bits, i64 n, u8* packed) {
    for (i64 i = 0; i < n / 8; ++i) packed[i] = packed_of(load_as<u64>(bits + 8 * i));
    if (n % 8 == 0) return;
    u64 last = 0;
    __builtin_memcpy(&last, bits + n / 8 * 8, (unsigned)(n % 8));
    packed[n / 8] = packed_of(last);
}

EXPORT(unpack_bits)(const u8* packed, i64 n, u8* bits) {
    for (i64 i = 0; i < n / 8; ++i) store_as(bits + 8 * i, bytes_of(packed[i]));
    if (n % 8 == 0) return;
    const u64 last = bytes_of(packed[n / 8]);
    __builtin_memcpy(bits + n / 8 * 8, &last, (unsigned)(n % 8));
}
