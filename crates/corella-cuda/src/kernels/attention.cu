// Paged attention on tensor cores, for decoding and for prompts.
//
// A block of ROW_WARPS * COLUMN_WARPS warps computes a tile of 16 * ROW_TILES * ROW_WARPS rows. Keys come in blocks of
// 64. COLUMN_WARPS warps have the same rows, and divide the keys of a block (for the scores) and the dimensions of the
// values (for the sums). Two shapes of this are compiled:
//
// * 16 rows and 4 column warps, for decoding. Memory is the limit: an H100 brings a multiprocessor about 14 bytes per
//   clock, thus a block of keys and values with 128 dimensions in bf16 (32 KiB) every 2300 clocks. One warp alone would
//   take about as long for products, addresses and softmax. Four warps take a third of that time, so that two or three
//   thread blocks on a multiprocessor hide each other's latencies. Padding 4 heads to 16 rows costs nothing: the tensor
//   cores are idle for most of the time.
// * 128 rows and 4 row warps with 2 row tiles each, for prompts. The tensor cores are the limit: 1620 clocks for a
//   block of 64 keys at the rate of mma.sync. Each warp reads all keys and values from shared memory: at 128 bytes per
//   clock that is 1024 clocks with 32 rows in a warp, and would be 2048 with 16.
//
// A row's operations, and so the bits of its results, are the same in both shapes: scores sum over dimensions 16 by 16,
// a block's weights are summed separately for each 16 keys, values sum over keys 16 by 16. The shapes differ in the
// threads that do the work and in the places of intermediate results.
#include "attention_staging.cuh"

constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int TILE_ROWS = WARP_ROWS * ROW_WARPS;
// Runs of 16 keys in a block, and in a warp.
constexpr int KEY_RUNS = KEYS / 16;
constexpr int WARP_KEY_RUNS = KEY_RUNS / COLUMN_WARPS;
// Runs of 16 dimensions in a head, and in a warp; the last warp may have fewer.
constexpr int DIM_RUNS = DIMS / 16;
constexpr int WARP_DIM_RUNS = (DIM_RUNS + COLUMN_WARPS - 1) / COLUMN_WARPS;
constexpr bool IS_DIVIDED = COLUMN_WARPS > 1;
// Elements from one row's weights in shared memory to the weights of the next row.
constexpr int WEIGHT_STRIDE = KEYS + 8;
// A block's weights replace its keys, which are no longer read. Where zeros pad the keys, weights have memory of their
// own: a NaN among them would stay in the padding for other requests.
constexpr bool HAS_WEIGHTS = IS_DIVIDED && !IS_CONVERTED && DIMS > HEAD_DIM;
// The number of blocks on a multiprocessor for which registers suffice.
constexpr int BLOCKS_AT_ONCE = IS_DIVIDED && DIMS <= 128 ? 3 : 1;

// The place of a lane. Matrices of scores and sums of values have mma's layout. Of each tile of 16 rows, lane l has
// rows l / 4 (half 0) and l / 4 + 8 (half 1). Of each 8 columns (side 0 or 1 of a run of 16), it has columns l % 4 * 2
// and l % 4 * 2 + 1.
struct Place {
    u32 lane, row_warp, column;

    __device__ u32 row(int tile, int half) const { return row_warp * WARP_ROWS + tile * 16 + half * 8 + lane / 4; }
    __device__ u32 key(int run, int side) const {
        return (column * WARP_KEY_RUNS + run) * 16 + side * 8 + lane % 4 * 2;
    }
    __device__ u32 dim(int run, int side) const {
        return (column * WARP_DIM_RUNS + run) * 16 + side * 8 + lane % 4 * 2;
    }
    __device__ bool has_dims(int run) const {
        return DIM_RUNS % COLUMN_WARPS == 0 || column * WARP_DIM_RUNS + run < DIM_RUNS;
    }
    // The start of the row whose address this lane gives, in the four matrices that make 16 rows and 16 columns of an
    // operand.
    __device__ u32 matrix_row(u32 first_row, u32 first_column, u32 stride) const {
        return (first_row + lane % 16) * stride + first_column + lane / 16 * 8;
    }
};

