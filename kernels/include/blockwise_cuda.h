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

constexpr int kWarps = 8;  // of a block of threads, as cuda.py launches it

// For blocks of BLOCK entries: the entries of a span, this lane's share, and log2 of BLOCK.
// WHOLE: a span is no less than a block, which a warp rotates. Otherwise 2048 entries would take 168
// registers, with which 8 warps fit a multiprocessor instead of 40.
template <int BLOCK, bool WHOLE = false> constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK > kMeanOf && !WHOLE ? kMeanOf : BLOCK;
template <int BLOCK, bool WHOLE = false> using Entries = float[kSpan<BLOCK, WHOLE> / kLanes];
template <int BLOCK> constexpr int kLog = 1 + kLog<BLOCK / 2>;
template <> constexpr int kLog<32> = 5;
// How many blocks of 256 threads a multiprocessor is to hold where warps have spans of SPAN entries: as
// many as do without spilled registers.
template <int SPAN> constexpr int kResident = SPAN > 512 ? 2 : SPAN > 256 ? 3 : 4;

// The draws of a dither: where they are in the stream, the rank that encodes, and how many ranks there are.
struct Dither {
    const i64* step;
    i64 seed, stream, first;  // `first` is the index of slot 0
    u32 shift, apart;  // of the rank that encodes, and from a rank to the next
};

// This lane's draws in a group of 256 slots; its first entry is `from` places behind the group's begin.
template <class F> struct Draws {
    u32 a = 0, b = 0, step = 0;

    Draws() = default;
    __device__ __forceinline__ Draws(const Dither& dither, i64 slot, int from) {
        if constexpr (F::is_dithered) {
            u32 unused[2];
            philox(dither.seed, kDitherCalls + ((dither.first + slot) >> 8), (u32)*dither.step,
                   dither.stream, a, b, unused[0], unused[1]);
            a += dither.shift + b * (u32)from;
            step = dither.apart;
        }
    }
    __device__ __forceinline__ void next_rank() { a += step; }
    // Returns the draw of the entry `places` behind the first.
    __device__ __forceinline__ u32 at(int places) const { return a + b * (u32)places; }
};

// A lane decodes 8 of the 256 entries of a group: those whose codes are consecutive bytes, so that it
// loads them at once. All lie in one unit, and so in one block: kInRun entries follow each other, and more
// lie 32 behind.
template <class F> constexpr int kInRun = F::is_sign ? 8 : F::bits;
template <class F> INLINE int first_place() {
    const int byte = lane() * kInRun<F>;
    return byte / 32 * kUnit<F> + byte % 32;
}
constexpr int kPitch = kLanes + 1;  // of rows in shared memory, so that lanes reach different banks
// Aligned: parts and rows of a payload begin at multiples of 16 bytes.
template <class F> INLINE u64 load_codes(const u8* codes) {
    if constexpr (F::bits == 8) return *(const u64*)codes;
    else if constexpr (F::bits == 4) return *(const u32*)codes;
    else if constexpr (F::bits == 2) return *(const u16*)codes;
    else return *codes;
}
// Returns entry `j` of a lane's codes, times their scale.
template <class F> INLINE float decoded(u64 codes, int j, float scale, const Draws<F>& draws) {
    const int byte = j % kInRun<F> % 4, plane = j / kInRun<F> * F::bits;
    const u32 four = (u32)(codes >> j % kInRun<F> / 4 * 32);  // bytes
    if constexpr (F::is_sign) {
        return float_of(bits_of(scale) ^ ((u32)codes << (31 - j) & 0x80000000u));
    } else if constexpr (F::is_dithered) {
        const u32 shifted = byte < 2 ? four << (15 - byte * 8) : four >> (byte * 8 - 15);
        return F::decode_shifted(shifted & 0xffu << 15, draws.at(j)) * scale;
    } else if constexpr (F::is_float) {
        return F::decode_high(four << (32 - F::bits - byte * 8 - plane)) * scale;
    } else {
        // As F::decode, four codes at a time: a code becomes the lowest byte of kRound, whose last place is worth 1.
        constexpr u32 kEach = 0x01010101u, kMiddle = 1u << (F::bits - 1);
        const u32 flipped = (four >> plane & kEach * (2 * kMiddle - 1)) ^ kEach * kMiddle;
        const float shifted = float_of(__byte_perm(flipped, bits_of(kRound), 0x7650 + byte));
        return (shifted - (kRound + (float)kMiddle)) * scale;
    }
}

