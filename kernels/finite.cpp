// Checks for finite entries on the CPU; the specification is in finite.py.
#include "include/cpu.h"

namespace {

// Compares bits, which needs no conversion: infinity has the least magnitude of what is not finite.
template <class Word> bool finite(const void* entries, i64 n, Word infinity) {
    constexpr Word kMagnitude = (Word)~(Word)0 >> 1;
    const Word* x = (const Word*)entries;
    Word largest = 0;
    for (i64 i = 0; i < n; ++i) {
        const Word magnitude = x[i] & kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < infinity;
}

bool finite(float, const void* x, i64 n) { return finite<u32>(x, n, 0x7F800000); }
bool finite(Half, const void* x, i64 n) { return finite<u16>(x, n, 0x7C00); }
bool finite(BFloat16, const void* x, i64 n) { return finite<u16>(x, n, 0x7F80); }

}  // namespace

EXPORT(finite)(i64 dtype, const void* x, i64 n, u8* answer) {
    with_dtype((int)dtype, [&](auto number) { *answer = finite(number, x, n); });
}
