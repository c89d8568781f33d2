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

INLINE void store(Half* out, const Floats (&row)[kVectors], const u16* noise) {
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_half(row[v], widen(noise + v * kWidth));
    narrow(bits, (u16*)out);
}
INLINE void store(BFloat16* out, const Floats (&row)[kVectors], const u16* noise) {
    Words bits[kVectors];
    for (int v = 0; v < kVectors; ++v) bits[v] = to_bfloat16(row[v], widen(noise + v * kWidth));
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

// philox() of the 32 calls from `call` on, in 64-bit lanes, whose upper halves fill up with what
// nobody reads.
constexpr int kCalls = 32, kLaneCount = kWidth / 2, kLaneVectors = kCalls / kLaneCount;
static void fill_lanes(const Random& random, u64 call, Lanes (&words)[4][kLaneVectors]) {
    constexpr int kAtOnce = kLaneVectors < 4 ? kLaneVectors : 4;
    const Lanes zero = {};
    for (int begin = 0; begin < kLaneVectors; begin += kAtOnce) {
        Lanes a[kAtOnce], b[kAtOnce], c[kAtOnce], d[kAtOnce];
        for (int v = 0; v < kAtOnce; ++v) {
            a[v] = zero;
            for (int l = 0; l < kLaneCount; ++l) a[v][l] = call + (u64)((begin + v) * kLaneCount + l);
            b[v] = a[v] >> 32;
            c[v] = zero + random.step;
            d[v] = zero + random.stream;
        }
        u32 key0 = (u32)random.seed, key1 = (u32)(random.seed >> 32);
        for (int round = 0; round < kRounds; ++round) {
            Lanes k0 = zero + key0, k1 = zero + key1;
            for (int v = 0; v < kAtOnce; ++v) {
                Lanes p = times(a[v], zero + 0xD2511F53u), q = times(c[v], zero + 0xCD9E8D57u);
                a[v] = (q >> 32) ^ b[v] ^ k0;
                c[v] = (p >> 32) ^ d[v] ^ k1;
                b[v] = q;
                d[v] = p;
            }
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        for (int v = 0; v < kAtOnce; ++v) {
            words[0][begin + v] = a[v], words[1][begin + v] = b[v];
            words[2][begin + v] = c[v], words[3][begin + v] = d[v];
        }
    }
}

// Random half-words of the 256 entries of group `group`.
static inline void fill_noise(const Random& random, i64 group, u16* noise) {
    Lanes words[4][kLaneVectors];
    fill_lanes(random, (u64)group * kCalls, words);
    for (int word = 0; word < 4; ++word) {
        const u64* lanes = (const u64*)words[word];
        for (int l = 0; l < kCalls; ++l) {
            noise[2 * word * kCalls + l] = (u16)lanes[l];
            noise[(2 * word + 1) * kCalls + l] = (u16)(lanes[l] >> 16);
        }
    }
}

// The words of all 32 calls of a group: random bits of its 4096 entries.
static inline void fill_words(const Random& random, i64 group, u32 (&found)[4][kCalls]) {
    Lanes words[4][kLaneVectors];
    fill_lanes(random, (u64)group * kCalls, words);
    for (int word = 0; word < 4; ++word)
        for (int l = 0; l < kCalls; ++l) found[word][l] = (u32)((const u64*)words[word])[l];
}
