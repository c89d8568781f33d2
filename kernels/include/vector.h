// Vectors of a CPU, of the width of its instruction set, in rows of 32 entries.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__clang__)
#include <utility>
#endif

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kRow = 32, kVectors = kRow / kWidth;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef u32 Words __attribute__((vector_size(4 * kWidth)));
typedef u64 Lanes __attribute__((vector_size(4 * kWidth)));

INLINE Words bits_of(Floats x) { return (Words)x; }
INLINE Floats float_of(Words bits) { return (Floats)bits; }

template <class V> INLINE V load_as(const void* from) {
    V vector;
    __builtin_memcpy(&vector, from, sizeof(V));
    return vector;
}
template <class V> INLINE void store_as(void* to, const V& what) { __builtin_memcpy(to, &what, sizeof(V)); }

// Picks entries: entry l is entry AT::entry(l) of `a` followed by `b`. The compilers' functions differ:
// gcc's takes a vector of numbers, clang's takes constants.
#if defined(__clang__)
template <class AT, int... L> INLINE Floats picked(Floats a, Floats b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, AT::entry(L)...);
}
template <class AT> INLINE Floats picked(Floats a, Floats b) {
    return picked<AT>(a, b, std::make_integer_sequence<int, kWidth>{});
}
#else
template <class AT> INLINE Floats picked(Floats a, Floats b) {
    Words entries;
    for (int l = 0; l < kWidth; ++l) entries[l] = (u32)AT::entry(l);
    return __builtin_shuffle(a, b, entries);
}
#endif

// Returns `b` where either is NaN, as for single numbers. Intrinsics, since gcc would compare and
// blend.
INLINE Floats smaller_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}
INLINE Floats larger_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Widens kWidth bytes or half-words to words.
INLINE Words widen(const u8* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return Words{from[0], from[1], from[2], from[3]};
#endif
}
INLINE Words widen(const u16* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return Words{from[0], from[1], from[2], from[3]};
#endif
}

// Narrows a row of words, all below 256, to 32 bytes.
INLINE void narrow(const Words (&row)[kVectors], u8* to) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)row[0]));
    _mm_storeu_si128((__m128i*)to + 1, _mm512_cvtepi32_epi8((__m512i)row[1]));
#elif defined(__AVX2__)
    __m256i low = _mm256_packus_epi32((__m256i)row[0], (__m256i)row[1]);
    __m256i high = _mm256_packus_epi32((__m256i)row[2], (__m256i)row[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within 128-bit halves
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    _mm256_storeu_si256((__m256i*)to, bytes);
#else
    for (int i = 0; i < kRow; ++i) to[i] = (u8)row[i / kWidth][i % kWidth];
#endif
}
// Narrows a row of words, all below 65536, to 32 half-words.
INLINE void narrow(const Words (&row)[kVectors], u16* to) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)row[0]));
    _mm256_storeu_si256((__m256i*)to + 1, _mm512_cvtepi32_epi16((__m512i)row[1]));
#elif defined(__AVX2__)
    for (int i = 0; i < 4; i += 2) {
        __m256i both = _mm256_packus_epi32((__m256i)row[i], (__m256i)row[i + 1]);
        _mm256_storeu_si256((__m256i*)(to + 8 * i), _mm256_permute4x64_epi64(both, 0xd8));
    }
#else
    for (int i = 0; i < kRow; ++i) to[i] = (u16)row[i / kWidth][i % kWidth];
#endif
}

// Returns the sign bits of a vector.
INLINE u32 mask_of(Words x) {
#if defined(__AVX512F__)
    return (u32)_mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__)
    return (u32)_mm256_movemask_ps((__m256)x);
#else
    return x[0] >> 31 | x[1] >> 31 << 1 | x[2] >> 31 << 2 | x[3] >> 31 << 3;
#endif
}
// Returns a word whose bit l is set where entry l of a row is negative; -0 and NaN are not.
INLINE u32 negative(const Floats (&row)[kVectors]) {
    u32 word = 0;
    for (int v = 0; v < kVectors; ++v) word |= mask_of((Words)(row[v] < 0.0f)) << (v * kWidth);
    return word;
}
// Reverses `negative`: puts the bits of vector `v` of the row into the sign bits of its words.
INLINE Words signs(u32 word, int v) {
    Words shifts;
    for (int l = 0; l < kWidth; ++l) shifts[l] = (u32)(31 - v * kWidth - l);
    return (Words{} + word) << shifts;
}

// Returns the lower halves of 64-bit lanes; each four are two of `a` and two of `b`.
INLINE Words lower_halves(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return (Words)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
#else
    return Words{(u32)a[0], (u32)a[1], (u32)b[0], (u32)b[1]};
#endif
}
// Returns the products of the lower halves of 64-bit lanes.
INLINE Lanes times(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}
