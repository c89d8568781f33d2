// Eight bits as one byte, and as eight bytes of 0 or 1; the specification is in bitmap.py.
#pragma once
#include "portable.h"

// Packs bytes of 0 or 1: the product moves byte i to bit 56 + i.
INLINE u8 packed_of(u64 bytes) { return (u8)(bytes * 0x0102040810204080u >> 56); }
// Unpacks: the mask leaves bit i alone in byte i, and adding 0x7f carries any bit to the byte's top.
INLINE u64 bytes_of(u8 packed) {
    constexpr u64 kEach = 0x0101010101010101u;
    return ((packed * kEach & 0x8040201008040201u) + 0x7f * kEach) >> 7 & kEach;
}
