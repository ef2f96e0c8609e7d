// The common parts of the kernels of paged attention: the work items that the host plans, the places of keys and
// values, and the formula by which the parts of a long context become one.
//
// The bits of a query's result must not depend on a step's plan. So the context of a query is cut at absolute positions
// into splits, whose length depends only on the query's own position (and on the model). Within a split, keys are
// walked in blocks at absolute positions, from an empty state; then `merge_weights` merges the splits in their order.
// One item may walk all splits and merge them in registers, or many items may write them to memory and the last one
// merge them: the same operations are done in the same order.
#pragma once
#include "prelude.cuh"

constexpr u32 NO_PARTIALS = 0xffffffffu;

// One KV head of a run of rows and a range of splits. A row is a pair of a token and a query head that
// reads this KV head, token by token, so that decoding fills a tile with the heads of its group.
struct AttentionItem {
    // The first token's row in the step, its position and its slot.
    u32 first_row;
    u32 position;
    u32 slot;
    // The number of query heads of the first token that belong to the previous tile.
    u32 first_head;
    u32 num_rows;
    // The binary logarithm of the number of positions in a split.
    u32 split_shift;
    // The splits of this item, and the splits of its task.
    u32 first_split;
    u32 num_splits;
    u32 task_first_split;
    u32 task_num_splits;
    // The number of items that share the task; the place of its first partial result, in rows, or `NO_PARTIALS` for one
    // item alone; and the counter that identifies the last of them.
    u32 num_items;
    u32 partial_row;
    u32 counter;
};

struct AttentionArgs {
    // `[row][num_heads][HEAD_DIM]`.
    const ELEMENT* queries;
    ELEMENT* out;
    // The address of the layer's keys and values in page 0.
    const u8* kv;
    // The page tables of the layer's KV group, `[slot][table_len]`.
    const u32* tables;
    const AttentionItem* items;
    const u32* num_items;
    // `[partial row][DIMS]`, and `[partial row][largest score, sum of weights]`.
    float* partials;
    float* partial_stats;
    // A counter for each task and KV head, all 0 before a launch. The last item of a task sets the counter to 0 again.
    u32* counters;
    u64 page_bytes;
    u32 head_bytes;
    u32 page_size;
    u32 table_len;
    // The capacity of `items`.
    u32 max_items;
    u32 num_heads;
    u32 num_kv_heads;
    // The number of positions that a query sees, including its own.
    u32 window;
    // A product becomes `soft_cap * tanh(product * score_scale)` if `soft_cap` is not 0. Weights are
    // 2 to the power of `exponent_scale` times the difference of two scores.
    float soft_cap;
    float score_scale;
    float exponent_scale;
};

constexpr int DIMS = (HEAD_DIM + 15) / 16 * 16;

template <typename T> constexpr bool is_i8 = false;
template <> constexpr bool is_i8<i8> = true;
template <typename T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

DEVICE float negative_infinity() {
    return __uint_as_float(0xff800000);
}

// The start of the partials of a split's rows, in rows.
DEVICE u64 partial_row(const AttentionArgs& args, const AttentionItem& item, u32 kv_head,
                                  u32 split) {
    const u64 before = u64(split - item.task_first_split) * args.num_kv_heads + kv_head;
    return item.partial_row + before * item.num_rows;
}

// The item of the block's first unit. A unit is one KV head of one item. The item is read before it is known whether it
// exists, so that it arrives at the same time as the number of items.
DEVICE AttentionItem first_item(const AttentionArgs& args) {
    return args.items[min(blockIdx.x / args.num_kv_heads, args.max_items - 1)];
}

// The first position that a query sees.
DEVICE u32 first_seen(const AttentionArgs& args, u32 position) {
    return position + 1 > args.window ? position + 1 - args.window : 0;
}

// The positions of the item's first and last row, and the range of positions whose keys the item reads, in blocks of
// `block_len`.
struct KeyRange {
    u32 first_position, last_position, begin, end;
};

DEVICE KeyRange key_range(const AttentionArgs& args, const AttentionItem& item, u32 block_len) {
    const u32 group = args.num_heads / args.num_kv_heads;
    const u32 first = first_seen(args, item.position);
    const u32 last = item.position + (item.first_head + item.num_rows - 1) / group;
    const u32 split_begin = item.first_split << item.split_shift;
    const u32 split_end = (item.first_split + item.num_splits) << item.split_shift;
    return {first, last, split_begin > first ? split_begin : first / block_len * block_len,
            split_end <= last ? split_end : last + 1};
}

// The place of a position's key in a known page, in bytes from `args.kv`. The value lies `page_size` keys further on.
DEVICE u64 key_offset(const AttentionArgs& args, u32 page, u32 kv_head, u32 in_page) {
    return page * args.page_bytes + u64(kv_head) * args.head_bytes
        + u64(in_page) * (HEAD_DIM * sizeof(KV_ELEMENT));
}