// The scores of a block, and later the block's weights.
using Scores = float[ROW_TILES][WARP_KEY_RUNS][2][4];

// The largest scores of a split so far, and its sums of values. The sums of its weights are kept apart.
struct Sums {
    // The largest score of each row.
    float largest[ROW_TILES][2];
    float values[ROW_TILES][WARP_DIM_RUNS][2][4];

    __device__ void clear() {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            largest[tile][0] = largest[tile][1] = negative_infinity();
#pragma unroll
            for (int i = 0; i < WARP_DIM_RUNS * 8; i++) values[tile][i / 8][i / 4 % 2][i % 4] = 0.0f;
        }
    }
};

// Begins to copy the tile's queries, 16 bytes at a time. If the head's length does not allow that, reads the queries
// without an asynchronous copy.
DEVICE void load_queries(const AttentionArgs& args, const AttentionItem& item, u32 kv_head, bf16* queries) {
    if constexpr (HEAD_DIM % 8 == 0) {
        constexpr int CHUNKS = DIMS / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += NUM_THREADS) {
            const u32 row = i / CHUNKS, dim = i % CHUNKS * 8;
            const bool exists = row < item.num_rows && dim < HEAD_DIM;
            const bf16* from = exists ? query_row(args, item, kv_head, row) + dim : args.queries;
            copy_async_16(queries + row * STRIDE + dim, from, exists);
        }
        return;
    }
    constexpr int WORDS = DIMS / 2;
    for (int i = threadIdx.x; i < TILE_ROWS * WORDS; i += NUM_THREADS) {
        const u32 row = i / WORDS, dim = i % WORDS * 2;
        u32 word = 0;
        if (row < item.num_rows && dim < HEAD_DIM) {
            word = *(const u32*)(query_row(args, item, kv_head, row) + dim);
        }
        *(u32*)(queries + row * STRIDE + dim) = word;
    }
}

DEVICE void multiply_keys(const Place& place, const bf16* queries, const bf16* keys, Scores& scores) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * WARP_KEY_RUNS * 8; i++) {
        scores[i / (WARP_KEY_RUNS * 8)][i / 8 % WARP_KEY_RUNS][i / 4 % 2][i % 4] = 0.0f;
    }
#pragma unroll
    for (int dim_run = 0; dim_run < DIM_RUNS; dim_run++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            const u32 first_row = place.row_warp * WARP_ROWS + tile * 16;
            load_matrix_x4(a[tile], queries + place.matrix_row(first_row, dim_run * 16, STRIDE));
        }
#pragma unroll
        for (int run = 0; run < WARP_KEY_RUNS; run++) {
            // Keys are the columns of the second operand. Each 8 keys take two matrices, of 8 dimensions each.
            const u32 key = (place.column * WARP_KEY_RUNS + run) * 16 + place.lane % 8 + place.lane / 16 * 8;
            u32 b[4];
            load_matrix_x4(b, keys + key * STRIDE + dim_run * 16 + place.lane / 8 % 2 * 8);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                mma_16x8x16(scores[tile][run][0], a[tile], b);
                mma_16x8x16(scores[tile][run][1], a[tile], b + 2);
            }
        }
    }
}

// Applies the scales of keys and the soft cap.
DEVICE void finish_scores(const AttentionArgs& args, const Place& place, const float* key_scales, Scores& scores) {
    if (is_i8<KV_ELEMENT>) {
#pragma unroll
        for (int i = 0; i < WARP_KEY_RUNS * 4; i++) {
            const int run = i / 4, side = i / 2 % 2, odd = i % 2;
            const float scale = key_scales[place.key(run, side) + odd];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                scores[tile][run][side][odd] *= scale;
                scores[tile][run][side][odd + 2] *= scale;
            }
        }
    }
    if (args.soft_cap != 0.0f) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * WARP_KEY_RUNS * 8; i++) {
            float& score = scores[i / (WARP_KEY_RUNS * 8)][i / 8 % WARP_KEY_RUNS][i / 4 % 2][i % 4];
            score = args.soft_cap * tanhf(score * args.score_scale);
        }
    }
}

