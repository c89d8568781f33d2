// Computes the randomised Hadamard transform on the CPU; the specification is in hadamard.py.
#include "include/hadamard_cpu.h"

EXPORT(hadamard)(i64 block_size, const float* x, i64 n, float scale, i64 inverse, const i64* step,
                 i64 seed, i64 stream, i64 first, i64 shard, float* out) {
    constexpr int kLongest = 2048;
    Rotation rotation = {random_of(step, seed, stream, first), scale};
    const int block = (int)block_size;
    float c[kLongest];
    for (i64 begin = 0; begin < n; begin += shard, rotation.random.first += kRowKeys)
        for (i64 at = begin; at < n && at < begin + shard; at += block) {
            fetch(x + at + block, block);
            __builtin_memcpy(c, x + at, 4 * (unsigned)block);
            if (inverse) rotation.turn_back(at - begin, block, c);
            else rotation.turn(at - begin, block, c);
            __builtin_memcpy(out + at, c, 4 * (unsigned)block);
        }
}
