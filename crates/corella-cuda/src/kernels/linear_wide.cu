// A linear layer for many rows, as in prompts: tiles of weights and of inputs go through shared memory.
//
// Tensor cores are the limit. A block of 4 warps computes a tile of CHANNEL_TILE channels and ROW_TILE rows, each
// warp a quarter of it. For 128 x 128 a warp has 64 x 64: it reads 16 times 512 bytes of a stage of 32 inputs,
// which takes shared memory 64 clocks, for 64 `mma`, which take a multiprocessor's four tensor cores at least 64. A
// warp tile of half the rows would read 48 clocks' worth for 32 `mma`.
//
// Copies of NUM_STAGES - 1 stages are under way while one is multiplied. Two blocks share a multiprocessor, so that one
// multiplies while the other waits for a barrier or writes its results. Small tiles have more stages: there may be so
// few tiles that a block is alone on a multiprocessor, and memory is then the limit.
//
// The arithmetic of an output equals linear_narrow.cu's. A chain of products of the present split is in registers; the
// total of earlier splits is needed once per split, and waits in shared memory, because a second set of registers would
// halve the tile. With too few tiles for all multiprocessors, splits are divided among blocks, `num_parts` of them for
// a tile, which leave the sums of splits in memory for linear_finish.cu.
#include "weight_fragment.cuh"

// Macros: CHANNEL_TILE and ROW_TILE are 64 or 128, NUM_STAGES is at least 3.
constexpr u32 NUM_THREADS = 128;
constexpr u32 WARP_CHANNELS = CHANNEL_TILE / 2, WARP_ROWS = ROW_TILE / 2;
constexpr u32 A_TILES = WARP_CHANNELS / 16, B_TILES = WARP_ROWS / 8;
// In shared memory, a row of a block of inputs has 64 bytes, and so has a channel's part of a stage. A quarter of a
// warp reads 16 bytes of 4 lanes t for two neighbours g: 128 neighbouring bytes, and no two in one bank.
constexpr u32 WEIGHT_BYTES = CHANNEL_TILE * LOADED_BYTES;
constexpr u32 BLOCK_BYTES = ROW_TILE * LOADED_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + LOAD_BLOCKS * BLOCK_BYTES;
// Stages in a unit.
constexpr u32 UNIT_STAGES = UNIT / LOAD_INPUTS;
// The distance between rows of results, in words: lanes write rows 2 t and channels g.
constexpr u32 RESULT_STRIDE = CHANNEL_TILE + 4;
// Groups with inputs in a stage.
constexpr u32 STAGE_GROUPS = LOAD_INPUTS > GROUP_LEN ? LOAD_INPUTS / GROUP_LEN : 1;

// Blocks run about in the order of their numbers, x before y before z. Concurrent blocks should read the same rows and
// channels, because their reads come from the L2 cache. So with whole tiles, z counts bands of tiles of rows, and a
// band is walked channel by channel.
DEVICE u32 row_tile(const LinearArgs& args) {
    return args.num_parts == 1 ? blockIdx.z * gridDim.x + blockIdx.x : blockIdx.x;
}

// The start of a warp's part of the tile, and a lane's place in that part.
struct Place {
    u32 first_channel, first_row, warp_channel, warp_row, g, t;
    // The lane's first 16 bytes of weights and of inputs in a stage.
    u32 weights, inputs;

    __device__ __forceinline__ explicit Place(const LinearArgs& args) {
        const u32 warp = threadIdx.x / 32;
        first_channel = blockIdx.y * CHANNEL_TILE;
        first_row = row_tile(args) * ROW_TILE;
        warp_channel = warp % 2 * WARP_CHANNELS;
        warp_row = warp / 2 * WARP_ROWS;
        g = threadIdx.x % 32 / 4;
        t = threadIdx.x % 4;
        weights = (warp_channel + g) * LOADED_BYTES + t * 16;
        inputs = WEIGHT_BYTES + (warp_row + g) * LOADED_BYTES + t * 16;
    }
};

// A thread's copies: part `threadIdx.x % 4` of the four parts of 16 bytes, of every 32nd channel and every 32nd row.
struct Copies {
    static constexpr u32 PARTS = LOADED_BYTES / 16, STRIDE = NUM_THREADS / PARTS;
    // The addresses of the tile's first channel and first row, and the offsets of the copied bytes from there.
    const u8 *weights, *inputs;
    u32 weight_offsets[CHANNEL_TILE / STRIDE], input_offsets[ROW_TILE / STRIDE];

