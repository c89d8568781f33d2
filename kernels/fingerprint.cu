// Fingerprints of gradients and parameters on a GPU; the specification is in fingerprint.py.
//
// Norms, hash and sketches come from one read: 8 bytes per entry, 16 with error feedback. Entries lie in lines of
// 64 to 1,024, each line is turned by a hash, and number c of the sketch is the sum of column c, with signs. A warp
// has the sketches, squares and hash of 32 columns of 32 lines in registers; its loads are consecutive except where
// a line is turned. A second launch adds up the sums of all warps, in one order. Hashes are sums of integers, whose
// order is free, so those of parameters are added atomically.
#include "include/fingerprint.h"

#include "include/cuda.h"

constexpr int kTogether = 4;  // lines whose loads are under way together
constexpr int kAhead = 32;    // sums whose loads are under way together

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
// The square of a float is exact: the sum is rounded once in either way.
INLINE void add_square(double& sum, float x) { sum = fma((double)x, (double)x, sum); }

// Returns a number of 32 bits, 0 to `most`.
INLINE int clamped(i64 x, int most) { return x < 0 ? 0 : x < most ? (int)x : most; }

// Loads entries at the places from `low` to `high` behind `at`; the others are zero.
template <class X, class G, int COUNT>
INLINE void load_lines(const X* x, i64 at, const int (&places)[COUNT], int low, int high, G (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        c[i] = places[i] >= low && places[i] < high ? (G)wide(x[at + places[i]]) : (G)0;
}

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
        const i64 first = slice * kSlice, at = piece->begin + first * draw.width;
        // Places within the slice are numbers of 32 bits.
        const int width = (int)draw.width, lines = (int)Draw::lines(draw, first);
        const int count = clamped(draw.n - first * draw.width, kSlice * width);
        const int low = clamped(begin - at, count), high = clamped(end - at, count);  // that have an average
        static_assert(kSlice == kLanes && kSlice % kTogether == 0);  // each lane draws for a line
        const u32 turns = Draw::turn(draw, first + lane()), signs = Draw::signs(draw, first + lane(), block);
        double square[kSquares] = {};
        G sent = 0, difference = 0, averaged = 0;
        u64 hash = 0;
        for (int line = 0; line < lines; line += kTogether) {
            int places[kTogether];
            G g[kTogether], m[kTogether], b[kTogether] = {}, a[kTogether] = {};
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const u32 turned = column - __shfl_sync(kAllLanes, turns, line + i);
                places[i] = (line + i) * width + (int)(turned & draw.mask);
            }
            load_lines(gradient, at, places, 0, count, g);
            load_lines(mean, at - begin, places, low, high, m);
            if (before) load_lines(before, at, places, 0, count, b);
            if (after) load_lines(after, at, places, 0, count, a);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const G all = g[i] + b[i] - a[i], own = keeps ? g[i] : all, ours = m[i] * factor, d = own - ours;
                add_square(square[0], own);
                add_square(square[1], m[i]);
                add_square(square[2], d);
                const u32 place = (u32)(first * draw.width) + (u32)places[i];
                hash += places[i] >= low && places[i] < high ? hash_of_entry(canonical_bits(m[i]), place) : 0;
                const bool negative = __shfl_sync(kAllLanes, signs, line + i) >> lane() & 1;
                const G rest = all - ours;
                sent += negative ? -rest : rest;
                difference += negative ? -d : d;
                averaged += negative ? -ours : ours;
            }
            if (before)
#pragma unroll
                for (int i = 0; i < kTogether; ++i) add_square(square[3], b[i]);
            if (after)
#pragma unroll
                for (int i = 0; i < kTogether; ++i) add_square(square[4], a[i]);
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

// Adds the entries from `first` to `end` that are `distance` apart to a sum, in order, for each of COUNT
// arrays that are `apart` from one another.
template <int COUNT, class N>
INLINE void add_in_order(N (&sums)[COUNT], const N* x, i64 apart, i64 first, i64 end, i64 distance) {
    for (; first < end; first += kAhead * distance) {
        N some[kAhead][COUNT];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const i64 at = first + i * distance;
                some[i][c] = at < end ? x[c * apart + at] : (N)-0.0;  // x + -0 is x
            }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int c = 0; c < COUNT; ++c) sums[c] += some[i][c];
    }
}

// Adds up what an owner's tasks have in each of COUNT arrays, in the order of its pieces, and then those sums.
template <int COUNT, class N> INLINE N of_owner(Table table, i64 owner, const N* numbers, i64 apart) {
    N sums[COUNT] = {};
    for (i64 place = Table::owned_before(table, owner); place < Table::owned_before(table, owner + 1);
         ++place) {
        const Piece* piece = Table::piece(table, Table::owned(table, place));
        add_in_order(sums, numbers, apart, piece[0].task + lane(), piece[1].task, kLanes);
    }
    N all = added_up(sums[0]);
    for (int c = 1; c < COUNT; ++c) all += added_up(sums[c]);
    return all;
}

// Adds up the sums of tasks. A warp takes a row of an owner, or 32 numbers of a sketch of a piece.
template <class G>
__global__ void fingerprint_sums(const i64* lines, i64 tasks, const double* squares, const u64* hashes,
                                 const G* sums, i64 count, double* rows, G* sketches) {
    constexpr int kHash = 4, kRows = 5;
    const Table table = {lines};
    const i64 owners = Table::owners(table), pieces = Table::pieces(table);
    const Piece& ends = *Table::piece(table, pieces);
    for (i64 work = warp(); work < kRows * owners + count * ends.block; work += warps()) {
        if (work < kRows * owners) {
            const i64 row = work / owners, owner = work % owners;
            if (row == kHash) {
                const u64 hash = of_owner<1>(table, owner, hashes, tasks);
                if (lane() == 0) ((u64*)rows)[work] = hash;
                continue;
            }
            // Rows are: contribution, average, twice both residuals, difference. Squares are: contribution,
            // average, difference, both residuals.
            const double* of = squares + (row == 2 ? 3 : row == 3 ? 2 : row) * tasks;
            const double sum =
                row == 2 ? 2.0 * of_owner<2>(table, owner, of, tasks) : of_owner<1>(table, owner, of, tasks);
            if (lane() == 0) rows[work] = sum;
            continue;
        }
        const i64 s = (work - kRows * owners) / ends.block, all = (work - kRows * owners) % ends.block;
        const Piece* piece = piece_with(table, &Piece::block, all);
        const i64 block = all - piece->block, blocks = piece[1].block - piece->block;
        const i64 number = block * kLanes + lane(), width = piece[1].sketch - piece->sketch;
        const G* of = sums + s * tasks * kLanes + lane();
        G sum[1] = {};
        add_in_order(sum, of, 0, (piece->task + block) * kLanes, piece[1].task * kLanes, blocks * kLanes);
        if (number < width) sketches[s * ends.sketch + piece->sketch + number] = sum[0];
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
