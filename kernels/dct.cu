// Sends the largest cosine coefficients on a GPU; the specification is in dct.py.
//
// A block of 64 threads works on a tile. Each thread holds a column in registers, and then a row; between
// the two, entries pass through shared memory. Rows there are 65 places apart, so that the entries of a
// row or of a column lie in different banks. Loads and stores of a warp are full lines.
//
// Encoding is one launch, and coefficients are never in memory:
// 1. The momentum decays, the gradient is added, and columns and rows are transformed.
// 2. The k-th largest magnitude is found bit by bit: each turn counts the coefficients that reach a bound, and
//    ends when exactly k do, usually after 16 of 31 bits. Bounds above the largest magnitude, and, up to k = 64,
//    bounds that every row of the tile reaches, need no count.
// 3. Those coefficients are written in the order of their places; all others become zero.
// 4. Rows and columns are transformed back, and what was sent is subtracted from the momentum, which is computed
//    once more, from inputs that are still in a cache.
// Decoding adds up the payloads of all ranks in shared memory, divides, transforms back and takes signs.
#include "include/dct.h"
#include "include/tiles.h"

#include "include/cuda.h"

constexpr int kPitch = kSide + 1;
constexpr int kCountPitch = kSide + 2;  // of counts, of which a bank has two

// Returns where entry `i` of the line is in the bucket; -1 behind its end.
INLINE i64 place_in_line(const Tiles* table, i64 i) {
    const Run* runs = (const Run*)(table + 1) + table->matrices;
    const Run& one = *run_at(runs, table->pieces, i);
    return i - one.first < one.columns ? one.begin + i - one.first : -1;
}

// Calls f(row, place in the bucket) for this thread's column of a tile.
template <class F> INLINE void for_column(const Tiles* table, i64 tile, F f) {
    const int t = (int)threadIdx.x;
    if (tile >= table->squares) {
#pragma unroll 1
        for (int i = 0; i < kSide; ++i) {
            const i64 place = place_in_line(table, (tile - table->squares) * kTile + i * kSide + t);
            if (place >= 0) f(i, place);
        }
        return;
    }
    const Square square = square_of(table, tile);
    i64 place = square.at + t;
    const int rows = t < square.columns ? square.rows : 0;
#pragma unroll 8
    for (int i = 0; i < rows; ++i, place += square.stride) f(i, place);
}

// Columns of a square and then rows, or rows alone, are transformed by the same code, which is half as long:
// what a thread reads as a column it writes as a row, so that the other one is a column in the next turn.

// Transforms columns and rows; returns this thread's row.
INLINE void transform(bool square, float* room, float (&c)[kSide]) {
#pragma unroll 1
    for (int left = square ? 2 : 1; left; --left) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSide; ++i) c[i] = room[i * kPitch + threadIdx.x] * kUnit;
        dct_64<false>(c);
        if (left == 1) continue;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kSide; ++j) room[threadIdx.x * kPitch + j] = c[j];
    }
}
// Transforms rows back, of which each thread has written its own, and columns.
INLINE void transform_back(bool square, float* room) {
#pragma unroll 1
    for (int left = square ? 2 : 1; left; --left) {
        float c[kSide];
#pragma unroll
        for (int j = 0; j < kSide; ++j) c[j] = room[threadIdx.x * kPitch + j] * kUnit;
        dct_64<true>(c);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSide; ++i) room[i * kPitch + threadIdx.x] = c[i];
        __syncthreads();
    }
}

// Returns the smallest and the largest number of both warps, in all threads.
INLINE void extremes_of_block(u32& low, u32& high, u32 (&lows)[2], u32 (&highs)[2]) {
    const u32 lowest = ~largest_of_warp(~low), highest = largest_of_warp(high);
    if (lane() == 0) lows[threadIdx.x / kLanes] = lowest, highs[threadIdx.x / kLanes] = highest;
    __syncthreads();
    low = smaller(lows[0], lows[1]), high = larger(highs[0], highs[1]);
}

// Returns the sum of both warps, in all threads. Rows of `sums` take turns, so that one barrier is enough.
INLINE u32 sum_of_block(u32 x, u32 (&sums)[2][2], int& turn) {
    x = __reduce_add_sync(kAllLanes, x);
    if (lane() == 0) sums[turn][threadIdx.x / kLanes] = x;
    __syncthreads();
    x = sums[turn][0] + sums[turn][1];
    turn ^= 1;
    return x;
}

