// Helpers of CUDA kernels. A warp works on rows of 32 consecutive entries, one per lane.
#pragma once
#include "philox.h"

constexpr int kLanes = 32;
constexpr u32 kAllLanes = 0xffffffffu;

INLINE float to_float(float x) { return x; }
INLINE float to_float(Half x) { return from_half((u32)x.bits); }
INLINE float to_float(BFloat16 x) { return from_bfloat16((u32)x.bits); }
INLINE void store(float* out, float x) { *out = x; }
INLINE void store(Half* out, float x) { out->bits = (u16)to_half(x); }
INLINE void store(BFloat16* out, float x) { out->bits = (u16)to_bfloat16(x); }

INLINE void store(Half* out, float x, u32 random) { out->bits = (u16)to_half(x, random); }
INLINE void store(BFloat16* out, float x, u32 random) { out->bits = (u16)to_bfloat16(x, random); }
INLINE float rounded_to(float, float x) { return x; }
INLINE float rounded_to(Half, float x) { return from_half((u32)to_half(x)); }
INLINE float rounded_to(BFloat16, float x) { return from_bfloat16((u32)to_bfloat16(x)); }

INLINE int lane() { return (int)(threadIdx.x % kLanes); }
// The number of this warp in the grid, and the number of warps.
INLINE i64 warp() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) / kLanes; }
INLINE i64 warps() { return (i64)gridDim.x * blockDim.x / kLanes; }

INLINE u32 largest_of_warp(u32 x) { return __reduce_max_sync(kAllLanes, x); }
// Adds halves to halves, as the CPU does; all lanes receive the sum.
INLINE float sum_of_warp(float x) {
    for (int half = kLanes / 2; half; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
    return x;
}

// A span is what a warp works on at a time. Places within a span are 32-bit numbers that the compiler
// knows, so that an access to memory is one instruction: kernels reach the limit of instructions as
// soon as that of memory (docs/design/kernels.md).

// Returns the number of entries in a span; this lane has entry 32 k + lane() if that is below.
template <int SPAN> INLINE int entries_in(i64 at, i64 n) { return n - at < SPAN ? (int)(n - at) : SPAN; }
INLINE bool has(int k, int count) { return k * kLanes + lane() < count; }

// Loads this lane's entries of a span; entries beyond `count` are zero.
template <int ROWS, class T> INLINE void load_span(const T* x, i64 at, int count, float (&c)[ROWS]) {
    x += at + lane();
#pragma unroll
    for (int k = 0; k < ROWS; ++k) c[k] = has(k, count) ? to_float(x[k * kLanes]) : 0.0f;
}

template <int ROWS> INLINE void add_span(const float* more, i64 at, int count, float (&c)[ROWS]) {
    more += at + lane();
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
        if (has(k, count)) c[k] += more[k * kLanes];
}

// Loads a span of x + residual. All loads come before any store: the compiler cannot tell whether a
// store changes what is loaded next, and would make each load wait for the store before it.
template <int ROWS, class T>
INLINE void load_span(const T* x, const float* residual, i64 at, int count, float (&c)[ROWS]) {
    load_span(x, at, count, c);
    if (residual) add_span(residual, at, count, c);
}

template <int ROWS, class T> INLINE void store_span(T* out, i64 at, int count, const float (&c)[ROWS]) {
    out += at + lane();
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
        if (has(k, count)) store(out + k * kLanes, c[k]);
}

// Writes c * factor, or adds it to `out`.
template <int ROWS, class T>
INLINE void store_span(T* out, i64 at, int count, float factor, bool accumulate, const float (&c)[ROWS]) {
    out += at + lane();
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
        if (has(k, count)) {
            const float entry = c[k] * factor;
            store(out + k * kLanes, accumulate ? to_float(out[k * kLanes]) + entry : entry);
        }
}

// Loads a span of x + residual, writes it to `unsent` if that is given, and returns its entries'
// number.
template <int ROWS, class T>
INLINE int correct_span(const T* x, const float* residual, float* unsent, i64 at, i64 n, float (&c)[ROWS]) {
    const int count = entries_in<ROWS * kLanes>(at, n);
    load_span(x, residual, at, count, c);
    if (unsent) store_span(unsent, at, count, c);
    return count;
}

// Writes x + residual to `unsent`.
template <class T> INLINE void correct(const T* x, const float* residual, float* unsent, i64 n) {
    float c[8];
    for (i64 at = warp() * 256; at < n; at += warps() * 256) correct_span(x, residual, unsent, at, n, c);
}
