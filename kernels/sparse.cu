// Selects largest entries and adds values at indices on a GPU; the specification is in sparse.py.
//
//
// If the bound let too few entries through, or too many in some tile, the kernels after `collect`
// read the gradient instead of the slots, so that the host never waits for a count.
#include "include/cuda.h"

constexpr int kTile = 2048;  // entries per warp
constexpr int kSpan = 256;   // entries whose loads are under way together
constexpr int kBins = 2048;
constexpr int kSample = 8192;

struct Work {
    u32 bound, found, overflow, threshold, wanted, done[3];
    u32 histogram[3][kBins];
};

// Locates what follows `Work` in memory: per tile the number of slots in use, the counts of entries
// above and equal, and the slots.
struct Tiles {
    Work* work;
    u32 *slots, *above, *equal;
    int* indices;
    float* values;
    i64 count;
    int room;  // slots of a tile
};

INLINE Tiles tiles_of(u8* memory, i64 n, i64 slots_each) {
    const i64 count = (n + kTile - 1) / kTile;
    const int room = (int)slots_each;
    u32* slots = (u32*)(memory + sizeof(Work));
    return {(Work*)memory, slots, slots + count, slots + 2 * count, (int*)(slots + 3 * count),
            (float*)(slots + (3 + room) * count), count, room};
}

template <class T> struct Entries {
    const T* x;
    const float* residual;
    float* unsent;
    i64 n;
};
template <class T> INLINE float first_read(const Entries<T>& from, i64 i) {
    return from.residual ? to_float(from.x[i]) + from.residual[i] : to_float(from.x[i]);
}
template <class T> INLINE float read_again(const Entries<T>& from, i64 i) {
    return from.unsent ? from.unsent[i] : to_float(from.x[i]);
}

INLINE bool slots_hold(const Work& work, i64 k) { return !work.overflow && work.found >= k; }

// Calls f(index, value, valid) for rows of 32 entries of a tile, in order, one entry per lane.
template <class T, class F>
INLINE void rows_of(const Entries<T>& from, const Tiles& tiles, i64 tile, i64 k, F f) {
    if (slots_hold(*tiles.work, k)) {
        const int count = (int)tiles.slots[tile];
        for (int begin = 0; begin < count; begin += kLanes) {
            const int slot = begin + lane();
            const bool valid = slot < count;
            const i64 at = tile * tiles.room + (valid ? slot : 0);
            f(tiles.indices[at], tiles.values[at], valid);
        }
    } else {
        for (int begin = 0; begin < kTile; begin += kLanes) {
            const i64 i = tile * kTile + begin + lane();
            f((int)i, i < from.n ? read_again(from, i) : 0.0f, i < from.n);
        }
    }
}

INLINE int ones_before(u32 word) { return __popc(word & ((1u << lane()) - 1)); }

template <class T>
__global__ void sample(const T* x, const float* residual, i64 n, i64 k, i64 place, u8* memory) {
    constexpr int kThreads = 256, kEach = kSample / kThreads;
    __shared__ u32 parts[kThreads / kLanes];
    Work& work = *(Work*)memory;
    const Entries<T> from = {x, residual, nullptr, n};
    for (int i = (int)threadIdx.x; i < 3 * kBins; i += kThreads) (&work.histogram[0][0])[i] = 0;
    const i64 size = n < kSample ? n : kSample;
    u32 keys[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const i64 i = (i64)j * kThreads + threadIdx.x;
        keys[j] = i < size ? magnitude(first_read(from, i * n / size)) : 0u;
    }
    u32 bound = 0;
    for (u32 bit = 1u << 30; bit && place < size; bit >>= 1) {
        u32 reached = 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j) reached += keys[j] >= (bound | bit);
        for (int half = kLanes / 2; half; half /= 2)
            reached += __shfl_xor_sync(kAllLanes, reached, half);
        if (lane() == 0) parts[threadIdx.x / kLanes] = reached;
        __syncthreads();
        reached = 0;
        for (int w = 0; w < kThreads / kLanes; ++w) reached += parts[w];
        if (reached >= place) bound |= bit;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        work.bound = bound;
        work.found = work.overflow = work.threshold = 0;
        work.wanted = (u32)k;
        for (int pass = 0; pass < 3; ++pass) work.done[pass] = 0;
    }
}