// Hides keys that a row does not see. `positions` are the rows' positions.
DEVICE void mask(const AttentionArgs& args, const Place& place, u32 block_position,
                 const int (&positions)[ROW_TILES][2], Scores& scores) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int last = positions[tile][half], first = int(first_seen(args, u32(last)));
#pragma unroll
            for (int i = 0; i < WARP_KEY_RUNS * 4; i++) {
                const int run = i / 4, side = i / 2 % 2, odd = i % 2;
                const int position = int(block_position + place.key(run, side)) + odd;
                if (position < first || position > last) {
                    scores[tile][run][side][half * 2 + odd] = negative_infinity();
                }
            }
        }
    }
}

// The largest score of each row in a block. `of_columns` is shared memory.
DEVICE void find_largest(const Place& place, const Scores& scores, float (*of_columns)[TILE_ROWS],
                         float (&largest)[ROW_TILES][2]) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = negative_infinity();
#pragma unroll
            for (int i = 0; i < WARP_KEY_RUNS * 4; i++) {
                most = fmaxf(most, scores[tile][i / 4][i / 2 % 2][half * 2 + i % 2]);
            }
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            largest[tile][half] = most;
            if (IS_DIVIDED && place.lane % 4 == 0) {
                of_columns[place.column][place.row(tile, half)] = most;
            }
        }
    }
    if (IS_DIVIDED) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2 * COLUMN_WARPS; i++) {
            const int tile = i / (2 * COLUMN_WARPS), half = i / COLUMN_WARPS % 2;
            const float other = of_columns[i % COLUMN_WARPS][place.row(tile, half)];
            largest[tile][half] = fmaxf(largest[tile][half], other);
        }
    }
}

// Turns scores into weights, and adds them to the sum of each run of 16 keys. Earlier sums are scaled to the new
// largest score.
DEVICE void weigh(const AttentionArgs& args, const float (&largest)[ROW_TILES][2], Scores& scores, Sums& sums,
                  float (&run_weights)[ROW_TILES][WARP_KEY_RUNS][2]) {
    float factors[ROW_TILES][2];
    bool is_scaled = false;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float before = sums.largest[tile][half];
            const float now = fmaxf(before, largest[tile][half]);
            const float subtracted = now == negative_infinity() ? 0.0f : now;
            const float factor = exp2_fast((before - subtracted) * args.exponent_scale);
            const float shift = -(subtracted * args.exponent_scale);
            sums.largest[tile][half] = now;
            factors[tile][half] = factor;
            is_scaled |= factor != 1.0f;
#pragma unroll
            for (int run = 0; run < WARP_KEY_RUNS; run++) {
                float of_sides[2];
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    float* pair = scores[tile][run][side] + half * 2;
                    pair[0] = exp2_fast(fmaf(pair[0], args.exponent_scale, shift));
                    pair[1] = exp2_fast(fmaf(pair[1], args.exponent_scale, shift));
                    of_sides[side] = pair[0] + pair[1];
                }
                float& sum = run_weights[tile][run][half];
                sum = fmaf(sum, factor, of_sides[0] + of_sides[1]);
            }
        }
    }
    // A factor of 1 changes no bit, and is the factor of all rows in most blocks.
    if (vote_any(is_scaled)) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * WARP_DIM_RUNS * 8; i++) {
            const int tile = i / (WARP_DIM_RUNS * 8);
            sums.values[tile][i / 8 % WARP_DIM_RUNS][i / 4 % 2][i % 4] *= factors[tile][i / 2 % 2];
        }
    }
}

