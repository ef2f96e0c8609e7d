// A linear layer of bf16 weights for more than 32 rows on sm_90a: tiles go through shared memory by tensor maps, and are
// multiplied there by `wgmma`.
//
// The arithmetic of an output equals linear_narrow.cu's: if `wgmma` and `mma.sync` add the products of the same 16
// inputs to a sum, the bits are the same, in any order of the 16. Both facts were measured (bench/cuda/wgmma_bits.cu).
//
// A block has a warpgroup for each 64 channels of its tile, and one more warpgroup, of which one thread begins all
// copies. Copies of NUM_STAGES stages of 64 inputs are under way or wait to be multiplied. A multiplying warpgroup has
// two sets of sums in registers: the chain of the present split, and the total of earlier splits.
//
// * Whole tiles, `num_parts` 1: a block computes tile after tile where IS_PERSISTENT, and copies of the next run while a
//   tile's results are written.
// * With few tiles, a cluster of `num_parts` blocks shares a tile's splits, at most two for each. Each block leaves the
//   sums of its splits in its shared memory, and then each block adds up all splits of a part of the outputs.
// * Where SHARED_BY is 2, clusters of two blocks have the same channels of neighbouring tiles of rows, and each block
//   copies half of the weights to both blocks.
#define GATE_RUN 8
#include "bulk_copy.cuh"
#include "linear_args.cuh"
#include "wgmma.cuh"

// Macros: CHANNEL_TILE is a multiple of 64, ROW_TILE is as in wgmma.cuh.
constexpr u32 WARPGROUP = 128;
constexpr u32 NUM_CONSUMERS = CHANNEL_TILE / 64;
constexpr u32 NUM_THREADS = WARPGROUP * (NUM_CONSUMERS + 1);
// A row of a stage has 128 bytes.
constexpr u32 STAGE_INPUTS = 64, STAGE_ROW = 128;
constexpr u32 WEIGHT_BYTES = CHANNEL_TILE * STAGE_ROW;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + ROW_TILE * STAGE_ROW;
constexpr u32 UNIT_STAGES = UNIT / STAGE_INPUTS;
// The number of bytes after which the pattern of swizzled rows repeats.
constexpr u32 ALIGNMENT = 1024;
// Results of whole tiles change places 32 rows at a time, separately for each warpgroup. The distance between rows, in
// words: lanes write rows 2 t and channels g.
constexpr u32 RESULT_ROWS = 32, RESULT_STRIDE = 64 + 4;
constexpr u32 RESULT_BYTES = RESULT_ROWS * RESULT_STRIDE * 4;
// The layout of the sums of splits that a cluster adds up.
constexpr u32 SUM_STRIDE = CHANNEL_TILE + 4;
constexpr u32 SUM_BYTES = ROW_TILE * SUM_STRIDE * 4;
static_assert(IS_PERSISTENT || 2 * SUM_BYTES <= NUM_STAGES * STAGE_BYTES, "sums of two splits are in place of stages");

struct HopperArgs {
    // Boxes of CHANNEL_TILE / SHARED_BY channels and of ROW_TILE rows, of 64 inputs each.
    TensorMap weights, inputs;
    LinearArgs linear;
    u32 padding[6];
};

// Shared memory: stages, the results of whole tiles, and two barriers for each stage. One barrier says that the stage
// is full, the other that it is empty.
struct Memory {
    u8* base;
    u32 stages, barriers;

    __device__ __forceinline__ Memory() {
        u8* begin = dynamic_shared();
        base = begin + (ALIGNMENT - shared_address(begin) % ALIGNMENT) % ALIGNMENT;
        stages = shared_address(base);
        barriers = stages + NUM_STAGES * STAGE_BYTES + (IS_PERSISTENT ? NUM_CONSUMERS * RESULT_BYTES : 0);
    }

    __device__ __forceinline__ u32 full(u32 slot) const { return barriers + slot * 16; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return barriers + slot * 16 + 8; }
    __device__ __forceinline__ u32 weights(u32 slot) const { return stages + slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 inputs(u32 slot) const { return weights(slot) + WEIGHT_BYTES; }

    __device__ __forceinline__ float* results(u32 warpgroup) const {
        u8* first = IS_PERSISTENT ? base + NUM_STAGES * STAGE_BYTES : base;
        return reinterpret_cast<float*>(first + warpgroup * RESULT_BYTES);
    }

    __device__ __forceinline__ void init_barriers() const {
        for (u32 slot = 0; slot < NUM_STAGES; slot++) {
            barrier_init(full(slot), 1);
            // Each warp that multiplies arrives, in both blocks that received the weights.
            barrier_init(empty(slot), SHARED_BY * NUM_CONSUMERS * 4);
        }
        barrier_init_fence();
    }
};

// A place in the ring of stages, and the parity of the phase of the place's barriers.
struct Ring {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        slot++;
        if (slot < NUM_STAGES) return;
        slot = 0;
        parity ^= 1;
    }
};

