// A linear layer for few rows, as in decoding: weights stream once from memory into registers.
//
// Memory is the limit. An H100 delivers 3.35 TB/s after about 800 ns, so 2.7 MB must be under way, 20 KB for each of
// 132 multiprocessors. A warp has a whole unit of 128 inputs of 16 channels under way while it multiplies another one:
// 4 KiB in bf16. Registers, at most 128 of a thread, allow 16 warps, and so 64 KiB; integers, which are smaller, have
// more units under way. Shared memory would add a copy without a gain, because no two warps read the same weights.
//
// Every block reads the inputs, so these are mostly in the cache of the multiprocessor; weights do not displace them.
// Rows of inputs are the 8 columns of `mma`, so 1 row costs tensor cores the same as 8, and that is little: the 512
// bytes of weights of one `mma` take a multiprocessor 35 clocks to get, and one of its four tensor cores about 4 to
// multiply.
//
// One block computes 16 channels, and each of its warps one split. n = 4096 gives 256 blocks of 8 warps, which
// is one wave.
#include "weight_fragment.cuh"

constexpr u32 CHANNELS = 16;
constexpr u32 UNIT_LOADS = UNIT_BLOCKS / LOAD_BLOCKS;
constexpr u32 UNIT_BYTES = UNIT_LOADS * LOADED_BYTES;
constexpr u32 UNIT_GROUPS = UNIT / GROUP_LEN;
// COLUMN_TILES, a macro, is the number of tiles of 8 rows of a block: 1, 2 or 4.
constexpr u32 ROWS = 8 * COLUMN_TILES;
// The registers of a unit, the number of units for which the intended registers suffice, and the number of units that
// are held. At least two are held, one under way and one that is multiplied. In bf16, two take more registers than
// intended.
constexpr u32 UNIT_REGISTERS = 8 * UNIT_LOADS + (IS_GROUPED ? (UNIT_GROUPS + 1) / 2 * 2 * (1 + HAS_MINIMUM) : 0);
constexpr u32 MOST_UNITS = (COLUMN_TILES == 4 ? 32 : 56) / UNIT_REGISTERS;
constexpr u32 DEPTH = MOST_UNITS < 2 ? 2 : MOST_UNITS;
// The distance between columns of sums. Lanes write columns 2 t and rows g; 20 words put all 32 in different banks.
constexpr u32 COLUMN_STRIDE = CHANNELS + 4;

// A unit of the weights of channels g and g + 8, and the factors of their groups.
struct Unit {
    uint4 words[2][UNIT_LOADS];
    GroupNumbers<UNIT_GROUPS> scales[2], minimums[2];
};

// A lane's inputs. Inputs of 8 rows are read a unit ahead: as soon as a block is multiplied, its registers get that
// block of the next unit. For more rows the registers do not suffice, and inputs are read when they are needed.
struct Inputs {
    static constexpr bool IS_AHEAD = COLUMN_TILES == 1;
    // The first of the lane's inputs of the current unit, as an index in a row and as addresses.
    u32 first;
    const bf16* rows[COLUMN_TILES];
    uint4 ahead[UNIT_BLOCKS];

    __device__ __forceinline__ Inputs(const LinearArgs& args, u32 row, u32 unit, u32 t)
        : first(unit * UNIT + (LANES_EXCHANGE ? t % 2 * 8 + t / 2 * 4 : t * CHUNK)) {
#pragma unroll
        for (u32 tile = 0; tile < COLUMN_TILES; tile++) rows[tile] = input_row(args, row + 8 * tile) + first;
#pragma unroll
        for (u32 block = 0; block < UNIT_BLOCKS; block++) read_ahead(args, block);
    }

    __device__ __forceinline__ uint4 load(const LinearArgs& args, u32 tile, u32 block) const {
#if LANES_EXCHANGE
        // The lane's inputs after an exchange.
        const bf16* from = rows[tile] + block * BLOCK;
        const uint2 low = load_half(from, first + block * BLOCK, args.k);
        const uint2 high = load_half(from + 16, first + block * BLOCK + 16, args.k);
        return make_uint4(low.x, low.y, high.x, high.y);
#else
        return load_elements<false>(rows[tile] + block * BLOCK, first + block * BLOCK, args.k);
#endif
    }

