// Helpers of CPU kernels. Each file is built once per instruction set, whose name ends its functions.
#pragma once
#include "philox.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, ISA)

// Calls f with a number of the dtype; `DTYPES` of runtime/cpu.py has the same numbers.
template <class F> static void with_dtype(int dtype, F f) {
    if (dtype == 0) f(float{});
    else if (dtype == 1) f(Half{});
    else f(BFloat16{});
}

// Load a vector of entries of any type as float32.
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

// Loads a row of `count` entries; entries beyond are zero.
template <class T> INLINE void load_row(const T* x, i64 count, Floats (&row)[kVectors]) {
    T some[kRow] = {};
    if (count < kRow) {
        if (count > 0) __builtin_memcpy(some, x, sizeof(T) * (unsigned long)count);  // at any address
        x = some;
    }
    for (int v = 0; v < kVectors; ++v) row[v] = load(x + v * kWidth);
}

// Prefetches what is read next. A prefetch past the end of memory does nothing.
template <class T> INLINE void fetch(const T* x, int count) {
    for (int i = 0; i < count; i += 64 / (int)sizeof(T)) __builtin_prefetch(x + i);
}

INLINE void store(float* out, const Floats (&row)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) store_as(out + v * kWidth, row[v]);
}

INLINE float square_root(float x) { return __builtin_sqrtf(x); }

// Adds the 32 partial sums of a row, halves to halves.
INLINE float summed(const Floats (&sums)[kVectors]) {
    float sum[kRow];
    store(sum, sums);
    for (int half = kRow / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
    return sum[0];
}

// Stores past the cache, which then need not read the line first. Pays for results larger than a cache
// that nobody reads soon (docs/design/kernels.md).
INLINE void stream(float* out, const Floats (&row)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512F__)
        _mm512_stream_ps(out + v * kWidth, (__m512)row[v]);
#elif defined(__AVX2__)
        _mm256_stream_ps(out + v * kWidth, (__m256)row[v]);
#else
        store_as(out + v * kWidth, row[v]);
#endif
    }
}
INLINE void end_of_stream() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}
constexpr i64 kStreamed = 1 << 20;  // entries from which it pays
INLINE bool worth_streaming(const float* out, i64 n) {
    return n >= kStreamed && (unsigned long)out % sizeof(Floats) == 0;
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

// Stores the first `count` entries of a row.
template <class T> INLINE void store_row(T* out, const Floats (&row)[kVectors], i64 count) {
    if (count == kRow) return store(out, row);
    alignas(Floats) T some[kRow];
    store(some, row);
    for (i64 l = 0; l < count; ++l) out[l] = some[l];
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

// Round to the nearest number of a type.
INLINE Floats rounded_to(float, Floats x) { return x; }
INLINE Floats rounded_to(Half, Floats x) { return from_half(to_half(x)); }
INLINE Floats rounded_to(BFloat16, Floats x) { return from_bfloat16(to_bfloat16(x)); }

// A stream of random bits, with the keys of all rounds.
struct Random {
    u64 keys[kRounds][2];
    u32 step, stream;  // the third and the fourth word of the counter
    i64 first;         // global index of the first entry, a multiple of 256
};

// Converts the arguments of a kernel; without a step, nothing is random.
INLINE Random random_of(const i64* step, i64 seed, i64 stream, i64 first) {
    Random random = {{}, step ? (u32)*step : 0, (u32)stream, step ? first : 0};
    for (u32 round = 0; round < kRounds; ++round) {
        random.keys[round][0] = (u32)seed + round * kKeySteps[0];
        random.keys[round][1] = (u32)(seed >> 32) + round * kKeySteps[1];
    }
    return random;
}

constexpr i64 kGroup = 256;  // entries that share 32 calls of Philox
constexpr int kCalls = 32;

// Writes the four words of each of the 32 calls of a group as words[word][call]: half-words for 256
// entries, or single bits for 4096. Calls are computed in 64-bit lanes whose upper halves are ignored:
// with 32-bit lanes, products would need even and odd lanes shuffled apart. Counters of calls differ in
// their first word only, so half of the first two rounds is computed once.
[[maybe_unused]] static void fill_words(const Random& random, i64 group, u32* words) {
    const u64 call = (u64)group * kCalls, q = (u64)kFactors[1] * random.step;
    const u32 first = (u32)(q >> 32) ^ (u32)(call >> 32) ^ (u32)random.keys[0][0];
    const u64 p = (u64)kFactors[0] * first;
    const Lanes zero = {};
    Lanes calls;  // the first two of each four calls; the next vector has the others
    for (u64 l = 0; l < kWidth / 2; ++l) calls[l] = l / 2 * 4 + l % 2;
    calls += call;
    constexpr int kOnce = 4;  // vectors at a time, each of kWidth / 2 calls
    for (int at = 0; at < kCalls; at += kWidth / 2 * kOnce, calls += kWidth / 2 * kOnce) {
        Lanes a[kOnce], b[kOnce], c[kOnce], d[kOnce];
        for (int v = 0; v < kOnce; ++v) {
            a[v] = calls + (u64)(v / 2 * kWidth + v % 2 * 2);
            d[v] = times(a[v], zero + kFactors[0]);
            c[v] = (d[v] >> 32) ^ (zero + (random.stream ^ random.keys[0][1]));
            b[v] = times(c[v], zero + kFactors[1]);
            a[v] = (b[v] >> 32) ^ (zero + ((u32)q ^ random.keys[1][0]));
            c[v] = d[v] ^ (zero + ((u32)(p >> 32) ^ random.keys[1][1]));
            d[v] = zero + (u32)p;
        }
        for (int round = 2; round < kRounds; ++round)
            for (int v = 0; v < kOnce; ++v) {
                const Lanes low = times(a[v], zero + kFactors[0]), high = times(c[v], zero + kFactors[1]);
                a[v] = (high >> 32) ^ (b[v] ^ (zero + random.keys[round][0]));
                c[v] = (low >> 32) ^ (d[v] ^ (zero + random.keys[round][1]));
                b[v] = high;
                d[v] = low;
            }
        for (int v = 0; v < kOnce; v += 2) {
            u32* to = words + at + v / 2 * kWidth;
            store_as(to, lower_halves(a[v], a[v + 1]));
            store_as(to + kCalls, lower_halves(b[v], b[v + 1]));
            store_as(to + 2 * kCalls, lower_halves(c[v], c[v + 1]));
            store_as(to + 3 * kCalls, lower_halves(d[v], d[v + 1]));
        }
    }
}

// Returns 16 random bits for each entry of vector `v` of row `row` of the words of a group.
INLINE Words random_bits(const u32* words, i64 row, int v) {
    const Words both = load_as<Words>(words + (row >> 1) * kCalls + v * kWidth);
    const u32 shift = (u32)(row & 1) * 16;
#if defined(__AVX2__)
    return both >> (Words{} + shift) & 0xffffu;
#else
    return both >> shift & 0xffffu;
#endif
}
