// Computes the randomised Hadamard transform on a GPU; the specification is in hadamard.py.
#include "include/blockwise_cuda.h"

template <int BLOCK>
__global__ void hadamard(const float* x, i64 n, float scale, i64 inverse, const i64* step, i64 seed,
                         i64 stream, i64 first, Segments table, i64 chosen, i64 accumulate, float* out) {
    constexpr int SPAN = kSpan<BLOCK, true>;
    Rotation rotation = {step, seed, stream, first, scale};
    Row row = {};
    if (table) {
        row = row_here(table, chosen);
        rotation.first += blockIdx.y * kRowKeys;
        x += inverse ? blockIdx.y * n : row.entry;
        out += inverse ? row.entry : blockIdx.y * n;
    }
    for (i64 at = warp() * SPAN; at < n; at += warps() * SPAN) {
        const Place place = table ? coded_place(table, row.index, at) : Place{at, n - at};
        const int count = entries_at<SPAN>(place), slots = entries_in<SPAN>(at, n);
        float c[SPAN / kLanes];
        if (inverse) {
            load_span(x, at, slots, c);
            turn_back<BLOCK>(rotation, at, c);
            if (accumulate) add_span(out, place.entry, count, c);
            store_span(out, place.entry, count, c);
        } else {
            load_span(x, place.entry, count, c);
            turn<BLOCK>(rotation, at, c);
            // Signs make some of the zeros negative that no entry has.
#pragma unroll
            for (int k = 0; k < SPAN / kLanes; ++k)
                if (k * kLanes / BLOCK * BLOCK >= count) c[k] = 0.0f;
            store_span(out, at, slots, c);
        }
    }
}
