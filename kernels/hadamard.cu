// Computes the randomised Hadamard transform on a GPU; the specification is in hadamard.py.
#include "include/hadamard_cuda.h"

#include "include/blockwise.h"

template <int BLOCK>
__global__ void hadamard(const float* x, i64 n, float scale, i64 inverse, const i64* step, i64 seed,
                         i64 stream, i64 first, i64 shard, float* out) {
    // Blocks of the grid with blockIdx.y = r work on row r.
    x += blockIdx.y * shard;
    out += blockIdx.y * shard;
    first += blockIdx.y * kRowKeys;
    n = entries_of_row(n, shard, blockIdx.y);
    constexpr int kSpan = BLOCK < 256 ? 256 : BLOCK;
    const Rotation rotation = {step, seed, stream, first, scale};
    for (i64 at = warp() * kSpan; at < n; at += warps() * kSpan) {
        const int count = entries_in<kSpan>(at, n);
        float c[kSpan / kLanes];
        load_span(x, at, count, c);
        if (inverse) turn_back<BLOCK>(rotation, at, c);
        else turn<BLOCK>(rotation, at, c);
        store_span(out, at, count, c);
    }
}
