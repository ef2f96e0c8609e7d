// Paged attention in f32, for small models and exact comparisons: the items, splits and formulas of
// attention.cu, with products in plain arithmetic.
//
// A block of 4 warps computes a tile of 16 rows, 4 rows a warp. Keys come in blocks of 32, so that each
// lane has the score of one key; for the sums of values, each lane has every 32nd dimension. Sums over
// dimensions and over keys go from first to last.
#include "attention_item.cuh"

constexpr int KEYS = 32;
constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int WARP_ROWS = 4;
constexpr int TILE_ROWS = WARP_ROWS * NUM_WARPS;
constexpr int PARTS = (DIMS + 31) / 32;
// The distance between keys: an odd number of floats, so that the same dimension of 32 keys lies in 32 banks.
constexpr int KEY_STRIDE = HEAD_DIM + 1;

KERNEL_OF(attention, AttentionArgs, NUM_THREADS, 1) {
    __shared__ float queries[TILE_ROWS][HEAD_DIM];
    __shared__ float weights[TILE_ROWS][KEYS];
    __shared__ u32 is_last;
    float* const keys = (float*)dynamic_shared();
    float* const values = keys + KEYS * KEY_STRIDE;

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 group = args.num_heads / args.num_kv_heads;
    AttentionItem item = first_item(args);
    const u32 num_units = *args.num_items * args.num_kv_heads;
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        if (unit != blockIdx.x) {
            item = args.items[unit / args.num_kv_heads];
        }
        const u32 kv_head = unit % args.num_kv_heads;
        const u32* table = args.tables + u64(item.slot) * args.table_len;
        const KeyRange range = key_range(args, item, KEYS);

        __syncthreads();
        for (u32 i = threadIdx.x; i < TILE_ROWS * HEAD_DIM; i += NUM_THREADS) {
            const u32 row = i / HEAD_DIM, dim = i % HEAD_DIM;
            queries[row][dim] =
                row < item.num_rows ? to_float(query_row(args, item, kv_head, row)[dim]) : 0.0f;
        }
        int positions[WARP_ROWS];
        float total_largest[WARP_ROWS], total_weights[WARP_ROWS], total_values[WARP_ROWS][PARTS];
        for (int i = 0; i < WARP_ROWS; i++) {
            const u32 row = warp * WARP_ROWS + i;
            positions[i] =
                row < item.num_rows ? int(item.position + (item.first_head + row) / group) : -1;
            total_largest[i] = negative_infinity();
            total_weights[i] = 0.0f;
            for (int part = 0; part < PARTS; part++) {
                total_values[i][part] = 0.0f;
            }
        }

        for (u32 split = item.first_split; split < item.first_split + item.num_splits; split++) {
            const u32 begin = max(split << item.split_shift, range.begin);
            const u32 end = min((split + 1) << item.split_shift, range.end);
            float largest[WARP_ROWS], sum_weights[WARP_ROWS], sum_values[WARP_ROWS][PARTS];
            for (int i = 0; i < WARP_ROWS; i++) {
                largest[i] = negative_infinity();
                sum_weights[i] = 0.0f;
                for (int part = 0; part < PARTS; part++) {
                    sum_values[i][part] = 0.0f;
                }
            }

            for (u32 block = begin; block < end; block += KEYS) {
                // No thread reads the block of keys any more.
                __syncthreads();
                for (u32 i = threadIdx.x; i < KEYS * HEAD_DIM; i += NUM_THREADS) {
                    const u32 key = i / HEAD_DIM, dim = i % HEAD_DIM;
                    const u32 position = block + key;
                    float pair[2] = {0.0f, 0.0f};
                    if (position >= range.first_position && position < end) {
                        const u32 page = table[position / args.page_size];
                        const u32 in_page = position % args.page_size;
                        const u64 offset = key_offset(args, page, kv_head, in_page);
                        const KV_ELEMENT* from = (const KV_ELEMENT*)(args.kv + offset) + dim;
                        pair[0] = to_float(from[0]);
                        pair[1] = to_float(from[u64(args.page_size) * HEAD_DIM]);
                        if (is_i8<KV_ELEMENT>) {
                            const u64 at = key_scale_offset(args, page, kv_head, in_page);
                            const float* scale = (const float*)(args.kv + at);
                            pair[0] *= scale[0];
                            pair[1] *= scale[args.page_size];
                        }
                    }
                    keys[key * KEY_STRIDE + dim] = pair[0];
                    values[key * HEAD_DIM + dim] = pair[1];
                }
                __syncthreads();

                float scores[WARP_ROWS] = {};
                for (int dim = 0; dim < HEAD_DIM; dim++) {
                    const float key = keys[lane * KEY_STRIDE + dim];
#pragma unroll
                    for (int i = 0; i < WARP_ROWS; i++) {
                        scores[i] = fmaf(queries[warp * WARP_ROWS + i][dim], key, scores[i]);
                    }
                }
                const int position = int(block + lane);
#pragma unroll
                for (int i = 0; i < WARP_ROWS; i++) {
                    float score = scores[i];
                    if (args.soft_cap != 0.0f) {
                        score = args.soft_cap * tanhf(score * args.score_scale);
                    }
                    if (position > positions[i] || position < int(first_seen(args, u32(positions[i])))) {
                        score = negative_infinity();
                    }
                    const float now = fmaxf(largest[i], warp_max(score));
                    const float subtracted = now == negative_infinity() ? 0.0f : now;
                    const float factor = exp2_fast((largest[i] - subtracted) * args.exponent_scale);
                    const float weight = exp2_fast((score - subtracted) * args.exponent_scale);
                    largest[i] = now;
                    sum_weights[i] = fmaf(sum_weights[i], factor, warp_sum(weight));
                    weights[warp * WARP_ROWS + i][lane] = weight;
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        sum_values[i][part] *= factor;
                    }
                }
                __syncwarp();
                for (int key = 0; key < KEYS; key++) {
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        const u32 dim = part * 32 + lane;
                        const float value = dim < HEAD_DIM ? values[key * HEAD_DIM + dim] : 0.0f;
#pragma unroll
                        for (int i = 0; i < WARP_ROWS; i++) {
                            sum_values[i][part] =
                                fmaf(weights[warp * WARP_ROWS + i][key], value, sum_values[i][part]);
                        }
                    }
                }
                __syncwarp();
            }

