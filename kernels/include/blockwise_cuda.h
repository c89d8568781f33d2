// Blockwise quantisation on a GPU, for blockwise.cu and rotated.cu.
//
// A warp takes a span of 256 to 512 entries: several blocks, one, or its share of a longer one, whose
// warps meet in shared memory. Lane l has entries l, l + 32 and so on in registers: each load and store
// is a full line, and a ballot is 32 consecutive signs.
#pragma once
#include "blockwise.h"
#include "hadamard_cuda.h"
#include "segments.h"

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

// The draws of a dither: where they are in the stream, the rank that encodes, and how many ranks there are.
struct Dither {
    const i64* step;
    i64 seed, stream, first;  // `first` is the index of slot 0
    u32 shift, apart;  // of the rank that encodes, and from a rank to the next
};

// This lane's draws in the groups of ROWS rows; kept in registers, as every index is known to the compiler.
template <class F, int ROWS> struct Draws {
    static constexpr int kGroups = F::is_dithered ? (ROWS + 7) / 8 : 1;
    u32 a[kGroups], b[kGroups], step;

    __device__ __forceinline__ Draws(const Dither& dither, i64 slot) {
        step = 0;
        if constexpr (F::is_dithered) {
            step = dither.apart;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                u32 unused[2];
                const i64 group = ((dither.first + slot) >> 8) + g;
                philox(dither.seed, kDitherCalls + group, (u32)*dither.step, dither.stream, a[g], b[g],
                       unused[0], unused[1]);
                a[g] += dither.shift + b[g] * (u32)lane();
            }
        }
    }
    __device__ __forceinline__ void next_rank() {
        if constexpr (F::is_dithered)
            for (int g = 0; g < kGroups; ++g) a[g] += step;
    }
    // Returns the draw of this lane's entry of row `k`.
    __device__ __forceinline__ u32 at(int k) const {
        return a[k / 8] + b[k / 8] * (u32)(k % 8 * kLanes);
    }
};

// Adds the decoded payload `r` in the ROWS rows from entry `at` on, of which `count` entries exist. A
// block has 2^LOG rows, or 2^log where LOG is -1.
template <class F, int LOG, bool FIRST, int ROWS>
INLINE void add_payload(const Payloads& from, int r, i64 at, int count, int log, const Draws<F, ROWS>& draws,
                        float (&sum)[ROWS]) {
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
            if constexpr (F::is_dithered) value = F::decode(byte, draws.at(k));
            else value = F::decode(byte >> (F::bits * (k % kPlanes<F>)));
        }
        sum[k] = FIRST ? value * scale : sum[k] + value * scale;
    }
}

// Sums all decoded payloads in their order; rows beyond `count` are zero.
template <class F, int LOG, int ROWS>
INLINE void sum_payloads(const Payloads& from, i64 at, int count, int log, const Dither& dither,
                         float (&sum)[ROWS]) {
    Draws<F, ROWS> draws(dither, at);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) sum[k] = 0.0f;
    add_payload<F, LOG, true>(from, 0, at, count, log, draws, sum);
    // Payloads whose loads are under way together, as far as registers go.
    constexpr int kAhead = ROWS > 8 ? 1 : F::is_dithered ? 2 : 4;
#pragma unroll kAhead
    for (int r = 1; r < from.count; ++r) {
        draws.next_rank();
        add_payload<F, LOG, false>(from, r, at, count, log, draws, sum);
    }
}

// A slot's entry in its row, and how many entries lie from there on without a gap: 0 or less in padding.
struct Place {
    i64 entry, left;
};

// Returns the place of a slot in its row.
INLINE Place place_of(Segments first, Segments end, i64 slot) {
    if (first == end) return {0, 0};
    while (end - first > 1) {
        Segments middle = first + (end - first) / 2;
        if (middle->slot <= slot) first = middle;
        else end = middle;
    }
    return {first->begin + slot - first->slot, first->slot + first->count - slot};
}
INLINE Place coded_place(Segments table, i64 row, i64 slot) {
    return place_of(runs_of(table, row), runs_of(table, row + 1), slot);
}
template <int SPAN> INLINE int entries_at(const Place& place) {
    return place.left >= SPAN ? SPAN : place.left > 0 ? (int)place.left : 0;
}

// The rows of the grid are those of the message, or the one that is chosen.
INLINE Row row_here(Segments table, i64 chosen) { return row_of(table, chosen, blockIdx.y); }

// Calls f(entry, place, half-words) for this warp's share of the entries of 16 bits of a row, by the last
// warps of the grid first, since the first ones may have one block more.
template <class Call>
INLINE void each_tail(Segments table, i64 row, const i64* step, i64 seed, i64 stream, i64 first, Call call) {
    const Segments runs = tail_runs_of(table, row), end = tail_runs_of(table, row + 1);
    if (runs == end) return;
    const i64 tails = (end - 1)->slot + (end - 1)->count;
    for (i64 at = (warps() - 1 - warp()) * 256; at < tails; at += warps() * 256) {
        u32 random[4] = {};
        if (step)
            philox(seed, ((u64)(first + slots_of_row(table) + at) >> 8) * kLanes + lane(), (u32)*step, stream,
                   random[0], random[1], random[2], random[3]);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const i64 place = at + k * kLanes + lane();
            if (place < tails)
                call(place_of(runs, end, place).entry, place, random[k / 2] >> (k % 2 * 16) & 0xffffu);
        }
    }
}

