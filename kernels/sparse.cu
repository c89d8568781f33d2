// Selects largest entries on a GPU; the specification is in sparse.py.
//
// The exact selection takes two launches. `sample`, one block, finds a bound that a little more than k entries
// reach, from an entry of each of 2,048 stretches, each at another place so that no period of the gradient misleads.
// `select` goes through the gradient once and puts those entries into slots; three digits of their
// magnitudes give the k-th largest, and the result is written in the order of indices. These stages
// are tasks of one launch, ordered by tickets. If the bound let too few entries through, or too many in
// some tile, later stages read the gradient instead of the slots: the host never waits for a count.
#include "include/tickets.h"

constexpr int kTile = 2048;  // entries of a warp in `select`; a part has kWarps tiles
constexpr int kTake = 512;   // entries of a warp in `take`
constexpr int kSpan = 256;   // entries whose loads are under way together
constexpr int kGroup = 4;    // tiles of a warp in the later stages of `select`
constexpr int kBins = 2048;
constexpr int kThreads = kWarps * kLanes;

struct Work {
    u32 bound, threshold, wanted, overflow, ticket, finished, recount, done[5];
    u32 histogram[3][kBins];
};
INLINE u64* sums_of(u8* memory) { return (u64*)(memory + sizeof(Work)); }

// A candidate, loaded and stored by one access.
struct alignas(8) Slot {
    int index;
    float value;
};

// Locates what follows `Work` in memory: the sums of parts, the slots of each tile, and how many are in use.
struct Tiles {
    Work* work;
    u64* sums;
    Slot* slots;
    u32* used;
    i64 count, parts;
    int room;  // slots of a tile
};

INLINE Tiles tiles_of(u8* memory, i64 n, i64 room) {
    const i64 count = (n + kTile - 1) / kTile, parts = (count + kWarps - 1) / kWarps;
    u64* sums = sums_of(memory);
    Slot* slots = (Slot*)(sums + parts);
    return {(Work*)memory, sums, slots, (u32*)(slots + room * count), count, parts, (int)room};
}

INLINE int ones_before(u32 word) { return __popc(word & ((1u << lane()) - 1)); }

// Finds the `place`-th largest magnitude of SIZE entries, and prepares the memory. ROUGH: of one entry
// of each of SIZE stretches, at a place that differs between stretches, so that no period of the
// gradient misleads; the lowest bits, which select few entries, are left out.
template <class T, int SIZE, bool ROUGH>
__global__ void sample(const T* x, const float* residual, i64 n, i64 k, i64 place, u8* memory, i64 parts) {
    constexpr int kEach = SIZE / kThreads;
    constexpr u32 kLowest = ROUGH ? 1u << 15 : 1u;
    __shared__ u32 counts[2][kWarps];
    Work& work = *(Work*)memory;
    const i64 size = n < SIZE ? n : SIZE;
    const u64 stretch = (u64)(n / size);
    u32 keys[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const i64 i = (i64)j * kThreads + threadIdx.x;
        const i64 shift = ROUGH ? (i64)((u64)((u32)i * 2654435769u) * stretch >> 32) : 0;
        const i64 at = i * n / size + shift;
        keys[j] = i < size ? magnitude(residual ? to_float(x[at]) + residual[at] : to_float(x[at])) : 0u;
    }
    for (i64 i = threadIdx.x; i < parts; i += kThreads) sums_of(memory)[i] = 0;
    for (int i = (int)threadIdx.x; ROUGH && i < 3 * kBins; i += kThreads) work.histogram[i / kBins][i % kBins] = 0;
    u32 bound = 0;
    int turn = 0;
    for (u32 bit = 1u << 30; bit >= kLowest && place < size; bit >>= 1, turn ^= 1) {
        u32 reached = 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j) reached += keys[j] >= (bound | bit);
        reached = __reduce_add_sync(kAllLanes, reached);
        if (lane() == 0) counts[turn][threadIdx.x / kLanes] = reached;
        __syncthreads();  // once per turn: the next one writes to the other row
        reached = 0;
        for (int w = 0; w < kWarps; ++w) reached += counts[turn][w];
        if (reached >= place) bound |= bit;
    }
    if (threadIdx.x == 0) {
        work.bound = ROUGH && !bound ? 1 : bound;  // `select` counts zeros only where it has to
        work.threshold = work.overflow = work.ticket = work.finished = work.recount = 0;
        work.wanted = (u32)k;
        for (u32& one : work.done) one = 0;
    }
}