// Sums all decoded payloads in their order, of the 256 slots from `at` on, of which `count` have entries;
// what is beyond these means nothing. A block has 2^log entries.
template <class F>
INLINE void sum_group(const Payloads& from, i64 at, int count, int log, const Dither& dither, float* room,
                      float (&c)[8]) {
    constexpr int kAhead = 4;  // payloads whose loads are under way together
    const int first = first_place<F>();
    const u8* codes = from.codes + (at >> 3) * F::bits + lane() * F::bits;
    const u8* scales = from.scales + ((at + first) >> log) * kScaleBytes<F>;
    Draws<F> draws(dither, at, first);
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = -0.0f;  // which changes no number that is added to it
    for (int r = 0; r < from.count && first < count; r += kAhead) {
        u64 words[kAhead];
        float factors[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
            if (r + a < from.count) {
                words[a] = load_codes<F>(codes + a * from.stride);
                factors[a] = scale_at<F>(scales + a * from.stride, 0);
            }
        codes += kAhead * from.stride, scales += kAhead * from.stride;
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
            if (r + a < from.count) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += decoded<F>(words[a], j, factors[a], draws);
                draws.next_rank();
            }
    }
    // From the lanes that have decoded entries to those of their rows.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j)
        room[first + first / kLanes + j / kInRun<F> * kPitch + j % kInRun<F>] = sum[j];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8; ++k) c[k] = room[k * kPitch + lane()];
}

// Sums the payloads in a span.
template <class F, int ROWS>
INLINE void sum_payloads(const Payloads& from, i64 at, int count, int log, const Dither& dither,
                         float (&sum)[ROWS]) {
    __shared__ float rooms[kWarps][8 * kPitch];
#pragma unroll
    for (int g = 0; g < ROWS / 8; ++g) {
        float c[8];
        sum_group<F>(from, at + g * 256, count - g * 256, log, dither, rooms[threadIdx.x / kLanes], c);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[g * 8 + k] = c[k];
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
    // A row at a time, which takes few registers: of 256 entries, each row has one half-word of a call.
    for (i64 at = (warps() - 1 - warp()) * kLanes; at < tails; at += warps() * kLanes) {
        const i64 place = at + lane();
        const int k = (int)(at / kLanes % 8);
        u32 random[4] = {};
        if (step)
            philox(seed, ((u64)(first + slots_of_row(table) + at - k * kLanes) >> 8) * kLanes + lane(), (u32)*step,
                   stream, random[0], random[1], random[2], random[3]);
        const u32 word = k < 2 ? random[0] : k < 4 ? random[1] : k < 6 ? random[2] : random[3];
        if (place < tails) call(place_of(runs, end, place).entry, place, word >> (k % 2 * 16) & 0xffffu);
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
        u8* scales = payload + (at >> kLog<BLOCK>) * kScaleBytes<F>;
        Scale scale = {};
        u32 random[4] = {}, byte = 0;
        Draws<F> draws;
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
            if (k % 8 == 0) draws = {Dither{step, seed, stream, first, shift, 0}, at + k * kLanes, lane()};
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
                    code = F::encode(y, draws.at(k % 8 * kLanes), value);
                } else {
                    const u32 bits = random[k % 8 / 2] >> (k % 2 * 16) & 0xffffu;
                    code = step ? F::encode(y, bits, value) : F::encode(y, value);
                    if constexpr (F::is_float) value = F::decode_high(code << (32 - F::bits));
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
