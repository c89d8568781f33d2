// Blockwise quantisation on the CPU, for blockwise.cpp and rotated.cpp.
#pragma once
#include "blockwise.h"
#include "cpu.h"
#include "hadamard_cpu.h"
#include "segments.h"

namespace {

constexpr int kLongest = 2048;  // the longest block

float as_float(float x) { return x; }
float as_float(Half x) { return from_half((u32)x.bits); }
float as_float(BFloat16 x) { return from_bfloat16((u32)x.bits); }
void put(float* out, float x) { *out = x; }
void put(Half* out, float x) { out->bits = (u16)to_half(x); }
void put(BFloat16* out, float x) { out->bits = (u16)to_bfloat16(x); }

int rounded_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

// The entries to encode: a gradient of type T, plus a residual if there is one.
template <class T> struct Source {
    const T* x;
    const float* residual;

    // A copy is aligned, and read twice.
    bool in_place() const { return sizeof(T) == 4 && !residual && (unsigned long)x % sizeof(Floats) == 0; }
};

// The bits of the largest magnitude of a block and, for signs, its mean magnitude.
struct Extent {
    u32 largest;
    float mean;
};

// Returns the sum of a row of 32 numbers, and clears the row. Halves are added to halves, as by the
// shuffles of a warp.
inline float take_sum(Floats (&row)[kVectors]) {
    float sum[kRow];
    store_as(sum, row);
    for (Floats& part : row) part = Floats{};
    for (int half = kRow / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
    return sum[0];
}

// Measures a block of `count` entries. With COPY, `c` receives them as float32, and zeros up to `end`.
template <bool MEAN, bool COPY, bool RESIDUAL, class T>
Extent measure(const T* x, const float* residual, int count, int end, int block, float* c) {
    Words largest[kVectors] = {};
    Floats sums[kVectors] = {};
    float total = 0.0f;
    const float share = 1.0f / (float)block;
    auto take = [&](const T* from, const float* rest, float* to) {
        for (int v = 0; v < kVectors; ++v) {
            Floats entries = load(from + v * kWidth);
            if (RESIDUAL) entries += load(rest + v * kWidth);
            if (COPY) store_as(to + v * kWidth, entries);
            largest[v] = larger(largest[v], magnitude(entries));
            if (MEAN) sums[v] += float_of(magnitude(entries)) * share;
        }
    };
    int i = 0;
    for (; i + kRow <= count; i += kRow) {
        if (MEAN && i % kMeanOf == 0) total += take_sum(sums);
        take(x + i, residual + i, c + i);
    }
    if (i < count) {  // the last row, which is not whole
        if (MEAN && i % kMeanOf == 0) total += take_sum(sums);
        T some[kRow] = {};
        float rest[kRow] = {};
        for (int l = 0; l < count - i; ++l) {
            some[l] = x[i + l];
            if (RESIDUAL) rest[l] = residual[i + l];
        }
        take(some, rest, c + i);
        i += kRow;
    }
    for (; i < end; ++i) c[i] = 0.0f;
    u32 most[kRow];
    store_as(most, largest);
    for (int half = kRow / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) most[l] = larger(most[l], most[l + half]);
    if (MEAN) total = (total + take_sum(sums)) * ((float)block / (float)count);
    return {most[0], total};
}

// The draws of a dither for a row of slots, and what leads to the next row of the group.
struct Draws {
    Words of[kVectors], next;
    void advance() {
        for (Words& draw : of) draw += next;
    }
};

// Finds the draws of any slot.
struct Dither {
    Random random;   // its first index is that of slot 0
    u32 rank, step;  // what the rank that encodes adds to the draws, and from a rank to the next
    i64 filled = -1;
    u32 words[4 * kCalls];  // of kCalls groups

    // Goes to row i of a block that begins at `slot`. Draws are a local variable of the caller: a code is
    // a byte, which for all the compiler knows may be part of them.
    void go(i64 slot, int i, Draws& draws) {
        if (i % kGroup) return draws.advance();
        const i64 index = random.first + slot + i, group = index / kGroup, call = group % kCalls;
        if (group / kCalls != filled) {
            filled = group / kCalls;
            fill_words(random, kDitherCalls / kCalls + filled, words);
        }
        const u32 a = words[call] + rank, b = words[kCalls + call];
        Words entries;
        for (u32 l = 0; l < kWidth; ++l) entries[l] = l;
        entries += (u32)(index % kGroup);
        for (int v = 0; v < kVectors; ++v) draws.of[v] = (entries + (u32)(v * kWidth)) * b + a;
        draws.next = Words{} + b * (u32)kRow;
    }
};

// Without a step, of a format that is not dithered, nobody asks for draws.
inline Dither dither_from(const Random& random, i64 rank, i64 ranks) {
    Dither dither;  // not initialised in full: `go` writes what it reads
    dither.random = random;
    dither.step = dither_step(ranks);
    dither.rank = (u32)rank * dither.step;
    return dither;
}

// Writes the codes of `end` entries; with LEFT, `unsent` receives what they leave out.
template <class F, bool NOISE, bool LEFT>
void encode(const float* c, int end, Scale scale, const u32* noise, i64 row, u8* codes, float* unsent,
            Dither* dither, i64 slot) {
    [[maybe_unused]] Draws draws;
    for (int i = 0; i < end; i += kUnit<F>, c += kUnit<F>, codes += kUnitBytes<F>) {
        if constexpr (F::is_sign) {
            Floats entries[kVectors];
            for (int v = 0; v < kVectors; ++v) entries[v] = load(c + v * kWidth);
            store_as(codes, negative(entries));
            for (int v = 0; v < kVectors && LEFT; ++v)
                store_as(unsent + i + v * kWidth, entries[v] - F::value(entries[v]) * scale.value);
        } else {
            if constexpr (F::is_dithered) dither->go(slot, i, draws);
            Words bytes[kVectors] = {};
            for (int v = 0; v < kVectors; ++v)
                for (int plane = 0; plane < kPlanes<F>; ++plane) {
                    const int j = plane * kRow + v * kWidth;
                    Floats entries = load(c + j), y = entries * scale.inverse, value;
                    Words code;
                    if constexpr (F::is_dithered) code = F::encode(y, draws.of[v], value);
                    else if constexpr (NOISE) code = F::encode(y, random_bits(noise, row + i / kRow + plane, v), value);
                    else code = F::encode(y, value);
                    bytes[v] |= code << (F::bits * plane);
                    if (LEFT) store_as(unsent + i + j, entries - value * scale.value);
                }
            narrow(bytes, codes);
        }
    }
}

// Entries of any type: what is the same for all types is compiled once.
struct Entries {
    const u8* x;
    const float* residual;
    int size;  // of an entry, in bytes
    bool in_place;
    Extent (*measure)(const void*, const float*, bool in_place, int count, int end, int block, float* copy);
};

template <bool MEAN, class T>
Extent measure_entries(const void* x, const float* residual, bool in_place, int count, int end, int block,
                       float* copy) {
    const T* from = (const T*)x;
    if constexpr (sizeof(T) == 4)
        if (in_place) return measure<MEAN, false, false>(from, residual, count, end, block, copy);
    return residual ? measure<MEAN, true, true>(from, residual, count, end, block, copy)
                    : measure<MEAN, true, false>(from, residual, count, end, block, copy);
}

// Writes the payload of `n` entries of `from`, which are in the slots from `slot` on, block by block,
// rotated first if there is a `rotation`.
template <class F>
void encode_entries(const Entries& from, i64 n, int block, const Random* random, u8* scales, u8* codes,
                    float* unsent, i64 slot, Rotation* rotation, Dither* dither) {
    float copy[kLongest], tail[kLongest];
    u32 noise[kLongest / 2];
    for (i64 at = 0; at < n; at += block, scales += kScaleBytes<F>) {
        const int count = (int)(n - at < block ? n - at : block);
        // A rotation spreads entries over the whole block, so that a short block is sent as a full one.
        const int coded = rotation ? block : count, end = rounded_up(coded, kUnit<F>);
        // The last block is padded, so it is never worked on in place.
        const bool whole = count == block, in_place = whole && from.in_place && !rotation;
        const u8* x = from.x + at * from.size;
        const float* residual = from.residual + (from.residual ? at : 0);
        Extent extent = from.measure(x, residual, in_place, count, end, block, copy);
        // The processor loads the next block while this one is worked on: 0.75 of the time without it.
        // The lambda is inlined, as gcc drops calls of a function that only prefetches.
        auto fetch_next = [=](int i, int entries) __attribute__((always_inline)) {
            fetch(x + (block + i) * from.size, entries * from.size);
            if (residual) fetch(residual + block + i, entries);
        };
        if (!random || F::is_dithered) fetch_next(0, block);
        if (rotation) {
            rotation->turn(slot + at, block, copy);
            extent = measure<F::is_sign, false, false>((const float*)copy, residual, coded, end, block, copy);
        }
        const float* c = in_place ? (const float*)x : copy;
        float* rest = whole && unsent ? unsent + at : tail;
        const Scale scale = scale_of<F>(extent.largest, extent.mean);
        u8* code = codes + at / kUnit<F> * kUnitBytes<F>;
        if constexpr (F::is_mx) *scales = (u8)mx_byte(scale.value);
        else __builtin_memcpy(scales, &scale.value, 4);

        const i64 first = random ? random->first + slot + at : 0, row = first % kGroup / kRow;
        if (random && !F::is_dithered && (at == 0 || first % kGroup == 0))
            for (int i = 0; i < block; i += kGroup) {
                fetch_next(i, kGroup);
                fill_words(*random, (first + i) / kGroup, noise + i / 2);
            }
        if (scale.inverse == 0.0f) {
            for (int i = 0; i < end * F::bits / 8; ++i) code[i] = 0;
            for (int i = 0; i < coded && unsent; ++i) rest[i] = c[i] - scale.value;
        } else if (random && !F::is_dithered) {
            unsent ? encode<F, true, true>(c, end, scale, noise, row, code, rest, dither, slot + at)
                   : encode<F, true, false>(c, end, scale, noise, row, code, rest, dither, slot + at);
        } else {
            unsent ? encode<F, false, true>(c, end, scale, noise, row, code, rest, dither, slot + at)
                   : encode<F, false, false>(c, end, scale, noise, row, code, rest, dither, slot + at);
        }
        if (unsent && rotation) rotation->turn_back(slot + at, block, rest);
        if (unsent && !whole)
            for (int i = 0; i < count; ++i) unsent[at + i] = tail[i];
    }
}

template <class F, class T>
INLINE void encode_all(const Source<T>& from, i64 n, int block, const Random* random, u8* scales, u8* codes,
                       float* unsent, i64 slot = 0, Rotation* rotation = nullptr, Dither* dither = nullptr) {
    const Entries entries = {(const u8*)from.x, from.residual, (int)sizeof(T), from.in_place(),
                             measure_entries<F::is_sign, T>};
    encode_entries<F>(entries, n, block, random, scales, codes, unsent, slot, rotation, dither);
}

// Sums block `b` of the decoded payloads in their order, and calls emit(i, row of 32 entries).
template <class F, class Emit>
INLINE void sum_block(const Payloads& from, i64 b, int block, int end, Dither* dither, Emit emit) {
    const u8* codes = from.codes + b * (block / kUnit<F> * kUnitBytes<F>);
    const u8* scales = from.scales + b * kScaleBytes<F>;
    const i64 stride = from.stride;
    const int payloads = from.count;
    [[maybe_unused]] Draws draws;
    const u32 step = F::is_dithered ? dither->step : 0u;
    for (int i = 0; i < end; i += kUnit<F>, codes += kUnitBytes<F>) {
        Floats sum[kPlanes<F>][kVectors];
        if constexpr (F::is_dithered) dither->go(from.slot + b * block, i, draws);
        auto add = [&](int r, bool first) __attribute__((always_inline)) {
            const u8 *code = codes + r * stride, *stored = scales + r * stride;
            const float scale = F::is_mx ? mx_scale(*stored) : load_as<float>(stored);
            for (int v = 0; v < kVectors; ++v) {
                Words word = F::is_sign ? signs(load_as<u32>(code), v) : widen(code + v * kWidth);
                for (int plane = 0; plane < kPlanes<F>; ++plane) {
                    Floats entries;
                    if constexpr (F::is_dithered)
                        entries = F::decode(word, draws.of[v] + (u32)r * step) * scale;
                    else entries = F::decode(word >> (F::bits * plane)) * scale;
                    sum[plane][v] = first ? entries : sum[plane][v] + entries;
                }
            }
        };
        add(0, true);
        for (int r = 1; r < payloads; ++r) add(r, false);
        for (int plane = 0; plane < kPlanes<F>; ++plane) emit(i + plane * kRow, sum[plane]);
    }
}

// Puts the first `n` entries of a row. Called once per run, so it is not inlined, which would double the code.
template <class T> __attribute__((noinline)) void store_some(T* to, int n, const Floats (&row)[kVectors]) {
    alignas(Floats) T some[kRow];
    store(some, row);
    for (int l = 0; l < n; ++l) to[l] = some[l];
}

template <class F, class T, bool STREAMED = false>
void decode_all(const Payloads& from, i64 n, int block, float factor, T* out, Dither* dither = nullptr) {
    for (i64 at = 0, b = 0; at < n; at += block, out += block, ++b) {
        const int count = (int)(n - at < block ? n - at : block);
        sum_block<F>(from, b, block, rounded_up(count, kUnit<F>), dither,
                     [=](int i, const Floats(&sum)[kVectors]) __attribute__((always_inline)) {
                         Floats row[kVectors];
                         for (int v = 0; v < kVectors; ++v) row[v] = sum[v] * factor;
                         if (i + kRow > count) store_some(out + i, count - i, row);
                         else if constexpr (STREAMED) stream(out + i, row);
                         else store(out + i, row);
                     });
    }
    if constexpr (STREAMED) end_of_stream();
}

// The same with stores past the cache, which are aligned, for entries that begin anywhere: blocks are decoded
// to a buffer whose rows lie as those of memory, and the end of a row that is not whole waits there.
template <class F>
void decode_streaming(const Payloads& from, i64 n, int block, float factor, float* out, Dither* dither) {
    alignas(128) float buffer[kLongest + 2 * kRow];
    const int ahead = (int)((unsigned long)out / 4 % kRow);  // entries of the first row that are not ours
    float* row = out - ahead;
    int first = ahead, filled = ahead;
    for (i64 at = 0, b = 0; at < n; at += block, ++b) {
        const int count = (int)(n - at < block ? n - at : block);
        float* to = buffer + filled;
        sum_block<F>(from, b, block, rounded_up(count, kUnit<F>), dither,
                     [=](int i, const Floats(&sum)[kVectors]) __attribute__((always_inline)) {
                         for (int v = 0; v < kVectors; ++v) store_as(to + i + v * kWidth, sum[v] * factor);
                     });
        filled += count;
        int done = 0;
        for (; done + kRow <= filled; done += kRow, row += kRow) {
            if (first) {
                for (; first < kRow; ++first) row[first] = buffer[first];
                first = 0;
                continue;
            }
            Floats entries[kVectors];
            for (int v = 0; v < kVectors; ++v) entries[v] = load(buffer + done + v * kWidth);
            stream(row, entries);
        }
        filled -= done;
        for (int i = 0; i < filled && done; ++i) buffer[i] = buffer[done + i];
    }
    for (; first < filled; ++first) row[first] = buffer[first];
    end_of_stream();
}

// Calls f with the format of a number; _blockwise_formats.py has the same numbers.
template <class Call> void with_format(int format, Call call) {
    switch (format) {
        case 0: return call(Int8{});
        case 1: return call(Int4{});
        case 2: return call(Int2{});
        case 3: return call(E4M3Scaled{});
        case 4: return call(E5M2Scaled{});
        case 5: return call(E4M3MX{});
        case 6: return call(E5M2MX{});
        case 8: return call(E2M1Scaled{});
        case 9: return call(DitheredInt8{});
        default: return call(Sign{});
    }
}

// Returns the number of the block that a slot begins. A block is a power of two; a division takes as long as
// 16 entries.
INLINE i64 block_of(i64 slot, int block) { return slot >> __builtin_ctz((u32)block); }

// Returns the payloads from a slot on, which begins a block.
template <class F> Payloads from_slot(const Payloads& from, i64 slot, int block) {
    return {from.scales + block_of(slot, block) * kScaleBytes<F>, from.codes + slot / kUnit<F> * kUnitBytes<F>,
            from.stride, from.count, slot};
}

// Adds to `out` what decode_all writes, by a buffer in the nearest cache.
template <class F, class T>
void add_decoded(const Payloads& from, i64 slot, i64 n, int block, float factor, T* out, Dither* dither) {
    float some[kLongest];
    for (i64 at = 0; at < n; at += kLongest) {
        const int count = (int)(n - at < kLongest ? n - at : kLongest);
        decode_all<F, float>(from_slot<F>(from, slot + at, block), count, block, factor, some, dither);
        for (int i = 0; i < count; ++i) put(out + at + i, as_float(out[at + i]) + some[i]);
    }
}

void clear(u8* bytes, i64 from, i64 to) {
    for (i64 i = from; i < to; ++i) bytes[i] = 0;
}

// Writes zeros where no entry of a row is: in slots that no run has, and between the parts.
template <class F>
void clear_padding(Segments segments, i64 row, int block, bool rotated, u8* payload, const Places& at) {
    i64 scales = 0, codes = at.codes;
    for (const Run *run = runs_of(segments, row), *end = runs_of(segments, row + 1); run < end; ++run) {
        clear(payload, scales, block_of(run->slot, block) * kScaleBytes<F>);
        clear(payload, codes, at.codes + run->slot / kUnit<F> * kUnitBytes<F>);
        // A rotation spreads entries over the whole block.
        const i64 coded = rotated ? (run->count + block - 1) & -(i64)block : run->count;
        scales = block_of(run->slot + coded + block - 1, block) * kScaleBytes<F>;
        codes = at.codes + (run->slot + coded + kUnit<F> - 1) / kUnit<F> * kUnitBytes<F>;
    }
    i64 tails = at.tails;
    for (const Run *run = tail_runs_of(segments, row), *end = tail_runs_of(segments, row + 1); run < end; ++run)
        tails += 2 * run->count;
    clear(payload, scales, at.codes);
    clear(payload, codes, at.tails);
    clear(payload, tails, at.bytes);
}

// Calls f(run, place) for the runs of entries of 16 bits of a row.
template <class Call> void each_tail_run(Segments segments, i64 row, Call call) {
    for (const Run *run = tail_runs_of(segments, row), *end = tail_runs_of(segments, row + 1); run < end; ++run)
        call(*run, run->slot);
}

// Writes a row's entries of 16 bits: take(entry, place, n, to) gives n entries, and put(entry, n, errors)
// takes what is left out. `shift` is added to the random bits.
template <class Take, class Put>
void encode_tails(Segments segments, i64 row, const Random* random, u32 shift, BFloat16* out, Take take, Put put) {
    const i64 count = tails_of_row(segments, row);
    const i64 first = random ? random->first + slots_of_row(segments) : 0;
    const Run* run = tail_runs_of(segments, row);
    i64 done = 0;  // entries of the run
    for (i64 at = 0; at < count; at += kGroup, out += kGroup) {
        const int here = (int)(count - at < kGroup ? count - at : kGroup);
        // Calls f(entry, i, n) for the parts of runs that are in the group, and moves on.
        auto each = [&](const Run*& run, i64& done, auto call) {
            for (int i = 0; i < here;) {
                const int n = (int)(run->count - done < here - i ? run->count - done : here - i);
                call(run->begin + done, i, n);
                i += n, done += n;
                if (done == run->count) ++run, done = 0;
            }
        };
        const Run* begin = run;
        i64 from = done;
        float group[kGroup + kRow];  // `take` may write whole rows
        BFloat16 narrow[kGroup];
        u32 noise[kGroup / 2];
        each(run, done, [&](i64 entry, int i, int n) { take(entry, at + i, n, group + i); });
        for (int i = here; i % kRow; ++i) group[i] = 0.0f;
        if (random) fill_words(*random, (first + at) / kGroup, noise);
        for (int i = 0; i < here; i += kRow) {
            Floats entries[kVectors];
            Words bits[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                entries[v] = load(group + i + v * kWidth);
                if (random) bits[v] = (random_bits(noise, i / kRow, v) + shift) & 0xffffu;
            }
            if (random) store(narrow + i, entries, bits);
            else store(narrow + i, entries);
            for (int v = 0; v < kVectors; ++v)
                store_as(group + i + v * kWidth, entries[v] - load(narrow + i + v * kWidth));
        }
        __builtin_memcpy(out, narrow, sizeof(BFloat16) * (unsigned)here);
        each(begin, from, [&](i64 entry, int i, int n) { put(entry, n, group + i); });
    }
}

// Sums `n` entries of 16 bits of all payloads, in their order; writes whole rows.
void sum_tails(const u8* tails, i64 stride, i64 payloads, i64 place, int n, float* sums) {
    for (int i = 0; i < n; i += kRow) {
        Floats sum[kVectors], row[kVectors];
        const u8* from = tails + 2 * (place + i);
        load_row((const BFloat16*)from, n - i, sum);
        for (i64 r = 1; r < payloads; ++r) {
            load_row((const BFloat16*)(from + r * stride), n - i, row);
            for (int v = 0; v < kVectors; ++v) sum[v] += row[v];
        }
        store(sums + i, sum);
    }
}

}  // namespace
