// Quantises to affine levels on the CPU; the specification is in affine.py.
#include "include/affine.h"

#include "include/cpu.h"

namespace {

template <class T> Range range_of(const T* x, i64 n) {
    Floats low[kVectors] = {}, high[kVectors] = {}, row[kVectors];
    Words largest[kVectors] = {};
    for (i64 i = 0; i < n; i += kRow) {
        load_row(x + i, n - i, row);
        for (int v = 0; v < kVectors; ++v) {
            low[v] = smaller(row[v], low[v]);
            high[v] = larger(row[v], high[v]);
            largest[v] = larger(largest[v], magnitude(row[v]));
        }
    }
    Range all = {};
    float lows[kRow], highs[kRow];
    u32 most[kRow];
    store_as(lows, low);
    store_as(highs, high);
    store_as(most, largest);
    for (int l = 0; l < kRow; ++l) {
        all.low = smaller(lows[l], all.low);
        all.high = larger(highs[l], all.high);
        all.largest = larger(all.largest, most[l]);
    }
    return all;
}

template <class T> void encode(const T* x, i64 n, const Levels& levels, u8* out) {
    Floats row[kVectors];
    Words codes[kVectors];
    u8 some[kRow];
    for (i64 i = 0; i < n; i += kRow) {
        load_row(x + i, n - i, row);
        for (int v = 0; v < kVectors; ++v) codes[v] = level_of(row[v], levels);
        const bool whole = i + kRow <= n;
        narrow(codes, whole ? out + i : some);
        for (i64 l = 0; l < n - i && !whole; ++l) out[i + l] = some[l];
    }
}

template <class T>
void decode(const u8* levels, i64 n, float scale, float zero, float factor, bool accumulate, T* out) {
    for (i64 i = 0; i < n; i += kRow) {
        const i64 count = n - i < kRow ? n - i : kRow;
        u8 some[kRow] = {};
        T rest[kRow] = {};
        const u8* from = levels + i;
        T* to = out + i;
        if (count < kRow) {
            for (int l = 0; l < count; ++l) some[l] = from[l], rest[l] = to[l];
            from = some, to = rest;
        }
        Floats row[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            const Floats level = float_of(widen(from + v * kWidth) + bits_of(kRound)) - kRound;
            row[v] = (level - zero) * scale * factor;
            if (accumulate) row[v] += load(to + v * kWidth);
        }
        store(to, row);
        for (int l = 0; l < count && count < kRow; ++l) out[i + l] = rest[l];
    }
}

}  // namespace

EXPORT(quantize_affine)(i64 dtype, const void* x, i64 n, i64 block, u8* levels, float* scale, u8* zero) {
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        for (i64 at = 0, b = 0; at < n; at += block, ++b) {
            const i64 count = n - at < block ? n - at : block;
            const Levels found = levels_of(range_of(from + at, count));
            scale[b] = found.scale;
            zero[b] = (u8)found.zero;
            if (found.inverse == 0.0f) __builtin_memset(levels + at, 0, (u64)count);
            else encode(from + at, count, found, levels + at);
        }
    });
}

EXPORT(dequantize_affine)(i64 dtype, const u8* levels, i64 n, i64 block, const float* scale,
                          const u8* zero, float factor, i64 accumulate, void* out) {
    with_dtype((int)dtype, [&](auto number) {
        for (i64 at = 0, b = 0; at < n; at += block, ++b)
            decode(levels + at, n - at < block ? n - at : block, scale[b], (float)zero[b], factor,
                   (bool)accumulate, (decltype(number)*)out + at);
    });
}
