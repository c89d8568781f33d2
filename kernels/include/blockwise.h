// Blockwise formats: one scale per block, one code per entry. See docs/design/kernels.md.
#pragma once
#include "portable.h"

// Signed integers of BITS bits between -TOP and TOP; the scale is the largest magnitude over TOP.
template <int BITS> struct Integer {
    static constexpr int bits = BITS;
    static constexpr bool is_sign = false, is_mx = false, is_dithered = false, is_float = false;
    static constexpr u32 tiny = kTiny;
    INLINE float top() { return (float)((1 << (BITS - 1)) - 1); }

    // |y| is at most TOP, up to rounding, so nothing is clamped.
    template <class V> INLINE auto encode(V y, V& value) {
        auto shifted = y + kRound;
        value = shifted - kRound;
        return bits_of(shifted) & ((1u << BITS) - 1);
    }
    template <class V, class W> INLINE auto encode(V y, W random, V& value) {
        auto inside = larger(smaller(y, top()), -top());
        return encode(inside + centred(random), value);
    }
    // Bits of `code` above BITS are ignored: they are codes of other entries.
    template <class W> INLINE auto decode(W code) {
        if constexpr (BITS < 8) code &= (1u << BITS) - 1;
        constexpr u32 middle = 1u << (BITS - 1);  // flipping the sign bit adds it, modulo 2^BITS
        return float_of(code ^ (0x4b400000u | middle)) - (kRound + (float)middle);
    }
};

// Subtractive dither on an 8-bit grid: values are 0 and k - d scales with k = +-1 to +-127, where d is drawn
// for every entry and known to all ranks; see docs/design/kernels.md.
struct DitheredInt8 {
    static constexpr int bits = 8;
    static constexpr bool is_sign = false, is_mx = false, is_dithered = true, is_float = false;
    static constexpr u32 tiny = kTiny;
    INLINE float top() { return 126.5f; }  // half a step of room for the draw

    // The bits of 384.5 - d, with 14 bits of the draw. The integer of a code has its place in the same float,
    // so that one subtraction gives k - d.
    template <class W> INLINE auto place(W draw) { return draw >> 17 | 0x43c00001u; }

    template <class V, class W> INLINE auto encode(V y, W draw, V& value) {
        // Here with 22 bits, since entries may be tiny.
        V d = 1.5f - float_of(draw >> 9 | 0x3f800001u), sum = y + d, zero{};
        // Entries below 1 take the first value on their side so often that its mean is the entry: where
        // |y + d| > (d^2 + 3/4) / 2. Others take the nearest value.
        V size = float_of(magnitude(sum));
        auto taken = size > d * 0.5f * d + 0.375f;
        V near = taken ? float_of(bits_of(larger(size, 0.75f)) | (bits_of(sum) & 0x80000000u)) : zero;
        V shifted = near + kRound;
        value = taken ? (shifted - kRound) - (384.5f - float_of(place(draw))) : zero;
        return bits_of(shifted) & 0xffu;
    }
    template <class W> INLINE auto decode(W code, W draw) { return decode_shifted(code << 15, draw); }
    template <class W> INLINE auto decode_shifted(W shifted, W draw) {
        auto value = float_of(shifted ^ place(draw)) - 384.5f;
        return shifted == 0u ? decltype(value){} : value;
    }
};

// 8-bit floats; the scale is the largest magnitude over the largest value, or a power of two (MX).
template <class F, int LOG2_TOP, u32 TOP_BITS, bool MX> struct Scaled8 {
    static constexpr int bits = 8;
    static constexpr bool is_sign = false, is_mx = MX, is_dithered = false, is_float = true;
    static constexpr int log2_top = LOG2_TOP;
    static constexpr u32 tiny = MX ? kTiny : (127u - 110u) << 23;  // top / 2^-120 would overflow
    INLINE float top() { return float_of(TOP_BITS); }

    template <class V> INLINE auto encode(V y, V& value) {
        auto code = F::encode(y);
        value = F::decode(code);
        return code;
    }
    template <class V, class W> INLINE auto encode(V y, W random, V& value) {
        auto code = F::encode(y, random);
        value = F::decode(code);
        return code;
    }
    template <class W> INLINE auto decode(W code) { return F::decode(code); }
    INLINE float decode_high(u32 code) { return F::decode_high(code); }
};
// 4-bit floats; the scale is the largest magnitude over 6.
struct E2M1Scaled {
    static constexpr int bits = 4;
    static constexpr bool is_sign = false, is_mx = false, is_dithered = false, is_float = true;
    static constexpr u32 tiny = kTiny;
    INLINE float top() { return 6.0f; }

    // E2M1 has the sign in bit 7, as 8-bit floats have it; here it is in bit 3.
    template <class W> INLINE auto narrow(W code) { return (code & 7u) | (code >> 4 & 8u); }
    template <class W> INLINE auto wide(W code) { return (code & 7u) | (code & 8u) << 4; }