template <class T>
__global__ void collect(const T* x, const float* residual, float* unsent, i64 n, u8* memory, i64 room) {
    const Tiles tiles = tiles_of(memory, n, room);
    const u32 bound = tiles.work->bound;
    for (i64 tile = warp(); tile < tiles.count; tile += warps()) {
        int count = 0;
        for (int begin = 0; begin < kTile; begin += kSpan) {
            const i64 at = tile * kTile + begin;
            float c[kSpan / kLanes];
            const int there = correct_span(x, residual, unsent, at, n, c);
#pragma unroll
            for (int row = 0; row < kSpan / kLanes; ++row) {
                const bool taken = has(row, there) && magnitude(c[row]) >= bound;
                const u32 word = __ballot_sync(kAllLanes, taken);
                const int slot = count + ones_before(word);
                if (taken && slot < room) {
                    tiles.indices[tile * room + slot] = (int)at + row * kLanes + lane();
                    tiles.values[tile * room + slot] = c[row];
                }
                count += __popc(word);
            }
        }
        if (lane() == 0) {
            tiles.slots[tile] = (u32)count;
            atomicAdd(&tiles.work->found, (u32)count);
            if (count > room) tiles.work->overflow = 1;
        }
    }
}

// Finds a digit of the threshold: bits 20 to 30, 9 to 19 or 0 to 8. Counts are integers, so that atomic
// additions give the same sums in any order.
template <class T, int PASS>
__global__ void histogram(const T* x, float* unsent, i64 n, i64 k, u8* memory, i64 room) {
    constexpr int kShift = PASS == 0 ? 20 : PASS == 1 ? 9 : 0, kWidth = PASS == 2 ? 9 : 11;
    constexpr int kThreads = 256, kEach = kBins / kThreads;
    __shared__ u32 bins[kBins];
    __shared__ u32 parts[kThreads];
    __shared__ u32 last;
    const Entries<T> from = {x, nullptr, unsent, n};
    const Tiles tiles = tiles_of(memory, n, room);
    Work& work = *tiles.work;
    for (int i = (int)threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    const u32 prefix = work.threshold;
    for (i64 tile = warp(); tile < tiles.count; tile += warps())
        rows_of(from, tiles, tile, k, [&](int, float value, bool valid) {
            const u32 key = magnitude(value);
            if (valid && (PASS == 0 || key >> (kShift + kWidth) == prefix >> (kShift + kWidth)))
                atomicAdd(&bins[key >> kShift & ((1u << kWidth) - 1)], 1u);
        });
    __syncthreads();
    for (int i = (int)threadIdx.x; i < kBins; i += kThreads)
        if (bins[i]) atomicAdd(&work.histogram[PASS][i], bins[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&work.done[PASS], 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    // The last block walks down from the top until enough entries are counted.
    __threadfence();
    u32 sum = 0;
    for (int i = 0; i < kEach; ++i) sum += ((volatile u32*)work.histogram[PASS])[threadIdx.x * kEach + i];
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 wanted = work.wanted;
        int part = kThreads - 1;
        while (part > 0 && parts[part] < wanted) wanted -= parts[part--];
        int bin = part * kEach + kEach - 1;
        for (u32 count; bin > part * kEach; --bin, wanted -= count) {
            count = ((volatile u32*)work.histogram[PASS])[bin];
            if (count >= wanted) break;
        }
        work.threshold = prefix | (u32)bin << kShift;
        work.wanted = wanted;
    }
}

template <class T>
__global__ void count(const T* x, float* unsent, i64 n, i64 k, u8* memory, i64 room) {
    const Entries<T> from = {x, nullptr, unsent, n};
    const Tiles tiles = tiles_of(memory, n, room);
    const u32 threshold = tiles.work->threshold;
    for (i64 tile = warp(); tile < tiles.count; tile += warps()) {
        u32 above = 0, equal = 0;
        rows_of(from, tiles, tile, k, [&](int, float value, bool valid) {
            above += __popc(__ballot_sync(kAllLanes, valid && magnitude(value) > threshold));
            equal += __popc(__ballot_sync(kAllLanes, valid && magnitude(value) == threshold));
        });
        if (lane() == 0) tiles.above[tile] = above, tiles.equal[tile] = equal;
    }
}

// Replaces both counts of each tile by their sums over all tiles before it.
__global__ void scan(i64 n, u8* memory, i64 room) {
    constexpr int kThreads = 256;
    __shared__ u32 above[kThreads], equal[kThreads];
    const Tiles tiles = tiles_of(memory, n, room);
    const i64 each = (tiles.count + kThreads - 1) / kThreads, begin = each * threadIdx.x;
    const i64 end = begin + each < tiles.count ? begin + each : tiles.count;
    u32 a = 0, e = 0;
    for (i64 tile = begin; tile < end; ++tile) a += tiles.above[tile], e += tiles.equal[tile];
    above[threadIdx.x] = a;
    equal[threadIdx.x] = e;
    __syncthreads();
    a = e = 0;
    for (int t = 0; t < (int)threadIdx.x; ++t) a += above[t], e += equal[t];
    for (i64 tile = begin; tile < end; ++tile) {
        const u32 own_a = tiles.above[tile], own_e = tiles.equal[tile];
        tiles.above[tile] = a;
        tiles.equal[tile] = e;
        a += own_a;
        e += own_e;
    }
}

template <class T>
__global__ void emit(const T* x, float* unsent, i64 n, i64 k, u8* memory, i64 room, int* indices,
                     float* values) {
    const Entries<T> from = {x, nullptr, unsent, n};
    const Tiles tiles = tiles_of(memory, n, room);
    const u32 threshold = tiles.work->threshold, wanted = tiles.work->wanted;
    for (i64 tile = warp(); tile < tiles.count; tile += warps()) {
        u32 equal = tiles.equal[tile];
        u32 taken_before = tiles.above[tile] + (equal < wanted ? equal : wanted);
        rows_of(from, tiles, tile, k, [&](int index, float value, bool valid) {
            const u32 key = magnitude(value);
            const u32 ties = __ballot_sync(kAllLanes, valid && key == threshold);
            const bool tie = key == threshold && equal + ones_before(ties) < wanted;
            const bool taken = valid && (key > threshold || tie);
            const u32 word = __ballot_sync(kAllLanes, taken);
            if (taken) {
                const u32 place = taken_before + ones_before(word);
                indices[place] = index;
                values[place] = value;
                if (unsent) unsent[index] = 0.0f;
            }
            equal += __popc(ties);
            taken_before += __popc(word);
        });
    }
}

// Counts the entries of each tile that reach the bound of the sample; sums go to `unsent`.
template <class T>
__global__ void count_reached(const T* x, const float* residual, float* unsent, i64 n, u8* memory) {
    const Tiles tiles = tiles_of(memory, n, 0);
    const u32 bound = tiles.work->bound;
    for (i64 tile = warp(); tile < tiles.count; tile += warps()) {
        u32 reached = 0;
        for (int begin = 0; begin < kTile; begin += kSpan) {
            const i64 at = tile * kTile + begin;
            float c[kSpan / kLanes];
            const int there = correct_span(x, residual, unsent, at, n, c);
#pragma unroll
            for (int row = 0; row < kSpan / kLanes; ++row) {
                const bool taken = has(row, there) && magnitude(c[row]) >= bound;
                reached += __popc(__ballot_sync(kAllLanes, taken));
            }
        }
        if (lane() == 0) tiles.above[tile] = reached, tiles.equal[tile] = 0;
    }
}

// Writes the first k of these entries, in order; `above` has the count of all tiles before.
template <class T>
__global__ void take_reached(const T* x, const float* residual, float* unsent, i64 n, i64 k, u8* memory,
                             int* indices, float* values) {
    const Tiles tiles = tiles_of(memory, n, 0);
    const u32 bound = tiles.work->bound;
    for (i64 tile = warp(); tile < tiles.count; tile += warps()) {
        i64 before = tiles.above[tile];
        for (int begin = 0; begin < kTile; begin += kSpan) {
            const i64 at = tile * kTile + begin;
            const int there = entries_in<kSpan>(at, n);
            float c[kSpan / kLanes];
            if (unsent) load_span(unsent, at, there, c);
            else load_span(x, residual, at, there, c);
#pragma unroll
            for (int row = 0; row < kSpan / kLanes; ++row) {
                const i64 i = at + row * kLanes + lane();
                const bool reached = has(row, there) && magnitude(c[row]) >= bound;
                const u32 word = __ballot_sync(kAllLanes, reached);
                const i64 place = before + ones_before(word);
                if (reached && place < k) {
                    indices[place] = (int)i;
                    values[place] = c[row];
                    if (unsent) unsent[i] = 0.0f;
                }
                before += __popc(word);
            }
        }
        if (tile == tiles.count - 1)
            for (i64 place = before + lane(); place < k; place += kLanes) {
                indices[place] = -1;
                values[place] = 0.0f;
            }
    }
}

// Adds one payload, whose places are all different, so that no addition needs to be atomic.
__global__ void scatter_add(const int* indices, const float* values, i64 count, float factor,
                            float* out, i64 n) {
    for (i64 i = warp() * kLanes + lane(); i < count; i += warps() * kLanes)
        if ((u32)indices[i] < (u64)n) out[indices[i]] += values[i] * factor;
}
