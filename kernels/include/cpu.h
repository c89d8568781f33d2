// For CPU kernels: every file is built once for each instruction set, which names its functions.
#pragma once
#include "philox.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, ISA)

// Calls f(a number of the type), by the dtype as Python numbers it.
template <class F> static void with_dtype(int dtype, F f) {
    if (dtype == 0) f(float{});
    else if (dtype == 1) f(Half{});
    else f(BFloat16{});
}

// Vectors of entries, whatever their type.
INLINE Floats load(const float* x) { return load_as<Floats>(x); }
INLINE Floats load(const Half* x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#else
    return from_half(widen((const u16*)x));
#endif
}
INLINE Floats load(const BFloat16* x) { return from_bfloat16(widen((const u16*)x)); }

// A row of 32 entries, of which `count` are there; the others are zero.
template <class T> INLINE void load_row(const T* x, i64 count, Floats (&row)[kVectors]) {
    T some[kRow] = {};
    if (count < kRow) {
        for (int l = 0; l < count; ++l) some[l] = x[l];
        x = some;
    }
    for (int v = 0; v < kVectors; ++v) row[v] = load(x + v * kWidth);
}

INLINE void store(float* out, const Floats (&row)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) store_as(out + v * kWidth, row[v]);
}

// Past the cache, which need not read the line before: for results of more than a cache's size.
INLINE void stream(float* out, const Floats (&row)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512F__)
        _mm512_stream_ps(out + v * kWidth, (__m512)row[v]);
#elif defined(__AVX2__)
        _mm256_stream_ps(out + v * kWidth, (__m256)row[v]);
#elif defined(__SSE2__)
        _mm_stream_ps(out + v * kWidth, (__m128)row[v]);
#else
        store_as(out + v * kWidth, row[v]);
#endif
    }
}
INLINE void end_of_stream() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
INLINE bool worth_streaming(const float* out, i64 n) {
    return n >= 1 << 20 && (unsigned long)out % sizeof(Floats) == 0;
}

INLINE void store(Half* out, const Floats (&row)[kVectors]) {
#if defined(__AVX512F__)
    for (int v = 0; v < kVectors; ++v)
        _mm256_storeu_si256((__m256i*)out + v, _mm512_cvtps_ph((__m512)row[v], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int v = 0; v < kVectors; ++v)
        _mm_storeu_si128((__m128i*)out + v, _mm256_cvtps_ph((__m256)row[v], _MM_FROUND_TO_NEAREST_INT));
#else
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_half(row[v]);
    narrow(bits, (u16*)out);
#endif
}
INLINE void store(BFloat16* out, const Floats (&row)[kVectors]) {
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_bfloat16(row[v]);
    narrow(bits, (u16*)out);
}

template <class T> INLINE bool worth_streaming(const T*, i64) { return false; }
template <class T> INLINE void stream(T* out, const Floats (&row)[kVectors]) { store(out, row); }

INLINE void store(Half* out, const Floats (&row)[kVectors], const Words (&random)[kVectors]) {
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_half(row[v], random[v]);
    narrow(bits, (u16*)out);
}
INLINE void store(BFloat16* out, const Floats (&row)[kVectors], const Words (&random)[kVectors]) {
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_bfloat16(row[v], random[v]);
    narrow(bits, (u16*)out);
}

// Rounds to the nearest number of a type.
INLINE Floats rounded_to(float, Floats x) { return x; }
INLINE Floats rounded_to(Half, Floats x) { return from_half(to_half(x)); }
INLINE Floats rounded_to(BFloat16, Floats x) { return from_bfloat16(to_bfloat16(x)); }

// As kernels get it; without a step there is no randomness.
INLINE Random random_of(const i64* step, i64 seed, i64 stream, i64 first) {
    return {(u64)seed, step ? (u32)*step : 0, (u32)stream, first};
}

constexpr i64 kGroup = 256;  // entries that share 32 calls of Philox
constexpr int kCalls = 32;

// The four words of each of the 32 calls of group `group`, as words[word][call]: half-words for the
// 256 entries of a group, or single bits for 4096. Calls go through 64-bit lanes, whose upper halves
// fill up with what nobody reads. They differ in their first word only, so half of the first two
// rounds is the same for all.
static void fill_words(const Random& random, i64 group, u32* words) {
    constexpr u32 kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
    const u64 call = (u64)group * kCalls;
    u32 key0[kRounds], key1[kRounds];
    for (int round = 0; round < kRounds; ++round) {
        key0[round] = (u32)random.seed + (u32)round * 0x9E3779B9u;
        key1[round] = (u32)(random.seed >> 32) + (u32)round * 0xBB67AE85u;
    }
    const u64 q = (u64)kSecond * random.step;
    const u32 first = (u32)(q >> 32) ^ (u32)(call >> 32) ^ key0[0];
    const u64 p = (u64)kFirst * first;
    const Lanes zero = {};
    for (int at = 0; at < kCalls; at += kWidth) {
        Lanes a[2], b[2], c[2], d[2];
        for (int half = 0; half < 2; ++half) {
            // Of every four calls, one half has the first two.
            for (int l = 0; l < kWidth / 2; ++l) a[half][l] = (u32)call + (u32)(at + l / 2 * 4 + l % 2 + half * 2);
            d[half] = times(a[half], zero + kFirst);
            c[half] = (d[half] >> 32) ^ (zero + (random.stream ^ key1[0]));
            b[half] = times(c[half], zero + kSecond);
            a[half] = (b[half] >> 32) ^ (zero + ((u32)q ^ key0[1]));
            c[half] = d[half] ^ (zero + ((u32)(p >> 32) ^ key1[1]));
            d[half] = zero + (u32)p;
        }
        for (int round = 2; round < kRounds; ++round)
            for (int half = 0; half < 2; ++half) {
                const Lanes low = times(a[half], zero + kFirst), high = times(c[half], zero + kSecond);
                a[half] = (high >> 32) ^ b[half] ^ (zero + key0[round]);
                c[half] = (low >> 32) ^ d[half] ^ (zero + key1[round]);
                b[half] = high;
                d[half] = low;
            }
        store_as(words + at, lower_halves(a[0], a[1]));
        store_as(words + kCalls + at, lower_halves(b[0], b[1]));
        store_as(words + 2 * kCalls + at, lower_halves(c[0], c[1]));
        store_as(words + 3 * kCalls + at, lower_halves(d[0], d[1]));
    }
}

// 16 random bits for each entry of vector `v` of row `row`, of the words of its group and those after.
INLINE Words random_bits(const u32* words, i64 row, int v) {
    const Words both = load_as<Words>(words + (row >> 1) * kCalls + v * kWidth);
    const u32 shift = (u32)(row & 1) * 16;
#if defined(__AVX2__)
    return both >> (Words{} + shift) & 0xffffu;
#else
    return both >> shift & 0xffffu;
#endif
}