// Adds a block's weighed values. If warps divide the keys, each warp needs the weights of all warps, which are in
// `shared`.
DEVICE void add_values(const Place& place, const bf16* values, const float* value_scales, bf16* shared,
                       Scores& weights, Sums& sums) {
    // The warp's own weights as the first operand: 16 rows and 16 keys in 4 registers.
    u32 own[WARP_KEY_RUNS][ROW_TILES][4];
#pragma unroll
    for (int run = 0; run < WARP_KEY_RUNS; run++) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * 4; i++) {
            const int tile = i / 4, side = i / 2 % 2, half = i % 2;
            float* pair = weights[tile][run][side] + half * 2;
            if (is_i8<KV_ELEMENT>) {
                pair[0] *= value_scales[place.key(run, side)];
                pair[1] *= value_scales[place.key(run, side) + 1];
            }
            own[run][tile][i % 4] = pack2_bf16(pair[0], pair[1]);
            if (IS_DIVIDED) {
                *(u32*)(shared + place.row(tile, half) * WEIGHT_STRIDE + place.key(run, side)) = own[run][tile][i % 4];
            }
        }
    }
    if (IS_DIVIDED) {
        __syncthreads();
    }
#pragma unroll
    for (int key_run = 0; key_run < KEY_RUNS; key_run++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            if (IS_DIVIDED) {
                const u32 first_row = place.row_warp * WARP_ROWS + tile * 16;
                load_matrix_x4(a[tile], shared + place.matrix_row(first_row, key_run * 16, WEIGHT_STRIDE));
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) a[tile][i] = own[key_run % WARP_KEY_RUNS][tile][i];
            }
        }
#pragma unroll
        for (int run = 0; run < WARP_DIM_RUNS; run++) {
            if (place.has_dims(run)) {
                const u32 dim_run = place.column * WARP_DIM_RUNS + run;
                u32 b[4];
                load_matrix_x4_transposed(b, values + place.matrix_row(key_run * 16, dim_run * 16, STRIDE));
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++) {
                    mma_16x8x16(sums.values[tile][run][0], a[tile], b);
                    mma_16x8x16(sums.values[tile][run][1], a[tile], b + 2);
                }
            }
        }
    }
}

// Adds up the weights of a split: first those of each run of 16 keys over the lanes of a row, then the sums of the
// runs. `shared` is shared memory.
DEVICE void sum_weights(const Place& place, float (&run_weights)[ROW_TILES][WARP_KEY_RUNS][2],
                        float (*shared)[TILE_ROWS], float (&weights)[ROW_TILES][2]) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * WARP_KEY_RUNS * 2; i++) {
        const int tile = i / (WARP_KEY_RUNS * 2), run = i / 2 % WARP_KEY_RUNS, half = i % 2;
        float& sum = run_weights[tile][run][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (IS_DIVIDED && place.lane % 4 == 0) {
            shared[place.column * WARP_KEY_RUNS + run][place.row(tile, half)] = sum;
        }
    }
    if (IS_DIVIDED) {
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; i++) {
        const int tile = i / 2, half = i % 2;
        float of_runs[KEY_RUNS];
#pragma unroll
        for (int run = 0; run < KEY_RUNS; run++) {
            of_runs[run] = IS_DIVIDED ? shared[run][place.row(tile, half)]
                                      : run_weights[tile][run % WARP_KEY_RUNS][half];
        }
        weights[tile][half] = (of_runs[0] + of_runs[1]) + (of_runs[2] + of_runs[3]);
    }
}

// Merges a split into the earlier ones.
DEVICE void merge_split(const AttentionArgs& args, const Sums& sums, const float (&weights)[ROW_TILES][2],
                        Sums& total, float (&total_weights)[ROW_TILES][2]) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
        Merge merges[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Merge& merge = merges[half];
            merge = merge_weights(args, total.largest[tile][half], sums.largest[tile][half]);
            total.largest[tile][half] = merge.largest;
            total_weights[tile][half] =
                fmaf(weights[tile][half], merge.second, total_weights[tile][half] * merge.first);
        }
#pragma unroll
        for (int i = 0; i < WARP_DIM_RUNS * 8; i++) {
            const Merge& merge = merges[i / 2 % 2];
            float& value = total.values[tile][i / 8][i / 4 % 2][i % 4];
            value = fmaf(sums.values[tile][i / 8][i / 4 % 2][i % 4], merge.second, value * merge.first);
        }
    }
}

