// Quantises to integers of a shared scale on a GPU; the specification is in shared.py.
#include "include/shared.h"

#include "include/cuda.h"

// A warp takes a block, or a chunk of a longer one, whose `out` begins as 0.
template <class T>
__global__ void largest_magnitudes(const T* x, const float* residual, i64 n, i64 block, i64 chunk,
                                   u32* out) {
    const i64 chunks = (block + chunk - 1) / chunk;
    for (i64 task = warp(); task / chunks * block < n; task += warps()) {
        const i64 b = task / chunks, block_end = (b + 1) * block < n ? (b + 1) * block : n;
        i64 at = b * block + task % chunks * chunk;
        const i64 end = at + chunk < block_end ? at + chunk : block_end;
        u32 most = 0;
        for (; at < end; at += 256) {
            float c[8];
            load_span(x, residual, at, entries_in<256>(at, end), c);
#pragma unroll
            for (int k = 0; k < 8; ++k) most = larger(most, magnitude(c[k]));
        }
        most = largest_of_warp(most);
        if (lane()) continue;
        most = most > kInfinity ? kNaN : most;
        if (chunks == 1) out[b] = most;
        else atomicMax(out + b, most);
    }
}

// Returns the block of the 256 entries from `at` on. Blocks are multiples of 256, so that 32-bit
// numbers do, whose division takes far fewer instructions than that of 64-bit numbers.
INLINE u32 block_at(i64 at, i64 block) { return (u32)(at >> 8) / (u32)(block >> 8); }

template <class T>
__global__ void quantize_shared(const T* x, const float* residual, i64 n, i64 block,
                                const u32* magnitudes, float levels, const i64* step, i64 seed,
                                i64 stream, i64 first, i8* codes, float* unsent) {
    // A warp takes 256 entries of one block in eight rows, whose loads are under way together.
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const int count = entries_in<256>(at, n);
        float rows[8];
        load_span(x, residual, at, count, rows);
        const Scale scale = scale_of(magnitudes[block_at(at, block)], levels);
        u32 random[4] = {};
        if (step)
            philox(seed, ((u64)(first + at) >> 8) * kLanes + lane(), (u32)*step, stream, random[0],
                   random[1], random[2], random[3]);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (!has(k, count)) continue;
            float units = units_of(rows[k], scale, levels);
            if (step) units += centred(random[k / 2] >> (k % 2 * 16) & 0xffffu);
            const float rounded = units + kRound;
            codes[at + k * kLanes + lane()] = (i8)(bits_of(rounded) & 0xffu);
            if (unsent) unsent[at + k * kLanes + lane()] = rows[k] - (rounded - kRound) * scale.level;
        }
    }
}

template <class T>
__global__ void dequantize_shared(const i8* codes, i64 n, i64 block, const u32* magnitudes,
                                  float levels, float factor, T* out) {
    for (i64 at = warp() * 256; at < n; at += warps() * 256) {
        const float level = scale_of(magnitudes[block_at(at, block)], levels).level;
        const int count = entries_in<256>(at, n);
        const i8* from = codes + at + lane();
        float c[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) c[k] = has(k, count) ? (float)from[k * kLanes] * level : 0.0f;
        store_span(out, at, count, factor, false, c);
    }
}