    template <class V> INLINE auto encode(V y, V& value) {
        auto code = E2M1::encode(y);
        value = E2M1::decode(code);
        return narrow(code);
    }
    template <class V, class W> INLINE auto encode(V y, W random, V& value) {
        auto code = E2M1::encode(y, random);
        value = E2M1::decode(code);
        return narrow(code);
    }
    // Bits of `code` above the lowest four are ignored: they are codes of other entries.
    template <class W> INLINE auto decode(W code) { return E2M1::decode(wide(code)); }
    INLINE float decode_high(u32 code) { return E2M1::decode_high(code); }
};
using Int8 = Integer<8>;
using Int4 = Integer<4>;
using Int2 = Integer<2>;
using E4M3Scaled = Scaled8<E4M3, 8, 0x43e00000u, false>;
using E5M2Scaled = Scaled8<E5M2, 15, 0x47600000u, false>;
using E4M3MX = Scaled8<E4M3, 8, 0x43e00000u, true>;
using E5M2MX = Scaled8<E5M2, 15, 0x47600000u, true>;

// The mean magnitude of a longer block is summed in parts, one after the other, so that several warps
// can share it.
constexpr int kMeanOf = 512;

// One bit, set for negative numbers; the scale is the mean magnitude.
struct Sign {
    static constexpr int bits = 1;
    static constexpr bool is_sign = true, is_mx = false, is_dithered = false, is_float = false;
    static constexpr u32 tiny = kTiny;

    template <class V> INLINE V value(V y) { return y < 0.0f ? -1.0f : 1.0f; }
    // The code is the sign bit of a word.
    template <class W> INLINE auto decode(W code) {
        return float_of((code & 0x80000000u) | 0x3f800000u);
    }
};

// Factors of codes (`value`) and of entries (`inverse`). An inverse of 0 makes all codes 0.
struct Scale {
    float value;
    float inverse;
};

// Returns the scale for the bits of the largest magnitude; for signs, from the mean magnitude.
template <class F> INLINE Scale scale_of(u32 largest, float mean) {
    if (largest >= kInfinity) return {float_of(kNaN), 0.0f};
    if (largest < F::tiny) return {0.0f, 0.0f};
    if constexpr (F::is_sign) return {mean, 1.0f};
    if constexpr (F::is_mx) {
        // 2^E with E = floor(log2(largest)) - log2_top, not below the smallest normal number.
        int exponent = (int)(largest >> 23) - F::log2_top;
        u32 stored = exponent < 1 ? 1u : (u32)exponent;
        return {float_of(stored << 23), float_of((254u - stored) << 23)};
    }
    if constexpr (!F::is_sign)
        return {float_of(largest) / F::top(), F::top() / float_of(largest)};
}

INLINE u32 mx_byte(float scale) {
    return magnitude(scale) > kInfinity ? 255u : bits_of(scale) >> 23;
}
INLINE float mx_scale(u32 byte) { return float_of(byte == 255u ? kNaN : byte << 23); }

// The layout of a payload of `n` entries; bytes between and behind its parts are zero.
// Entries are coded in planes: the bytes of 32 * 8 / bits entries hold entries 0 to 31 in their
// lowest bits, then 32 to 63, and so on. Signs are 32 consecutive bits.
template <class F> constexpr int kPlanes = F::is_sign ? 1 : 8 / F::bits;
template <class F> constexpr int kUnit = 32 * kPlanes<F>;
template <class F> constexpr int kUnitBytes = kUnit<F> * F::bits / 8;
template <class F> constexpr int kScaleBytes = F::is_mx ? 1 : 4;
template <class F> INLINE i64 end_of_scales(i64 n, int block) {
    return (n + block - 1) / block * kScaleBytes<F>;
}

// Where the parts of a payload are, in bytes: codes, entries of 16 bits, and the next payload.
struct Places {
    i64 codes, tails, bytes;
};

// The payloads of all ranks, `stride` bytes apart.
struct Payloads {
    const u8* scales;
    const u8* codes;
    i64 stride;  // bytes from a payload to the next
    int count;
    i64 slot = 0;  // of the first code
};

// Of a dither, entry i of group g of 256 slots has the draw a + b i modulo 2^32, with a and b of call
// 2^62 + g of Philox; other calls of the stream round entries of 16 bits. Rank r of n adds r / n of the
// range. The specification is in philox.py.
constexpr i64 kDitherCalls = (i64)1 << 62;
INLINE u32 dither_step(i64 ranks) { return (0u - (u32)ranks) / (u32)ranks + 1u; }

// Returns the number of entries of row `row` of a message of n entries, `shard` in a full row.
INLINE i64 entries_of_row(i64 n, i64 shard, i64 row) {
    const i64 rest = n - row * shard;
    return rest > shard ? shard : rest > 0 ? rest : 0;
}
