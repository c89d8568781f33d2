// Code of both CPU and CUDA kernels: integer types, bits of floats, conversions of number formats.
// No headers are included, so that NVRTC needs none. All arithmetic is IEEE, without contraction to
// fused multiply-adds or flushing to zero, so that a kernel and its definition agree bit for bit.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if defined(__CUDACC_RTC__)
#define INLINE static __device__ __forceinline__
#else
#define INLINE static inline __attribute__((always_inline))
#endif

INLINE u32 bits_of(float x) {
#if defined(__CUDACC_RTC__)
    return __float_as_uint(x);
#else
    u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
#endif
}

INLINE float float_of(u32 bits) {
#if defined(__CUDACC_RTC__)
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
#endif
}

// 16-bit floats as stored in memory.
struct Half { u16 bits; };
struct BFloat16 { u16 bits; };

#if !defined(__CUDACC_RTC__) && !defined(CUDA_EMU)
#include "vector.h"
#endif

// The functions below take a number or, on the CPU, a vector of numbers. Conditions of vectors are
// vectors, from which `?:` picks entry by entry; hence no `if`.

// Magnitudes as integers order as their values do; infinity and NaN come last.
template <class V> INLINE auto magnitude(V x) { return bits_of(x) & 0x7fffffffu; }
constexpr u32 kInfinity = 0x7f800000u;
constexpr u32 kNaN = 0x7fc00000u;
constexpr u32 kTiny = (127u - 120u) << 23;  // 2^-120: blocks below it decode to zero

template <class V> INLINE V smaller_of(V a, V b) { return a < b ? a : b; }
template <class V> INLINE V larger_of(V a, V b) { return a > b ? a : b; }
template <class V, class W> INLINE V smaller(V a, W b) { return smaller_of(a, V{} + b); }
template <class V, class W> INLINE V larger(V a, W b) { return larger_of(a, V{} + b); }

// Rounds to the nearest integer, ties to even, for |x| below 2^22: the last place of the sum is 1, and
// its lowest bits are those of the integer.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
template <class V> INLINE V nearest(V x) { return (x + kRound) - kRound; }
// Converts 16 random bits to a number in the open interval (-0.5, 0.5). Adding it and rounding to
// nearest rounds stochastically.
template <class W> INLINE auto centred(W random) { return float_of(0x3f800040u | random << 7) - 1.5f; }

// Convert between float32 and the bits of 16-bit floats.
template <class W> INLINE auto from_bfloat16(W bits) { return float_of(bits << 16); }
template <class V> INLINE auto to_bfloat16(V x) {
    auto bits = bits_of(x);
    auto rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7fffffffu) > kInfinity ? (bits & 0u) + 0x7fc0u : rounded;
}
// Rounds stochastically: adds random bits below the last place and truncates. NaN has no sign, since
// processors give that of a sum either sign.
template <class V, class W> INLINE auto to_bfloat16(V x, W random) {
    auto a = magnitude(x), sign = bits_of(x) >> 16 & 0x8000u;
    auto cut = sign | (a >= kInfinity ? (a & 0u) + 0x7f80u : (a + random) >> 16);
    return a > kInfinity ? (a & 0u) + 0x7fc0u : cut;
}
template <class W> INLINE auto from_half(W bits) {
    auto sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    auto finite = (rest + (112u << 10)) << 13, infinite = (rest + (224u << 10)) << 13;
    auto denormal = bits_of(float_of(rest + 0x3f000000u) - 0.5f);  // the last place of 0.5: 2^-24
    auto normal = rest >= 0x7c00u ? infinite : finite;
    return float_of(sign | (rest < 0x400u ? denormal : normal));
}
template <class V> INLINE auto to_half(V x) {
    auto a = magnitude(x), sign = bits_of(x) >> 16 & 0x8000u;
    auto normal = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
    auto denormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
    auto finite = a < (113u << 23) ? denormal : normal;
    auto large = a > kInfinity ? (a & 0u) + 0x7e00u : (a & 0u) + 0x7c00u;
    return sign | (a >= 0x477ff000u ? large : finite);  // 65520 and above round to infinity
}

template <class V, class W> INLINE auto to_half(V x, W random) {
    auto a = magnitude(x), sign = bits_of(x) >> 16 & 0x8000u;
    auto normal = smaller((a - (112u << 23) + (random >> 3)) >> 13, 0x7c00u);
    auto places = float_of(a) * 16777216.0f;  // 2^24, of which denormal numbers are multiples
    auto denormal = bits_of(places + centred(random) + kRound) & 0x7ffu;
    auto finite = a < (113u << 23) ? denormal : normal;
    return sign | (a > kInfinity ? (a & 0u) + 0x7e00u : finite);
}

// Saturating floats of up to 8 bits, of E exponent bits and M mantissa bits; TOP is the code of the largest value.
template <int E, int M, u32 TOP> struct Float8 {
    static constexpr u32 bias = (1u << (E - 1)) - 1;
    static constexpr u32 dropped = 23 - M;
    static constexpr u32 smallest_normal = (127u - bias + 1) << 23;
    static constexpr u32 rebias = (127u - bias) << M;
    // Added to a number below the smallest normal number, rounds it to a multiple of the last place.
    static constexpr u32 align = (127u + dropped + 1 - bias) << 23;

    template <class V> INLINE auto encode(V x) {
        auto a = magnitude(x), sign = bits_of(x) >> 24 & 0x80u;
        auto normal = ((a + ((1u << (dropped - 1)) - 1) + (a >> dropped & 1u)) >> dropped) - rebias;
        auto denormal = bits_of(float_of(a) + float_of(align)) - align;
        return sign | smaller(a < smallest_normal ? denormal : normal, TOP);
    }
    template <class V, class W> INLINE auto encode(V x, W random) {
        auto a = magnitude(x), sign = bits_of(x) >> 24 & 0x80u;
        auto noise = random << (dropped - 16) | 1u << (dropped - 17);
        auto normal = ((a + noise) >> dropped) - rebias;
        auto places = float_of(a) * float_of((127u + bias - 1 + M) << 23);
        auto denormal = bits_of(places + centred(random) + kRound) & 0xffu;
        return sign | smaller(a < smallest_normal ? denormal : normal, TOP);
    }
    template <class W> INLINE auto decode(W code) {
        auto rest = code & 0x7fu;
        auto denormal = bits_of(float_of(rest + align) - float_of(align));
        auto normal = (rest + rebias) << dropped;
        return float_of((code & 0x80u) << 24 | ((rest >> M) == 0u ? denormal : normal));
    }
    // As `decode`, of a code in the highest bits of a word; other bits may follow. Codes of denormal numbers
    // pass through denormal floats, which are slow on a CPU.
    INLINE float decode_high(u32 code) {
        const u32 places = (u32)((int)code >> (8 - E));
        return float_of(places & (0x80000000u | ((1u << (E + M)) - 1) << dropped)) * float_of((254u - bias) << 23);
    }
};
using E4M3 = Float8<4, 3, 0x7e>;  // up to 448
using E5M2 = Float8<5, 2, 0x7b>;  // up to 57344
using E2M1 = Float8<2, 1, 0x07>;  // up to 6; the code's sign is in bit 7

// Returns the number of the row of a table to which a task belongs: of the last row that begins there or
// before, by binary search.
template <class Row> INLINE i64 row_with(const Row* rows, i64 count, i64 Row::*first, i64 task) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        (rows[middle].*first <= task ? low : high) = middle;
    }
    return low;
}
