// The operations on queries, keys and values between their projection and attention: norms of queries and keys, RoPE,
// and writes of keys and values to pages.
//
// HEAD_LANES lanes of a warp share one head of one row. With 128 dimensions these are 16 lanes, each with 4 pairs of
// elements (i, i + HEAD_DIM / 2), so that a pair is rotated within a lane and memory is read 8 bytes at a time. For a
// prompt of 8192 tokens with 48 heads, 100 MB are read and as many written, which takes an H100 60 us. With one element
// at a time, the instructions alone would take longer. For few rows, only the chain of loads counts: row, page, store.
#include "step_row.cuh"

constexpr int NUM_THREADS = 128;
constexpr int HEADS_PER_BLOCK = NUM_THREADS / HEAD_LANES;
constexpr int HALF = HEAD_DIM / 2;
// A lane's pairs: runs of PAIRS_AT_ONCE.
constexpr int ROUNDS = (HALF / PAIRS_AT_ONCE + HEAD_LANES - 1) / HEAD_LANES;
constexpr int PAIRS = ROUNDS * PAIRS_AT_ONCE;

// The kinds of norms of queries and keys: none, or one of all heads together. Any other number means a norm of each
// head.
constexpr u32 NO_NORM = 0, WHOLE_NORM = 2;

struct RotaryArgs {
    // `[row][(num_heads + 2 * num_kv_heads) * HEAD_DIM]`: queries, keys, values.
    const ELEMENT* qkv;
    // `[row][num_heads * HEAD_DIM]`.
    ELEMENT* queries;
    // The address of the layer's keys and values in page 0.
    u8* kv;
    const Row* rows;
    // `[slot][table_len]`.
    const u32* tables;
    // `[position][pair][cosine, sine]` of the rotated pairs.
    const float* angles;
    // HEAD_DIM weights, or one for each element of all heads.
    const float* query_norm;
    const float* key_norm;
    u64 page_bytes;
    u32 head_bytes;
    u32 page_size;
    u32 table_len;
    u32 num_heads;
    u32 num_kv_heads;
    u32 num_rotated_pairs;
    u32 norm_kind;
    // Whether a norm subtracts the mean.
    u32 is_centred;
    float eps;
};

// A lane's elements of a head.
struct Pairs {
    float first[PAIRS], second[PAIRS];
};

// Elements that are read and written at a time.
template <class T>
struct alignas(sizeof(T) * PAIRS_AT_ONCE) Run {
    T at[PAIRS_AT_ONCE];
};

// The first of the pairs of a lane's run.
DEVICE u32 first_pair(int round) { return (round * HEAD_LANES + threadIdx.x % HEAD_LANES) * PAIRS_AT_ONCE; }

template <class T>
DEVICE void load(const T* head, Pairs& x) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const u32 pair = first_pair(round);
        Run<T> first = {}, second = {};
        if (pair < HALF) {
            first = *(const Run<T>*)(head + pair);
            second = *(const Run<T>*)(head + pair + HALF);
        }
#pragma unroll
        for (int i = 0; i < PAIRS_AT_ONCE; i++) {
            x.first[round * PAIRS_AT_ONCE + i] = to_float(first.at[i]);
            x.second[round * PAIRS_AT_ONCE + i] = to_float(second.at[i]);
        }
    }
}

// Writes elements converted to T by `convert`.
template <class T, class Convert>
DEVICE void store(const Pairs& x, T* head, Convert convert) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const u32 pair = first_pair(round);
        Run<T> first, second;
#pragma unroll
        for (int i = 0; i < PAIRS_AT_ONCE; i++) {
            first.at[i] = convert(x.first[round * PAIRS_AT_ONCE + i]);
            second.at[i] = convert(x.second[round * PAIRS_AT_ONCE + i]);
        }
        if (pair < HALF) {
            *(Run<T>*)(head + pair) = first;
            *(Run<T>*)(head + pair + HALF) = second;
        }
    }
}

// The sum and the maximum over the lanes of a head. All these lanes get the same bits.
DEVICE float head_sum(float value) {
#pragma unroll
    for (int distance = HEAD_LANES / 2; distance > 0; distance /= 2) value += shuffle_xor(value, distance);
    return value;
}

DEVICE u32 head_max(u32 value) {
#pragma unroll
    for (int distance = HEAD_LANES / 2; distance > 0; distance /= 2) value = max(value, shuffle_xor(value, distance));
    return value;
}

// Norms queries and keys, over the elements of one head, or of all query heads or all key heads. All lanes of a warp
// call this; other heads stay unchanged.
DEVICE void apply_norm(const RotaryArgs& args, const ELEMENT* qkv, u32 head, bool is_normed, Pairs& x) {
    const bool is_query = head < args.num_heads;
    const u32 first_head = is_query ? 0 : args.num_heads;
    const bool is_whole = args.norm_kind == WHOLE_NORM;
    Pairs weights;
    if (is_normed) {
        load((is_query ? args.query_norm : args.key_norm) + (is_whole ? (head - first_head) * HEAD_DIM : 0), weights);
    }
    u32 len = HEAD_DIM;
    float mean = 0.0f, squares = 0.0f;
    if (is_whole) {
        // The lanes of each head sum all heads, which lie in the caches; a barrier would wait for the slowest warp.
        len = is_normed ? (is_query ? args.num_heads : args.num_kv_heads) * HEAD_DIM : 0;
        const ELEMENT* all = qkv + first_head * HEAD_DIM;
        if (args.is_centred) {
            float sum = 0.0f;
            for (u32 i = threadIdx.x % HEAD_LANES; i < len; i += HEAD_LANES) sum += to_float(all[i]);
            mean = head_sum(sum) / float(len);
        }
#pragma unroll 8
        for (u32 i = threadIdx.x % HEAD_LANES; i < len; i += HEAD_LANES) {
            const float value = to_float(all[i]) - mean;
            squares = fmaf(value, value, squares);
        }
    } else {
        if (args.is_centred) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) sum += x.first[i] + x.second[i];
            mean = head_sum(sum) / float(len);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (first_pair(i / PAIRS_AT_ONCE) < HALF) {
                const float first = x.first[i] - mean, second = x.second[i] - mean;
                squares = fmaf(second, second, fmaf(first, first, squares));
            }
        }
    }
    const float scale = 1.0f / sqrtf(head_sum(squares) / float(len) + args.eps);
    if (is_normed) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            x.first[i] = (x.first[i] - mean) * scale * weights.first[i];
            x.second[i] = (x.second[i] - mean) * scale * weights.second[i];
        }
    }
}

