// Blockwise quantisation on a GPU, for blockwise.cu and rotated.cu.
//
// A warp takes a span of 256 to 512 entries: several blocks, one, or its share of a longer one, whose
// warps meet in shared memory. Lane l has entries l, l + 32 and so on in registers: each load and store
// is a full line, and a ballot is 32 consecutive signs.
#pragma once
#include "blockwise.h"
#include "hadamard_cuda.h"

template <class F> INLINE float scale_at(const u8* scales, i64 block) {
    if constexpr (F::is_mx) return mx_scale(scales[block]);
    else return ((const float*)scales)[block];
}

// For blocks of BLOCK entries: the entries of a span, this lane's share, and log2 of a block's rows.
// WHOLE: a span is no less than a block, which a warp rotates. Otherwise 2048 entries would take 168
// registers, with which 8 warps fit a multiprocessor instead of 40.
template <int BLOCK, bool WHOLE = false> constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK > kMeanOf && !WHOLE ? kMeanOf : BLOCK;
template <int BLOCK, bool WHOLE = false> using Entries = float[kSpan<BLOCK, WHOLE> / kLanes];
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

// The bits of the largest magnitude of a block, and for signs the sum of a share of the magnitudes.
struct Extent {
    u32 largest;
    float sum;
};

// Combines the extents of the TEAM warps of a block, in their order; all threads of the grid's block
// call it. `turn` is 0 and 1 alternately: a warp that is ahead writes where nobody reads any more.
template <int TEAM> INLINE Extent combined(Extent mine, int turn) {
    constexpr int kWarps = 8;
    __shared__ u32 largest[2][kWarps];
    __shared__ float sums[2][kWarps];
    const int here = (int)threadIdx.x / kLanes, first = here / TEAM * TEAM;
    if (lane() == 0) largest[turn][here] = mine.largest, sums[turn][here] = mine.sum;
    __syncthreads();
    Extent all = {largest[turn][first], sums[turn][first]};
#pragma unroll
    for (int i = 1; i < TEAM; ++i) {
        all.largest = larger(all.largest, largest[turn][first + i]);
        all.sum += sums[turn][first + i];
    }
    return all;
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
    constexpr int SPAN = kSpan<BLOCK, ROTATED>, TEAM = BLOCK > SPAN ? BLOCK / SPAN : 1;
    constexpr int kRows = SPAN / kLanes, kPerBlock = BLOCK / TEAM / kLanes;
    // Warps of a team meet at a barrier, so that all warps of a grid's block take the same turns.
    const i64 ahead = TEAM > 1 ? (i64)(threadIdx.x / kLanes) * SPAN : 0;
    int turn_of_team = 0;
    for (i64 begin = warp() * SPAN - ahead; begin < n; begin += warps() * SPAN, turn_of_team ^= 1) {
        const i64 at = begin + ahead;
        const int there = TEAM > 1 && at >= n ? 0 : entries_in<SPAN>(at, n);
        const int count = ROTATED ? entries_in_blocks<BLOCK>(at, coded) : there;
        Entries<BLOCK, ROTATED> c;
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
                Extent extent = {0, 0.0f};
                float sum = 0.0f;  // of at most kMeanOf entries
#pragma unroll
                for (int j = k; j < k + kPerBlock; ++j) {
                    extent.largest = larger(extent.largest, magnitude(c[j]));
                    if constexpr (F::is_sign) {
                        sum += float_of(magnitude(c[j])) * (1.0f / BLOCK);
                        if ((j + 1 - k) % (kMeanOf / kLanes) == 0 || j + 1 == k + kPerBlock) {
                            extent.sum += sum_of_warp(sum);
                            sum = 0.0f;
                        }
                    }
                }
                extent.largest = largest_of_warp(extent.largest);
                const i64 in_block = at % BLOCK;  // not 0 in a team's later warps alone
                if constexpr (TEAM > 1) extent = combined<TEAM>(extent, turn_of_team);
                const i64 rest = TEAM > 1 ? n - (at - in_block) : count - k * kLanes;
                if (F::is_sign) extent.sum *= (float)BLOCK / (float)(rest < BLOCK ? rest : BLOCK);
                scale = scale_of<F>(extent.largest, extent.sum);
                if (lane() == 0 && exists && (TEAM == 1 || !in_block)) {
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
