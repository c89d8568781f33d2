// Fingerprints of gradients and parameters on a GPU; the specification is in fingerprint.py.
#include "include/fingerprint.h"

#include "include/cuda.h"

INLINE const Piece* piece_with(Table table, i64 Piece::*first, i64 task) {
    const Piece* pieces = Table::piece(table, 0);
    return pieces + row_with(pieces, Table::pieces(table), first, task);
}

template <class N> INLINE N added_up(N x) {
    for (int half = kLanes / 2; half; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
    return x;
}

template <class T> INLINE auto wide(T x) { return to_float(x); }
INLINE double wide(double x) { return x; }
INLINE void add_square(double& sum, double x) { sum += x * x; }

// A warp takes 32 columns of a slice, one per lane, and reads every tensor once. G is float or double.
template <class G, class T>
__global__ void fingerprint(const G* gradient, const T* mean, i64 begin, i64 end, float factor,
                            const G* before, const G* after, i64 keeps, i64 step, const i64* lines,
                            i64 tasks, double* squares, u64* hashes, G* sums) {
    const Table table = {lines};
    for (i64 task = warp(); task < tasks; task += warps()) {
        const Piece* piece = piece_with(table, &Piece::task, task);
        const Draw draw = Draw::of(piece[0], piece[1], (u32)step);
        const i64 number = task - piece->task, slice = number / draw.blocks, block = number % draw.blocks;
        const u32 column = (u32)block * kLanes + lane();
        double square[kSquares] = {};
        G sent = 0, difference = 0, averaged = 0;
        u64 hash = 0;
        const i64 first = slice * kSlice, last = first + Draw::lines(draw, first);
#pragma unroll 4
        for (i64 line = first; line < last; ++line) {
            const i64 place = line * draw.width + ((column - Draw::turn(draw, line)) & draw.mask);
            const i64 at = piece->begin + place;
            const bool has = place < draw.n, has_mean = has && at >= begin && at < end;
            const G g = has ? gradient[at] : (G)0, m = has_mean ? wide(mean[at - begin]) : (G)0;
            const G b = has && before ? before[at] : (G)0, a = has && after ? after[at] : (G)0;
            const G all = g + b - a, own = keeps ? g : all, ours = m * factor, d = own - ours;
            const G values[kSquares] = {own, m, d, b, a};
#pragma unroll
            for (int s = 0; s < kSquares; ++s) add_square(square[s], values[s]);
            if (has_mean) hash += hash_of_entry(canonical_bits(m), (u32)place);
            const bool negative = Draw::signs(draw, line, block) >> lane() & 1;
            const G rest = all - ours;
            sent += negative ? -rest : rest;
            difference += negative ? -d : d;
            averaged += negative ? -ours : ours;
        }
        for (int s = 0; s < kSquares; ++s) {
            const double sum = added_up(square[s]);
            if (lane() == 0) squares[s * tasks + task] = sum;
        }
        hash = added_up(hash);
        if (lane() == 0) hashes[task] = hash;
        if (!sums) continue;
        G* to = sums + task * kLanes + lane();
        if (keeps) *to = sent;
        to += keeps ? tasks * kLanes : 0;
        *to = difference;
        to[tasks * kLanes] = averaged;
    }
}

// Adds up the sums of an owner's tasks, in the order of its pieces.
INLINE void write_row(Table table, i64 owner, i64 tasks, const double* squares, const u64* hashes,
                      double* rows) {
    double square[kSquares] = {};
    u64 hash = 0;
    for (i64 place = Table::owned_before(table, owner); place < Table::owned_before(table, owner + 1);
         ++place) {
        const Piece* piece = Table::piece(table, Table::owned(table, place));
        for (i64 task = piece[0].task + lane(); task < piece[1].task; task += kLanes) {
#pragma unroll
            for (int s = 0; s < kSquares; ++s) square[s] += squares[s * tasks + task];
            hash += hashes[task];
        }
    }
    for (int s = 0; s < kSquares; ++s) square[s] = added_up(square[s]);
    hash = added_up(hash);
    if (lane()) return;
    const i64 owners = Table::owners(table);
    rows += owner;
    rows[0] = square[0];
    rows[owners] = square[1];
    rows[2 * owners] = 2.0 * (square[3] + square[4]);
    rows[3 * owners] = square[2];
    ((u64*)rows)[4 * owners] = hash;
}

// Adds up the sums of tasks. A warp takes an owner, or 32 numbers of the sketches of a piece.
template <class G>
__global__ void fingerprint_sums(const i64* lines, i64 tasks, const double* squares, const u64* hashes,
                                 const G* sums, i64 count, double* rows, G* sketches) {
    const Table table = {lines};
    const i64 owners = Table::owners(table), pieces = Table::pieces(table);
    const Piece& ends = *Table::piece(table, pieces);
    const i64 all = owners + (count ? ends.block : 0);
    for (i64 work = warp(); work < all; work += warps()) {
        if (work < owners) {
            write_row(table, work, tasks, squares, hashes, rows);
            continue;
        }
        const Piece* piece = piece_with(table, &Piece::block, work - owners);
        const i64 block = work - owners - piece->block, blocks = piece[1].block - piece->block;
        const i64 number = block * kLanes + lane(), width = piece[1].sketch - piece->sketch;
        for (i64 s = 0; s < count; ++s) {
            G sum = 0;
#pragma unroll 8
            for (i64 task = piece->task + block; task < piece[1].task; task += blocks)
                sum += sums[(s * tasks + task) * kLanes + lane()];
            if (number < width) sketches[s * ends.sketch + piece->sketch + number] = sum;
        }
    }
}

// ---- parameters

// Adds the hash of each part to `out`. A warp takes a chunk of a part.
template <class Word>
__global__ void hash_parts(const Word* x, const Part* parts, i64 count, i64 zero, u64* out) {
    for (i64 chunk = warp(); chunk < parts[count].chunk; chunk += warps()) {
        const i64 p = row_with(parts, count, &Part::chunk, chunk);
        const i64 first = (chunk - parts[p].chunk) * kChunk;
        const i64 n = parts[p + 1].begin - parts[p].begin;
        const i64 end = n - first < kChunk ? n : first + kChunk;
        u64 hash = 0;
#pragma unroll 8
        for (i64 place = first + lane(); place < end; place += kLanes) {
            const Word bits = x[parts[p].begin + place];
            hash += hash_of_entry(bits == (Word)zero ? (Word)0 : bits, (u32)place);
        }
        hash = added_up(hash);
        // Integers: in any order the sum is the same.
        if (lane() == 0) atomicAdd((unsigned long long*)out + p, hash);
    }
}
