// Sends the largest cosine coefficients on the CPU; the specification is in dct.py.
#include "include/dct.h"
#include "include/tiles.h"

#include "include/cpu.h"

namespace {

typedef int Ints __attribute__((vector_size(4 * kWidth)));

// Takes entries of two vectors in turn, from the lower or the upper halves of both.
template <bool UPPER> struct InTurn {
    static constexpr int entry(int l) { return l % 2 * kWidth + l / 2 + (UPPER ? kWidth / 2 : 0); }
};

// Transposes a square: each step takes the upper and the lower half of its rows in turn.
INLINE void transpose(Floats (&square)[kWidth]) {
    UNROLL
    for (int step = 1; step < kWidth; step *= 2) {
        Floats next[kWidth];
        UNROLL
        for (int i = 0; i < kWidth / 2; ++i) {
            next[2 * i] = picked<InTurn<false>>(square[i], square[i + kWidth / 2]);
            next[2 * i + 1] = picked<InTurn<true>>(square[i], square[i + kWidth / 2]);
        }
        UNROLL
        for (int i = 0; i < kWidth; ++i) square[i] = next[i];
    }
}

// Transforms kWidth rows of a tile. A vector has the same entry of each.
template <bool INVERSE> void transform_rows(float* x) {
    Floats entries[kSide], square[kWidth];
    UNROLL
    for (int i = 0; i < kSide; i += kWidth) {
        UNROLL
        for (int l = 0; l < kWidth; ++l) square[l] = load(x + l * kSide + i) * kUnit;
        transpose(square);
        UNROLL
        for (int l = 0; l < kWidth; ++l) entries[i + l] = square[l];
    }
    dct_64<INVERSE>(entries);
    UNROLL
    for (int i = 0; i < kSide; i += kWidth) {
        UNROLL
        for (int l = 0; l < kWidth; ++l) square[l] = entries[i + l];
        transpose(square);
        UNROLL
        for (int l = 0; l < kWidth; ++l) store_as(x + l * kSide + i, square[l]);
    }
}

// Transforms kWidth columns of a tile.
template <bool INVERSE> void transform_columns(float* x) {
    Floats entries[kSide];
    UNROLL
    for (int i = 0; i < kSide; ++i) entries[i] = load(x + i * kSide) * kUnit;
    dct_64<INVERSE>(entries);
    UNROLL
    for (int i = 0; i < kSide; ++i) store_as(x + i * kSide, entries[i]);
}

void transform(float* tile, bool square) {
    for (int j = 0; j < kSide && square; j += kWidth) transform_columns<false>(tile + j);
    for (int i = 0; i < kSide; i += kWidth) transform_rows<false>(tile + i * kSide);
}
void transform_back(float* tile, bool square) {
    for (int i = 0; i < kSide; i += kWidth) transform_rows<true>(tile + i * kSide);
    for (int j = 0; j < kSide && square; j += kWidth) transform_columns<true>(tile + j);
}

// Calls f(place in the tile, place in the bucket, number of entries) for each stretch of a tile that has
// no gap in the bucket.
template <class F> void each_stretch(const Tiles* table, i64 tile, F f) {
    if (tile < table->squares) {
        const Square square = square_of(table, tile);
        for (int i = 0; i < square.rows; ++i) f(i * kSide, square.at + i * square.stride, square.columns);
        return;
    }
    const Run *runs = (const Run*)(table + 1) + table->matrices, *end = runs + table->pieces;
    const i64 first = (tile - table->squares) * kTile;
    for (const Run* one = run_at(runs, table->pieces, first); one < end && one->first < first + kTile; ++one) {
        const i64 from = one->first < first ? first : one->first, to = one->first + one->columns;
        f((int)(from - first), one->begin + from - one->first,
          (int)((to < first + kTile ? to : first + kTile) - from));
    }
}

// Writes x + momentum * decay.
template <class T> void add(const T* x, const float* momentum, float decay, int n, float* out) {
    for (int i = 0; i < n; i += kRow) {
        Floats row[kVectors], old[kVectors];
        load_row(x + i, n - i, row);
        load_row(momentum + i, n - i, old);
        for (int v = 0; v < kVectors; ++v) row[v] += old[v] * decay;
        store_row(out + i, row, n - i < kRow ? n - i : kRow);
    }
}

// Counts the magnitudes that reach the bound. All are below 2^31, so that vectors may compare them as
// signed integers.
i64 count_of(const u32* magnitudes, u32 bound) {
    Words sum = {};
    for (int i = 0; i < kTile; i += kWidth)
        sum -= (Words)((Ints)load_as<Words>(magnitudes + i) >= Ints{} + (int)bound);
    i64 count = 0;
    for (int l = 0; l < kWidth; ++l) count += sum[l];
    return count;
}

// Writes the k largest coefficients of a tile to the payload, and keeps in the tile what was sent:
// these, rounded, and zeros.
void take(float* tile, i64 k, u16* places, u16* values) {
    u32 magnitudes[kTile], bound = 0;
    for (int i = 0; i < kTile; ++i) magnitudes[i] = magnitude_bits(tile[i]);
    i64 reached = kTile;
    for (u32 bit = 1u << 30; bit && reached != k; bit >>= 1) {
        const i64 some = count_of(magnitudes, bound | bit);
        if (some >= k) bound |= bit, reached = some;
    }
    i64 ties = k - count_of(magnitudes, bound + 1);  // entries of exactly the bound that are taken
    for (int i = 0; i < kTile; ++i) {
        const bool taken = magnitudes[i] > bound || (magnitudes[i] == bound && ties-- > 0);
        const float value = tile[i];
        tile[i] = 0.0f;
        if (!taken) continue;
        const u32 bits = to_bfloat16(value);
        *places++ = (u16)i;
        *values++ = (u16)bits;
        tile[i] = from_bfloat16(bits);
    }
}

}  // namespace

