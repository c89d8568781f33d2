// The randomised Hadamard transform on the CPU; the specification is in hadamard.py.
#include "include/cpu.h"

namespace {

constexpr int kLongest = 2048;

// Sums and differences of entries `distance` apart within a vector.
template <int DISTANCE> INLINE Floats within(Floats x) {
    Words partner, flip;
    for (int l = 0; l < kWidth; ++l) {
        partner[l] = (u32)(l ^ DISTANCE);
        flip[l] = l & DISTANCE ? 0x80000000u : 0u;
    }
    return __builtin_shuffle(x, partner) + float_of(bits_of(x) ^ flip);
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
    for (int distance = kWidth; distance < block; distance *= 2)
        for (int begin = 0; begin < block; begin += 2 * distance)
            for (int i = begin; i < begin + distance; i += kWidth) {
                const Floats low = load(c + i), high = load(c + i + distance);
                store_as(c + i, low + high);
                store_as(c + i + distance, low - high);
            }
}

}  // namespace

EXPORT(hadamard)(i64 block_size, const float* x, i64 n, float scale, i64 inverse, const i64* step,
                 i64 seed, i64 stream, i64 first, float* out) {
    const Random random = random_of(step, seed, stream, first);
    const int block = (int)block_size;
    u32 words[4][kRow];
    float c[kLongest];
    for (i64 at = 0; at < n; at += block) {
        const i64 place = random.first + at;
        if (at == 0 || place % kSigns == 0) fill_words(random, place / kSigns, words);
        // The signs of vector v of the row at `i`, each in the top bit of its word.
        auto signs = [&](int i, int v) {
            const int row = (int)((place + i) % kSigns / kRow);
            return load_as<Words>(words[row / 32] + v * kWidth) << (31 - row % 32) & 0x80000000u;
        };
        for (int i = 0; i < block; i += kRow)
            for (int v = 0; v < kVectors; ++v) {
                Floats entries = load(x + at + i + v * kWidth);
                if (!inverse) entries = float_of(bits_of(entries) ^ signs(i, v));
                store_as(c + i + v * kWidth, entries);
            }
        transform(c, block);
        for (int i = 0; i < block; i += kRow)
            for (int v = 0; v < kVectors; ++v) {
                Floats entries = load(c + i + v * kWidth) * scale;
                if (inverse) entries = float_of(bits_of(entries) ^ signs(i, v));
                store_as(out + at + i + v * kWidth, entries);
            }
    }
}