// A head's scale in pages, and the factor of its elements before rounding. Empty for formats without scales. All lanes
// of a warp call this.
struct Scale {
    float scale, inverse;
};

template <class T>
DEVICE Scale scale_for(const Pairs&, const T*) {
    return {1.0f, 1.0f};
}

// As `int8_scale` of corella-model.
DEVICE Scale scale_for(const Pairs& x, const i8*) {
    constexpr u32 INFINITE = 0x7f800000;
    // As integers, the bits of magnitudes have the order of the numbers, and NaN is above all others.
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        bits = max(bits, __float_as_uint(x.first[i]) & 0x7fffffff);
        bits = max(bits, __float_as_uint(x.second[i]) & 0x7fffffff);
    }
    bits = head_max(bits);
    if (bits >= INFINITE) {
        return {__uint_as_float(0x7fc00000), 0.0f};
    }
    const float largest = __uint_as_float(bits);
    const float inverse = bits == 0 ? 0.0f : 127.0f / largest;
    // The inverse of the smallest scales is infinite.
    return {largest / 127.0f, __float_as_uint(inverse) < INFINITE ? inverse : 0.0f};
}

// Writes a key or a value, and its scale, if any.
template <class T>
DEVICE void store_kv(const Pairs& x, Scale, T* out, float*) {
    store(x, out, [](float value) { return from_float<T>(value); });
}

// As `quantise_int8_row` of corella-model: adding 1.5 * 2^23 leaves no room for a fraction, so that the sum is rounded,
// and ends in the integer.
DEVICE void store_kv(const Pairs& x, Scale scale, i8* out, float* stored_scale) {
    if (threadIdx.x % HEAD_LANES == 0) {
        *stored_scale = scale.scale;
    }
    store(x, out, [=](float value) { return i8(__float_as_uint(value * scale.inverse + 12582912.0f) & 0xff); });
}

// Block (x, y) has row x and heads from y * HEADS_PER_BLOCK on.
KERNEL_OF(rotary, RotaryArgs, NUM_THREADS, 8) {
    const u32 num_heads = args.num_heads, num_kv_heads = args.num_kv_heads;
    const u32 lane_head = blockIdx.y * HEADS_PER_BLOCK + threadIdx.x / HEAD_LANES;
    const bool exists = lane_head < num_heads + 2 * num_kv_heads;
    const u32 head = exists ? lane_head : 0;
    const bool is_query = head < num_heads;
    const bool is_value = head >= num_heads + num_kv_heads;
    const Row row = args.rows[blockIdx.x];
    const ELEMENT* qkv = args.qkv + u64(blockIdx.x) * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    Pairs x;
    load(qkv + head * HEAD_DIM, x);

    // A row that only pads the step has position -1, and writes nothing to pages. Data that depend on the position are
    // read before the norm, which does not depend on it.
    const u32 position = row.position < 0 ? 0 : u32(row.position);
    const bool is_stored = exists && !is_query && row.position >= 0;
    const u32 page_index = position / args.page_size;
    const u32 page = is_stored ? args.tables[u64(row.slot) * args.table_len + page_index] : 0;
    const float2* row_angles = (const float2*)args.angles + u64(position) * args.num_rotated_pairs;
    float2 angles[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 pair = first_pair(i / PAIRS_AT_ONCE) + i % PAIRS_AT_ONCE;
        angles[i] = !is_value && pair < args.num_rotated_pairs ? row_angles[pair] : make_float2(1.0f, 0.0f);
    }

    if (args.norm_kind != NO_NORM) {
        apply_norm(args, qkv, head, !is_value, x);
    }
    if (!is_value) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float first = x.first[i], second = x.second[i];
            if (first_pair(i / PAIRS_AT_ONCE) + i % PAIRS_AT_ONCE < args.num_rotated_pairs) {
                x.first[i] = first * angles[i].x - second * angles[i].y;
                x.second[i] = second * angles[i].x + first * angles[i].y;
            }
        }
    }

    const Scale scale = scale_for(x, (const KV_ELEMENT*)nullptr);
    if (is_query && exists) {
        ELEMENT* out = args.queries + (u64(blockIdx.x) * num_heads + head) * HEAD_DIM;
        store(x, out, [](float value) { return from_float<ELEMENT>(value); });
    } else if (is_stored) {
        const u32 kv_head = (head - num_heads) % num_kv_heads;
        const u32 at = (is_value ? args.page_size : 0) + position - page_index * args.page_size;
        u8* part = args.kv + page * args.page_bytes + u64(kv_head) * args.head_bytes;
        float* scales = (float*)(part + u64(args.page_size) * (2 * HEAD_DIM * sizeof(KV_ELEMENT)));
        store_kv(x, scale, (KV_ELEMENT*)part + u64(at) * HEAD_DIM, scales + at);
    }
}
