// Works on all parts of a bucket on a GPU; the specification is in parts.py.
#include "include/parts.h"

#include "include/blockwise.h"
#include "include/cuda.h"

// A block of a part, and where its codes and its scale are in a payload.
struct Place {
    i64 at;     // of the first entry
    int count;  // of entries
    i64 scale;  // bytes from the first payload
    i64 codes;
};

INLINE Place place_of(const Part* parts, i64 count, i64 block) {
    const i64 p = row_with(parts, count, &Part::block, block);
    const Part here = parts[p], next = parts[p + 1];
    const i64 index = block - here.block, codes_at = ((next.block - here.block) * 4 + 15) / 16 * 16;
    const i64 at = here.begin + index * kBlock;
    return {at, entries_in<kBlock>(at, next.begin), here.byte + index * 4,
            here.byte + codes_at + index * kBlock};
}

__global__ void quantize_parts(const float* x, const Part* parts, i64 count, u8* payloads) {
    const i64 blocks = parts[count].block;
    for (i64 block = warp(); block < blocks; block += warps()) {
        const Place to = place_of(parts, count, block);
        float c[8];
        load_span(x, to.at, to.count, c);
        u32 largest = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = larger(largest, magnitude(c[k]));
        const Scale scale = scale_of<Int8>(largest_of_warp(largest), 0.0f);
        if (lane() == 0) *(float*)(payloads + to.scale) = scale.value;
        u8* codes = payloads + to.codes + lane();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            float value;
            const float y = scale.inverse != 0.0f ? c[k] * scale.inverse : 0.0f;
            if (k * kLanes < to.count) codes[k * kLanes] = (u8)Int8::encode(y, value);
        }
    }
    // The bytes between scales and codes; codes end at a multiple of 32, and so does a payload.
    for (i64 p = warp(); p < count; p += warps()) {
        const i64 end = parts[p].byte + (parts[p + 1].block - parts[p].block) * 4;
        if (end % 16 && lane() < 16 - end % 16) payloads[end + lane()] = 0;
    }
}

__global__ void dequantize_parts(const u8* payloads, const Part* parts, i64 count, float* out) {
    const i64 blocks = parts[count].block;
    for (i64 block = warp(); block < blocks; block += warps()) {
        const Place from = place_of(parts, count, block);
        const float scale = *(const float*)(payloads + from.scale);
        const u8* codes = payloads + from.codes + lane();
        float c[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            c[k] = has(k, from.count) ? Int8::decode((u32)codes[k * kLanes]) * scale : 0.0f;
        store_span(out, from.at, from.count, c);
    }
}

INLINE double sum_of_warp(double x) {
    for (int half = kLanes / 2; half; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
    return x;
}

template <class T> __global__ void squares(const T* x, const Part* parts, i64 count, double* sums) {
    const i64 chunks = parts[count].chunk;
    for (i64 chunk = warp(); chunk < chunks; chunk += warps()) {
        const i64 p = row_with(parts, count, &Part::chunk, chunk), part_end = parts[p + 1].begin;
        i64 at = parts[p].begin + (chunk - parts[p].chunk) * kChunk;
        const i64 end = part_end - at < kChunk ? part_end : at + kChunk;
        double sum = 0.0;
        for (; at < end; at += 256) {
            float c[8];
            load_span(x, at, entries_in<256>(at, end), c);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += (double)c[k] * (double)c[k];
        }
        sum = sum_of_warp(sum);
        if (lane() == 0) sums[chunk] = sum;
    }
}

// A block of threads adds the sums of a part's chunks.
__global__ void squared_norms(const double* sums, const Part* parts, i64 count, double* out) {
    __shared__ double columns[kThreads];
    const int thread = (int)threadIdx.x;
    for (i64 p = blockIdx.x; p < count; p += gridDim.x) {
        double sum = 0.0;
#pragma unroll 4
        for (i64 chunk = parts[p].chunk + thread; chunk < parts[p + 1].chunk; chunk += kThreads)
            sum += sums[chunk];
        columns[thread] = sum;
        __syncthreads();
        for (int half = kThreads / 2; half; half /= 2) {
            if (thread < half) columns[thread] += columns[thread + half];
            __syncthreads();
        }
        if (thread == 0) out[p] = columns[0];
    }
}
