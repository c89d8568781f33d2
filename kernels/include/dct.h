// Fast discrete cosine transforms (DCT) of numbers or vectors; the specification is in dct.py.
#pragma once
#include "portable.h"

// Loops are unrolled: the compiler then knows the places of entries, and keeps them in registers.
#if defined(__CUDACC_RTC__) || defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

// Returns cos(k pi / 128); dct.py computes the same numbers.
INLINE constexpr float cosine(int k) {
    constexpr float kTable[65] = {
        1.0f, 0.999698818f, 0.99879545f, 0.997290432f, 0.99518472f, 0.992479563f, 0.989176512f,
        0.985277653f, 0.980785251f, 0.975702107f, 0.970031261f, 0.963776052f, 0.956940353f,
        0.949528158f, 0.941544056f, 0.932992816f, 0.923879504f, 0.914209783f, 0.903989315f,
        0.893224299f, 0.881921291f, 0.870086968f, 0.857728601f, 0.84485358f, 0.831469595f, 0.817584813f,
        0.803207517f, 0.78834641f, 0.773010433f, 0.757208824f, 0.740951121f, 0.724247098f, 0.707106769f,
        0.689540565f, 0.671558976f, 0.653172851f, 0.634393275f, 0.615231574f, 0.59569931f, 0.575808167f,
        0.555570245f, 0.534997642f, 0.514102757f, 0.492898196f, 0.471396744f, 0.449611336f,
        0.427555084f, 0.405241311f, 0.382683426f, 0.359895051f, 0.336889863f, 0.313681751f,
        0.290284663f, 0.266712755f, 0.242980182f, 0.219101235f, 0.195090324f, 0.170961887f,
        0.146730468f, 0.122410677f, 0.0980171412f, 0.0735645667f, 0.0490676761f, 0.024541229f, 0.0f};
    return kTable[k];
}

template <int N, class V> INLINE void dct_iv(V (&x)[N]);

// Takes a DCT-II times sqrt(N) in place. Its even results are the DCT-II of the sums of entries and
// their mirror images, its odd results the DCT-IV of their differences.
template <int N, class V> INLINE void dct_ii(V (&x)[N]) {
    if constexpr (N > 1) {
        V sums[N / 2], differences[N / 2];
        UNROLL
        for (int j = 0; j < N / 2; ++j) sums[j] = x[j] + x[N - 1 - j];
        UNROLL
        for (int j = 0; j < N / 2; ++j) differences[j] = x[j] - x[N - 1 - j];
        dct_ii(sums);
        dct_iv(differences);
        UNROLL
        for (int j = 0; j < N / 2; ++j) x[2 * j] = sums[j], x[2 * j + 1] = differences[j];
    }
}

// Takes a DCT-III times sqrt(N) in place: the transpose of `dct_ii`, by the same steps in reverse. A
// DCT-IV is its own transpose.
template <int N, class V> INLINE void dct_iii(V (&x)[N]) {
    if constexpr (N > 1) {
        V sums[N / 2], differences[N / 2];
        UNROLL
        for (int j = 0; j < N / 2; ++j) sums[j] = x[2 * j], differences[j] = x[2 * j + 1];
        dct_iii(sums);
        dct_iv(differences);
        UNROLL
        for (int j = 0; j < N / 2; ++j) {
            x[j] = sums[j] + differences[j];
            x[N - 1 - j] = sums[j] - differences[j];
        }
    }
}

// Takes a DCT-IV times sqrt(N) in place: rotates entries and their mirror images, and adds two DCT-II.
template <int N, class V> INLINE void dct_iv(V (&x)[N]) {
    if constexpr (N > 1) {
        constexpr float kRoot = 2.0f * cosine(32);  // of 2
        V a[N / 2], b[N / 2];
        UNROLL
        for (int j = 0; j < N / 2; ++j) {
            const int angle = (2 * j + 1) * (32 / N);
            const float c = cosine(angle), s = cosine(64 - angle);
            a[j] = x[j] * c + x[N - 1 - j] * s;
            const V p = x[N - 1 - j] * c, q = x[j] * s;
            b[j] = j % 2 ? q - p : p - q;
        }
        dct_ii(a);
        dct_ii(b);
        x[0] = a[0] * kRoot;
        x[N - 1] = b[0] * -kRoot;
        UNROLL
        for (int m = 1; m < N / 2; ++m) {
            x[2 * m - 1] = a[m] - b[N / 2 - m];
            x[2 * m] = a[m] + b[N / 2 - m];
        }
    }
}

// 1 / sqrt(64), which is exact. Entries are multiplied by it before the transform, so that no sum
// overflows where results do not.
constexpr float kUnit = 0.125f;

template <bool INVERSE, class V> INLINE void dct_64(V (&x)[64]) {
    if constexpr (INVERSE) dct_iii(x);
    else dct_ii(x);
}
