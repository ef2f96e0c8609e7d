// The copies of blocks of keys and values from pages to shared memory in attention.cu, a block ahead of the computed
// one.
#pragma once
#include "attention_item.cuh"

constexpr int KEYS = 64;
constexpr int NUM_STAGES = 2;
constexpr int NUM_WARPS = ROW_WARPS * COLUMN_WARPS;
constexpr int NUM_THREADS = 32 * NUM_WARPS;

// Rows of shared memory are 16 bytes longer than their elements. Their length is then an odd multiple of 16 bytes, so
// that 8 rows of one column lie in different banks, as ldmatrix needs.
constexpr int STRIDE = DIMS + 8;

// Keys and values that are not bf16 are staged unchanged, and converted when they are used.
constexpr bool IS_CONVERTED = !is_bf16<KV_ELEMENT>;
constexpr int ROW_BYTES = HEAD_DIM * sizeof(KV_ELEMENT);
constexpr int STAGED_STRIDE = IS_CONVERTED ? (ROW_BYTES + 15) / 16 * 16 : STRIDE * 2;
constexpr int STAGED_BYTES = KEYS * STAGED_STRIDE;
constexpr int STAGE_BYTES = 2 * STAGED_BYTES;
constexpr int CONVERTED_BYTES = IS_CONVERTED ? KEYS * STRIDE * 2 : 0;

static_assert(KEYS <= NUM_THREADS, "a thread looks up one key's page");

// A thread's key in a block: the key's page, and the position in the page. Pages of keys that are not read are not
// looked up.
struct PlacedKey {
    u32 page, in_page;
    bool is_read;
};

struct Staging {
    const AttentionArgs& args;
    const u32* table;
    u32 kv_head;
    // Positions outside of this range are not looked up, and their keys count as zeros: the table may be stale there,
    // and the pages may contain NaN.
    u32 first_position, end_position;
    // `[stage][key or value][KEYS][STAGED_STRIDE]`.
    u8* stages;
    // `[stage][key]`: the place of the key, or a negative number if it counts as zeros; and the scales of the key and
    // the value.
    i64 (*offsets)[KEYS];
    float (*scales)[2][KEYS];

    __device__ PlacedKey look_up(u32 block_position) const {
        const u32 position = block_position + threadIdx.x;
        if (threadIdx.x >= KEYS || position < first_position || position >= end_position) {
            return {0, 0, false};
        }
        const u32 index = position / args.page_size;
        return {table[index], position - index * args.page_size, true};
    }

    // Records the sources of a stage's keys. A barrier must separate it from the `begin` of the stage.
    __device__ void note(u32 stage, const PlacedKey& key) const {
        if (threadIdx.x < KEYS) {
            offsets[stage][threadIdx.x] = key.is_read ? i64(key_offset(args, key.page, kv_head, key.in_page)) : -1;
        }
    }

    __device__ float2 read_scales(const PlacedKey& key) const {
        if (!is_i8<KV_ELEMENT> || !key.is_read) {
            return make_float2(0.0f, 0.0f);
        }
        const float* scale = (const float*)(args.kv + key_scale_offset(args, key.page, kv_head, key.in_page));
        return make_float2(scale[0], scale[args.page_size]);
    }

    __device__ void note_scales(u32 stage, float2 pair) const {
        if (is_i8<KV_ELEMENT> && threadIdx.x < KEYS) {
            scales[stage][0][threadIdx.x] = pair.x;
            scales[stage][1][threadIdx.x] = pair.y;
        }
    }

    // Begins to read the recorded keys and values of a stage, as one group of copies.
    __device__ void begin(u32 stage) const {
        u8* keys = stages + stage * STAGE_BYTES;
        const u64 to_value = u64(args.page_size) * ROW_BYTES;
#if KV_IS_ALIGNED
        constexpr int CHUNKS = ROW_BYTES / 16;
        // If the threads divide evenly among the columns of 16 bytes, each thread has one column of all its rows, and
        // few addresses to compute.
        constexpr bool IS_EVEN = NUM_THREADS % CHUNKS == 0 && KEYS % (NUM_THREADS / CHUNKS) == 0;
        constexpr int ROUNDS = (KEYS * CHUNKS + NUM_THREADS - 1) / NUM_THREADS;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int i = round * NUM_THREADS + threadIdx.x;
            const int key = IS_EVEN ? round * (NUM_THREADS / CHUNKS) + threadIdx.x / CHUNKS : i / CHUNKS;
            const int byte = (IS_EVEN ? threadIdx.x % CHUNKS : i % CHUNKS) * 16;
            if (IS_EVEN || key < KEYS) {
                const i64 offset = offsets[stage][key];
                const u8* from = args.kv + (offset < 0 ? 0 : offset) + byte;
                u8* to = keys + key * STAGED_STRIDE + byte;
                copy_async_16(to, from, offset >= 0);
                copy_async_16(to + STAGED_BYTES, from + to_value, offset >= 0);
            }
        }
#else
        for (int i = threadIdx.x; i < KEYS * HEAD_DIM; i += NUM_THREADS) {
            const int key = i / HEAD_DIM, dim = i % HEAD_DIM;
            const i64 offset = offsets[stage][key];
            KV_ELEMENT pair[2] = {};
            if (offset >= 0) {
                const u8* from = args.kv + offset;
                pair[0] = ((const KV_ELEMENT*)from)[dim];
                pair[1] = ((const KV_ELEMENT*)(from + to_value))[dim];
            }
            u8* to = keys + key * STAGED_STRIDE;
            ((KV_ELEMENT*)to)[dim] = pair[0];
            ((KV_ELEMENT*)(to + STAGED_BYTES))[dim] = pair[1];
        }
#endif
        copy_async_commit();
    }
};

// Converts staged keys or values to bf16. Integers of 8 bits are exact in bf16; their scales come later.
DEVICE void convert(const u8* staged, bf16* out) {
    if constexpr (is_i8<KV_ELEMENT> && HEAD_DIM % 16 == 0) {
        // 16 integers at a time: one by one, a block would take as long as its keys' reads from memory.
        constexpr int PIECES = HEAD_DIM / 16;
#pragma unroll 2
        for (int i = threadIdx.x; i < KEYS * PIECES; i += NUM_THREADS) {
            const int key = i / PIECES, dim = i % PIECES * 16;
            const uint4 piece = *(const uint4*)(staged + key * STAGED_STRIDE + dim);
            const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
            u32 pairs[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 two = words[j / 2] >> j % 2 * 16;
                pairs[j] = pack2_bf16(to_float(i8(two & 0xff)), to_float(i8(two >> 8 & 0xff)));
            }
            uint4* to = (uint4*)(out + key * STRIDE + dim);
            to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        }
        return;
    }
    constexpr int PAIRS = DIMS / 2;
    for (int i = threadIdx.x; i < KEYS * PAIRS; i += NUM_THREADS) {
        const int key = i / PAIRS, dim = i % PAIRS * 2;
        const KV_ELEMENT* row = (const KV_ELEMENT*)(staged + key * STAGED_STRIDE);
        float low = 0.0f, high = 0.0f;
        if (dim < HEAD_DIM) {
            low = to_float(row[dim]);
            high = to_float(row[dim + 1]);
        }
        *(u32*)(out + key * STRIDE + dim) = pack2_bf16(low, high);
    }
}