    // Half a chunk, zeros beyond the row's end.
    static __device__ __forceinline__ uint2 load_half(const bf16* from, u32 at, u32 k) {
        if (!WHOLE_UNITS && at >= k) return make_uint2(0, 0);
        return *reinterpret_cast<const uint2*>(from);
    }

    __device__ __forceinline__ void read_ahead(const LinearArgs& args, u32 block) {
        if constexpr (IS_AHEAD) ahead[block] = load(args, 0, block);
    }

    __device__ __forceinline__ void advance() {
        first += UNIT;
#pragma unroll
        for (u32 tile = 0; tile < COLUMN_TILES; tile++) rows[tile] += UNIT;
    }
};

// A lane's weights of channels g and g + 8, from one unit to the next.
struct Channels {
    const u8* weights[2];
    const f16 *scales[2], *minimums[2];

    __device__ __forceinline__ Channels(const LinearArgs& args, u32 channel, u32 unit, u32 t) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            weights[i] = weight_row(args, channel + 8 * i) + (u64(unit) * UNIT_BYTES + t * 16);
            const u64 group = group_row(args, channel + 8 * i) + unit * UNIT_GROUPS;
            scales[i] = args.group_scales + group;
            minimums[i] = args.group_minimums + group;
        }
    }

    // Reads unit `index`, which is the next one.
    __device__ __forceinline__ void load(const LinearArgs& args, u32 index, u32 t, Unit& unit) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 load = 0; load < UNIT_LOADS; load++) {
                const u8* from = weights[i] + load * LOADED_BYTES;
#if WEIGHT == FLOATS
                const u32 first = index * UNIT + load * BLOCK + t * CHUNK;
                unit.words[i][load] = load_elements<true>(reinterpret_cast<const bf16*>(from), first, args.k);
#else
                unit.words[i][load] = load_streaming_16(from);
#endif
            }
            if (IS_GROUPED) unit.scales[i].load(scales[i]);
            if (HAS_MINIMUM) unit.minimums[i].load(minimums[i]);
            weights[i] += UNIT_BYTES;
            scales[i] += UNIT_GROUPS;
            minimums[i] += UNIT_GROUPS;
        }
    }
};

// The sums of one split.
struct Sums {
    // Chains of products, and with scales of groups, the totals of their chains.
    float chains[COLUMN_TILES][4], totals[COLUMN_TILES][4];
    // Sums of inputs in all four places, for minimums.
    float input_sums[COLUMN_TILES][4];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (u32 tile = 0; tile < COLUMN_TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) chains[tile][i] = totals[tile][i] = input_sums[tile][i] = 0.0f;
        }
    }

    __device__ __forceinline__ void add(const LinearArgs& args, const Unit& unit, Inputs& inputs, bool is_last) {
        // After the last unit, the same unit is read again and ignored.
        if (Inputs::IS_AHEAD && !is_last) inputs.advance();
#pragma unroll
        for (u32 block = 0; block < UNIT_BLOCKS; block++) {
            uint4 x[COLUMN_TILES];
#pragma unroll
            for (u32 tile = 0; tile < COLUMN_TILES; tile++) {
                x[tile] = Inputs::IS_AHEAD ? inputs.ahead[block] : inputs.load(args, tile, block);
            }
            uint4 words[2] = {unit.words[0][block / LOAD_BLOCKS], unit.words[1][block / LOAD_BLOCKS]};
            if (LANES_EXCHANGE) {
                words[0] = exchange(words[0], threadIdx.x % 4);
                words[1] = exchange(words[1], threadIdx.x % 4);
            }
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint4 &low = words[0], &high = words[1];
                const Operand upper = weight_operand(low, block % LOAD_BLOCKS, half);
                const Operand lower = weight_operand(high, block % LOAD_BLOCKS, half);
                const u32 a[4] = {upper.low, lower.low, upper.high, lower.high};
                multiply(a, x, half);
            }
            inputs.read_ahead(args, block);
            if (IS_GROUPED && (block + 1) % GROUP_BLOCKS == 0) end_group(unit, block / GROUP_BLOCKS);
        }
        if (!Inputs::IS_AHEAD) inputs.advance();
    }

    __device__ __forceinline__ void multiply(const u32 a[4], const uint4 x[COLUMN_TILES], u32 half) {
        const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (u32 tile = 0; tile < COLUMN_TILES; tile++) {
            const Operand input = input_operand(x[tile], half);
            const u32 b[2] = {input.low, input.high};
            mma_16x8x16(chains[tile], a, b);
            if (HAS_MINIMUM) mma_16x8x16(input_sums[tile], ones, b);
        }
    }

    __device__ __forceinline__ void end_group(const Unit& unit, u32 group) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float scale = unit.scales[i / 2].at(group);
            const float minimum = HAS_MINIMUM ? unit.minimums[i / 2].at(group) : 0.0f;