    __device__ __forceinline__ Copies(const LinearArgs& args, const Place& place) {
        weights = weight_row(args, place.first_channel);
        inputs = reinterpret_cast<const u8*>(input_row(args, place.first_row));
        const u32 first = threadIdx.x / PARTS;
#pragma unroll
        for (u32 i = 0; i < CHANNEL_TILE / STRIDE; i++) {
            const u32 channel = min(first + i * STRIDE, args.n - 1 - place.first_channel);
            const u32 row = channel_row(args, place.first_channel + channel);
            weight_offsets[i] = (row - channel_row(args, place.first_channel)) * weight_row_bytes(args);
        }
#pragma unroll
        for (u32 i = 0; i < ROW_TILE / STRIDE; i++) {
            const u32 row = min(first + i * STRIDE, args.rows - 1 - place.first_row);
            input_offsets[i] = row * args.k * sizeof(bf16);
        }
    }

    // Begins to copy stage `index`.
    __device__ __forceinline__ void begin(const LinearArgs& args, u32 index, u8* stage) const {
        begin_weights(args, index, stage);
        begin_inputs(args, index, stage);
    }

    __device__ __forceinline__ void begin_weights(const LinearArgs& args, u32 index, u8* stage) const {
        const u32 part = threadIdx.x % PARTS;
        u8* to = stage + threadIdx.x * 16;
#pragma unroll
        for (u32 i = 0; i < CHANNEL_TILE / STRIDE; i++, to += NUM_THREADS * 16) {
            const u8* row = weights + weight_offsets[i];
#if WEIGHT == FLOATS
            copy_elements(to, row, index * BLOCK + part * CHUNK, args.k);
#else
            copy_async_16(to, row + index * LOADED_BYTES + part * 16);
#endif
        }
    }

    __device__ __forceinline__ void begin_inputs(const LinearArgs& args, u32 index, u8* stage) const {
        const u32 part = threadIdx.x % PARTS;
        u8* to = stage + WEIGHT_BYTES + threadIdx.x * 16;
#pragma unroll
        for (u32 block = 0; block < LOAD_BLOCKS; block++) {
            const u32 first = index * LOAD_INPUTS + block * BLOCK + part * CHUNK;
#pragma unroll
            for (u32 i = 0; i < ROW_TILE / STRIDE; i++, to += NUM_THREADS * 16) {
                copy_elements(to, inputs + input_offsets[i], first, args.k);
            }
        }
    }

    // Copies 8 elements, zeros beyond the row's end. Rows of unaligned length are copied by element.
    static __device__ __forceinline__ void copy_elements(u8* to, const u8* row, u32 first, u32 k) {
#if WHOLE_UNITS
        copy_async_16(to, row + first * sizeof(bf16));
#elif WHOLE_CHUNKS
        copy_async_16(to, row + (first < k ? first * sizeof(bf16) : 0), first < k);
#else
        *reinterpret_cast<uint4*>(to) = load_elements<false>(reinterpret_cast<const bf16*>(row) + first, first, k);
#endif
    }
};

DEVICE uint4 load_shared(const u8* from) {
    return *reinterpret_cast<const uint4*>(from);
}

// A thread's results of one kind, `[A_TILES][B_TILES][4]`.
struct Tile {
    float at[A_TILES][B_TILES][4];

    __device__ __forceinline__ void clear() {
        for_each([](float& x, u32, u32, u32) { x = 0.0f; });
    }

    template <class F>
    __device__ __forceinline__ void for_each(F visit) {
#pragma unroll
        for (u32 a = 0; a < A_TILES; a++) {
#pragma unroll
            for (u32 b = 0; b < B_TILES; b++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) visit(at[a][b][i], a, b, i);
            }
        }
    }
};

struct Sums {
    Tile chains;
    // The totals of groups' chains, and sums of inputs. Formats without them leave these unused.
    Tile totals;
    float inputs[B_TILES][4];

    __device__ __forceinline__ void clear() {
        chains.clear();
        if (!IS_GROUPED) return;
        totals.clear();
        clear_inputs();
    }

