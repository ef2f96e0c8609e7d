// The conversion of weights for tensor cores: 16 bytes from memory become operands of `mma`.
//
// A warp multiplies 16 output channels by inputs in blocks of 32. Lane 4 g + t holds inputs 8 t to 8 t + 7 of a block
// for channels g and g + 8, which is 16 bytes in bf16, so that weights and activations can be read by 16-byte loads of
// neighbouring lanes without ldmatrix. `mma` expects inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16 in that lane. But a
// lane may hold any other inputs, if it holds the same inputs of both operands: the sum is the same. So the first `mma`
// of a block takes the lane's inputs 0 to 3, the second 4 to 7.
//
// Integers are packed so that 16 bytes also belong to one lane: two blocks of 8 bits, or four of 4 bits
// (`packed_weight.rs`). They become bf16 exactly, and are multiplied by their scales after the sum.
#pragma once
#include "linear_args.cuh"

constexpr u32 BLOCK = 32;
constexpr u32 UNIT_BLOCKS = UNIT / BLOCK;

// The number of blocks in 16 bytes of a lane, and so in 64 bytes of a channel.
#if WEIGHT == FLOATS
constexpr u32 LOAD_BLOCKS = 1;
#elif WEIGHT == INT4_GROUPS
constexpr u32 LOAD_BLOCKS = 4;
#else
constexpr u32 LOAD_BLOCKS = 2;
#endif
constexpr u32 LOAD_INPUTS = LOAD_BLOCKS * BLOCK;
constexpr u32 LOADED_BYTES = 64;

#if WEIGHT >= INT8_GROUPS
constexpr bool IS_GROUPED = true;
#else
#undef GROUP_LEN
#undef HAS_MINIMUM
#define GROUP_LEN 128
#define HAS_MINIMUM 0
constexpr bool IS_GROUPED = false;
#endif
constexpr u32 GROUP_BLOCKS = GROUP_LEN / BLOCK;

// The exact sums of two pairs of bf16, rounded.
DEVICE u32 add2_bf16(u32 a, u32 b) {
#ifdef EMULATED_DEVICE
    return pack2_bf16(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b));
#else
    // There is no addition before sm_90.
    const u32 ONES = 0x3f803f80u;
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(ONES), "r"(b));
    return sum;
#endif
}

// `(a & b) | c` in one instruction. The compiler takes two instructions for constant b and c, and this is needed for
// every two integer weights.
DEVICE u32 and_or(u32 a, u32 b, u32 c) {
#ifdef EMULATED_DEVICE
    return (a & b) | c;
#else
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
#endif
}

DEVICE u32 word_at(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// With LANES_EXCHANGE, the first `mma` of a block of floats takes inputs 0 to 15 and the second inputs 16 to 31, as
// `wgmma` does (linear_hopper.cu). For that, lanes t and t ^ 2 exchange halves of their inputs.
#ifndef LANES_EXCHANGE
#define LANES_EXCHANGE 0
#endif
DEVICE uint4 exchange(const uint4& words, u32 t) {
    const bool is_first = t < 2;
    const u32 low = shuffle_xor(is_first ? words.z : words.x, 2), high = shuffle_xor(is_first ? words.w : words.y, 2);
    return is_first ? make_uint4(words.x, words.y, low, high) : make_uint4(low, high, words.z, words.w);
}

// The lane's part of an operand of one `mma`, for one channel or one row of inputs: four inputs.
struct Operand {
    u32 low, high;
};

DEVICE Operand input_operand(const uint4& words, u32 half) {
    return half == 0 ? Operand{words.x, words.y} : Operand{words.z, words.w};
}

// The operand `half` of block `block` in a lane's 16 bytes.
DEVICE Operand weight_operand(const uint4& words, u32 block, u32 half) {
#if WEIGHT == FLOATS
    return input_operand(words, half);
#elif WEIGHT == INT4_GROUPS
    // In a bf16 with the exponent of 128, the last bit of the mantissa has the value 1. So a nibble q in the last bits
    // makes 128 + q, and an addition leaves q, or q - 8 for formats without minimums.
    const u32 offset = HAS_MINIMUM ? 0xc300c300u : 0xc308c308u;
    const u32 word = word_at(words, block) >> (8 * half);
    return {
        add2_bf16(and_or(word, 0x000f000fu, 0x43004300u), offset),
        add2_bf16(and_or(word >> 4, 0x000f000fu, 0x43004300u), offset),
    };
#else
    // As above, the low 7 bits of a byte become 128 + (q & 127). Then 128 is to be subtracted, or 256 if the
    // sign bit is set, which is the last bit of the exponent of -128.
    const u32 word = word_at(words, 2 * block + half), high = word >> 8;
    return {
        add2_bf16(and_or(word, 0x007f007fu, 0x43004300u), and_or(word, 0x00800080u, 0xc300c300u)),
        add2_bf16(and_or(high, 0x007f007fu, 0x43004300u), and_or(high, 0x00800080u, 0xc300c300u)),
    };
#endif
}

DEVICE u32 weight_row_bytes(const LinearArgs& args) {
#if WEIGHT == FLOATS
    return args.k * sizeof(ELEMENT);
#else
    return num_units(args) * (UNIT / LOAD_INPUTS * LOADED_BYTES);
#endif
}

// The start of a channel's weights. Channels beyond the last one read the weights of the last one, and their results
// are not stored.
DEVICE const u8* weight_row(const LinearArgs& args, u32 channel) {
    return static_cast<const u8*>(args.weight) + u64(min(channel_row(args, channel), args.n - 1)) * weight_row_bytes(args);
}

// The same for a row of inputs.
DEVICE const bf16* input_row(const LinearArgs& args, u32 row) {
    return args.input + u64(min(row, args.rows - 1)) * args.k;
}

// Reads 8 elements of a row of `k` elements, from element `first` on, which lies at `from`; zeros beyond the row's end.
// WHOLE_CHUNKS is `has_whole_chunks(k)`, and WHOLE_UNITS whether rows consist of whole units.
template <bool IS_STREAMED>
DEVICE uint4 load_elements(const bf16* from, u32 first, u32 k) {
#if WHOLE_UNITS
    return IS_STREAMED ? load_streaming_16(from) : *reinterpret_cast<const uint4*>(from);
#elif WHOLE_CHUNKS
    uint4 words = make_uint4(0, 0, 0, 0);
    if (first < k) {
        words = IS_STREAMED ? load_streaming_16(from) : *reinterpret_cast<const uint4*>(from);
    }
    return words;
#else
    u32 pairs[4] = {};
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) {
        if (first + i < k) pairs[i / 2] |= u32(from[i].bits) << (i % 2 * 16);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

// The scales or minimums of N neighbouring groups of a channel, the first a multiple of N.
template <u32 N>
struct GroupNumbers {
    u32 words[(N + 1) / 2];

    __device__ __forceinline__ void load(const f16* from) {
        if constexpr (N == 1) {
            words[0] = from->bits;
        } else if constexpr (N == 2) {
            words[0] = *reinterpret_cast<const u32*>(from);
        } else {
            static_assert(N == 4, "a unit has 1, 2 or 4 groups");
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            words[0] = both.x;
            words[1] = both.y;
        }
    }

    __device__ __forceinline__ float at(u32 i) const {
        return to_float(f16{u16(words[i / 2] >> (i % 2 * 16))});
    }
};

// The start of the scales, or minimums, of a channel's groups.
DEVICE u64 group_row(const LinearArgs& args, u32 channel) {
    return u64(min(channel_row(args, channel), args.n - 1)) * num_units(args) * (UNIT / GROUP_LEN);
}
