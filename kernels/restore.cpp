// Puts old values back on the CPU; the specification is in restore.py.
#include "include/cpu.h"

EXPORT(restore)(u8* values, const u8* old, i64 bytes, const u8* good) {
    if (!*good) __builtin_memcpy(values, old, (u64)bytes);
}
