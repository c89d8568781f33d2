// Computes the randomised Hadamard transform of blocks on the CPU.
#pragma once
#include "cpu.h"

namespace {

template <int DISTANCE> struct Partner {
    static constexpr int entry(int l) { return l ^ DISTANCE; }
};

// Returns sums and differences of entries DISTANCE apart within a vector.
template <int DISTANCE> INLINE Floats within(Floats x) {
    Words flip;
    for (int l = 0; l < kWidth; ++l) flip[l] = l & DISTANCE ? 0x80000000u : 0u;
    return picked<Partner<DISTANCE>>(x, x) + float_of(bits_of(x) ^ flip);
}

void transform(float* c, int block) {
    for (int i = 0; i < block; i += kWidth) {
        Floats x = load(c + i);
        x = within<1>(x);
        x = within<2>(x);
        if constexpr (kWidth > 4) x = within<4>(x);
        if constexpr (kWidth > 8) x = within<8>(x);
        store_as(c + i, x);
    }
    int distance = kWidth;
    for (; 2 * distance < block; distance *= 4)  // two steps at a time, which halves the passes over memory
        for (int begin = 0; begin < block; begin += 4 * distance)
            for (float* to = c + begin; to < c + begin + distance; to += kWidth) {
                const Floats p = load(to), q = load(to + distance);
                const Floats r = load(to + 2 * distance), s = load(to + 3 * distance);
                const Floats sums[2] = {p + q, r + s}, differences[2] = {p - q, r - s};
                store_as(to, sums[0] + sums[1]);
                store_as(to + distance, differences[0] + differences[1]);
                store_as(to + 2 * distance, sums[0] - sums[1]);
                store_as(to + 3 * distance, differences[0] - differences[1]);
            }
    for (int i = 0; i < distance && distance < block; i += kWidth) {
        const Floats low = load(c + i), high = load(c + i + distance);
        store_as(c + i, low + high);
        store_as(c + i + distance, low - high);
    }
}

// The transform with random signs; `scale` is 1 / sqrt(block).
struct Rotation {
    Random random;
    float scale;
    i64 group = -1;  // the group whose signs are in `words`
    u32 words[4 * kCalls] = {};

    // Returns the signs of vector `v` of the row at `place`, each in the top bit of its word.
    Words signs(i64 place, int v) {
        if (place / kSigns != group) {
            group = place / kSigns;
            fill_words(random, group, words);
        }
        const int row = (int)(place % kSigns / kRow);
        return load_as<Words>(words + row / 32 * kCalls + v * kWidth) << (31 - row % 32) & 0x80000000u;
    }

    void flip(i64 at, int block, float* c) {
        for (int i = 0; i < block; i += kRow)
            for (int v = 0; v < kVectors; ++v) {
                float* entries = c + i + v * kWidth;
                store_as(entries, float_of(bits_of(load(entries)) ^ signs(random.first + at + i, v)));
            }
    }
    void shrink(int block, float* c) {
        for (int i = 0; i < block; i += kWidth) store_as(c + i, load(c + i) * scale);
    }
    // Rotates the block at `at` in place.
    void turn(i64 at, int block, float* c) {
        flip(at, block, c);
        transform(c, block);
        shrink(block, c);
    }
    void turn_back(i64 at, int block, float* c) {
        transform(c, block);
        shrink(block, c);
        flip(at, block, c);
    }
};

}  // namespace