    __device__ __forceinline__ void clear_inputs() {
#pragma unroll
        for (u32 b = 0; b < B_TILES; b++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) inputs[b][i] = 0.0f;
        }
    }

    // Multiplies stage `index`, which is in shared memory, and calls `meanwhile` while tensor cores are busy.
    template <class Meanwhile>
    __device__ __forceinline__ void
    add(const LinearArgs& args, const Place& place, u32 index, const u8* stage, Meanwhile meanwhile) {
        GroupNumbers<STAGE_GROUPS> scales[A_TILES][2], minimums[A_TILES][2];
        uint4 weights[A_TILES][2];
#pragma unroll
        for (u32 a = 0; a < A_TILES; a++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                weights[a][i] = load_shared(stage + place.weights + (16 * a + 8 * i) * LOADED_BYTES);
                if (!IS_GROUPED) continue;
                const u32 channel = place.first_channel + place.warp_channel + 16 * a + 8 * i + place.g;
                const u64 row = group_row(args, channel);
                const u64 group = row + index * LOAD_INPUTS / GROUP_LEN;
                scales[a][i].load(args.group_scales + group);
                if (HAS_MINIMUM) minimums[a][i].load(args.group_minimums + group);
            }
        }
#pragma unroll
        for (u32 block = 0; block < LOAD_BLOCKS; block++) {
            const u8* block_inputs = stage + place.inputs + block * BLOCK_BYTES;
            uint4 rows[B_TILES];
#pragma unroll
            for (u32 b = 0; b < B_TILES; b++) rows[b] = load_shared(block_inputs + 8 * b * LOADED_BYTES);
#pragma unroll
            for (u32 a = 0; a < A_TILES; a++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) multiply(a, weights[a], rows, block, half, args.zero);
                if (block == 0 && a == 0) meanwhile();
            }
            if (IS_GROUPED && (index * LOAD_BLOCKS + block + 1) % GROUP_BLOCKS == 0) {
                end_group(scales, minimums, block / GROUP_BLOCKS);
            }
        }
    }

    __device__ __forceinline__ void
    multiply(u32 a, const uint4 weights[2], const uint4 rows[B_TILES], u32 block, u32 half, u32 zero) {
        const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
        const Operand upper = weight_operand(weights[0], block, half);
        const Operand lower = weight_operand(weights[1], block, half);
        u32 operand[4] = {upper.low, lower.low, upper.high, lower.high};
#if WEIGHT == FLOATS
        // Operands need registers in another order than loads fill them. An `or` with an unknown zero moves each
        // register once. With plain moves, the compiler would move each register several times, 180 times in all for 64
        // `mma`, and instructions would be the limit.
#pragma unroll
        for (u32 i = 0; i < 4; i++) operand[i] |= zero;
#endif
#pragma unroll
        for (u32 b = 0; b < B_TILES; b++) {
            const Operand input = input_operand(rows[b], half);
            const u32 other[2] = {input.low, input.high};
            mma_16x8x16(chains.at[a][b], operand, other);
            if (HAS_MINIMUM && a == 0) mma_16x8x16(inputs[b], ones, other);
        }
    }

    __device__ __forceinline__ void
    end_group(const GroupNumbers<STAGE_GROUPS> scales[A_TILES][2],
              const GroupNumbers<STAGE_GROUPS> minimums[A_TILES][2], u32 group) {
        totals.for_each([&](float& total, u32 a, u32 b, u32 i) {
            float& chain = chains.at[a][b][i];
            total = fmaf(scales[a][i / 2].at(group), chain, total);
            if (HAS_MINIMUM) total = fmaf(minimums[a][i / 2].at(group), inputs[b][i], total);
            chain = 0.0f;
        });
        clear_inputs();
    }

    __device__ __forceinline__ Tile& of_split() { return IS_GROUPED ? totals : chains; }
};

// Adds the sums of earlier splits, which have waited in `[tile][thread][4]`.
DEVICE void add_earlier(Tile& sums, const float4* waiting) {
#pragma unroll
    for (u32 a = 0; a < A_TILES; a++) {
#pragma unroll
        for (u32 b = 0; b < B_TILES; b++) {
            const float4 earlier = waiting[(a * B_TILES + b) * NUM_THREADS + threadIdx.x];
            float* sum = sums.at[a][b];
            sum[0] = earlier.x + sum[0];
            sum[1] = earlier.y + sum[1];
            sum[2] = earlier.z + sum[2];
            sum[3] = earlier.w + sum[3];
        }
    }
}

DEVICE void let_wait(const Tile& sums, float4* waiting) {
#pragma unroll
    for (u32 a = 0; a < A_TILES; a++) {
#pragma unroll
        for (u32 b = 0; b < B_TILES; b++) {
            const float* sum = sums.at[a][b];
            const float4 all = make_float4(sum[0], sum[1], sum[2], sum[3]);
            waiting[(a * B_TILES + b) * NUM_THREADS + threadIdx.x] = all;
        }
    }
}