#pragma unroll
            for (u32 tile = 0; tile < COLUMN_TILES; tile++) {
                totals[tile][i] = fmaf(scale, chains[tile][i], totals[tile][i]);
                if (HAS_MINIMUM) totals[tile][i] = fmaf(minimum, input_sums[tile][i], totals[tile][i]);
                chains[tile][i] = input_sums[tile][i] = 0.0f;
            }
        }
    }
};

KERNEL_AHEAD(linear_narrow, LinearArgs, 512, 1) {
    const u32 lane = threadIdx.x % 32, split = threadIdx.x / 32;
    const u32 g = lane / 4, t = lane % 4;
    const u32 first_channel = blockIdx.x * CHANNELS, first_row = blockIdx.y * ROWS;
    const u32 begin = split_begin(args, split), end = split_begin(args, split + 1);
    Channels channels(args, first_channel + g, begin, t);
    Unit units[DEPTH];
#pragma unroll
    for (u32 i = 0; i + 1 < DEPTH; i++) {
        if (begin + i < end) channels.load(args, begin + i, t, units[i]);
    }
    wait_for_kernel_before();
    Inputs inputs(args, first_row + g, begin, t);
    Sums sums;
    for (u32 round = begin; round < end; round += DEPTH) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            const u32 index = round + i, next = index + DEPTH - 1;
            if (index < end) {
                if (next < end) channels.load(args, next, t, units[(i + DEPTH - 1) % DEPTH]);
                sums.add(args, units[i], inputs, index + 1 == end);
            }
        }
    }
    // `[split][column][channel]`.
    float* splits = reinterpret_cast<float*>(dynamic_shared());
#pragma unroll
    for (u32 tile = 0; tile < COLUMN_TILES; tile++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 column = 8 * tile + 2 * t + i % 2, channel = g + i / 2 * 8;
            const float sum = IS_GROUPED ? sums.totals[tile][i] : sums.chains[tile][i];
            splits[(split * ROWS + column) * COLUMN_STRIDE + channel] = sum;
        }
    }
    __syncthreads();
    auto sum_splits = [&](u32 column, u32 channel) {
        float sum = 0.0f;
        for (u32 other = 0; other < args.num_splits; other++) {
            sum += splits[(other * ROWS + column) * COLUMN_STRIDE + channel];
        }
        return sum;
    };
#if GATED
    for (u32 i = threadIdx.x; i < ROWS * GATE_RUN; i += blockDim.x) {
        const u32 column = i / GATE_RUN, gate = i % GATE_RUN;
        const float gate_sum = sum_splits(column, gate), sum = sum_splits(column, GATE_RUN + gate);
        write_gated(args, first_row + column, first_channel / 2 + gate, gate_sum, sum);
    }
#else
    for (u32 i = threadIdx.x; i < ROWS * CHANNELS; i += blockDim.x) {
        const u32 column = i / CHANNELS, channel = i % CHANNELS;
        write_output(args, first_row + column, first_channel + channel, sum_splits(column, channel));
    }
#endif
}
