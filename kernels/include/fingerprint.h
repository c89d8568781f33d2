// Draws sketches, and hashes entries, of gradients and parameters; the specification is in fingerprint.py.
#pragma once
#include "parts.h"

// A piece of the gradient, or what lies behind the last one: numbers of what the pieces before it have.
struct Piece {
    i64 begin;   // entries
    i64 sketch;  // numbers of sketches
    i64 task;    // tasks of a warp: 32 columns of a slice
    i64 block;   // blocks of 32 numbers
};

// The table of `Pieces` in fingerprint.py, in lines of four numbers: the numbers of pieces and of owners;
// each piece, and what lies behind the last one; for each owner, and once more, the number of owned pieces
// before it; and the owned pieces.
struct Table {
    const i64* lines;

    INLINE i64 pieces(const Table& table) { return table.lines[0]; }
    INLINE i64 owners(const Table& table) { return table.lines[1]; }
    INLINE const Piece* piece(const Table& table, i64 p) { return (const Piece*)table.lines + 1 + p; }
    INLINE i64 owned_before(const Table& table, i64 owner) {
        return table.lines[4 * (2 + table.lines[0] + owner)];
    }
    INLINE i64 owned(const Table& table, i64 place) {
        return table.lines[4 * (3 + table.lines[0] + table.lines[1] + place)];
    }
};

constexpr int kSlice = 32;     // lines of a piece that are added up one after the other
constexpr int kWidest = 1024;  // numbers of a sketch
// Sums of squares of a task: of the contribution, the average, their difference, and the residual before
// and after the step.
constexpr int kSquares = 5;

// Mixes the bits of a number: different numbers have different results, of which every bit depends on
// every bit of the number.
// Reference: Wellons, Prospecting for Hash Functions, 2018 (lowbias32).
template <class V> INLINE V mixed(V x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Returns the hash of 32 bits at a place. The hash of a tensor is the sum of the hashes of its entries.
template <class V> INLINE V hash_of(V bits, V place) { return mixed(bits + place * 0x9e3779b9u); }

// Bits of a number, or of a vector of float32. All zeros are equal, and so are all NaN.
template <class V> INLINE auto canonical_bits(V x) {
    const auto bits = bits_of(x), size = magnitude(x);
    const auto other = size > kInfinity ? (size & 0u) + kNaN : bits;
    return size == 0u ? size : other;
}

// How the sketch of a piece is drawn. Entry i is in column i % width of line i / width, and is added to
// number (column + turn) % width with the sign of that number and line.
struct Draw {
    i64 n, blocks;  // entries, and blocks of 32 numbers
    i64 width;
    u32 mask;   // of columns; a piece with a sketch of less than 64 numbers has one line
    u32 key, turn_key;

    INLINE Draw of(const Piece& piece, const Piece& next, u32 step) {
        const i64 width = next.sketch - piece.sketch;
        const u32 key = mixed(step + 0x632be5abu);
        return {next.begin - piece.begin, next.block - piece.block, width,
                (u32)(width < 64 ? 64 : width) - 1, key, mixed(~key)};
    }
    // Returns the number of lines of a slice.
    INLINE i64 lines(const Draw& draw, i64 first) {
        const i64 left = (draw.n - first * draw.width + draw.width - 1) / draw.width;
        return left < kSlice ? left : kSlice;
    }
    INLINE u32 turn(const Draw& draw, i64 line) { return line ? mixed(draw.turn_key + (u32)line) : 0; }
    // Returns a word whose bit l is set where number 32 block + l is subtracted.
    INLINE u32 signs(const Draw& draw, i64 line, i64 block) {
        return mixed(draw.key + (u32)(line * draw.blocks + block));
    }
};

INLINE u64 canonical_bits(double x) {
#if defined(__CUDACC_RTC__)
    const u64 bits = (u64)__double_as_longlong(x);
#else
    u64 bits;
    __builtin_memcpy(&bits, &x, 8);
#endif
    return x == 0.0 ? 0 : x != x ? 0x7ff8000000000000ull : bits;
}

INLINE u64 hash_of_entry(u64 bits, u32 place) {
    return (u64)hash_of((u32)bits, 2 * place) + hash_of((u32)(bits >> 32), 2 * place + 1);
}
template <class Word> INLINE u64 hash_of_entry(Word bits, u32 place) { return hash_of((u32)bits, place); }