// The tiles of a cluster. The blocks of the cluster differ in `block`.
struct Tiles {
    u32 row_tiles, channel_tiles, block, next, stride;
    u32 first_channel, first_row;

    __device__ __forceinline__ explicit Tiles(const LinearArgs& args) {
        const u32 cluster_blocks = SHARED_BY * args.num_parts;
        row_tiles = (args.rows + SHARED_BY * ROW_TILE - 1) / (SHARED_BY * ROW_TILE);
        channel_tiles = (args.n + CHANNEL_TILE - 1) / CHANNEL_TILE;
        block = cluster_blocks == 1 ? 0 : cluster_block();
        next = blockIdx.x / cluster_blocks;
        stride = gridDim.x / cluster_blocks;
    }

    // Advances to the next tile. Concurrent tiles should read the same rows and channels, because their reads come from
    // the L2 cache: a band of tiles of rows is walked channel by channel.
    __device__ __forceinline__ bool advance() {
        if (next >= row_tiles * channel_tiles) return false;
        const u32 band_tiles = BAND_ROWS / (SHARED_BY * ROW_TILE);
        const u32 band = next / (band_tiles * channel_tiles), in_band = next % (band_tiles * channel_tiles);
        const u32 rows_of_band = min(band_tiles, row_tiles - band * band_tiles);
        first_channel = in_band / rows_of_band * CHANNEL_TILE;
        first_row = (band * band_tiles + in_band % rows_of_band) * SHARED_BY * ROW_TILE;
        if (SHARED_BY > 1) first_row += block * ROW_TILE;
        next += stride;
        return true;
    }
};

// The splits of a block.
struct Splits {
    u32 begin, end;

    __device__ __forceinline__ Splits(const LinearArgs& args, u32 block) {
        const u32 num = args.num_splits / args.num_parts;
        begin = args.num_parts == 1 ? 0 : block * num;
        end = begin + num;
    }
};

DEVICE u32 first_stage(const LinearArgs& args, u32 split) { return split_begin(args, split) * UNIT_STAGES; }

// Begins all copies of a block. The first stages have their weights before other kernels' results may be read.
struct Producer {
    const HopperArgs& args;
    const Memory& memory;

    __device__ __forceinline__ void copy_weights(const Tiles& tiles, u32 index, u32 slot) const {
        const u32 input = index * STAGE_INPUTS, barrier = memory.full(slot);
        barrier_expect(barrier, STAGE_BYTES);
        constexpr u32 CHANNELS = CHANNEL_TILE / SHARED_BY;
        const u32 part = SHARED_BY == 1 ? 0 : tiles.block;
        const u32 to = memory.weights(slot) + part * CHANNELS * STAGE_ROW, channel = tiles.first_channel + part * CHANNELS;
#if GATED && SHARED_BY > 1
        copy_box_to(3, to, args.weights, barrier, input, 0, 0, channel / (2 * GATE_RUN));
#elif GATED
        copy_box(to, args.weights, barrier, input, 0, 0, channel / (2 * GATE_RUN));
#elif SHARED_BY > 1
        copy_box_to(3, to, args.weights, barrier, input, channel);
#else
        copy_box(to, args.weights, barrier, input, channel);
#endif
    }

    __device__ __forceinline__ void copy_inputs(const Tiles& tiles, u32 index, u32 slot) const {
        copy_box(memory.inputs(slot), args.inputs, memory.full(slot), index * STAGE_INPUTS, tiles.first_row);
    }

