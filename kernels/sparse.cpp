// Selects largest entries on the CPU; the specification is in sparse.py.
//
// A bound from a sample lets a little more than k entries through; one pass collects them, and the k
// largest of them are taken. Where the sample misleads (constant, mostly zero or clustered gradients),
// counting passes narrow the threshold down to one magnitude instead: at most 11 passes for any data,
// where histograms took 5 to 60 ms (docs/design/kernels.md).
#include <algorithm>

#include "include/cpu.h"

namespace {

constexpr int kSample = 1 << 14;
constexpr int kPivots = 7;

typedef int Ints __attribute__((vector_size(4 * kWidth)));

// Returns a bit per entry: whether its magnitude is at least `bound`. Both are below 2^31, so that
// vectors may compare them as signed integers; x86 has no unsigned comparison before AVX-512.
u32 at_least(const Floats (&row)[kVectors], u32 bound) {
    u32 word = 0;
    for (int v = 0; v < kVectors; ++v) {
        Ints there = (Ints)magnitude(row[v]) >= (Ints{} + (int)bound);
        word |= mask_of((Words)there) << (v * kWidth);
    }
    return word;
}

template <class T> struct Entries {
    const T* x;
    const float* residual;
    float* unsent;  // receives the sum; later passes read it from here
    i64 n;

    float one(i64 i) const {
        T row[kWidth] = {x[i]};
        float sums[kWidth];
        store_as(sums, load(row));
        return residual ? sums[0] + residual[i] : sums[0];
    }

    // Calls f(begin, row, valid lanes) for rows of 32 entries; the FIRST pass writes sums to `unsent`.
    template <bool FIRST, class F> __attribute__((always_inline)) void rows(F f) const {
        for (i64 i = 0; i < n; i += kRow) {
            Floats row[kVectors];
            const int count = n - i < kRow ? (int)(n - i) : kRow;
            if (count == kRow) {
                for (int v = 0; v < kVectors; ++v) {
                    const i64 j = i + v * kWidth;
                    row[v] = !FIRST && unsent ? load(unsent + j) : load(x + j);
                    if (FIRST && residual) row[v] += load(residual + j);
                    if (FIRST && unsent) store_as(unsent + j, row[v]);
                }
            } else {
                float some[kRow] = {};
                for (int l = 0; l < count; ++l) {
                    some[l] = !FIRST && unsent ? unsent[i + l] : one(i + l);
                    if (FIRST && unsent) unsent[i + l] = some[l];
                }
                for (int v = 0; v < kVectors; ++v) row[v] = load(some + v * kWidth);
            }
            f(i, row, count == kRow ? ~0u : (1u << count) - 1);
        }
    }
};

struct Candidates {
    int* indices;
    float* values;
    u32* scratch;
    i64 room;
    i64 found;
};

// Collects the entries of magnitude `bound` and more; counts them where there is no room.
template <bool FIRST, class T> void collect(const Entries<T>& from, u32 bound, Candidates& to) {
    i64 found = 0;
    from.template rows<FIRST>([&](i64 begin, const Floats(&row)[kVectors], u32 valid) {
        u32 word = at_least(row, bound) & valid;
        if (!word) return;
        float entries[kRow];
        for (int v = 0; v < kVectors; ++v) store_as(entries + v * kWidth, row[v]);
        if (found + kRow > to.room) {
            found += __builtin_popcount(word);
            if (found > to.room) return;
            found -= __builtin_popcount(word);
        }
        for (; word; word &= word - 1) {
            const int l = __builtin_ctz(word);
            to.indices[found] = (int)begin + l;
            to.values[found++] = entries[l];
        }
    });
    to.found = found;
}

// Counts the entries that reach each of the bounds.
template <class T> void count(const Entries<T>& from, const u32 (&bounds)[kPivots], i64 (&counts)[kPivots]) {
    for (i64& one : counts) one = 0;
    from.template rows<false>([&](i64, const Floats(&row)[kVectors], u32 valid) {
        for (int p = 0; p < kPivots; ++p)
            counts[p] += __builtin_popcount(at_least(row, bounds[p]) & valid);
    });
}

// Writes the taken entries.
struct Taken {
    int* indices;
    float* values;
    float* unsent;
    i64 ties;  // how many entries of exactly the threshold are taken
    i64 count;

