// Quantises to the nearest levels on a GPU; the specification is in levels.py.
//
// A warp takes a block, 256 entries at a time, whose loads are under way together; later passes over
// the block read the nearest cache. Lane j has level j and the bound above it, so that a shuffle finds
// those of any number, where a choice among registers takes two instructions for each.
#include "include/levels.h"

#include "include/cuda.h"

struct Own {
    float level, bound;
};

template <int BITS> INLINE Own own_of(const float* table) {
    const int j = lane() % kLevels<BITS>;
    return {table[j], table[kLevels<BITS> + (j + 1 < kLevels<BITS> ? j : 0)]};
}

// Returns how many bounds are below z: all lanes of a warp search together.
template <int BITS> INLINE u32 number_of(float z, const Own& own) {
    u32 number = 0;
#pragma unroll
    for (u32 step = kLevels<BITS> / 2; step; step /= 2)
        number += z > __shfl_sync(kAllLanes, own.bound, (int)(number + step - 1)) ? step : 0;
    return number;
}

template <int BITS>
__global__ void quantize_levels(const float* x, i64 blocks, i64 block, i64 per_row, float root,
                                const float* table, u8* payload, i64 rows, i64 bytes, float* unsent) {
    const Own own = own_of<BITS>(table);
    for (i64 b = warp(); b < blocks; b += warps()) {
        const i64 index = b % per_row;  // in its row of the message
        u8* row = payload + b / per_row * bytes;
        u8* codes = row + 4 * per_row + index * block / 8 * BITS;
        const float* from = x + b * block;
        float c[8];
        u32 largest = 0;
        for (i64 i = 0; i < block; i += 256) {
            load_span(from, i, entries_in<256>(i, block), c);
#pragma unroll
            for (int k = 0; k < 8; ++k) largest = larger(largest, magnitude(c[k]));
        }
        largest = largest_of_warp(largest);
        const bool good = good_block(largest);
        const float inverse = good ? 1.0f / float_of(largest) : 0.0f;
        // Reads entries over the largest magnitude.
        auto read = [&](i64 i, int count) {
            load_span(from, i, count, c);
#pragma unroll
            for (int k = 0; k < 8; ++k) c[k] = good ? c[k] * inverse : 0.0f;
        };
        float square = 0.0f, product = 0.0f;
        for (i64 i = 0; i < block; i += 256) {
            read(i, entries_in<256>(i, block));
#pragma unroll
            for (int k = 0; k < 8; ++k) square += c[k] * c[k];
        }
        square = good ? sum_of_warp(square) : 1.0f;
        const float unit = root / sqrtf(square);
        for (i64 i = 0; i < block; i += 256) {
            const int count = entries_in<256>(i, block), place = lane() % 8;
            u8* to = codes + (i + lane()) / 8 * BITS + place;
            read(i, count);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if (k * kLanes >= count) continue;
                const u32 number = number_of<BITS>(c[k] * unit, own);
                product += __shfl_sync(kAllLanes, own.level, (int)number) * c[k];
                u32 word = number << (BITS * place);
#pragma unroll
                for (int other = 1; other < 8; other *= 2) word |= __shfl_xor_sync(kAllLanes, word, other);
                if (place < BITS) to[k * 4 * BITS] = (u8)(word >> (8 * place));
            }
        }
        const float scale = scale_of_block(largest, square, sum_of_warp(product));
        if (lane() == 0) ((float*)row)[index] = scale;
        if (!unsent) continue;
        for (i64 i = 0; i < block; i += 256) {
            const int count = entries_in<256>(i, block);
            load_span(from, i, count, c);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if (k * kLanes >= count) continue;
                const float y = good ? c[k] * inverse : 0.0f;
                const u32 number = number_of<BITS>(y * unit, own);
                c[k] -= __shfl_sync(kAllLanes, own.level, (int)number) * scale;
            }
            store_span(unsent, b * block + i, count, c);
        }
    }
    // The places of blocks that a short row does not have, and what is behind the codes.
    for (i64 r = warp(); r < rows; r += warps()) {
        const i64 rest = blocks - r * per_row, there = rest < 0 ? 0 : rest < per_row ? rest : per_row;
        u8* row = payload + r * bytes;
        for (i64 i = 4 * there + lane(); i < 4 * per_row; i += kLanes) row[i] = 0;
        for (i64 i = 4 * per_row + there * block / 8 * BITS + lane(); i < bytes; i += kLanes) row[i] = 0;
    }
}

template <int BITS>
__global__ void dequantize_levels(const u8* payloads, i64 payload_count, i64 stride, i64 bytes,
                                  i64 per_row, const float* table, i64 blocks, i64 block, float factor,
                                  float* out) {
    const Own own = own_of<BITS>(table);
    for (i64 b = warp(); b < blocks; b += warps()) {
        const i64 index = b % per_row;  // in its row of the message
        const u8* rows = payloads + b / per_row * bytes;
        for (i64 i = 0; i < block; i += 256) {
            const int count = entries_in<256>(i, block);
            const u8* from = rows + 4 * per_row + (index * block + i + lane()) / 8 * BITS;
            float c[8];
#pragma unroll 2
            for (i64 r = 0; r < payload_count; ++r, from += stride) {
                const float scale = ((const float*)(rows + r * stride))[index];
                u32 words[8] = {};
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    for (int byte = 0; byte < BITS && k * kLanes < count; ++byte)
                        words[k] |= (u32)from[k * 4 * BITS + byte] << (8 * byte);
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const u32 number = words[k] >> (BITS * (lane() % 8)) & (kLevels<BITS> - 1);
                    const float entry = __shfl_sync(kAllLanes, own.level, (int)number) * scale;
                    c[k] = r ? c[k] + entry : entry;
                }
            }
            store_span(out, b * block + i, count, factor, false, c);
        }
    }
}