KERNEL_AHEAD(linear_wide, LinearArgs, NUM_THREADS, 2) {
    const Place place(args);
    // The last band may have fewer tiles.
    if (place.first_row >= args.rows) {
        wait_for_kernel_before();
        return;
    }
    const Copies copies(args, place);
    u8* stages = dynamic_shared();
    float4* waiting = reinterpret_cast<float4*>(stages + NUM_STAGES * STAGE_BYTES);
    const bool is_whole = args.num_parts == 1;
    const u32 num_splits = args.num_splits / args.num_parts, first_split = is_whole ? 0 : blockIdx.z * num_splits;
    const u32 begin = split_begin(args, first_split) * UNIT_STAGES;
    const u32 end = split_begin(args, first_split + num_splits) * UNIT_STAGES;
#pragma unroll
    for (u32 i = 0; i + 1 < NUM_STAGES; i++) {
        if (begin + i < end) copies.begin_weights(args, begin + i, stages + i * STAGE_BYTES);
    }
    wait_for_kernel_before();
#pragma unroll
    for (u32 i = 0; i + 1 < NUM_STAGES; i++) {
        if (begin + i < end) copies.begin_inputs(args, begin + i, stages + i * STAGE_BYTES);
        copy_async_commit();
    }
    Sums sums;
    sums.clear();
    u32 split = first_split, split_end = split_begin(args, split + 1) * UNIT_STAGES, slot = 0;
    for (u32 index = begin; index < end; index++) {
        copy_async_wait<NUM_STAGES - 2>();
        // The copied stage has arrived for all, and the stage that is copied next is no longer read.
        __syncthreads();
        const u32 next = index + NUM_STAGES - 1;
        const u32 free_slot = slot == 0 ? NUM_STAGES - 1 : slot - 1;
        sums.add(args, place, index, stages + slot * STAGE_BYTES, [&] {
            if (next < end) copies.begin(args, next, stages + free_slot * STAGE_BYTES);
            copy_async_commit();
        });
        slot = slot + 1 == NUM_STAGES ? 0 : slot + 1;
        if (index + 1 != split_end) continue;
        if (!is_whole) {
            float* partials = args.partials + u64(split) * args.rows * args.n;
            sums.of_split().for_each([&](float& sum, u32 a, u32 b, u32 i) {
                const u32 row = place.first_row + place.warp_row + 8 * b + 2 * place.t + i % 2;
                const u32 channel = place.first_channel + place.warp_channel + 16 * a + i / 2 * 8 + place.g;
                if (row < args.rows && channel < args.n) partials[u64(row) * args.n + channel_row(args, channel)] = sum;
            });
        } else {
            if (split == 0) {
                sums.of_split().for_each([](float& sum, u32, u32, u32) { sum = 0.0f + sum; });
            } else {
                add_earlier(sums.of_split(), waiting);
            }
            if (index + 1 != end) let_wait(sums.of_split(), waiting);
        }
        if (index + 1 == end) break;
        split++;
        split_end = split_begin(args, split + 1) * UNIT_STAGES;
        sums.clear();
    }
    if (!is_whole) return;
    // Results change places between threads, so that neighbouring threads write neighbouring bytes of a row.
    copy_async_wait<0>();
    __syncthreads();
    float* results = reinterpret_cast<float*>(stages);
    sums.of_split().for_each([&](float& sum, u32 a, u32 b, u32 i) {
        const u32 row = place.warp_row + 8 * b + 2 * place.t + i % 2;
        results[row * RESULT_STRIDE + place.warp_channel + 16 * a + i / 2 * 8 + place.g] = sum;
    });
    __syncthreads();
#if GATED
    constexpr u32 PARTS = CHANNEL_TILE / (2 * CHUNK);
    for (u32 i = threadIdx.x; i < ROW_TILE * PARTS; i += NUM_THREADS) {
        const u32 row = i / PARTS, part = i % PARTS;
        const float* both = results + row * RESULT_STRIDE + part * 2 * CHUNK;
        const u32 first = place.first_channel / 2 + part * CHUNK;
        write_gated(args, place.first_row + row, first, load_whole_chunk(both), load_whole_chunk(both + CHUNK));
    }
#else
    constexpr u32 PARTS = CHANNEL_TILE / CHUNK;
    for (u32 i = threadIdx.x; i < ROW_TILE * PARTS; i += NUM_THREADS) {
        const u32 row = i / PARTS, channel = i % PARTS * CHUNK;
        const Chunk chunk = load_whole_chunk(results + row * RESULT_STRIDE + channel);
        write_outputs(args, place.first_row + row, place.first_channel + channel, chunk);
    }
#endif
}