    void offer(int index, float value, u32 threshold) {
        const u32 size = magnitude(value);
        if (size < threshold || (size == threshold && ties-- <= 0)) return;
        indices[count] = index;
        values[count++] = value;
        if (unsent) unsent[index] = 0.0f;
    }
};

void take_candidates(const Candidates& from, i64 k, Taken& to) {
    for (i64 i = 0; i < from.found; ++i) from.scratch[i] = magnitude(from.values[i]);
    std::nth_element(from.scratch, from.scratch + (k - 1), from.scratch + from.found,
                     [](u32 a, u32 b) { return a > b; });
    const u32 threshold = from.scratch[k - 1];
    i64 above = 0;
    for (i64 i = 0; i < k; ++i) above += from.scratch[i] > threshold;
    to.ties = k - above;
    for (i64 i = 0; i < from.found; ++i) to.offer(from.indices[i], from.values[i], threshold);
}

// Returns a bound that a little more than k entries reach: four standard deviations beyond rank k of
// the sample, so that it is rarely fewer.
template <class T> u32 bound_from_sample(const Entries<T>& from, i64 k, u32* scratch, i64 room) {
    const i64 size = std::min<i64>({from.n, kSample, room});
    const i64 stride = from.n / size;
    for (i64 i = 0; i < size; ++i) scratch[i] = magnitude(from.one(i * stride));
    const double rank = (double)k * (double)size / (double)from.n;
    const i64 place = (i64)(rank + 4.0 * __builtin_sqrt(rank)) + 8;
    if (place >= size) return 0;
    std::nth_element(scratch, scratch + place, scratch + size, [](u32 a, u32 b) { return a > b; });
    return scratch[place];
}

template <class T> void top_k(const Entries<T>& from, i64 k, Candidates some, Taken taken) {
    u32 low = k ? bound_from_sample(from, k, some.scratch, some.room) : 0x7fffffffu;
    u32 high = 0x80000000u;  // reached by fewer than k entries
    collect<true>(from, low, some);
    if (k == 0) return;
    i64 above = 0;           // number of entries that reach `high`
    const bool collected = some.found >= k && some.found <= some.room;
    if (some.found < k) high = low, above = some.found, low = 0, some.found = from.n;
    while (some.found > some.room && high - low > 1) {
        u32 bounds[kPivots];
        i64 counts[kPivots];
        const u32 step = (high - low) / (kPivots + 1);
        for (int p = 0; p < kPivots; ++p)
            bounds[p] = step ? low + step * (u32)(p + 1) : std::min(low + 1 + (u32)p, high);
        count(from, bounds, counts);
        for (int p = 0; p < kPivots; ++p) {
            if (counts[p] >= k) low = bounds[p], some.found = counts[p];
            else if (bounds[p] < high) { high = bounds[p], above = counts[p]; break; }
        }
    }
    if (some.found <= some.room) {
        if (!collected) collect<false>(from, low, some);
        take_candidates(some, k, taken);
        return;
    }
    taken.ties = k - above;
    from.template rows<false>([&](i64 begin, const Floats(&row)[kVectors], u32 valid) {
        u32 word = at_least(row, low) & valid;
        float entries[kRow];
        for (int v = 0; v < kVectors; ++v) store_as(entries + v * kWidth, row[v]);
        for (; word && taken.count < k; word &= word - 1) {
            const int l = __builtin_ctz(word);
            taken.offer((int)begin + l, entries[l], low);
        }
    });
}

void clear(const int* indices, i64 k, float* cleared) {
    for (i64 i = 0; i < k && cleared; ++i)
        if (indices[i] >= 0) cleared[indices[i]] = 0.0f;
}

}  // namespace

EXPORT(top_k)(i64 dtype, const void* x, i64 n, i64 k, int* indices, float* values,
              const float* residual, float* unsent, float* cleared, u32* scratch, i64 room) {
    if (!n) return;
    const Candidates some = {(int*)scratch, (float*)scratch + room, scratch + 2 * room, room, 0};
    with_dtype((int)dtype, [&](auto number) {
        const Entries<decltype(number)> from = {(const decltype(number)*)x, residual, unsent, n};
        ::top_k(from, k, some, Taken{indices, values, unsent, 0, 0});
    });
    clear(indices, k, cleared);
}

// Takes the first k entries that reach the `place`-th largest of a sample.
EXPORT(top_k_sampled)(i64 dtype, const void* x, i64 n, i64 k, i64 place, int* indices, float* values,
                      const float* residual, float* unsent, float* cleared, u32* scratch) {
    constexpr i64 kFew = 8192;
    with_dtype((int)dtype, [&](auto number) {
        const Entries<decltype(number)> from = {(const decltype(number)*)x, residual, unsent, n};
        const i64 size = std::min(n, kFew);
        u32 bound = k ? 0 : 0x80000000u;
        if (k && place < size) {
            for (i64 i = 0; i < size; ++i) scratch[i] = magnitude(from.one(i * n / size));
            std::nth_element(scratch, scratch + place - 1, scratch + size,
                             [](u32 a, u32 b) { return a > b; });
            bound = scratch[place - 1];
        }
        i64 count = 0;
        from.template rows<true>([&](i64 begin, const Floats(&row)[kVectors], u32 valid) {
            if (count == k) return;
            u32 word = at_least(row, bound) & valid;
            if (!word) return;
            float entries[kRow];
            for (int v = 0; v < kVectors; ++v) store_as(entries + v * kWidth, row[v]);
            for (; word && count < k; word &= word - 1) {
                const int l = __builtin_ctz(word);
                indices[count] = (int)begin + l;
                values[count++] = entries[l];
                if (unsent) unsent[begin + l] = 0.0f;
            }
        });
        for (; count < k; ++count) indices[count] = -1, values[count] = 0.0f;
    });
    clear(indices, k, cleared);
}
