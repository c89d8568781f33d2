// Blockwise quantisation on a GPU, for blockwise.cu and rotated.cu.
//
// A warp has a span of 256 entries, or of one block if that is longer. Lane l has entries l, l + 32
// and so on in registers: every load and store is whole lines, and a ballot is 32 consecutive signs.
#pragma once
#include "blockwise.h"
#include "hadamard_cuda.h"

template <class F> INLINE float scale_at(const u8* scales, i64 block) {
    if constexpr (F::is_mx) return mx_scale(scales[block]);
    else return ((const float*)scales)[block];
}

// What payload `r` decodes to in row `row`, in this lane.
template <class F> INLINE float entry(const Payloads& from, int r, i64 row, int block) {
    const u8* codes = from.codes + r * from.stride;
    const float scale = scale_at<F>(from.scales + r * from.stride, row * kLanes / block);
    if constexpr (F::is_sign)
        return F::decode(((const u32*)codes)[row] << (31 - lane())) * scale;
    else
        return F::decode((u32)codes[row / kPlanes<F> * kLanes + lane()] >>
                         (F::bits * (int)(row % kPlanes<F>))) * scale;
}

template <class F> INLINE float sum_of_entries(const Payloads& from, i64 row, int block) {
    float sum = entry<F>(from, 0, row, block);
    for (int r = 1; r < from.count; ++r) sum += entry<F>(from, r, row, block);
    return sum;
}

// Encodes spans of entries: read(row) gives this lane's entry of a row. With a `rotation`, what it
// makes of them.
template <class F, int BLOCK, bool ROTATED = false, class Read>
INLINE void encode(i64 n, const float* residual, float* left, const i64* step, i64 seed, i64 stream,
                   i64 first, u8* payload, i64 codes_at, i64 bytes, Read read,
                   const Rotation& rotation = {}) {
    u8 *scales = payload, *codes = payload + codes_at;
    if (warp() == 0) {
        for (i64 i = end_of_scales<F>(n, BLOCK) + lane(); i < codes_at; i += kLanes) payload[i] = 0;
        for (i64 i = end_of_codes<F>(n, codes_at) + lane(); i < bytes; i += kLanes) payload[i] = 0;
    }
    constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK, kRows = kSpan / kLanes, kPerBlock = BLOCK / kLanes;
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        float c[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 i = at + k * kLanes + lane();
            c[k] = i < n ? read(at / kLanes + k) : 0.0f;
            if (residual && i < n) c[k] += residual[i];
        }
        if constexpr (ROTATED) turn<BLOCK>(rotation, at, c);
        Scale scale = {};
        u32 random[4] = {}, byte = 0;
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 start = at + k * kLanes;  // of the row
            if (k % kPerBlock == 0) {
                u32 largest = 0;
                float sum = 0.0f;
#pragma unroll
                for (int j = k; j < k + kPerBlock; ++j) {
                    largest = larger(largest, magnitude(c[j]));
                    if (F::is_sign) sum += float_of(magnitude(c[j])) * (1.0f / BLOCK);
                }
                const i64 count = n - start < BLOCK ? n - start : BLOCK;
                if (F::is_sign) sum = sum_of_warp(sum) * ((float)BLOCK / (float)count);
                scale = scale_of<F>(largest_of_warp(largest), sum);
                if (lane() == 0 && start < n) {
                    if constexpr (F::is_mx) scales[start / BLOCK] = (u8)mx_byte(scale.value);
                    else ((float*)scales)[start / BLOCK] = scale.value;
                }
            }
            if (step && k % 8 == 0)
                philox(seed, (u64)((first + at) / 256 + k / 8) * kLanes + lane(), (u32)*step, stream,
                       random[0], random[1], random[2], random[3]);
            const float y = scale.inverse != 0.0f ? c[k] * scale.inverse : 0.0f;
            float value;
            if constexpr (F::is_sign) {
                value = F::value(y);
                const u32 word = __ballot_sync(kAllLanes, y < 0.0f);
                if (lane() == 0 && start < n) ((u32*)codes)[start / kLanes] = word;
            } else {
                const u32 bits = random[k % 8 / 2] >> (k % 2 * 16) & 0xffffu;
                const u32 code = step ? F::encode(y, bits, value) : F::encode(y, value);
                const int plane = k % kPlanes<F>;
                byte = (plane ? byte : 0) | code << (F::bits * plane);
                const i64 unit = start / kUnit<F>;
                if (plane == kPlanes<F> - 1 && unit * kUnit<F> < n)
                    codes[unit * kUnitBytes<F> + lane()] = (u8)byte;
            }
            c[k] -= value * scale.value;
        }
        if (!left) continue;
        if constexpr (ROTATED) turn_back<BLOCK>(rotation, at, c);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 i = at + k * kLanes + lane();
            if (i < n) left[i] = c[k];
        }
    }
}
