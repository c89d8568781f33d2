// Quantises to affine levels on a GPU; the specification is in affine.py.
//
// A block may be the whole bucket, so its range is found in two launches: of chunks, then of all
// chunks of a block.
#include "include/affine.h"

#include "include/cuda.h"

constexpr int kChunk = 2048;

INLINE Range range_of_warp(Range one) {
    for (int half = kLanes / 2; half; half /= 2) {
        one.low = smaller(__shfl_xor_sync(kAllLanes, one.low, half), one.low);
        one.high = larger(__shfl_xor_sync(kAllLanes, one.high, half), one.high);
    }
    one.largest = largest_of_warp(one.largest);
    return one;
}

template <class T> __global__ void affine_extents(const T* x, i64 n, i64 block, Range* extents) {
    const i64 each = block < n ? block : n;
    const i64 chunks = (each + kChunk - 1) / kChunk, tasks = (n + block - 1) / block * chunks;
    for (i64 task = warp(); task < tasks; task += warps()) {
        const i64 begin = task / chunks * block, first = begin + task % chunks * kChunk;
        i64 end = first + kChunk;
        end = end < begin + block ? end : begin + block;
        end = end < n ? end : n;
        Range found = {};
        for (i64 i = first + lane(); i < end; i += kLanes) {
            const float entry = to_float(x[i]);
            found.low = smaller(entry, found.low);
            found.high = larger(entry, found.high);
            found.largest = larger(found.largest, magnitude(entry));
        }
        found = range_of_warp(found);
        if (lane() == 0) extents[task] = found;
    }
}

__global__ void affine_scales(const Range* extents, i64 chunks, i64 blocks, float* scale, u8* zero) {
    for (i64 b = warp(); b < blocks; b += warps()) {
        Range found = {};
        for (i64 chunk = lane(); chunk < chunks; chunk += kLanes) {
            const Range one = extents[b * chunks + chunk];
            found.low = smaller(one.low, found.low);
            found.high = larger(one.high, found.high);
            found.largest = larger(found.largest, one.largest);
        }
        const Levels levels = levels_of(range_of_warp(found));
        if (lane() == 0) scale[b] = levels.scale, zero[b] = (u8)levels.zero;
    }
}

template <class T>
__global__ void affine_levels(const T* x, i64 n, i64 block, const float* scale, const u8* zero,
                              u8* levels) {
    for (i64 i = warp() * kLanes + lane(); i < n; i += warps() * kLanes) {
        const float distance = scale[i / block];
        const Levels by = {distance, distance > 0.0f ? distance : 1.0f, (float)zero[i / block]};
        levels[i] = distance == distance ? (u8)level_of(to_float(x[i]), by) : 0;
    }
}

template <class T>
__global__ void affine_entries(const u8* levels, i64 n, i64 block, const float* scale, const u8* zero,
                               float factor, i64 accumulate, T* out) {
    for (i64 i = warp() * kLanes + lane(); i < n; i += warps() * kLanes) {
        const float level = (float)levels[i] - (float)zero[i / block];
        const float entry = level * scale[i / block] * factor;
        store(out + i, accumulate ? to_float(out[i]) + entry : entry);
    }
}