EXPORT(encode_cosines)(i64 dtype, const void* x, const float* momentum, float decay, const Tiles* table, i64 k,
                       float* fresh, u16* payload) {
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        for (i64 index = 0; index < table->count; ++index) {
            const bool square = index < table->squares;
            float tile[kTile] = {}, total[kTile];
            each_stretch(table, index, [&](int at, i64 place, int n) {
                add(from + place, momentum + place, decay, n, tile + at);
            });
            __builtin_memcpy(total, tile, sizeof(tile));
            transform(tile, square);
            take(tile, k, payload + index * k, payload + (table->count + index) * k);
            transform_back(tile, square);
            each_stretch(table, index, [&](int at, i64 place, int n) {
                for (int i = 0; i < n; ++i) fresh[place + i] = total[at + i] - tile[at + i];
            });
        }
    });
}

EXPORT(decode_cosines)(i64 dtype, const u16* payloads, i64 count, i64 k, const Tiles* table, i64 sign, void* out) {
    with_dtype((int)dtype, [&](auto number) {
        auto* to = (decltype(number)*)out;
        const i64 plane = table->count * k;
        for (i64 index = 0; index < table->count; ++index) {
            float tile[kTile] = {};
            u16 counts[kTile] = {};
            for (i64 r = 0; r < count; ++r) {
                const u16* places = payloads + r * 2 * plane + index * k;
                for (i64 i = 0; i < k; ++i) {
                    const int place = places[i] & (kTile - 1);
                    tile[place] += from_bfloat16((u32)places[plane + i]);
                    ++counts[place];
                }
            }
            for (int i = 0; i < kTile; ++i) tile[i] /= (float)(counts[i] > 1 ? counts[i] : 1);
            transform_back(tile, index < table->squares);
            for (int i = 0; i < kTile && sign; ++i) {
                const float entry = tile[i];
                const float sign_of = entry > 0.0f ? 1.0f : entry < 0.0f ? -1.0f : 0.0f;
                tile[i] = magnitude(entry) < kInfinity ? sign_of : float_of(kNaN);
            }
            each_stretch(table, index, [&](int at, i64 place, int n) {
                for (int i = 0; i < n; i += kRow) {
                    Floats row[kVectors];
                    load_row(tile + at + i, n - i, row);
                    store_row(to + place + i, row, n - i < kRow ? n - i : kRow);
                }
            });
        }
    });
}
