// Quantises to integers of a shared scale on the CPU; the specification is in shared.py.
#include "include/shared.h"

#include "include/cpu.h"

namespace {

// Loads a row of x + residual of `count` entries; entries beyond are zero.
template <class T>
INLINE void load_corrected(const T* x, const float* residual, i64 count, Floats (&row)[kVectors]) {
    load_row(x, count, row);
    if (!residual) return;
    Floats rest[kVectors];
    load_row(residual, count, rest);
    for (int v = 0; v < kVectors; ++v) row[v] += rest[v];
}

template <class T>
u32 largest(const T* x, const float* residual, i64 n) {
    Floats row[kVectors];
    Words found[kVectors] = {};
    for (i64 i = 0; i < n; i += kRow) {
        load_corrected(x + i, residual ? residual + i : residual, n - i, row);
        for (int v = 0; v < kVectors; ++v) found[v] = larger(found[v], magnitude(row[v]));
    }
    u32 some[kRow], most = 0;
    store_as(some, found);
    for (int l = 0; l < kRow; ++l) most = larger(most, some[l]);
    return most > kInfinity ? kNaN : most;
}

template <class T>
void encode(const T* x, const float* residual, i64 n, i64 block, const u32* magnitudes, float levels,
            const Random& random, bool noisy, i8* codes, float* unsent) {
    u32 noise[kGroup / 2];
    Scale scale = {};
    for (i64 at = 0; at < n; at += kRow) {
        if (at % block == 0) scale = scale_of(magnitudes[at / block], levels);
        if (noisy && at % kGroup == 0) {
            fetch(x + at + kGroup, kGroup);
            if (residual) fetch(residual + at + kGroup, kGroup);
            fill_words(random, (random.first + at) / kGroup, noise);
        }
        const i64 count = n - at;
        Floats row[kVectors];
        Words found[kVectors];
        load_corrected(x + at, residual ? residual + at : residual, count, row);
        for (int v = 0; v < kVectors; ++v) {
            Floats units = units_of(row[v], scale, levels);
            if (noisy) units += centred(random_bits(noise, at % kGroup / kRow, v));
            const Floats rounded = units + kRound;
            found[v] = bits_of(rounded) & 0xffu;
            row[v] -= (rounded - kRound) * scale.level;
        }
        if (count >= kRow) {
            narrow(found, (u8*)codes + at);
            if (unsent) store(unsent + at, row);
        } else {
            u8 some[kRow];
            float rest[kRow];
            narrow(found, some);
            store(rest, row);
            for (i64 l = 0; l < count; ++l) codes[at + l] = (i8)some[l];
            for (i64 l = 0; l < count && unsent; ++l) unsent[at + l] = rest[l];
        }
    }
}

template <class T>
void decode(const i8* codes, i64 n, i64 block, const u32* magnitudes, float levels, float factor, T* out) {
    float level = 0.0f;
    for (i64 at = 0; at < n; at += kRow) {
        if (at % block == 0) level = scale_of(magnitudes[at / block], levels).level;
        const i64 count = n - at < kRow ? n - at : kRow;
        u8 some[kRow] = {};
        T rest[kRow];
        const u8* from = (const u8*)codes + at;
        if (count < kRow) {
            for (int l = 0; l < count; ++l) some[l] = from[l];
            from = some;
        }
        Floats row[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            // A code with its sign bit flipped is the code plus 128, a number without a sign.
            const Words above = widen(from + v * kWidth) ^ 0x80u;
            const Floats code = float_of(above + bits_of(kRound)) - (kRound + 128.0f);
            row[v] = code * level * factor;
        }
        store(count < kRow ? rest : out + at, row);
        for (int l = 0; l < count && count < kRow; ++l) out[at + l] = rest[l];
    }
}

}  // namespace

EXPORT(largest_magnitudes)(i64 dtype, const void* x, const float* residual, i64 n, i64 block, u32* out) {
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        for (i64 at = 0, b = 0; at < n; at += block, ++b)
            out[b] = largest(from + at, residual ? residual + at : residual, n - at < block ? n - at : block);
    });
}

EXPORT(quantize_shared)(i64 dtype, const void* x, const float* residual, i64 n, i64 block,
                        const u32* magnitudes, float levels, const i64* step, i64 seed, i64 stream,
                        i64 first, i8* codes, float* unsent) {
    const Random random = random_of(step, seed, stream, first);
    with_dtype((int)dtype, [&](auto number) {
        encode((const decltype(number)*)x, residual, n, block, magnitudes, levels, random, step != nullptr,
               codes, unsent);
    });
}

EXPORT(dequantize_shared)(i64 dtype, const i8* codes, i64 n, i64 block, const u32* magnitudes,
                          float levels, float factor, void* out) {
    with_dtype((int)dtype, [&](auto number) {
        decode(codes, n, block, magnitudes, levels, factor, (decltype(number)*)out);
    });
}
