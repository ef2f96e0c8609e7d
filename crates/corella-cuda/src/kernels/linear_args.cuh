// The common parts of the kernels of linear layers: parameters, the division of inputs, and the processing of a sum.
//
// The bits of an output may not depend on the number of rows. So every kernel computes an output in this way:
//
// * Inputs are divided into units of 128, and units into `num_splits` splits. The division depends only on n and k. A
//   split's products are summed in the order of inputs, by one chain of `mma` (or of `fmaf`).
// * If groups of inputs have scales of their own, a chain covers a group, and its end is multiplied by the scale and
//   added to the split's sum.
// * The sums of splits are added to 0 in their order, and `output_value` does the rest.
//
// Kernels differ only in the threads that compute a split and in the place where its sum waits.
#pragma once

#include "chunk.cuh"
#if GATED
#include "activation_function.cuh"
#endif

// WEIGHT is one of these.
#define FLOATS 0
#define INT8_CHANNELS 1
#define INT8_GROUPS 2
#define INT4_GROUPS 3

// The use of an output.
#define STORE_ELEMENT 0
#define STORE_FLOAT 1
#define ADD_FLOAT 2

struct LinearArgs {
    // `[rows][k]`.
    const ELEMENT* input;
    // `[n][k]` in ELEMENT, or rows of integers in the layout of `packed_weight.rs`.
    const void* weight;
    // `[n][groups]`.
    const f16* group_scales;
    const f16* group_minimums;
    // `[n]`, for integers.
    const float* channel_scales;
    // `[n]`, or null.
    const float* bias;
    // `[rows][n]`.
    void* out;
    // `[num_splits][rows][n]`.
    float* partials;
    u32 rows;
    u32 n;
    u32 k;
    u32 num_splits;
    u32 epilogue;
    float scale;
    // The soft cap; 0 for none.
    float soft_cap;
    // The number of blocks that share the splits of a tile.
    u32 num_parts;
    // Always 0, but the compiler does not know it.
    u32 zero;
    u32 padding;
};

constexpr u32 UNIT = 128;

DEVICE u32 num_units(const LinearArgs& args) {
    return (args.k + UNIT - 1) / UNIT;
}

// The row of the weights for a channel, if channels are counted in the order of tiles. If one half of the outputs gates
// the other half, each GATE_RUN gates are followed by the values that they gate, so that a block has both.
#ifndef GATE_RUN
#define GATE_RUN 8
#endif
DEVICE u32 channel_row(const LinearArgs& args, u32 channel) {
#if GATED
    const u32 in_pair = channel % (2 * GATE_RUN), gate = channel / (2 * GATE_RUN) * GATE_RUN + in_pair % GATE_RUN;
    return in_pair < GATE_RUN ? gate : args.n / 2 + gate;
#else
    return channel;
#endif
}

// The first unit of a split.
DEVICE u32 split_begin(const LinearArgs& args, u32 split) {
    return split * num_units(args) / args.num_splits;
}

DEVICE float output_value(const LinearArgs& args, u32 channel, float sum) {
#if WEIGHT != FLOATS
    sum *= args.channel_scales[channel];
#endif
    if (args.bias != nullptr) {
        sum += args.bias[channel];
    }
    if (args.epilogue != STORE_ELEMENT) {
        sum *= args.scale;
        if (args.soft_cap != 0.0f) {
            sum = args.soft_cap * tanhf(sum / args.soft_cap);
        }
    }
    return sum;
}

DEVICE void write_output(const LinearArgs& args, u32 row, u32 channel, float sum) {
    if (row >= args.rows || channel >= args.n) {
        return;
    }
    const float value = output_value(args, channel, sum);
    const u64 at = u64(row) * args.n + channel;
    float* floats = static_cast<float*>(args.out);
    if (args.epilogue == STORE_ELEMENT) {
        static_cast<ELEMENT*>(args.out)[at] = from_float<ELEMENT>(value);
    } else if (args.epilogue == STORE_FLOAT) {
        floats[at] = value;
    } else {
        floats[at] += value;
    }
}

// Writes neighbouring outputs of a row.
DEVICE void write_outputs(const LinearArgs& args, u32 row, u32 first_channel, const Chunk& sums) {
    if (row >= args.rows || first_channel >= args.n) {
        return;
    }
    if (!has_whole_chunks(args.n)) {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            write_output(args, row, first_channel + i, sums.at[i]);
        }
        return;
    }
    Chunk values;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) {
        values.at[i] = output_value(args, first_channel + i, sums.at[i]);
    }
    const u64 at = u64(row) * args.n + first_channel;
    if (args.epilogue == STORE_ELEMENT) {
        store_whole_chunk(static_cast<ELEMENT*>(args.out) + at, values);
        return;
    }
    float* out = static_cast<float*>(args.out) + at;
    if (args.epilogue == ADD_FLOAT) {
        const Chunk before = load_whole_chunk(out);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            values.at[i] = before.at[i] + values.at[i];
        }
    }
    store_whole_chunk(out, values);
}

#if GATED
DEVICE float gated_value(const LinearArgs& args, u32 gate, float gate_sum, float sum) {
    return activate(output_value(args, gate, gate_sum)) * output_value(args, args.n / 2 + gate, sum);
}

// Writes the product of an activated gate and the gated value, `[rows][n / 2]`.
DEVICE void write_gated(const LinearArgs& args, u32 row, u32 gate, float gate_sum, float sum) {
    if (row >= args.rows || gate >= args.n / 2) return;
    ELEMENT* out = static_cast<ELEMENT*>(args.out) + u64(row) * (args.n / 2);
    out[gate] = from_float<ELEMENT>(gated_value(args, gate, gate_sum, sum));
}

// The same for 8 neighbours. The number of gates is a multiple of 8.
DEVICE void write_gated(const LinearArgs& args, u32 row, u32 first, const Chunk& gate_sums, const Chunk& sums) {
    if (row >= args.rows || first >= args.n / 2) return;
    Chunk values;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) {
        values.at[i] = gated_value(args, first + i, gate_sums.at[i], sums.at[i]);
    }
    store_whole_chunk(static_cast<ELEMENT*>(args.out) + u64(row) * (args.n / 2) + first, values);
}
#endif
