// Packs and counts votes on the CPU; the specification is in votes.py.
#include "include/blockwise.h"
#include "include/cpu.h"

namespace {

// Writes the bits of `n` entries; returns whether all are finite.
template <class T> bool pack(const T* x, i64 n, u8* bits) {
    Words largest[kVectors] = {};
    for (i64 i = 0; i < n; i += kRow, bits += kRow / 8) {
        const i64 count = n - i;
        Floats row[kVectors];
        load_row(x + i, count, row);
        u32 word = 0;
        for (int v = 0; v < kVectors; ++v) {
            word |= mask_of((Words)(row[v] >= 0.0f)) << (v * kWidth);
            largest[v] = larger(largest[v], magnitude(row[v]));
        }
        if (count >= kRow) {
            store_as(bits, word);
        } else {
            word &= (1u << count) - 1;
            for (i64 byte = 0; byte < (count + 7) / 8; ++byte) bits[byte] = (u8)(word >> (8 * byte));
        }
    }
    u32 some[kRow], most = 0;
    store_as(some, largest);
    for (int l = 0; l < kRow; ++l) most = larger(most, some[l]);
    return most < kInfinity;
}

}  // namespace

EXPORT(pack_votes)(i64 dtype, const void* x, i64 n, i64 shard, i64 rows, i64 bytes, u8* payload) {
    with_dtype((int)dtype, [&](auto number) {
        const auto* from = (const decltype(number)*)x;
        for (i64 row = 0; row < rows; ++row, payload += bytes) {
            const i64 here = entries_of_row(n, shard, row);
            const bool finite = pack(from + (here ? row * shard : 0), here, payload);
            for (i64 i = (here + 7) / 8; i < bytes - 1; ++i) payload[i] = 0;
            payload[bytes - 1] = !finite;
        }
    });
}

EXPORT(count_votes)(i64 dtype, const u8* payloads, i64 count, i64 stride, i64 bytes, i64 n, i64 shard,
                    i64 rows, float scale, void* out) {
    with_dtype((int)dtype, [&](auto number) {
        using T = decltype(number);
        for (i64 row = 0; row < rows; ++row, payloads += bytes) {
            const i64 here = entries_of_row(n, shard, row);
            T* to = (T*)out + row * shard;
            bool finite = true;
            for (i64 r = 0; r < count; ++r) finite &= payloads[r * stride + bytes - 1] == 0;
            for (i64 i = 0; i < here; i += kRow) {
                Words votes[kVectors] = {};
                for (i64 r = 0; r < count; ++r) {
                    // A payload ends at a multiple of 16 bytes: a word of bits is there.
                    const u32 word = load_as<u32>(payloads + r * stride + i / 8);
                    for (int v = 0; v < kVectors; ++v) votes[v] += signs(word, v) >> 31;
                }
                Floats sum[kVectors];
                for (int v = 0; v < kVectors; ++v) {
                    const Words half = Words{} + (u32)((count + 1) / 2);
                    sum[v] = votes[v] >= half ? Floats{} + scale : Floats{} - scale;
                    if (!finite) sum[v] = Floats{} + float_of(kNaN);
                }
                T rest[kRow];
                const bool whole = i + kRow <= here;
                store(whole ? to + i : rest, sum);
                for (i64 l = 0; l < here - i && !whole; ++l) to[i + l] = rest[l];
            }
        }
    });
}
