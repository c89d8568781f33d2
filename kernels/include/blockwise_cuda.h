// Blockwise quantisation on a GPU, for blockwise.cu and rotated.cu.
//
// A warp takes a span of 256 entries, or of one block if that is longer. Lane l has entries l, l + 32
// and so on in registers: each load and store is a full line, and a ballot is 32 consecutive signs.
#pragma once
#include "blockwise.h"
#include "hadamard_cuda.h"

template <class F> INLINE float scale_at(const u8* scales, i64 block) {
    if constexpr (F::is_mx) return mx_scale(scales[block]);
    else return ((const float*)scales)[block];
}

// For blocks of BLOCK entries: the entries of a span, this lane's share, and log2 of a block's rows.
template <int BLOCK> constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK;
template <int BLOCK> using Entries = float[kSpan<BLOCK> / kLanes];
template <int BLOCK> constexpr int kLogRows = 1 + kLogRows<BLOCK / 2>;
template <> constexpr int kLogRows<32> = 0;

// Adds the decoded payload `r` in the ROWS rows from entry `at` on, of which `count` entries exist. A
// block has 2^LOG rows, or 2^log where LOG is -1.
template <class F, int LOG, bool FIRST, int ROWS>
INLINE void add_payload(const Payloads& from, int r, i64 at, int count, int log, float (&sum)[ROWS]) {
    const u8* codes = from.codes + r * from.stride + (at >> 3) * F::bits;
    const u8* scales = from.scales + r * from.stride;
    const i64 row = at >> 5;
    if (LOG >= 0) log = LOG;
    const bool one = LOG < 0 && log >= 3;  // the 8 rows share one scale
    float scale = one ? scale_at<F>(scales, row >> log) : 0.0f;
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        if (k * kLanes >= count) continue;
        if (LOG >= 0 ? k % (1 << (LOG < 0 ? 0 : LOG)) == 0 : !one) scale = scale_at<F>(scales, (row + k) >> log);
        float value;
        if constexpr (F::is_sign) {
            value = F::decode(((const u32*)codes)[k] << (31 - lane()));
        } else {
            const u32 byte = codes[k / kPlanes<F> * kLanes + lane()];
            value = F::decode(byte >> (F::bits * (k % kPlanes<F>)));
        }
        sum[k] = FIRST ? value * scale : sum[k] + value * scale;
    }
}

// Sums all decoded payloads in their order; rows beyond `count` are zero.
template <class F, int LOG, int ROWS>
INLINE void sum_payloads(const Payloads& from, i64 at, int count, int log, float (&sum)[ROWS]) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) sum[k] = 0.0f;
    add_payload<F, LOG, true>(from, 0, at, count, log, sum);
    constexpr int kAhead = ROWS <= 8 ? 4 : 1;  // payloads whose loads are under way together
#pragma unroll kAhead
    for (int r = 1; r < from.count; ++r) add_payload<F, LOG, false>(from, r, at, count, log, sum);
}

// A message is a payload per rank: payload r holds the entries from r * shard on, of n in all. All have
// the layout of a full one, so that rows have one length; the last may be short or empty. Row r is
// worked on by the blocks of the grid with blockIdx.y = r, so that no warp divides by `shard`.
INLINE i64 row() { return blockIdx.y; }

// What is not sent: the error, or `weight` times the error, which may be added to what is there.
struct Unsent {
    float* out;
    float weight;
    bool accumulate;
};

// A rotation spreads entries over the whole block, so that a short block is sent as a full one.
template <int BLOCK> INLINE i64 whole_blocks(i64 n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }
// Returns the entries of a span of whole blocks, a number that the compiler knows where it is one block.
template <int BLOCK> INLINE int entries_in_blocks(i64 at, i64 n) {
    return BLOCK >= 256 ? BLOCK : entries_in<kSpan<BLOCK>>(at, n);
}