// The place of the scale of a position's key. The scale of the value lies `page_size` floats further on.
DEVICE u64 key_scale_offset(const AttentionArgs& args, u32 page, u32 kv_head, u32 in_page) {
    return page * args.page_bytes + u64(kv_head) * args.head_bytes
        + u64(args.page_size) * (2 * HEAD_DIM * sizeof(KV_ELEMENT)) + u64(in_page) * sizeof(float);
}

// The largest score of two runs of keys, and the factors of their sums. Without any seen key, the largest score is
// minus infinity, which must not be subtracted from itself.
struct Merge {
    float largest, first, second;
};

DEVICE Merge merge_weights(const AttentionArgs& args, float first, float second) {
    const float largest = first > second ? first : second;
    const float subtracted = largest == negative_infinity() ? 0.0f : largest;
    return {
        largest,
        exp2_fast((first - subtracted) * args.exponent_scale),
        exp2_fast((second - subtracted) * args.exponent_scale),
    };
}

// A sum of weighed values, divided by the sum of the weights. Adding 0 makes every zero positive: whether a product
// that rounds to zero leaves a negative zero may depend on the tile.
DEVICE float quotient(float sum, float inverse) {
    return sum * inverse + 0.0f;
}

DEVICE ELEMENT* out_row(const AttentionArgs& args, const AttentionItem& item, u32 kv_head,
                                   u32 row) {
    const u32 group = args.num_heads / args.num_kv_heads;
    const u32 of_tokens = item.first_head + row;
    const u64 token = item.first_row + of_tokens / group;
    return args.out + (token * args.num_heads + kv_head * group + of_tokens % group) * HEAD_DIM;
}

DEVICE const ELEMENT* query_row(const AttentionArgs& args, const AttentionItem& item,
                                           u32 kv_head, u32 row) {
    return args.queries + (out_row(args, item, kv_head, row) - args.out);
}

// Merges the partials of a task's splits, in their order, and writes the rows. All threads of the last item's block
// call this; a warp computes a row at a time. Splits are read 8 at a time, because a merge waits for the previous one,
// and would have to wait for memory, too.
template <int NUM_WARPS>
DEVICE void combine(const AttentionArgs& args, const AttentionItem& item, u32 kv_head) {
    constexpr int PARTS = (DIMS + 31) / 32;
    constexpr int SPLITS_AT_ONCE = 8;
    const u32 lane = threadIdx.x % 32;
    for (u32 row = threadIdx.x / 32; row < item.num_rows; row += NUM_WARPS) {
        float sums[PARTS] = {};
        float largest = negative_infinity(), weights = 0.0f;
        for (u32 first = 0; first < item.task_num_splits; first += SPLITS_AT_ONCE) {
            float values[SPLITS_AT_ONCE][PARTS];
            float2 stats[SPLITS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SPLITS_AT_ONCE; i++) {
                // After the last split, the last split is read again and ignored.
                const u32 split = item.task_first_split + min(first + i, item.task_num_splits - 1);
                const u64 at = partial_row(args, item, kv_head, split) + row;
                stats[i] = ((const float2*)args.partial_stats)[at];
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const u32 dim = part * 32 + lane;
                    values[i][part] = dim < HEAD_DIM ? args.partials[at * DIMS + dim] : 0.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < SPLITS_AT_ONCE; i++) {
                if (first + i < item.task_num_splits) {
                    const Merge merge = merge_weights(args, largest, stats[i].x);
                    largest = merge.largest;
                    weights = fmaf(stats[i].y, merge.second, weights * merge.first);
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        sums[part] = fmaf(values[i][part], merge.second, sums[part] * merge.first);
                    }
                }
            }
        }
        const float inverse = 1.0f / weights;
        ELEMENT* out = out_row(args, item, kv_head, row);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const u32 dim = part * 32 + lane;
            if (dim < HEAD_DIM) {
                out[dim] = from_float<ELEMENT>(quotient(sums[part], inverse));
            }
        }
    }
}

// Counts the items of a task that have written their partials. The last item combines all partials. `is_last` is shared
// memory of the block.
template <int NUM_WARPS>
DEVICE void finish_partials(const AttentionArgs& args, const AttentionItem& item,
                                       u32 kv_head, u32* is_last) {
    // Every thread's partials reach the device's memory before the count does.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = args.counters + item.counter * args.num_kv_heads + kv_head;
        *is_last = atomic_add(counter, 1) == item.num_items - 1;
        if (*is_last) {
            *counter = 0;
        }
        __threadfence();
    }
    __syncthreads();
    if (*is_last) {
        combine<NUM_WARPS>(args, item, kv_head);
    }
}