#pragma unroll
            for (int i = 0; i < WARP_ROWS; i++) {
                const u32 row = warp * WARP_ROWS + i;
                if (item.partial_row == NO_PARTIALS) {
                    const Merge merge = merge_weights(args, total_largest[i], largest[i]);
                    total_largest[i] = merge.largest;
                    total_weights[i] =
                        fmaf(sum_weights[i], merge.second, total_weights[i] * merge.first);
                    for (int part = 0; part < PARTS; part++) {
                        total_values[i][part] = fmaf(sum_values[i][part], merge.second,
                                                     total_values[i][part] * merge.first);
                    }
                } else if (row < item.num_rows) {
                    const u64 at = partial_row(args, item, kv_head, split) + row;
                    if (lane == 0) {
                        args.partial_stats[2 * at] = largest[i];
                        args.partial_stats[2 * at + 1] = sum_weights[i];
                    }
                    for (int part = 0; part < PARTS; part++) {
                        const u32 dim = part * 32 + lane;
                        if (dim < DIMS) {
                            args.partials[at * DIMS + dim] = sum_values[i][part];
                        }
                    }
                }
            }
        }

        if (item.partial_row != NO_PARTIALS) {
            finish_partials<NUM_WARPS>(args, item, kv_head, &is_last);
            continue;
        }
        for (int i = 0; i < WARP_ROWS; i++) {
            const u32 row = warp * WARP_ROWS + i;
            if (row < item.num_rows) {
                const float inverse = 1.0f / total_weights[i];
                ELEMENT* out = out_row(args, item, kv_head, row);
                for (int part = 0; part < PARTS; part++) {
                    const u32 dim = part * 32 + lane;
                    if (dim < HEAD_DIM) {
                        out[dim] = from_float<ELEMENT>(quotient(total_values[i][part], inverse));
                    }
                }
            }
        }
    }
}
