// What the harness needs besides the kernels of linear layers: random data, comparisons, and sums in f64.
#include "prelude.cuh"

struct FillArgs {
    u16* at;
    u64 num;
    float scale;
    u32 seed;
};

DEVICE u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

DEVICE u64 first_of_thread() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE u64 num_threads() { return u64(gridDim.x) * blockDim.x; }

// Sums of three uniform numbers, with a standard deviation of `scale`.
KERNEL(fill_bf16, FillArgs) {
    for (u64 i = first_of_thread(); i < args.num; i += num_threads()) {
        const u32 two = mix(u32(i) ^ mix(args.seed + u32(i >> 32))), third = mix(two + 0x9e3779b9u) & 0xffff;
        const float sum = float(two & 0xffff) + float(two >> 16) + float(third);
        args.at[i] = bf16_bits((sum - 1.5f * 65535) * (1.0f / 32768) * args.scale);
    }
}

KERNEL(fill_float, FillArgs) {
    float* to = reinterpret_cast<float*>(args.at);
    for (u64 i = first_of_thread(); i < args.num; i += num_threads()) {
        to[i] = (float(mix(u32(i) ^ mix(args.seed)) >> 8) / (1 << 23) - 1.0f) * args.scale;
    }
}

// A count, and the least of the places that were counted.
DEVICE void count_wrong(u64* count, u64 place) {
    atomicAdd(count, u64(1));
    atomicMin(count + 1, place);
}

struct CompareArgs {
    const u32* a;
    const u32* b;
    u64 num;
    u64* count;
};

KERNEL(compare, CompareArgs) {
    for (u64 i = first_of_thread(); i < args.num; i += num_threads()) {
        if (args.a[i] != args.b[i]) count_wrong(args.count, i);
    }
}

// Compares a row of outputs with sums in f64.
struct ReferenceArgs {
    const bf16* input;
    const bf16* weight;
    const float* bias;
    const void* out;
    // What the outputs were added to.
    const float* before;
    u64* count;
    u64 row;
    u32 n, k, epilogue, is_gated;
    float scale, soft_cap;
};

// A warp's sum of a channel.
DEVICE double channel_sum(const ReferenceArgs& args, u32 channel) {
    const bf16 *x = args.input + args.row * args.k, *w = args.weight + u64(channel) * args.k;
    double sum = 0;
    for (u32 i = threadIdx.x % 32; i < args.k; i += 32) sum += double(to_float(x[i])) * double(to_float(w[i]));
    for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    return sum + (args.bias ? args.bias[channel] : 0.0f);
}

KERNEL_OF(reference, ReferenceArgs, 256, 1) {
    enum { STORE_ELEMENT, STORE_FLOAT, ADD_FLOAT };
    const u32 num_outputs = args.is_gated ? args.n / 2 : args.n;
    for (u32 i = blockIdx.x * 8 + threadIdx.x / 32; i < num_outputs; i += gridDim.x * 8) {
        double value = channel_sum(args, i);
        if (args.is_gated) value = value / (1.0 + exp(-value)) * channel_sum(args, args.n / 2 + i);
        if (args.epilogue != STORE_ELEMENT) {
            value *= args.scale;
            if (args.soft_cap != 0) value = args.soft_cap * tanh(value / args.soft_cap);
        }
        const u64 at = args.row * num_outputs + i;
        if (args.epilogue == ADD_FLOAT) value += args.before[at];
        const bool is_bf16 = args.epilogue == STORE_ELEMENT;
        const double actual =
            is_bf16 ? to_float(static_cast<const bf16*>(args.out)[at]) : static_cast<const float*>(args.out)[at];
        // A last digit of bf16, and sums of f32 whose terms cancel each other.
        const double tolerance = is_bf16 ? 0.006 * fabs(value) + 1e-3 : 1e-3 * fabs(value) + 3e-4;
        if (threadIdx.x % 32 == 0 && !(fabs(actual - value) <= tolerance)) count_wrong(args.count, i);
    }
}

// Sums of k products by `mma.sync`, the 16 inputs of each in an order of their own.
struct OrderArgs {
    const u16* a;
    const u16* b;
    float* out;
    u32 k;
    u32 order;
};

// Which input of 16 has a place.
DEVICE u32 ordered(u32 place, u32 order, u32 k) {
    if (order == 0) return place;
    if (order == 1) {
        // What lane t has after an exchange: inputs 0 to 3, 8 to 11, 4 to 7 and 12 to 15, where it has 2 t, 2 t + 1,
        // 2 t + 8 and 2 t + 9 otherwise.
        const u32 t = place % 8 / 2, i = place % 2 + place / 8 * 2;
        return t % 2 * 8 + t / 2 * 4 + i;
    }
    if (order == 2) return 15 - place;
    return (place * 5 + mix(k + order)) % 16;
}

KERNEL_OF(order, OrderArgs, 32, 1) {
    const u32 g = threadIdx.x / 4, t = threadIdx.x % 4;
    const u16* upper = args.a + (u64(blockIdx.x) * 16 + g) * args.k;
    const u16* lower = upper + 8 * args.k;
    const u16* column = args.b + (u64(blockIdx.x) * 8 + g) * args.k;
    float sums[4] = {};
    for (u32 k = 0; k < args.k; k += 16) {
        auto pair = [&](const u16* row, u32 place) {
            const u32 low = row[k + ordered(place, args.order, k)], high = row[k + ordered(place + 1, args.order, k)];
            return low | high << 16;
        };
        const u32 a[4] = {pair(upper, 2 * t), pair(lower, 2 * t), pair(upper, 2 * t + 8), pair(lower, 2 * t + 8)};
        const u32 b[2] = {pair(column, 2 * t), pair(column, 2 * t + 8)};
        mma_16x8x16(sums, a, b);
    }
    for (u32 i = 0; i < 4; i++) {
        args.out[(u64(blockIdx.x) * 16 + g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
    }
}