template <class T> struct Entries {
    const T* x;
    const float* residual;
    float *unsent, *cleared;
    i64 n;
};

// Calls f(index, value, valid) for rows of 32 candidates of a group of tiles, in order, one per lane: from
// the slots, or from the sums or the gradient itself where the slots do not hold all that is needed.
template <class T, class F>
INLINE void rows_of(const Entries<T>& from, const Tiles& tiles, i64 group, F f) {
    constexpr int kTogether = 4;  // rows whose loads are under way together
    const i64 first = group * kGroup;
    if (!seen(&tiles.work->overflow) && !seen(&tiles.work->recount)) {
        const bool there = lane() < kGroup && first + lane() < tiles.count;
        const int count = there ? (int)tiles.used[first + lane()] : 0;
        int end[kGroup];  // of each tile, among the slots of all
#pragma unroll
        for (int g = 0; g < kGroup; ++g)
            end[g] = (g ? end[g - 1] : 0) + __shfl_sync(kAllLanes, count, g);
        for (int begin = 0; begin < end[kGroup - 1]; begin += kTogether * kLanes) {
            Slot some[kTogether];
#pragma unroll
            for (int row = 0; row < kTogether; ++row) {
                const int slot = begin + row * kLanes + lane();
                i64 at = first * tiles.room + slot;
#pragma unroll
                for (int g = 0; g < kGroup - 1; ++g)
                    if (slot >= end[g]) at = (first + g + 1) * tiles.room + (slot - end[g]);
                some[row] = slot < end[kGroup - 1] ? tiles.slots[at] : Slot{0, 0.0f};
            }
#pragma unroll
            for (int row = 0; row < kTogether; ++row) {
                const int slot = begin + row * kLanes + lane();
                if (slot - lane() >= end[kGroup - 1]) break;
                f(some[row].index, some[row].value, slot < end[kGroup - 1]);
            }
        }
        return;
    }
    for (i64 at = first * kTile; at < (first + kGroup) * kTile && at < from.n; at += kSpan) {
        float c[kSpan / kLanes];
        const int there = entries_in<kSpan>(at, from.n);
        if (from.unsent) load_span(from.unsent, at, there, c);
        else load_span(from.x, at, there, c);
#pragma unroll
        for (int row = 0; row < kSpan / kLanes; ++row)
            f((int)at + row * kLanes + lane(), c[row], has(row, there));
    }
}

// Puts the entries of a tile that reach the bound into its slots, and counts their first digit.
template <class T>
INLINE void collect(const Entries<T>& from, const Tiles& tiles, i64 tile, u32* bins) {
    const u32 bound = tiles.work->bound;
    Slot* slots = tiles.slots + tile * tiles.room;
    int count = 0;
    for (i64 at = tile * kTile; at < (tile + 1) * kTile && at < from.n; at += kSpan) {
        float c[kSpan / kLanes];
        correct_span(from.x, from.residual, from.unsent, at, from.n, c);
#pragma unroll
        for (int row = 0; row < kSpan / kLanes; ++row) {
            const u32 key = magnitude(c[row]);
            const bool taken = key >= bound;  // at least 1, so that zeros beyond the end are not taken
            const u32 word = __ballot_sync(kAllLanes, taken);
            if (!word) continue;
            const int slot = count + ones_before(word);
            if (taken) atomicAdd(&bins[key >> 20], 1u);
            if (taken && slot < tiles.room) slots[slot] = {(int)at + row * kLanes + lane(), c[row]};
            count += __popc(word);
        }
    }
    if (lane() == 0) tiles.used[tile] = (u32)count;
    if (lane() == 0 && count > tiles.room) tiles.work->overflow = 1;
}