DEVICE void store_partials(const AttentionArgs& args, const AttentionItem& item, const Place& place, u64 first_row,
                           const Sums& sums, const float (&weights)[ROW_TILES][2]) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; i++) {
        const int tile = i / 2, half = i % 2;
        const u32 row = place.row(tile, half);
        if (row < item.num_rows) {
            const u64 at = first_row + row;
            if (place.column == 0 && place.lane % 4 == 0) {
                args.partial_stats[2 * at] = sums.largest[tile][half];
                args.partial_stats[2 * at + 1] = weights[tile][half];
            }
#pragma unroll
            for (int run = 0; run < WARP_DIM_RUNS; run++) {
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    if (place.has_dims(run)) {
                        const float* pair = sums.values[tile][run][side] + half * 2;
                        *(float2*)(args.partials + at * DIMS + place.dim(run, side)) = make_float2(pair[0], pair[1]);
                    }
                }
            }
        }
    }
}

DEVICE void store_rows(const AttentionArgs& args, const AttentionItem& item, u32 kv_head, const Place& place,
                       const Sums& total, const float (&weights)[ROW_TILES][2]) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; i++) {
        const int tile = i / 2, half = i % 2;
        const u32 row = place.row(tile, half);
        if (row < item.num_rows) {
            const float inverse = 1.0f / weights[tile][half];
            bf16* out = out_row(args, item, kv_head, row);
#pragma unroll
            for (int run = 0; run < WARP_DIM_RUNS; run++) {
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const float* pair = total.values[tile][run][side] + half * 2;
                    const u32 dim = place.dim(run, side);
                    if (dim < HEAD_DIM) {
                        *(u32*)(out + dim) = pack2_bf16(quotient(pair[0], inverse), quotient(pair[1], inverse));
                    }
                }
            }
        }
    }
}