template <class T>
__global__ void __launch_bounds__(kSide, 10)
    encode_cosines(const T* x, const float* momentum, float decay, const Tiles* table, i64 k, float* fresh,
                   u16* payload) {
    __shared__ float room[kSide * kPitch];
    __shared__ u32 sums[2][2], lows[2], highs[2];
    const int t = (int)threadIdx.x;
    int turn = 0;
    for (i64 tile = blockIdx.x; tile < table->count; tile += gridDim.x) {
        const bool square = tile < table->squares;
        // A part of the line lies turned, so that its rows come first.
        const int down = square ? kPitch : 1;
        float* column = room + (square ? t : t * kPitch);
        __syncthreads();  // others read the tile before
        for (int i = 0; i < kSide; ++i) column[i * down] = 0.0f;
        for_column(table, tile, [&](int i, i64 place) {
            column[i * down] = to_float(x[place]) + momentum[place] * decay;
        });
        float c[kSide];
        transform(square, room, c);

        // Magnitudes, with the sign as the last bit: a comparison takes no further register.
        u32 words[kSide];
#pragma unroll
        for (int j = 0; j < kSide; ++j) words[j] = magnitude_bits(c[j]) << 1 | bits_of(c[j]) >> 31;
        // At least k words reach `low`: all, or the largest of each row. None is above `high`.
        u32 low = 0, high = words[0];
#pragma unroll
        for (int j = 1; j < kSide; ++j) high = larger(high, words[j]);
        if (k <= kSide) low = high;
        // Its barrier also lets rows of `room` be overwritten, which others have read as columns.
        extremes_of_block(low, high, lows, highs);
        // The k-th largest magnitude, bit by bit, until exactly k reach the bound.
        u32 bound = 0, reached = kTile;
        for (u32 bit = 1u << 31; bit > 1 && reached != k; bit >>= 1) {
            const u32 next = bound | bit;
            if (next > high) continue;
            if (next <= low) {
                bound = next;
                continue;
            }
            u32 some = 0;
#pragma unroll
            for (int j = 0; j < kSide; ++j) some += words[j] >= next;
            some = sum_of_block(some, sums, turn);
            if (some >= k) bound = next, reached = some;
        }
        const u32 last = bound | 1u;  // the bound with the sign
        // Both counts of a thread in one word: entries above the bound, and equal ones.
        u32 own = 0;
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
            own += words[j] > last ? 1u << 16 : words[j] >= bound ? 1u : 0u;
            room[t * kPitch + j] = float_of(words[j]);
        }
        const u32 all = sum_of_block(own, sums, turn);
        u32 before = own;
        for (int by = 1; by < kLanes; by *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, before, by);
            if (lane() >= by) before += other;
        }
        // The sums of the turn before are still there.
        before = before - own + (t < kLanes ? 0 : sums[turn ^ 1][0]);
        const u32 wanted = (u32)k - (all >> 16);  // equal ones that are taken, the first ones
        u32 equal = before & 0xffffu, at = (before >> 16) + (equal < wanted ? equal : wanted);
        u16* places = payload + tile * k;
        u16* values = places + table->count * k;
#pragma unroll 4
        for (int j = 0; j < kSide; ++j) {
            const u32 word = bits_of(room[t * kPitch + j]);
            float sent = 0.0f;
            if (word >= bound) {
                const bool tie = word <= last, taken = !tie || equal < wanted;
                equal += tie;
                if (taken) {
                    const u32 bits = to_bfloat16(float_of(word >> 1 | word << 31));
                    sent = from_bfloat16(bits);
                    places[at] = (u16)(t * kSide + j);
                    values[at++] = (u16)bits;
                }
            }
            room[t * kPitch + j] = sent;
        }
        transform_back(square, room);
        for_column(table, tile, [&](int i, i64 place) {
            fresh[place] = to_float(x[place]) + momentum[place] * decay - column[i * down];
        });
    }
}

template <class T>
__global__ void decode_cosines(const u16* payloads, i64 count, i64 k, const Tiles* table, i64 sign, T* out) {
    __shared__ float room[kSide * kPitch];
    __shared__ u16 counts[kSide * kCountPitch];
    const int t = (int)threadIdx.x;
    for (i64 tile = blockIdx.x; tile < table->count; tile += gridDim.x) {
        const bool square = tile < table->squares;
        __syncthreads();  // others read the tile before
        for (int i = 0; i < kSide; ++i) room[i * kPitch + t] = 0.0f, counts[i * kCountPitch + t] = 0;
        __syncthreads();
        const u16* places = payloads + tile * k;
        const i64 plane = table->count * k;
        for (i64 r = 0; r < count; ++r, places += 2 * plane) {
            for (i64 i = t; i < k; i += kSide) {
                const int place = places[i] & (kTile - 1);  // those of one payload differ
                const int row = place / kSide, column = place % kSide;
                room[row * kPitch + column] += from_bfloat16((u32)places[plane + i]);
                ++counts[row * kCountPitch + column];
            }
            __syncthreads();
        }
#pragma unroll 4
        for (int j = 0; j < kSide; ++j)
            if (const int some = counts[t * kCountPitch + j]; some > 1) room[t * kPitch + j] /= (float)some;
        transform_back(square, room);
        for_column(table, tile, [&](int i, i64 place) {
            const float entry = square ? room[i * kPitch + t] : room[t * kPitch + i];
            const float sign_of = entry > 0.0f ? 1.0f : entry < 0.0f ? -1.0f : 0.0f;
            const bool finite = magnitude(entry) < kInfinity;
            store(out + place, !sign ? entry : finite ? sign_of : float_of(kNaN));
        });
    }
}
