// Computes the randomised Hadamard transform on the CPU; the specification is in hadamard.py.
#include "include/hadamard_cpu.h"
#include "include/segments.h"

namespace {

// Transforms the blocks of `n` entries from the slot `slot` on; slots beyond the entries are zeros.
void transform_all(Rotation& rotation, i64 slot, const float* x, i64 n, int block, bool inverse,
                   bool accumulate, float* out) {
    constexpr int kLongest = 2048;
    float c[kLongest];
    for (i64 at = 0; at < n; at += block) {
        const int count = (int)(n - at < block ? n - at : block);
        const int read = inverse ? block : count, written = inverse ? count : block;
        fetch(x + at + block, block);
        __builtin_memcpy(c, x + at, 4 * (unsigned)read);
        for (int i = read; i < block; ++i) c[i] = 0.0f;
        if (inverse) rotation.turn_back(slot + at, block, c);
        else rotation.turn(slot + at, block, c);
        for (int i = 0; i < written && accumulate; ++i) c[i] += out[at + i];
        __builtin_memcpy(out + at, c, 4 * (unsigned)written);
    }
}

}  // namespace

EXPORT(hadamard)(i64 block, const float* x, i64 n, float scale, i64 inverse, const i64* step, i64 seed,
                 i64 stream, i64 first, const Run* table, i64 chosen, i64 accumulate, float* out) {
    Rotation rotation = {random_of(step, seed, stream, first), scale};
    if (!table) return transform_all(rotation, 0, x, n, (int)block, inverse, accumulate, out);
    for (i64 place = 0; place < rows_chosen(table, chosen); ++place, rotation.random.first += kRowKeys) {
        const Row row = row_of(table, chosen, place);
        const i64 slots = slots_of_row(table), entry = row.entry;
        i64 end = 0;  // of the slots that are written
        for (Segments run = runs_of(table, row.index); run < runs_of(table, row.index + 1); ++run) {
            const i64 slot = place * slots + run->slot, begin = entry + run->begin;
            for (i64 i = end; !inverse && i < run->slot; ++i) out[place * slots + i] = 0.0f;
            transform_all(rotation, run->slot, x + (inverse ? slot : begin), run->count, (int)block, inverse,
                          accumulate, out + (inverse ? begin : slot));
            end = run->slot + (run->count + block - 1) / block * block;
        }
        for (i64 i = end; !inverse && i < slots; ++i) out[place * slots + i] = 0.0f;
    }
}
