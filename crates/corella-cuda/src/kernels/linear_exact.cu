// A linear layer in f32, for any number of rows: for comparisons with other implementations, and for small models.
//
// A lane has every 32nd run of 4 inputs, so that a warp reads 512 neighbouring bytes of f32. The lane sums the products
// of its inputs by one chain of `fmaf`; then lanes are summed as a butterfly. A warp computes one split of 4 channels
// and 8 rows, so that 12 loads serve 128 `fmaf`.
#define GATE_RUN 2
#include "linear_args.cuh"

constexpr u32 CHANNELS = 4;
constexpr u32 ROWS = 8;
constexpr u32 RUN = 4;

struct Run {
    float at[RUN];
};

DEVICE Run load_run(const float* row, u32 first, u32 k) {
    Run run = {};
#if WHOLE_CHUNKS
    if (first < k) {
        const float4 loaded = *reinterpret_cast<const float4*>(row + first);
        run = Run{{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
#else
#pragma unroll
    for (u32 i = 0; i < RUN; i++) {
        if (first + i < k) run.at[i] = row[first + i];
    }
#endif
    return run;
}

// Reads weights of a channel from input `first` on, in f32. Scales of channels are left to the end.
DEVICE Run load_weights(const LinearArgs& args, u32 channel, u32 first) {
    const u64 row = min(channel_row(args, channel), args.n - 1);
#if WEIGHT == FLOATS
    return load_run(static_cast<const float*>(args.weight) + row * args.k, first, args.k);
#else
    // The layout of a unit's runs in `packed_weight.rs`: 16 bytes of a lane of a tensor core's operand have inputs 8 t
    // to 8 t + 7 of several blocks of 32.
    const u32 block = first / 32, t = first % 32 / 8, half = first % 8 / 4;
    Run run;
#if WEIGHT == INT4_GROUPS
    const u64 word_index = (row * num_units(args) + first / UNIT) * 16 + t * 4 + block % 4;
    const u32 word = static_cast<const u32*>(args.weight)[word_index] >> (8 * half);
#pragma unroll
    for (u32 i = 0; i < RUN; i++) {
        const i32 nibble = word >> (i / 2 * 4 + i % 2 * 16) & 15;
        run.at[i] = float(HAS_MINIMUM ? nibble : nibble - 8);
    }
#else
    const u64 word_index = (row * num_units(args) * 2 + block / 2) * 16 + t * 4 + block % 2 * 2 + half;
    const u32 word = static_cast<const u32*>(args.weight)[word_index];
#pragma unroll
    for (u32 i = 0; i < RUN; i++) run.at[i] = float(i8(word >> (i / 2 * 8 + i % 2 * 16)));
#endif
#if WEIGHT >= INT8_GROUPS
    const u64 group = row * num_units(args) * (UNIT / GROUP_LEN) + first / GROUP_LEN;
    const float scale = to_float(args.group_scales[group]);
    const float minimum = HAS_MINIMUM ? to_float(args.group_minimums[group]) : 0.0f;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) run.at[i] = fmaf(scale, run.at[i], minimum);
#endif
    return run;
#endif
}

KERNEL_OF(linear_exact, LinearArgs, 512, 1) {
    // `[split][row][channel]`.
    float* splits = reinterpret_cast<float*>(dynamic_shared());
    const u32 lane = threadIdx.x % 32, split = threadIdx.x / 32;
    const u32 first_channel = blockIdx.x * CHANNELS, first_row = blockIdx.y * ROWS;
    const u32 num_rows = min(ROWS, args.rows - first_row);
    float sums[ROWS][CHANNELS] = {};
    const u32 end = split_begin(args, split + 1);
    for (u32 unit = split_begin(args, split); unit < end; unit++) {
        const u32 first = unit * UNIT + lane * RUN;
        Run weights[CHANNELS];
#pragma unroll
        for (u32 channel = 0; channel < CHANNELS; channel++) {
            weights[channel] = load_weights(args, first_channel + channel, first);
        }
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            if (row >= num_rows) continue;
            const Run input = load_run(args.input + u64(first_row + row) * args.k, first, args.k);
#pragma unroll
            for (u32 channel = 0; channel < CHANNELS; channel++) {
                float& sum = sums[row][channel];
#pragma unroll
                for (u32 i = 0; i < RUN; i++) sum = fmaf(weights[channel].at[i], input.at[i], sum);
            }
        }
    }
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (row >= num_rows) continue;
#pragma unroll
        for (u32 channel = 0; channel < CHANNELS; channel++) {
            const float sum = warp_sum(sums[row][channel]);
            if (lane == 0) splits[(split * ROWS + row) * CHANNELS + channel] = sum;
        }
    }
    __syncthreads();
    auto sum_splits = [&](u32 row, u32 channel) {
        float sum = 0.0f;
        for (u32 other = 0; other < args.num_splits; other++) sum += splits[(other * ROWS + row) * CHANNELS + channel];
        return sum;
    };
#if GATED
    if (threadIdx.x < num_rows * GATE_RUN) {
        const u32 row = threadIdx.x / GATE_RUN, gate = threadIdx.x % GATE_RUN;
        const float gate_sum = sum_splits(row, gate), sum = sum_splits(row, GATE_RUN + gate);
        write_gated(args, first_row + row, first_channel / 2 + gate, gate_sum, sum);
    }
#else
    if (threadIdx.x < num_rows * CHANNELS) {
        const u32 row = threadIdx.x / CHANNELS, channel = threadIdx.x % CHANNELS;
        write_output(args, first_row + row, first_channel + channel, sum_splits(row, channel));
    }
#endif
}
