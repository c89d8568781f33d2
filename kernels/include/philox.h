// Philox4x32-7 (Salmon et al., 2011): random bits from a counter and a key, the same on every device.
#pragma once
#include "portable.h"

// At 16 bits per entry, entry i of each 256 takes half-word (i / 32) % 8 of call i % 32.
// At one bit per entry, entry i of each 4096 takes bit (i / 32) % 128 of call i % 32.
constexpr i64 kSigns = 4096;
// Row r of a message of several payloads begins at this place of the stream times r, so that a row is
// packed by itself with the bits that it has in the whole message.
constexpr i64 kRowKeys = (i64)1 << 40;

constexpr int kRounds = 7;  // the fewest that pass BigCrush, by the paper; 10 is the usual margin
constexpr u32 kKeySteps[2] = {0x9E3779B9u, 0xBB67AE85u}, kFactors[2] = {0xD2511F53u, 0xCD9E8D57u};

// Named in CUDA: the compiler would multiply the upper half of a factor too, which is zero.
INLINE u64 wide_product(u32 a, u32 b) {
#if defined(__CUDACC_RTC__)
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return (u64)a * b;
#endif
}
INLINE void philox_round(u32& a, u32& b, u32& c, u32& d, u32 key0, u32 key1) {
    u64 p = wide_product(kFactors[0], a), q = wide_product(kFactors[1], c);
    u32 e = (u32)(q >> 32) ^ b ^ key0, f = (u32)(p >> 32) ^ d ^ key1;
    b = (u32)q;
    d = (u32)p;
    a = e;
    c = f;
}

// Writes the four words of a call, which entries of the same i % 32 share.
INLINE void philox(u64 seed, u64 call, u32 step, i64 stream, u32& a, u32& b, u32& c, u32& d) {
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
    a = (u32)call, b = (u32)(call >> 32), c = step, d = (u32)stream;
    for (int round = 0; round < kRounds; ++round) {
        philox_round(a, b, c, d, key0, key1);
        key0 += kKeySteps[0];
        key1 += kKeySteps[1];
    }
}

// Returns the place that is drawn in stratum `j` of the `k` strata of `n` entries.
INLINE i64 random_place(i64 j, i64 n, i64 k, u32 word) {
    const i64 begin = j * n / k, end = (j + 1) * n / k;
    return begin + (i64)((u64)word * (u64)(end - begin) >> 32);
}