KERNEL_OF(attention, AttentionArgs, NUM_THREADS, BLOCKS_AT_ONCE) {
    __shared__ i64 offsets[NUM_STAGES][KEYS];
    __shared__ float scales[NUM_STAGES][2][KEYS];
    __shared__ float of_columns[COLUMN_WARPS][TILE_ROWS];
    __shared__ float of_runs[IS_DIVIDED ? KEY_RUNS : 1][TILE_ROWS];
    __shared__ alignas(16) bf16 weights[HAS_WEIGHTS ? TILE_ROWS * WEIGHT_STRIDE : 8];
    __shared__ u32 is_last;

    u8* const shared = dynamic_shared();
    bf16* const queries = (bf16*)shared;
    u8* const stages = shared + TILE_ROWS * STRIDE * 2;
    bf16* const converted_keys = (bf16*)(stages + NUM_STAGES * STAGE_BYTES);
    bf16* const converted_values = (bf16*)((u8*)converted_keys + CONVERTED_BYTES);

    const u32 warp = threadIdx.x / 32;
    const Place place = {threadIdx.x % 32, warp / COLUMN_WARPS, warp % COLUMN_WARPS};
    const u32 group = args.num_heads / args.num_kv_heads;

    if (!IS_CONVERTED && DIMS > HEAD_DIM) {
        // Dimensions that only pad a row stay zero.
        for (int i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += NUM_THREADS) ((u32*)stages)[i] = 0;
    }

    AttentionItem item = first_item(args);
    const u32 num_units = *args.num_items * args.num_kv_heads;
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        if (unit != blockIdx.x) {
            item = args.items[unit / args.num_kv_heads];
        }
        const u32 kv_head = unit % args.num_kv_heads;
        const KeyRange range = key_range(args, item, KEYS);
        const u32 num_blocks = (range.end - range.begin + KEYS - 1) / KEYS;
        // Every row sees the keys from here on, up to the row's own position.
        const u32 all_see_from = first_seen(args, range.last_position);

        // The shared memory of the previous unit is no longer read.
        __syncthreads();
        const u32* table = args.tables + u64(item.slot) * args.table_len;
        const Staging staging = {args, table, kv_head, range.first_position, range.end, stages, offsets, scales};
        PlacedKey first_keys[NUM_STAGES];
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            first_keys[stage] = staging.look_up(range.begin + stage * KEYS);
        }
        load_queries(args, item, kv_head, queries);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            staging.note(stage, first_keys[stage]);
            if (stage < NUM_STAGES - 1) {
                staging.note_scales(stage, staging.read_scales(first_keys[stage]));
            }
        }
        __syncthreads();
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES - 1; stage++) staging.begin(stage);

        // The position of each row; rows after the tile's last row see no key.
        int positions[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++) {
            const u32 row = place.row(i / 2, i % 2);
            positions[i / 2][i % 2] = row < item.num_rows ? int(item.position + (item.first_head + row) / group) : -1;
        }

        Sums total;
        float total_weights[ROW_TILES][2] = {};
        total.clear();
        u32 block = 0;
        for (u32 split = item.first_split; split < item.first_split + item.num_splits; split++) {
            Sums sums;
            float run_weights[ROW_TILES][WARP_KEY_RUNS][2] = {};
            sums.clear();
            const u32 split_end = (split + 1) << item.split_shift;
            for (; block < num_blocks && range.begin + block * KEYS < split_end; block++) {
                const u32 block_position = range.begin + block * KEYS;
                const u32 stage = block % NUM_STAGES;
                copy_async_wait<NUM_STAGES - 2>();
                // The block has arrived for all threads, and no thread reads the previous block any more.
                __syncthreads();

                // Begins the copies of a later block, and the look-up of the pages of the block after that. The look-up
                // ends after the products.
                const u32 next = block + NUM_STAGES - 1;
                if (next < num_blocks) {
                    staging.begin(next % NUM_STAGES);
                } else {
                    copy_async_commit();
                }
                float2 next_scales = make_float2(0.0f, 0.0f);
                if (is_i8<KV_ELEMENT>) {
                    next_scales = staging.read_scales(staging.look_up(range.begin + next * KEYS));
                }
                const PlacedKey later = staging.look_up(range.begin + (next + 1) * KEYS);

                u8* const staged = stages + stage * STAGE_BYTES;
                bf16* const keys = IS_CONVERTED ? converted_keys : (bf16*)staged;
                bf16* const values = IS_CONVERTED ? converted_values : (bf16*)(staged + STAGED_BYTES);
                if (IS_CONVERTED) {
                    convert(staged, keys);
                    convert(staged + STAGED_BYTES, values);
                    __syncthreads();
                }

                Scores scores;
                float largest[ROW_TILES][2];
                multiply_keys(place, queries, keys, scores);
                finish_scores(args, place, scales[stage][0], scores);
                // Most blocks need no mask, because every row sees all their keys.
                if (block_position + KEYS - 1 > item.position || block_position < all_see_from) {
                    mask(args, place, block_position, positions, scores);
                }
                find_largest(place, scores, of_columns, largest);
                weigh(args, largest, scores, sums, run_weights);
                add_values(place, values, scales[stage][1], HAS_WEIGHTS ? weights : keys, scores, sums);

                staging.note((next + 1) % NUM_STAGES, later);
                staging.note_scales(next % NUM_STAGES, next_scales);
            }

            float split_weights[ROW_TILES][2];
            sum_weights(place, run_weights, of_runs, split_weights);
            if (item.partial_row == NO_PARTIALS) {
                merge_split(args, sums, split_weights, total, total_weights);
            } else {
                const u64 first_row = partial_row(args, item, kv_head, split);
                store_partials(args, item, place, first_row, sums, split_weights);
            }
        }

        if (item.partial_row == NO_PARTIALS) {
            store_rows(args, item, kv_head, place, total, total_weights);
        } else {
            finish_partials<NUM_WARPS>(args, item, kv_head, &is_last);
        }
    }
}
