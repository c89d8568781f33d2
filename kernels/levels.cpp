// Quantises to the nearest levels on the CPU; the specification is in levels.py.
#include "include/levels.h"

#include "include/cpu.h"

namespace {

constexpr int kLongest = 2048;  // the longest block

// Packs eight codes of one byte each into BITS bytes, the first code in the lowest bits.
template <int BITS> INLINE u64 packed(u64 bytes) {
    constexpr u64 kLow = (1u << BITS) - 1;
#if defined(__BMI2__)
    return _pext_u64(bytes, 0x0101010101010101ull * kLow);
#else
    u64 word = 0;
    for (int i = 0; i < 8; ++i) word |= (bytes >> (8 * i) & kLow) << (BITS * i);
    return word;
#endif
}
template <int BITS> INLINE u64 spread(u64 word) {
    constexpr u64 kLow = (1u << BITS) - 1;
#if defined(__BMI2__)
    return _pdep_u64(word, 0x0101010101010101ull * kLow);
#else
    u64 bytes = 0;
    for (int i = 0; i < 8; ++i) bytes |= (word >> (BITS * i) & kLow) << (8 * i);
    return bytes;
#endif
}

template <int BITS>
float encode(const float* x, int block, float root, const float* table, u8* codes, float* unsent) {
    Words most[kVectors] = {};
    for (int i = 0; i < block; i += kRow)
        for (int v = 0; v < kVectors; ++v)
            most[v] = larger(most[v], magnitude(load(x + i + v * kWidth)));
    u32 some[kRow], largest = 0;
    store_as(some, most);
    for (int l = 0; l < kRow; ++l) largest = larger(largest, some[l]);
    const bool good = good_block(largest);
    const float inverse = good ? 1.0f / float_of(largest) : 0.0f;

    float y[kLongest], values[kLongest];
    Floats sums[kVectors] = {};
    for (int i = 0; i < block; i += kRow)
        for (int v = 0; v < kVectors; ++v) {
            const int j = i + v * kWidth;
            const Floats entries = good ? load(x + j) * inverse : Floats{};
            store_as(y + j, entries);
            sums[v] += entries * entries;
        }
    const float square = good ? summed(sums) : 1.0f, unit = root / square_root(square);

    for (int v = 0; v < kVectors; ++v) sums[v] = Floats{};
    for (int i = 0; i < block; i += kRow) {
        Words found[kVectors];
        u8 bytes[kRow];
        for (int v = 0; v < kVectors; ++v) {
            const int j = i + v * kWidth;
            const Floats entries = load(y + j);
            const Floats value = nearest_level<BITS>(Floats(entries * unit), table, found[v]);
            store_as(values + j, value);
            sums[v] += value * entries;
        }
        narrow(found, bytes);
        for (int group = 0; group < kRow; group += 8, codes += BITS) {
            const u64 word = packed<BITS>(load_as<u64>(bytes + group));
            for (int k = 0; k < BITS; ++k) codes[k] = (u8)(word >> (8 * k));
        }
    }
    const float scale = scale_of_block(largest, square, summed(sums));
    for (int j = 0; j < block && unsent; j += kWidth)
        store_as(unsent + j, load(x + j) - load(values + j) * scale);
    return scale;
}

template <int BITS>
void decode(const u8* codes, int block, float scale, const float* table, bool accumulate, float factor, float* out) {
    for (int i = 0; i < block; i += kRow) {
        u8 bytes[kRow];
        for (int group = 0; group < kRow; group += 8, codes += BITS) {
            u64 word = 0;
            for (int k = 0; k < BITS; ++k) word |= (u64)codes[k] << (8 * k);
            store_as(bytes + group, spread<BITS>(word));
        }
        for (int v = 0; v < kVectors; ++v) {
            float* to = out + i + v * kWidth;
            const Floats entries = level_of<BITS, Floats>(widen(bytes + v * kWidth), table) * scale;
            store_as(to, (accumulate ? load(to) + entries : entries) * factor);
        }
    }
}

// Calls f with a type that stands for the number of bits.
template <int BITS> struct Bits {
    static constexpr int value = BITS;
};
template <class Call> void with_bits(i64 levels, Call call) {
    if (levels == 2) call(Bits<1>{});
    else if (levels == 4) call(Bits<2>{});
    else if (levels == 8) call(Bits<3>{});
    else call(Bits<4>{});
}

}  // namespace

EXPORT(quantize_levels)(i64 levels, const float* x, i64 n, i64 block, i64 shard, float root,
                        const float* table, u8* payload, i64 rows, i64 bytes, float* unsent) {
    with_bits(levels, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        // What is behind the codes, or a row of which not all blocks are there.
        for (i64 row = 0; row < rows; ++row)
            for (i64 i = n < (row + 1) * shard ? 0 : shard / block * 4 + shard / 8 * kBits; i < bytes; ++i)
                payload[row * bytes + i] = 0;
        for (i64 at = 0; at < n; at += block) {
            fetch(x + at + block, (int)block);
            const i64 place = at % shard;  // in its row of the message
            u8* row = payload + at / shard * bytes;
            const float scale = encode<kBits>(x + at, (int)block, root, table,
                                              row + shard / block * 4 + place / 8 * kBits,
                                              unsent ? unsent + at : unsent);
            store_as(row + place / block * 4, scale);
        }
    });
}

EXPORT(dequantize_levels)(i64 levels, const u8* payloads, i64 count, i64 stride, i64 bytes, i64 shard,
                          const float* table, i64 n, i64 block, float factor,
                          float* out) {
    with_bits(levels, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        for (i64 at = 0; at < n; at += block) {
            const i64 place = at % shard;  // in its row of the message
            const u8* row = payloads + at / shard * bytes;
            for (i64 r = 0; r < count; ++r, row += stride)
                decode<kBits>(row + shard / block * 4 + place / 8 * kBits, (int)block,
                              load_as<float>(row + place / block * 4), table, r > 0,
                              r + 1 < count ? 1.0f : factor, out + at);
        }
    });
}
