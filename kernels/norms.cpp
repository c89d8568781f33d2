// Quantises to levels of norms on the CPU; the specification is in norms.py.
#include "include/norms.h"

#include "include/blockwise.h"
#include "include/cpu.h"

namespace {

constexpr int kLongest = 2048;  // the longest block

// Writes the codes of a block of `count` entries and returns its scale.
template <class T>
float encode(const T* x, int count, float levels, const u32* noise, i64 row, u8* codes) {
    float y[kLongest];
    Words most[kVectors] = {};
    Floats sums[kVectors] = {}, entries[kVectors];
    for (int i = 0; i < count; i += kRow) {
        load_row(x + i, count - i, entries);
        for (int v = 0; v < kVectors; ++v) most[v] = larger(most[v], magnitude(entries[v]));
        store(y + i, entries);
    }
    u32 some[kRow], largest = 0;
    store_as(some, most);
    for (int l = 0; l < kRow; ++l) largest = larger(largest, some[l]);
    const float inverse = inverse_of(largest);
    for (int i = 0; i < count; i += kRow)
        for (int v = 0; v < kVectors; ++v) {
            const int j = i + v * kWidth;
            const Floats one = inverse != 0.0f ? load(y + j) * inverse : Floats{};
            store_as(y + j, one);
            sums[v] += one * one;
        }
    const Norm norm = norm_of(largest, square_root(summed(sums)), levels);
    for (int i = 0; i < count; i += kRow) {
        Words found[kVectors];
        for (int v = 0; v < kVectors; ++v)
            found[v] = code_of(load(y + i + v * kWidth), norm, levels,
                               random_bits(noise, row + i / kRow, v));
        u8 bytes[kRow];
        const bool whole = i + kRow <= count;
        narrow(found, whole ? codes + i : bytes);
        for (int l = 0; l < count - i && !whole; ++l) codes[i + l] = bytes[l];
    }
    return norm.scale;
}

}  // namespace

EXPORT(quantize_norms)(i64 dtype, const void* x, i64 n, i64 block, float levels, const i64* step,
                       i64 seed, i64 stream, i64 first, u8* payload, i64 codes_at, i64 bytes) {
    const Random random = random_of(step, seed, stream, first);
    for (i64 i = end_of_scales<Int8>(n, (int)block); i < codes_at; ++i) payload[i] = 0;
    for (i64 i = codes_at + n; i < bytes; ++i) payload[i] = 0;
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        u32 noise[kLongest / 2];
        for (i64 at = 0; at < n; at += block) {
            fetch(from + at + block, (int)block);
            if (at % kGroup == 0)
                for (i64 i = 0; i < block; i += kGroup)
                    fill_words(random, (first + at + i) / kGroup, noise + i / 2);
            const float scale = encode(from + at, (int)(n - at < block ? n - at : block), levels, noise,
                                       at % kGroup / kRow, payload + codes_at + at);
            store_as(payload + at / block * 4, scale);
        }
    });
}
