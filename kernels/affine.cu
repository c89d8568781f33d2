// Quantises to affine levels on a GPU; the specification is in affine.py.
//
// A warp has a short block in registers. A long one may be the whole bucket, so its range is found in
// two launches, of chunks and then of all chunks of a block, and a third one writes the levels.
#include "include/affine.h"

#include "include/cuda.h"

INLINE void widen(Range& range, float entry) {
    range.low = smaller(entry, range.low);
    range.high = larger(entry, range.high);
    range.largest = larger(range.largest, magnitude(entry));
}
INLINE void widen(Range& range, const Range& more) {
    range.low = smaller(more.low, range.low);
    range.high = larger(more.high, range.high);
    range.largest = larger(range.largest, more.largest);
}

INLINE Range range_of_warp(Range one) {
    for (int half = kLanes / 2; half; half /= 2) {
        one.low = smaller(__shfl_xor_sync(kAllLanes, one.low, half), one.low);
        one.high = larger(__shfl_xor_sync(kAllLanes, one.high, half), one.high);
    }
    one.largest = largest_of_warp(one.largest);
    return one;
}

INLINE u8 code_of(float entry, const Levels& by) {
    return by.inverse != 0.0f ? (u8)level_of(entry, by) : 0;
}

// Quantises blocks of at most 32 ROWS entries.
template <class T, int ROWS>
__global__ void affine_blocks(const T* x, i64 n, i64 block, float* scale, u8* zero, u8* levels) {
    for (i64 b = warp(); b * block < n; b += warps()) {
        const i64 at = b * block;
        const int count = n - at < block ? (int)(n - at) : (int)block;
        float c[ROWS];
        load_span(x, at, count, c);
        Range found = {};
#pragma unroll
        for (int k = 0; k < ROWS; ++k) widen(found, c[k]);
        const Levels by = levels_of(range_of_warp(found));
        if (lane() == 0) scale[b] = by.scale, zero[b] = (u8)by.zero;
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            if (has(k, count)) levels[at + k * kLanes + lane()] = code_of(c[k], by);
    }
}

template <class T>
__global__ void affine_extents(const T* x, i64 n, i64 block, i64 chunk, i64 chunks, Range* extents) {
    for (i64 task = warp(); task / chunks * block < n; task += warps()) {
        const i64 begin = task / chunks * block;
        i64 at = begin + task % chunks * chunk, end = at + chunk;
        end = end < begin + block ? end : begin + block;
        end = end < n ? end : n;
        Range found = {};
        for (; at < end; at += 256) {
            float c[8];
            load_span(x, at, entries_in<256>(at, end), c);
#pragma unroll
            for (int k = 0; k < 8; ++k) widen(found, c[k]);
        }
        found = range_of_warp(found);
        if (lane() == 0) extents[task] = found;
    }
}

// Finds the ranges of blocks from those of their chunks; a block's chunks go to 1 or 8 WARPS.
template <int WARPS>
__global__ void affine_scales(const Range* extents, i64 chunks, i64 blocks, float* scale, u8* zero) {
    __shared__ Range parts[WARPS];
    const int part = WARPS == 1 ? 0 : (int)threadIdx.x / kLanes;
    for (i64 b = warp() / WARPS; b < blocks; b += warps() / WARPS) {
        Range found = {};
#pragma unroll 4
        for (i64 chunk = part * kLanes + lane(); chunk < chunks; chunk += WARPS * kLanes)
            widen(found, extents[b * chunks + chunk]);
        found = range_of_warp(found);
        if (WARPS > 1) {
            __syncthreads();  // the first warp has read what was here before
            if (lane() == 0) parts[part] = found;
            __syncthreads();
            for (int other = 0; other < WARPS; ++other) widen(found, parts[other]);
        }
        const Levels by = levels_of(found);
        if (part == 0 && lane() == 0) scale[b] = by.scale, zero[b] = (u8)by.zero;
    }
}

// Calls f(row, distance, level of zero) for this lane's entries of a span.
template <class F>
INLINE void for_entries(i64 at, int count, i64 n, i64 block, const float* scale, const u8* zero, F f) {
    // A division of 64 bits takes 75 instructions, one of 32 bits 20.
    const i64 first = n >> 32 ? at / block : (u32)at / (u32)block, offset = at - first * block;
    const bool one = offset + count <= block;  // the span has entries of one block
    // Divides numbers below 512 by shorter blocks, exactly.
    const u32 inverse = block < 256 ? (1u << 20) / (u32)block + 1 : 0;
    scale += first, zero += first;
    float distance = *scale, middle = (float)*zero;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        if (!has(k, count)) continue;
        const i64 place = offset + k * kLanes + lane();
        if (!one) {
            const u32 next = inverse ? (u32)place * inverse >> 20 : place >= block;
            distance = scale[next], middle = (float)zero[next];
        }
        f(k, distance, middle);
    }
}

template <class T>
__global__ void affine_levels(const T* x, i64 n, i64 block, const float* scale, const u8* zero,
                              u8* levels) {
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        float c[8];
        u8 codes[8];
        load_span(x, at, count, c);
        Levels by = {};
        for_entries(at, count, n, block, scale, zero, [&](int k, float distance, float middle) {
            if (bits_of(distance) != bits_of(by.scale))
                by = {distance, distance > 0.0f ? 1.0f / distance : 0.0f, 0.0f};
            by.zero = middle;
            codes[k] = code_of(c[k], by);
        });
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (has(k, count)) levels[at + k * kLanes + lane()] = codes[k];
    }
}

template <class T>
__global__ void affine_entries(const u8* levels, i64 n, i64 block, const float* scale, const u8* zero,
                               float factor, i64 accumulate, T* out) {
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        const u8* from = levels + at + lane();
        float c[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) c[k] = has(k, count) ? (float)from[k * kLanes] : 0.0f;
        for_entries(at, count, n, block, scale, zero, [&](int k, float distance, float middle) {
            c[k] = (c[k] - middle) * distance;
        });
        store_span(out, at, count, factor, accumulate, c);
    }
}