// Finds the digit of the `wanted`-th largest magnitude, counted from the top; notes it if there is
// none, as too few entries reach the bound. The last block of a stage calls it.
INLINE void find_digit(Work& work, int pass, u32 prefix, int shift) {
    constexpr int kEach = kBins / kThreads;
    __shared__ u32 totals[kWarps];
    const u32* bins = work.histogram[pass];
    const int highest = kBins - 1 - (int)threadIdx.x * kEach, w = (int)threadIdx.x / kLanes;
    u32 each[kEach], sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum += each[j] = seen(bins + highest - j);
    u32 through = sum;  // of all bins from the top
    for (int by = 1; by < kLanes; by *= 2) {
        const u32 other = __shfl_up_sync(kAllLanes, through, by);
        if (lane() >= by) through += other;
    }
    if (lane() == kLanes - 1) totals[w] = through;
    const u32 wanted = work.wanted;
    __syncthreads();
    for (int i = 0; i < w; ++i) through += totals[i];
    if (threadIdx.x == kThreads - 1 && through < wanted) work.recount = 1;
    u32 before = through - sum;
    if (before >= wanted || through < wanted) return;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (before < wanted && before + each[j] >= wanted) {
            work.threshold = prefix | (u32)(highest - j) << shift;
            work.wanted = wanted - before;
        }
        before += each[j];
    }
}

// Writes the entries of a group of tiles above the threshold, and as many equal ones as are wanted.
template <class T>
INLINE void emit(const Entries<T>& from, const Tiles& tiles, i64 part, i64 group, int* indices, float* values) {
    const u32 threshold = seen(&tiles.work->threshold), wanted = seen(&tiles.work->wanted);
    u32 above = 0, equal = 0;
    rows_of(from, tiles, group, [&](int, float value, bool valid) {
        above += valid && magnitude(value) > threshold;
        equal += valid && magnitude(value) == threshold;
    });
    above = __reduce_add_sync(kAllLanes, above), equal = __reduce_add_sync(kAllLanes, equal);
    u64 end;  // both counts in one word: each is below 2^31
    const u64 before = counts_before(tiles.sums, part, (u64)above << 31 | equal, end);
    equal = (u32)before & 0x7fffffffu;
    u32 place = (u32)(before >> 31) + (equal < wanted ? equal : wanted);
    rows_of(from, tiles, group, [&](int index, float value, bool valid) {
        const u32 key = magnitude(value);
        const u32 ties = __ballot_sync(kAllLanes, valid && key == threshold);
        const bool tie = key == threshold && equal + ones_before(ties) < wanted;
        const bool taken = valid && (key > threshold || tie);
        const u32 word = __ballot_sync(kAllLanes, taken);
        if (taken) {
            const u32 at = place + ones_before(word);
            indices[at] = index;
            values[at] = value;
            if (from.unsent) from.unsent[index] = 0.0f;
            if (from.cleared) from.cleared[index] = 0.0f;
        }
        equal += __popc(ties);
        place += __popc(word);
    });
}