    __device__ __forceinline__ void run() const {
        prefetch_map(args.weights);
        prefetch_map(args.inputs);
        Tiles tiles(args.linear);
        const Splits splits(args.linear, tiles.block);
        const u32 begin = first_stage(args.linear, splits.begin), end = first_stage(args.linear, splits.end);
        const bool has_tile = tiles.advance();
        const u32 num_first = has_tile ? min(end - begin, NUM_STAGES) : 0;
        for (u32 i = 0; i < num_first; i++) copy_weights(tiles, begin + i, i);
        wait_for_kernel_before();
        copy_fence();
        if (!has_tile) return;
        Ring ring;
        for (u32 i = 0; i < num_first; i++, ring.advance()) copy_inputs(tiles, begin + i, i);
        u32 index = begin + num_first;
        do {
            for (; index < end; index++, ring.advance()) {
                barrier_wait(memory.empty(ring.slot), ring.parity ^ 1);
                copy_weights(tiles, index, ring.slot);
                copy_inputs(tiles, index, ring.slot);
            }
            index = begin;
        } while (tiles.advance());
    }
};

// A warpgroup that multiplies 64 channels of a tile.
struct Consumer {
    const LinearArgs& args;
    const Memory& memory;
    const u32 warpgroup = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / 32;
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Ring ring;

    __device__ __forceinline__ Consumer(const LinearArgs& args, const Memory& memory) : args(args), memory(memory) {}

    // Records that the warp is done with a stage.
    __device__ __forceinline__ void release(u32 slot) const {
        const u32 lane = threadIdx.x % 32;
        if (lane >= SHARED_BY) return;
        if (SHARED_BY == 1) {
            barrier_arrive(memory.empty(slot));
        } else {
            barrier_arrive_at(memory.empty(slot), lane);
        }
    }

    // Sums the products of a split of `num_stages` stages in `chain`.
    __device__ __forceinline__ void multiply(WarpgroupSums& chain, u32 num_stages) {
        u32 before = 0;
        for (u32 i = 0; i < num_stages; i++) {
            barrier_wait(memory.full(ring.slot), ring.parity);
            const u64 weights = swizzled_rows(memory.weights(ring.slot) + warpgroup * 64 * STAGE_ROW);
            const u64 inputs = swizzled_rows(memory.inputs(ring.slot));
            wgmma_fence();
#pragma unroll
            for (u32 step = 0; step < STAGE_INPUTS / 16; step++) {
                // 32 bytes, in units of 16.
                wgmma_64x16(chain, weights + 2 * step, inputs + 2 * step, i > 0 || step > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0) release(before);
            before = ring.slot;
            ring.advance();
        }
        wgmma_wait<0>();
        release(before);
    }

    __device__ __forceinline__ void run() {
        wait_for_kernel_before();
        Tiles tiles(args);
        const Splits splits(args, tiles.block);
        while (tiles.advance()) {
            WarpgroupSums chain, totals;
#pragma unroll
            for (u32 i = 0; i < ROW_TILE / 2; i++) totals.at[i] = 0.0f;
            for (u32 split = splits.begin; split < splits.end; split++) {
                multiply(chain, first_stage(args, split + 1) - first_stage(args, split));
                if (IS_PERSISTENT || args.num_parts == 1) {
#pragma unroll
                    for (u32 i = 0; i < ROW_TILE / 2; i++) totals.at[i] += chain.at[i];
                } else if (split + 1 < splits.end) {
                    totals = chain;
                }
            }
            if (IS_PERSISTENT) {
                write(tiles, totals);
                continue;
            }
            // Results are written over the stages, which are no longer read.
            sync_threads(1 + NUM_CONSUMERS, NUM_CONSUMERS * WARPGROUP);
            if (args.num_parts == 1) {
                write(tiles, totals);
                return;
            }
            const u32 num_splits = splits.end - splits.begin;
            keep(num_splits - 1, chain);
            if (num_splits > 1) keep(0, totals);
            sync_cluster();
            add_up(tiles, num_splits);
            return;
        }
    }

    // Writes a whole tile. Sums move up in their registers from one part to the next, so that one part's code serves
    // all.
    __device__ __forceinline__ void write(const Tiles& tiles, WarpgroupSums& sums) const {
        float* results = memory.results(warpgroup);
        const u32 first_channel = tiles.first_channel + warpgroup * 64;
        const u32 end = min(tiles.first_row + ROW_TILE, args.rows);
#pragma unroll 1
        for (u32 first_row = tiles.first_row; first_row < end; first_row += RESULT_ROWS) {
            constexpr u32 PART = RESULT_ROWS / 2;
            sync_threads(1 + warpgroup, WARPGROUP);
#pragma unroll
            for (u32 i = 0; i < PART; i++) {
                const u32 row = i / 4 * 8 + 2 * t + i % 2, channel = 16 * warp + g + i % 4 / 2 * 8;
                results[row * RESULT_STRIDE + channel] = sums.at[i];
            }
#pragma unroll
            for (u32 i = PART; i < ROW_TILE / 2; i++) sums.at[i - PART] = sums.at[i];
            sync_threads(1 + warpgroup, WARPGROUP);
            constexpr u32 CHUNKS = GATED ? 64 / (2 * CHUNK) : 64 / CHUNK;
#pragma unroll 1
            for (u32 i = threadIdx.x % WARPGROUP; i < RESULT_ROWS * CHUNKS; i += WARPGROUP) {
                const u32 row = i / CHUNKS, chunk = i % CHUNKS;
                const float* from = results + row * RESULT_STRIDE;
#if GATED
                const Chunk gates = load_whole_chunk(from + chunk * 2 * CHUNK);
                const Chunk values = load_whole_chunk(from + chunk * 2 * CHUNK + CHUNK);
                write_gated(args, first_row + row, first_channel / 2 + chunk * CHUNK, gates, values);
#else
                write_outputs(args, first_row + row, first_channel + chunk * CHUNK, load_whole_chunk(from + chunk * CHUNK));
#endif
            }
        }
    }

    // Leaves the sums of the block's split `index` for the cluster.
    __device__ __forceinline__ void keep(u32 index, const WarpgroupSums& sums) const {
        float* kept = reinterpret_cast<float*>(memory.base + index * SUM_BYTES);
#pragma unroll
        for (u32 j = 0; j < ROW_TILE / 8; j++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 row = 8 * j + 2 * t + i % 2, channel = warpgroup * 64 + 16 * warp + g + i / 2 * 8;
                kept[row * SUM_STRIDE + channel] = sums.at[4 * j + i];
            }
        }
    }

