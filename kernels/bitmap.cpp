// Packs bitmaps on the CPU; the specification is in bitmap.py. Eight bits
// are computed in one word of eight bytes.
#include "include/bitmap.h"

#include "include/cpu.h"

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