// Encodes `n` entries as one payload, rotated first if ROTATED: read(at, count, c) gives this lane's
// entries, and zeros beyond `count`.
template <class F, int BLOCK, bool ROTATED = false, bool WEIGHTED = false, class Read>
INLINE void encode(i64 n, const float* residual, const Unsent& unsent, const i64* step, i64 seed,
                   i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes, Read read,
                   const Rotation& rotation = {}) {
    const i64 coded = ROTATED ? whole_blocks<BLOCK>(n) : n;
    if (warp() == 0) {
        for (i64 i = end_of_scales<F>(n, BLOCK) + lane(); i < codes_at; i += kLanes) payload[i] = 0;
        for (i64 i = end_of_codes<F>(coded, codes_at) + lane(); i < bytes; i += kLanes) payload[i] = 0;
    }
    constexpr int kRows = kSpan<BLOCK> / kLanes, kPerBlock = BLOCK / kLanes;
    for (i64 at = warp() * kSpan<BLOCK>; at < n; at += warps() * kSpan<BLOCK>) {
        const int there = entries_in<kSpan<BLOCK>>(at, n);
        const int count = ROTATED ? entries_in_blocks<BLOCK>(at, coded) : there;
        Entries<BLOCK> c;
        read(at, there, c);
        if (residual) add_span(residual, at, there, c);
        if constexpr (ROTATED) turn<BLOCK>(rotation, at, c);
        u8* codes = payload + codes_at + (at >> 3) * F::bits;
        u8* scales = payload + (at >> kLogRows<BLOCK> >> 5) * kScaleBytes<F>;
        Scale scale = {};
        u32 random[4] = {}, byte = 0;
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const bool exists = k * kLanes < count;  // at least one entry of the row of 32
            if (k % kPerBlock == 0) {
                u32 largest = 0;
                float sum = 0.0f;
#pragma unroll
                for (int j = k; j < k + kPerBlock; ++j) {
                    largest = larger(largest, magnitude(c[j]));
                    if (F::is_sign) sum += float_of(magnitude(c[j])) * (1.0f / BLOCK);
                }
                const int rest = count - k * kLanes < BLOCK ? count - k * kLanes : BLOCK;
                if (F::is_sign) sum = sum_of_warp(sum) * ((float)BLOCK / (float)rest);
                scale = scale_of<F>(largest_of_warp(largest), sum);
                if (lane() == 0 && exists) {
                    if constexpr (F::is_mx) scales[k / kPerBlock] = (u8)mx_byte(scale.value);
                    else ((float*)scales)[k / kPerBlock] = scale.value;
                }
            }
            if (step && k % 8 == 0)
                philox(seed, (((u64)(first + at) >> 8) + k / 8) * kLanes + lane(), (u32)*step, stream,
                       random[0], random[1], random[2], random[3]);
            const float y = scale.inverse != 0.0f ? c[k] * scale.inverse : 0.0f;
            float value;
            if constexpr (F::is_sign) {
                value = F::value(y);
                const u32 word = __ballot_sync(kAllLanes, y < 0.0f);
                if (lane() == 0 && exists) ((u32*)codes)[k] = word;
            } else {
                const u32 bits = random[k % 8 / 2] >> (k % 2 * 16) & 0xffffu;
                const u32 code = step ? F::encode(y, bits, value) : F::encode(y, value);
                const int plane = k % kPlanes<F>;
                byte = (plane ? byte : 0) | code << (F::bits * plane);
                if (plane == kPlanes<F> - 1 && (k - plane) * kLanes < count)
                    codes[k / kPlanes<F> * kLanes + lane()] = (u8)byte;
            }
            c[k] -= value * scale.value;
        }
        if (!unsent.out) continue;
        if constexpr (ROTATED) turn_back<BLOCK>(rotation, at, c);
        float* rest = unsent.out + at + lane();
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            if (!has(k, there)) continue;
            if constexpr (WEIGHTED) {
                const float error = c[k] * unsent.weight;
                rest[k * kLanes] = unsent.accumulate ? rest[k * kLanes] + error : error;
            } else {
                rest[k * kLanes] = c[k];
            }
        }
    }
}