    // The total of all blocks' splits, for 8 channels of a row.
    __device__ __forceinline__ Chunk sum_splits(u32 row, u32 channel, u32 num_splits) const {
        const u32 at = memory.stages + (row * SUM_STRIDE + channel) * 4;
        Chunk sums = {};
        for (u32 block = 0; block < args.num_parts; block++) {
            const u32 there = address_in(block, at);
            for (u32 split = 0; split < num_splits; split++) {
                const float4 low = load_from_cluster(there + split * SUM_BYTES);
                const float4 high = load_from_cluster(there + split * SUM_BYTES + 16);
                const float all[CHUNK] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) sums.at[i] += all[i];
            }
        }
        return sums;
    }

    // Writes the block's part of a tile with shared splits.
    __device__ __forceinline__ void add_up(const Tiles& tiles, u32 num_splits) const {
        constexpr u32 CHUNKS = GATED ? CHANNEL_TILE / (2 * CHUNK) : CHANNEL_TILE / CHUNK;
        const u32 num_rows = min(ROW_TILE, args.rows - tiles.first_row);
        const u32 num_threads = args.num_parts * NUM_CONSUMERS * WARPGROUP;
        for (u32 i = tiles.block * NUM_CONSUMERS * WARPGROUP + threadIdx.x; i < num_rows * CHUNKS; i += num_threads) {
            const u32 row = i / CHUNKS, chunk = i % CHUNKS;
#if GATED
            const Chunk gates = sum_splits(row, chunk * 2 * CHUNK, num_splits);
            const Chunk values = sum_splits(row, chunk * 2 * CHUNK + CHUNK, num_splits);
            write_gated(args, tiles.first_row + row, tiles.first_channel / 2 + chunk * CHUNK, gates, values);
#else
            const Chunk sums = sum_splits(row, chunk * CHUNK, num_splits);
            write_outputs(args, tiles.first_row + row, tiles.first_channel + chunk * CHUNK, sums);
#endif
        }
    }
};

KERNEL_AHEAD(linear_hopper, HopperArgs, NUM_THREADS, BLOCKS) {
    const Memory memory;
    if (threadIdx.x == 0) memory.init_barriers();
    if (SHARED_BY > 1) {
        sync_cluster();
    } else {
        __syncthreads();
    }
    if (threadIdx.x >= NUM_CONSUMERS * WARPGROUP) {
        give_up_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == NUM_CONSUMERS * WARPGROUP) Producer{args, memory}.run();
        // The cluster has left its sums in shared memory.
        if (args.linear.num_parts > 1) sync_cluster();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer(args.linear, memory).run();
    }
    // No block ends while others read its memory or write to it.
    if (SHARED_BY * args.linear.num_parts > 1) sync_cluster();
}