INLINE float sum_of_tails(const u8* tails, i64 stride, int payloads, i64 place) {
    float sum = 0.0f;
    for (int r = 0; r < payloads; ++r) {
        const float entry = to_float(((const BFloat16*)(tails + r * stride))[place]);
        sum = r ? sum + entry : entry;
    }
    return sum;
}

// What is not sent: the error, or `weight` times the error, which may be added to what is there.
struct Unsent {
    float* out;
    float weight;
    bool accumulate;
};

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

// Encodes a row as one payload, rotated first if ROTATED: read(slot, entry, count, c) gives this lane's
// entries of a span, and zeros beyond `count`; tail(entry, place) gives one of 16 bits.
template <class F, int BLOCK, bool ROTATED = false, bool WEIGHTED = false, class Read, class Tail>
INLINE void encode(Segments table, i64 row, const float* residual, const Unsent& unsent, const i64* step,
                   i64 seed, i64 stream, i64 first, u8* payload, const Places& places, Read read, Tail tail,
                   u32 shift = 0, const Rotation& rotation = {}) {
    const i64 slots = slots_of_row(table);
    if (warp() == 0) {
        for (i64 i = slots / BLOCK * kScaleBytes<F> + lane(); i < places.codes; i += kLanes) payload[i] = 0;
        for (i64 i = places.tails + lane(); i < places.bytes; i += kLanes)
            if (i >= places.tails + 2 * tails_of_row(table, row)) payload[i] = 0;
    }
    auto put = [&](i64 entry, float error) {
        float* out = unsent.out + entry;
        if constexpr (WEIGHTED) {
            error *= unsent.weight;
            *out = unsent.accumulate ? *out + error : error;
        } else {
            *out = error;
        }
    };
    constexpr int SPAN = kSpan<BLOCK, ROTATED>, TEAM = BLOCK > SPAN ? BLOCK / SPAN : 1;
    constexpr int kRows = SPAN / kLanes, kPerBlock = BLOCK / TEAM / kLanes;
    // Warps of a team meet at a barrier, so that all warps of a grid's block take the same turns.
    const i64 ahead = TEAM > 1 ? (i64)(threadIdx.x / kLanes) * SPAN : 0;
    int turn_of_team = 0;
    for (i64 begin = warp() * SPAN - ahead; begin < slots; begin += warps() * SPAN, turn_of_team ^= 1) {
        const i64 at = begin + ahead;
        const bool exists = TEAM == 1 || at < slots;
        const Place place = exists ? coded_place(table, row, at) : Place{0, 0};
        const int there = entries_at<SPAN>(place);
        Entries<BLOCK, ROTATED> c;
        read(at, place.entry, there, c);
        if (residual) add_span(residual, place.entry, there, c);
        if constexpr (ROTATED) turn<BLOCK>(rotation, at, c);
        u8* codes = payload + places.codes + (at >> 3) * F::bits;
        u8* scales = payload + (at >> kLogRows<BLOCK> >> 5) * kScaleBytes<F>;
        Scale scale = {};
        u32 random[4] = {}, byte = 0;
        const Draws<F, kRows> draws(Dither{step, seed, stream, first, shift, 0}, at);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
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
                if constexpr (F::is_sign && !ROTATED) {
                    // Of the entries of the block, which a team's later warps have behind its begin.
                    const i64 rest = place.left + in_block - k * kLanes;
                    extent.sum *= (float)BLOCK / (float)(rest >= BLOCK ? BLOCK : rest > 0 ? rest : 1);
                }
                scale = scale_of<F>(extent.largest, extent.sum);
                if (lane() == 0 && exists && !in_block) {
                    if constexpr (F::is_mx) scales[k / kPerBlock] = (u8)mx_byte(scale.value);
                    else ((float*)scales)[k / kPerBlock] = scale.value;
                }
            }
            if (!F::is_dithered && step && k % 8 == 0)
                philox(seed, (((u64)(first + at) >> 8) + k / 8) * kLanes + lane(), (u32)*step, stream,
                       random[0], random[1], random[2], random[3]);
            const float y = scale.inverse != 0.0f ? c[k] * scale.inverse : 0.0f;
            float value;
            if constexpr (F::is_sign) {
                value = F::value(y);
                const u32 word = __ballot_sync(kAllLanes, y < 0.0f);
                if (lane() == 0 && exists) ((u32*)codes)[k] = word;
            } else {
                u32 code;
                if constexpr (F::is_dithered) {
                    code = F::encode(y, draws.at(k), value);
                } else {
                    const u32 bits = random[k % 8 / 2] >> (k % 2 * 16) & 0xffffu;
                    code = step ? F::encode(y, bits, value) : F::encode(y, value);
                }
                const int plane = k % kPlanes<F>;
                byte = (plane ? byte : 0) | code << (F::bits * plane);
                if (plane == kPlanes<F> - 1 && exists) codes[k / kPlanes<F> * kLanes + lane()] = (u8)byte;
            }
            c[k] -= value * scale.value;
        }
        if (!unsent.out) continue;
        if constexpr (ROTATED) turn_back<BLOCK>(rotation, at, c);
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            if (has(k, there)) put(place.entry + lane() + k * kLanes, c[k]);
    }
    if constexpr (!ROTATED)
        each_tail(table, row, step, seed, stream, first, [&](i64 entry, i64 at, u32 bits) {
            const float x = tail(entry, at);
            BFloat16* out = (BFloat16*)(payload + places.tails) + at;
            if (step) store(out, x, (bits + (F::is_dithered ? shift >> 16 : 0u)) & 0xffffu);
            else store(out, x);
            if (unsent.out) put(entry, x - to_float(*out));
        });
}