// Stage 0 collects; later ones count a digit each: bits 20 to 30 (again, if too few entries reach the
// bound), 10 to 19 and 0 to 9. The last stage emits. Counts are integers, so that atomic additions
// give the same sums in any order. A task of stage 0 is a part, and of later ones a part of groups. A block
// adds its counts to those of all once per stage: with the first task of another stage.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    select(const T* x, const float* residual, float* unsent, float* cleared, i64 n, i64 k, u8* memory, i64 room,
           int* indices, float* values, i64 padding) {
    constexpr int kEmit = 3;
    __shared__ u32 bins[kBins];
    const Entries<T> from = {x, residual, unsent, cleared, n};
    const Tiles tiles = tiles_of(memory, n, room);
    Work& work = *tiles.work;
    const u32 parts = (u32)tiles.parts, later = (parts + kGroup - 1) / kGroup;  // tasks of stages
    u32 counted = 0, stage = 0, prefix = 0;  // tasks in `bins`, their stage, and the digits known to it
    int pass = 0, shift = 20;
    for (int i = (int)threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    for (;;) {
        const u32 ticket = next_ticket(&work.ticket), before = stage;
        stage = ticket < parts ? 0 : 1 + (ticket - parts) / later;
        if (stage != before && counted) {
            for (int i = (int)threadIdx.x; i < kBins; i += kThreads) {
                if (bins[i]) atomicAdd(&work.histogram[pass][i], bins[i]);
                bins[i] = 0;
            }
            if (is_last(&work.done[before], before ? later : parts, counted)) {
                find_digit(work, pass, prefix, shift);
                announce(&work.finished, before + 1);
            }
            counted = 0;
        }
        if (stage != before) {
            wait_until(&work.finished, 1);  // stage 0 decides how many stages there are
            pass = (int)(stage - seen(&work.recount));
            if (pass > kEmit) return;
            wait_until(&work.finished, stage);
            shift = pass == 0 ? 20 : pass == 1 ? 10 : 0, prefix = seen(&work.threshold);
        }
        const u32 part = stage ? (ticket - parts) % later : ticket;
        const i64 nth = (i64)part * kWarps + threadIdx.x / kLanes;  // tile, or group
        if (pass == kEmit) {
            emit(from, tiles, part, nth, indices, values);
            if (part == later - 1 && threadIdx.x < padding) values[k + threadIdx.x] = 0.0f;
            continue;
        }
        ++counted;
        if (!stage) {
            if (nth < tiles.count) collect(from, tiles, nth, bins);
            continue;
        }
        const int width = pass ? 10 : 11;
        const u32 bound = work.bound;
        rows_of(from, tiles, nth, [&](int, float value, bool valid) {
            const u32 key = magnitude(value);
            // Stage 0 has counted those that reach the bound.
            const bool counts = pass ? key >> (shift + width) == prefix >> (shift + width) : key < bound;
            if (valid && counts) atomicAdd(&bins[key >> shift & ((1u << width) - 1)], 1u);
        });
    }
}

// Writes the first k entries that reach the bound of the sample, in order, in one pass.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    take(const T* x, const float* residual, float* unsent, float* cleared, i64 n, i64 k, u8* memory, int* indices,
         float* values, i64 padding) {
    constexpr int kRows = kTake / kLanes;
    Work& work = *(Work*)memory;
    const u32 bound = work.bound;
    const i64 parts = (n + kTake * kWarps - 1) / (kTake * kWarps);
    for (;;) {
        const i64 part = next_ticket(&work.ticket);
        if (part >= parts) return;
        const i64 at = (part * kWarps + threadIdx.x / kLanes) * kTake;
        const int there = entries_in<kTake>(at, n);  // negative beyond the end
        float c[kRows];
        load_span(x, residual, at, there, c);
        u32 words[kRows], count = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            words[row] = __ballot_sync(kAllLanes, has(row, there) && magnitude(c[row]) >= bound);
            count += __popc(words[row]);
        }
        u64 end;
        i64 before = (i64)counts_before(sums_of(memory), part, count, end);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const i64 i = at + row * kLanes + lane(), place = before + ones_before(words[row]);
            const bool taken = (words[row] >> lane() & 1u) && place < k;
            if (taken) {
                indices[place] = (int)i;
                values[place] = c[row];
                if (cleared) cleared[i] = 0.0f;
            }
            if (unsent && has(row, there)) unsent[i] = taken ? 0.0f : c[row];
            before += __popc(words[row]);
        }
        if (part < parts - 1) continue;
        for (i64 place = (i64)end + threadIdx.x; place < k; place += kThreads) {
            indices[place] = -1;
            values[place] = 0.0f;
        }
        if (threadIdx.x < padding) values[k + threadIdx.x] = 0.0f;
    }
}
