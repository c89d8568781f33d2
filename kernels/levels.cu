// Quantises to the nearest levels on a GPU; the specification is in levels.py. A
// warp takes a block.
#include "include/levels.h"

#include "include/cuda.h"

template <int BITS>
__global__ void quantize_levels(const float* x, i64 blocks, i64 block, float root, const float* table,
                                float* scales, u8* codes, float* unsent) {
    float own[2 * kLevels<BITS> - 1];
    for (int j = 0; j < 2 * kLevels<BITS> - 1; ++j) own[j] = table[j];
    for (i64 b = warp(); b < blocks; b += warps()) {
        const float* from = x + b * block;
        u32 largest = 0;
        for (i64 i = lane(); i < block; i += kLanes) largest = larger(largest, magnitude(from[i]));
        largest = largest_of_warp(largest);
        const bool good = good_block(largest);
        const float inverse = good ? 1.0f / float_of(largest) : 0.0f;
        float square = 0.0f, product = 0.0f;
        for (i64 i = lane(); i < block; i += kLanes) {
            const float y = good ? from[i] * inverse : 0.0f;
            square += y * y;
        }
        square = good ? sum_of_warp(square) : 1.0f;
        const float unit = root / sqrtf(square);
        u8* to = codes + b * (block / 8) * BITS;
        for (i64 i = lane(); i < block; i += kLanes) {
            const float y = good ? from[i] * inverse : 0.0f;
            u32 code;
            product += nearest_level<BITS>(y * unit, own, code) * y;
            const int place = lane() % 8;
            u32 word = code << (BITS * place);
            for (int other = 1; other < 8; other *= 2) word |= __shfl_xor_sync(kAllLanes, word, other);
            if (place < BITS) to[i / 8 * BITS + place] = (u8)(word >> (8 * place));
        }
        const float scale = scale_of_block(largest, square, sum_of_warp(product));
        if (lane() == 0) scales[b] = scale;
        if (!unsent) continue;
        for (i64 i = lane(); i < block; i += kLanes) {
            const float y = good ? from[i] * inverse : 0.0f;
            u32 code;
            unsent[b * block + i] = from[i] - nearest_level<BITS>(y * unit, own, code) * scale;
        }
    }
}

template <int BITS>
__global__ void dequantize_levels(const float* scales, const u8* codes, const float* table, i64 blocks,
                                  i64 block, i64 accumulate, float* out) {
    float own[kLevels<BITS>];
    for (int j = 0; j < kLevels<BITS>; ++j) own[j] = table[j];
    for (i64 b = warp(); b < blocks; b += warps()) {
        const u8* from = codes + b * (block / 8) * BITS;
        const float scale = scales[b];
        for (i64 i = lane(); i < block; i += kLanes) {
            u32 word = 0;
            for (int k = 0; k < BITS; ++k) word |= (u32)from[i / 8 * BITS + k] << (8 * k);
            const u32 code = word >> (BITS * (lane() % 8)) & (kLevels<BITS> - 1);
            const float entry = level_of<BITS, float>(code, own) * scale;
            const i64 at = b * block + i;
            out[at] = accumulate ? out[at] + entry : entry;
        }
    }
}
