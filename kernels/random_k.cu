// Selects random entries on a GPU; the specification is in random_k.py.
//
// A warp takes all entries of some strata, so that it writes a span before one of its lanes draws an
// entry from it, and knows whether all entries of these strata are finite.
#include "include/cuda.h"

struct Draw {
    i64 n, k;
    const i64* step;
    i64 seed, stream;
};
INLINE i64 begin_of(const Draw& draw, i64 stratum) { return stratum * draw.n / draw.k; }
INLINE i64 place_in(const Draw& draw, i64 stratum) {
    u32 words[4];
    philox(draw.seed, (u64)(stratum / 128) * kLanes + stratum % kLanes, (u32)*draw.step, draw.stream,
           words[0], words[1], words[2], words[3]);
    const int word = (int)(stratum / kLanes % 4);
    return random_place(stratum, draw.n, draw.k,
                        word == 0 ? words[0] : word == 1 ? words[1] : word == 2 ? words[2] : words[3]);
}

template <class T> INLINE float entry_of(const T* x, const float* unsent, i64 i) {
    return unsent ? unsent[i] : to_float(x[i]);
}
template <class T> INLINE bool all_finite(const T* x, const float* unsent, i64 begin, i64 end) {
    u32 largest = 0;
    for (i64 i = begin + lane(); i < end; i += kLanes)
        largest = larger(largest, magnitude(entry_of(x, unsent, i)));
    return largest_of_warp(largest) < kInfinity;
}

template <class T>
__global__ void gather_random(const T* x, i64 n, const float* residual, float* unsent, const i64* step,
                              i64 seed, i64 stream, float* values, i64 k, i64 each) {
    const Draw draw = {n, k, step, seed, stream};
    for (i64 first = warp() * each; first < k; first += warps() * each) {
        const i64 last = first + each < k ? first + each : k, end = begin_of(draw, last);
        u32 largest = 0;
        for (i64 at = begin_of(draw, first); at < end; at += 256) {
            float c[8];
            correct_span(x, residual, unsent, at, end, c);
#pragma unroll
            for (int row = 0; row < 8; ++row) largest = larger(largest, magnitude(c[row]));
        }
        const bool finite = largest_of_warp(largest) < kInfinity;
        __syncwarp();  // a lane draws what another one has written
        for (i64 at = first; at < last; at += kLanes) {
            u32 bad = 0;  // a bit per stratum
            for (int s = 0; !finite && s < kLanes && at + s < last; ++s)
                bad |= (u32)!all_finite(x, unsent, begin_of(draw, at + s), begin_of(draw, at + s + 1)) << s;
            const i64 j = at + lane();
            if (j >= last) continue;
            const i64 place = place_in(draw, j);
            values[j] = bad >> lane() & 1u ? float_of(kNaN) : entry_of(x, unsent, place);
            if (unsent) unsent[place] = 0.0f;
        }
    }
}

template <class T>
__global__ void scatter_random(const float* values, i64 k, float factor, const u8* finite, const i64* step,
                               i64 seed, i64 stream, T* out, i64 n, i64 each) {
    const Draw draw = {n, k, step, seed, stream};
    const bool fits = !finite || *finite;
    for (i64 first = warp() * each; first < k; first += warps() * each) {
        const i64 last = first + each < k ? first + each : k, end = begin_of(draw, last);
        for (i64 i = begin_of(draw, first) + lane(); i < end; i += kLanes)
            store(out + i, fits ? 0.0f : float_of(kNaN));
        __syncwarp();  // a lane writes an entry over another one's zero
        for (i64 j = first + lane(); fits && j < last; j += kLanes)
            store(out + place_in(draw, j), values[j] * factor);
    }
}
