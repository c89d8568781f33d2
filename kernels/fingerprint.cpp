// Fingerprints of gradients and parameters on the CPU; the specification is in fingerprint.py.
#include "include/fingerprint.h"

#include "include/cpu.h"

namespace {

// G is float, or double.
template <class G, class T> struct Compared {
    const G* gradient;
    const T* mean;
    i64 begin, end;  // of the average, in the gradient
    float factor;
    const G *before, *after;
    bool keeps;
};

// The sums of the columns of a slice.
template <class G> struct Sums {
    double squares[kSquares][kWidest];
    G sketches[3][kWidest];
};

// 32 columns of a line of a piece, from `column` on.
struct Place {
    i64 at, place;  // where the line begins, in the gradient and in its piece
    i64 count;      // entries of the line
    u32 column, mask;
};

// Loads 32 columns; columns beyond the line, or outside of `begin` to `end`, are zero.
template <class T>
INLINE void load_columns(const T* x, const Place& place, i64 begin, i64 end, Floats (&row)[kVectors]) {
    const i64 from = place.at + place.column;
    if (place.column + kRow <= place.count && from >= begin && from + kRow <= end) {
        for (int v = 0; v < kVectors; ++v) row[v] = load(x + (from - begin) + v * kWidth);
        return;
    }
    T some[kRow] = {};
    for (u32 l = 0; l < kRow; ++l) {
        const i64 column = (place.column + l) & place.mask, at = place.at + column;
        if (column < place.count && at >= begin && at < end) some[l] = x[at - begin];
    }
    for (int v = 0; v < kVectors; ++v) row[v] = load(some + v * kWidth);
}

// Adds the hashes of the columns that have an average.
INLINE u64 hash_of_columns(const Floats (&mean)[kVectors], const Place& place, i64 begin, i64 end) {
    u32 hashes[kRow];
    for (int v = 0; v < kVectors; ++v) {
        Words columns;
        for (int l = 0; l < kWidth; ++l) columns[l] = (u32)(v * kWidth + l);
        columns = ((columns + place.column) & place.mask) + (u32)place.place;
        store_as(hashes + v * kWidth, hash_of(canonical_bits(mean[v]), columns));
    }
    u64 sum = 0;
    const i64 from = place.at + place.column;
    if (place.column + kRow <= place.count && from >= begin && from + kRow <= end) {
        for (u32 hash : hashes) sum += hash;
        return sum;
    }
    for (u32 l = 0; l < kRow; ++l) {
        const i64 column = (place.column + l) & place.mask, at = place.at + column;
        if (column < place.count && at >= begin && at < end) sum += hashes[l];
    }
    return sum;
}

INLINE void add_squares(const Floats (&row)[kVectors], double* sums) {
    float entries[kRow];
    store(entries, row);
    for (int l = 0; l < kRow; ++l) sums[l] += (double)entries[l] * (double)entries[l];
}
INLINE void add_signed(const Floats (&row)[kVectors], u32 word, float* sums) {
    for (int v = 0; v < kVectors; ++v) {
        const Words sign = signs(word, v) & 0x80000000u;
        store_as(sums + v * kWidth, load(sums + v * kWidth) + float_of(bits_of(row[v]) ^ sign));
    }
}

// Adds 32 columns of a line; returns their hash.
template <class T>
INLINE u64 add_columns(const Compared<float, T>& x, const Place& place, i64 end, u32 word, i64 number,
                       Sums<float>& sums) {
    Floats own[kVectors], mean[kVectors], old[kVectors], total[kVectors];
    load_columns(x.gradient, place, 0, end, own);
    load_columns(x.mean, place, x.begin, x.end, mean);
    for (int v = 0; v < kVectors; ++v) total[v] = own[v];
    if (x.before) {
        load_columns(x.before, place, 0, end, old);
        add_squares(old, sums.squares[3] + number);
        for (int v = 0; v < kVectors; ++v) total[v] += old[v];
    }
    if (x.after) {
        load_columns(x.after, place, 0, end, old);
        add_squares(old, sums.squares[4] + number);
        for (int v = 0; v < kVectors; ++v) total[v] -= old[v];
    }
    add_squares(mean, sums.squares[1] + number);
    const u64 hash = hash_of_columns(mean, place, x.begin, x.end);
    Floats difference[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        own[v] = x.keeps ? own[v] : total[v];
        mean[v] *= x.factor;
        difference[v] = own[v] - mean[v];
        total[v] -= mean[v];
    }
    add_squares(own, sums.squares[0] + number);
    add_squares(difference, sums.squares[2] + number);
    if (x.keeps) add_signed(total, word, sums.sketches[2] + number);
    add_signed(difference, word, sums.sketches[0] + number);
    add_signed(mean, word, sums.sketches[1] + number);
    return hash;
}

// Does the same in float64, entry by entry.
u64 add_columns(const Compared<double, double>& x, const Place& place, i64, u32 word, i64 number,
                Sums<double>& sums) {
    u64 hash = 0;
    for (u32 l = 0; l < kRow; ++l) {
        const i64 column = (place.column + l) & place.mask, at = place.at + column, i = number + l;
        if (column >= place.count) continue;
        const bool has_mean = at >= x.begin && at < x.end;
        const double mean = has_mean ? x.mean[at - x.begin] : 0.0, ours = mean * x.factor;
        const double before = x.before ? x.before[at] : 0.0, after = x.after ? x.after[at] : 0.0;
        const double total = x.gradient[at] + before - after, own = x.keeps ? x.gradient[at] : total;
        const double values[kSquares] = {own, mean, own - ours, before, after};
        for (int s = 0; s < kSquares; ++s) sums.squares[s][i] += values[s] * values[s];
        if (has_mean) hash += hash_of_entry(canonical_bits(mean), (u32)(place.place + column));
        const double sign = word >> l & 1 ? -1.0 : 1.0;
        sums.sketches[0][i] += (own - ours) * sign;
        sums.sketches[1][i] += ours * sign;
        sums.sketches[2][i] += (total - ours) * sign;
    }
    return hash;
}

// Adds halves to halves.
INLINE double folded(const double* from) {
    double sums[kRow];
    __builtin_memcpy(sums, from, sizeof(sums));
    for (int half = kRow / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    return sums[0];
}

// Where the results of tasks go.
struct Tasks {
    i64 count;
    double* squares;
    u64* hashes;
};

template <class G, class T>
void add_slice(const Compared<G, T>& x, const Piece& piece, const Draw& draw, i64 first, i64 end,
               Sums<G>& sums, const Tasks& tasks) {
    const i64 last = first + Draw::lines(draw, first), task = piece.task + first / kSlice * draw.blocks;
    for (i64 s = 0; s < kSquares; ++s)
        for (i64 i = 0; i < draw.blocks * kRow; ++i) sums.squares[s][i] = 0.0;
    for (auto& sketch : sums.sketches)
        for (i64 i = 0; i < draw.blocks * kRow; ++i) sketch[i] = 0;
    for (i64 block = 0; block < draw.blocks; ++block) tasks.hashes[task + block] = 0;
    for (i64 line = first; line < last; ++line) {
        const i64 place = line * draw.width, left = draw.n - place;
        const u32 turn = Draw::turn(draw, line);
        for (i64 block = 0; block < draw.blocks; ++block) {
            const Place at = {piece.begin + place, place, left < draw.width ? left : draw.width,
                              ((u32)(block * kRow) - turn) & draw.mask, draw.mask};
            const u32 word = Draw::signs(draw, line, block);
            tasks.hashes[task + block] += add_columns(x, at, end, word, block * kRow, sums);
        }
    }
    for (i64 s = 0; s < kSquares; ++s)
        for (i64 block = 0; block < draw.blocks; ++block)
            tasks.squares[s * tasks.count + task + block] = folded(sums.squares[s] + block * kRow);
}

// Adds up the sums of an owner's tasks, in the order of its pieces.
void write_row(Table table, i64 owner, const Tasks& tasks, double* rows) {
    double sums[kSquares][kRow] = {};
    u64 hash = 0;
    for (i64 i = Table::owned_before(table, owner); i < Table::owned_before(table, owner + 1); ++i) {
        const Piece* piece = Table::piece(table, Table::owned(table, i));
        for (i64 task = piece[0].task; task < piece[1].task; ++task) {
            for (i64 s = 0; s < kSquares; ++s)
                sums[s][(task - piece[0].task) % kRow] += tasks.squares[s * tasks.count + task];
            hash += tasks.hashes[task];
        }
    }
    const i64 owners = Table::owners(table);
    rows[owner] = folded(sums[0]);
    rows[owners + owner] = folded(sums[1]);
    rows[2 * owners + owner] = 2.0 * (folded(sums[3]) + folded(sums[4]));
    rows[3 * owners + owner] = folded(sums[2]);
    store_as(rows + 4 * owners + owner, hash);
}

template <class G, class T>
void compare(const Compared<G, T>& x, u32 step, Table table, const Tasks& tasks, G* sketches) {
    const i64 pieces = Table::pieces(table), width = Table::piece(table, pieces)->sketch;
    const i64 kinds = sketches ? 2 + x.keeps : 0;
    Sums<G> sums;
    for (i64 p = 0; p < pieces; ++p) {
        const Piece* piece = Table::piece(table, p);
        const Draw draw = Draw::of(piece[0], piece[1], step);
        G* to = sketches + (sketches ? piece->sketch : 0);
        for (i64 s = 0; s < kinds; ++s)
            for (i64 i = 0; i < draw.width; ++i) to[s * width + i] = 0;
        for (i64 line = 0; line * draw.width < draw.n; line += kSlice) {
            add_slice(x, *piece, draw, line, piece[1].begin, sums, tasks);
            for (i64 s = 0; s < kinds; ++s) {
                const G* from = sums.sketches[x.keeps ? (s + 2) % 3 : s];
                for (i64 i = 0; i < draw.width; ++i) to[s * width + i] += from[i];
            }
        }
    }
}

}  // namespace

// dtype 3: all tensors are float64.
EXPORT(fingerprint)(i64 dtype, const void* gradient, const void* mean, i64 begin, i64 end, float factor,
                    const void* before, const void* after, i64 keeps, i64 step, const i64* lines,
                    i64 count, double* squares, u64* hashes, double* rows, void* sketches) {
    const Table table = {lines};
    const Tasks tasks = {count, squares, hashes};
    const auto run = [&](auto entry, auto number) {
        using G = decltype(entry);
        using T = decltype(number);
        const Compared<G, T> x = {(const G*)gradient, (const T*)mean, begin, end, factor,
                                  (const G*)before, (const G*)after, keeps != 0};
        compare(x, (u32)step, table, tasks, (G*)sketches);
    };
    if (dtype == 3) run(double{}, double{});
    else with_dtype((int)dtype, [&](auto number) { run(float{}, number); });
    for (i64 owner = 0; owner < Table::owners(table); ++owner) write_row(table, owner, tasks, rows);
}

namespace {

template <class Word> void hash_parts(const Word* x, const Part* parts, i64 count, Word zero, u64* out) {
    for (i64 p = 0; p < count; ++p, ++parts) {
        const i64 n = parts[1].begin - parts[0].begin;
        const Word* from = x + parts->begin;
        u64 hash = 0;
        for (i64 i = 0; i < n; ++i) hash += hash_of_entry(from[i] == zero ? (Word)0 : from[i], (u32)i);
        out[p] += hash;
    }
}

}  // namespace

EXPORT(hash_parts)(i64 nbytes, const void* x, const Part* parts, i64 count, i64 zero, u64* out) {
    if (nbytes == 1) hash_parts((const u8*)x, parts, count, (u8)zero, out);
    else if (nbytes == 2) hash_parts((const u16*)x, parts, count, (u16)zero, out);
    else if (nbytes == 4) hash_parts((const u32*)x, parts, count, (u32)zero, out);
    else hash_parts((const u64*)x, parts, count, (u64)zero, out);
}
