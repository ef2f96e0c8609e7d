// The common parts of the kernels that draw tokens: their data, and the arithmetic of the reference sampler
// (corella-model's `sampler`), operation by operation, so that draws and log-probabilities have the same bits. The
// host's half of the structures is in sample.rs.
#pragma once
#include "atomic.cuh"
#include "prelude.cuh"

// The reference sums weights in blocks of 256, each in 16 lanes that are then added in order.
constexpr u32 BLOCK = 256;
constexpr u32 LANES = 16;
// The number of tokens of a thread block if several blocks share a row.
constexpr u32 RANGE = 4096;
constexpr u32 BLOCKS_PER_RANGE = RANGE / BLOCK;
// The threads of every kernel here: a thread for each lane of a range's blocks.
constexpr u32 THREADS = BLOCKS_PER_RANGE * LANES;
// The number of size classes of weights. The last class has the weight zero.
constexpr u32 NUM_CLASSES = (127 << 4) + 1;
constexpr u32 CLASS_STRIDE = 2048;
// The number of bins of logits, by their distance from the maximum. The bin of the maximum is the last.
constexpr u32 NUM_BINS = 2048;
// The largest number of tokens that are sorted at once.
constexpr u32 LIST = 2048;

// Kinds of draws.
constexpr u32 NOTHING = 0;
constexpr u32 DRAW = 1;
constexpr u32 SCORE = 2;
// Flags of draws.
constexpr u32 IS_MASKED = 1;
constexpr u32 IS_BEHIND_DRAFT = 2;

struct Draw {
    u32 kind;
    // The row of logits.
    u32 row;
    u32 slot;
    // The number of tokens before the one to draw.
    u32 num_tokens;
    u32 flags;
    // The token to score.
    u32 token;
};

// Flags of slots.
constexpr u32 HAS_LOGPROBS = 1;
constexpr u32 HAS_PENALTIES = 2;
constexpr u32 HAS_ALLOWED = 4;

struct SlotParams {
    u64 seed;
    // Words: the bits of tokens that rules allow, if HAS_ALLOWED; tokens masked until `min_tokens`; tokens with a bias,
    // ascending; their biases; the start of each banned sequence, and the end of the last one; the sequences' tokens.
    const u32* rules;
    u32 choice;
    float temperature;
    u32 top_k;
    float top_p;
    float min_p;
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;
    u32 num_prompt_tokens;
    u32 min_tokens;
    u32 flags;
    u32 num_top;
    u32 num_prompt_top;
    u32 num_masked_until_min_tokens;
    u32 num_biases;
    u32 num_banned;
};

// The data about a draw that the kernels of a launch exchange. All zero before the first.
struct DrawWork {
    // The key of the first token with the largest logit.
    u64 best;
    // The sum of weights that top-p still needs after all classes before `last_class`.
    double missing;
    // The complement of the first token whose logit is NaN or infinite, or 0.
    u32 bad;
    // The number of tokens that rank before the scored one.
    u32 num_before;
    // The size class in which the nucleus ends.
    u32 last_class;
    // The lowest bin with a token that must be sorted.
    u32 last_bin;
    // Whether the members of `last_class`, and the tokens down to `last_bin`, are collected in lists.
    u32 collects_members;
    u32 collects_leading;
    u32 num_members;
    u32 num_leading;
    // Weights below `cut_weight` are cut off, and also the weights of tokens after `cut_last` that equal `cut_weight`.
    float cut_weight;
    u32 cut_last;
    // The token drawn with top-k.
    u32 token;
    u32 num_top;
};

constexpr u32 OK = 0;
constexpr u32 NOT_FINITE = 1;
constexpr u32 NOTHING_ALLOWED = 2;

struct Result {
    u32 error;
    u32 token;
    // The logit that is not finite.
    float value;
    float logprob;
    u32 rank;
    u32 num_top;
};

struct TopToken {
    u32 token;
    float logprob;
};

// Arrays by draw are indexed by blockIdx.y.
struct SampleArgs {
    // [rows][vocab_size]; rows of draws with masks, rules or penalties are changed.
    float* logits;
    const Draw* draws;
    const SlotParams* slots;
    // [slots][max_model_len]
    const u32* history;
    // [slots][ceil(vocab_size / 32)]
    const u32* masks;
    DrawWork* work;
    // [draws][2][num_blocks]: the sums of blocks of weights, then the same sums at a temperature of 1.
    double* sums;
    // [draws][CLASS_STRIDE]: from bit 40 on, the number of weights; below, the sum of the distances of these weights
    // from the largest weight of the class.
    u64* classes;
    // [draws][NUM_BINS]
    u32* bins;
    // [draws][2][LIST]: keys of members, then of leading tokens.
    u64* lists;
    Result* results;
    // [draws][max_top]
    TopToken* tops;
    // [slots]
    u32* drawn;
    u32 vocab_size;
    u32 max_model_len;
    u32 max_top;
    u32 num_blocks;
};

constexpr u32 NEG_INF_BITS = 0xff800000u;
constexpr u32 ONE_BITS = 0x3f800000u;
constexpr u32 INF_BITS = 0x7f800000u;

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DEVICE u64 bits_of(double x) {
    union { double value; u64 bits; } both;
    both.value = x;
    return both.bits;
}

DEVICE double double_of(u64 bits) {
    union { u64 bits; double value; } both;
    both.bits = bits;
    return both.value;
}

// The reference's exponential, for x <= 0; 0 where the result would be subnormal.
DEVICE float exponential(float x) {
    const float round = 12582912.0f;
    float clamped = x > -87.3f ? x : -87.3f;
    float shifted = clamped * 1.44269504f + round;
    float n = shifted - round;
    float r = clamped - n * 0.6933594f - n * -2.1219444e-4f;
    float p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float power = float_of((bits_of(shifted) + 127u) << 23);
    return x > -87.3f ? p * power : 0.0f;
}

// The reference's natural logarithm of a number >= 1.
DEVICE double logarithm(double x) {
    u64 bits = bits_of(x);
    i32 exponent = (i32)(bits >> 52) - 1023;
    double mantissa = double_of((bits & ~(0x7ffull << 52)) | (1023ull << 52));
    if (mantissa > 1.41421356237309504880) {
        mantissa *= 0.5;
        exponent += 1;
    }
    double s = (mantissa - 1.0) / (mantissa + 1.0);
    double square = s * s;
    double series = 0.0;
    for (i32 odd = 21; odd >= 1; odd -= 2) {
        series = series * square + 1.0 / (double)odd;
    }
    return 2.0 * s * series + (double)exponent * 0.693147180559945309417;
}

// Philox4x32-10: a number in [0, 1) for the token at `position` of choice `choice`.
DEVICE double uniform(u64 seed, u32 choice, u32 position) {
    u32 counter[4] = {position, choice, 0, 0};
    u32 key[2] = {(u32)seed, (u32)(seed >> 32)};
    for (u32 round = 0; round < 10; round++) {
        u64 a = (u64)counter[0] * 0xD2511F53u;
        u64 b = (u64)counter[2] * 0xCD9E8D57u;
        u32 next[4] = {(u32)(b >> 32) ^ counter[1] ^ key[0], (u32)b,
                       (u32)(a >> 32) ^ counter[3] ^ key[1], (u32)a};
        for (u32 i = 0; i < 4; i++) counter[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    u64 bits = (u64)counter[0] << 32 | counter[1];
    return (double)(bits >> 11) * (1.0 / 9007199254740992.0);
}

// Keys order tokens by the reference's ranking, the best with the largest key: above 20 bits the sort value, then the
// complement of the id. No key is 0.
constexpr u32 ID_BITS = 20;

DEVICE u64 key_of(u32 order, u32 token) {
    return (u64)order << ID_BITS | (((1u << ID_BITS) - 1) - token);
}

DEVICE u32 token_of(u64 key) {
    return ((1u << ID_BITS) - 1) - (u32)(key & ((1u << ID_BITS) - 1));
}

// Logits in the order of unsigned numbers; both zeros are equal.
DEVICE u64 logit_key(float logit, u32 token) {
    u32 bits = logit == 0.0f ? 0u : bits_of(logit);
    return key_of(bits >> 31 ? ~bits : bits | 0x80000000u, token);
}

DEVICE float logit_of(u64 key) {
    u32 order = (u32)(key >> ID_BITS);
    return float_of(order >> 31 ? order & 0x7fffffffu : ~order);
}

// A weight above 0.
DEVICE u64 weight_key(float weight, u32 token) {
    return key_of(bits_of(weight), token);
}

DEVICE float weight_of(u64 key) {
    return float_of((u32)(key >> ID_BITS));
}

// The size class of a weight, with 4 bits of mantissa.
DEVICE u32 class_of(float weight) {
    return (ONE_BITS - bits_of(weight)) >> 19;
}

// The sum of a class of weights. All of these weights are multiples of one power of two, and there are fewer than 2^20
// of them. So the sum has the bits of the reference's sum in any order.
DEVICE double class_sum(u32 index, u64 packed) {
    u64 count = packed >> 40;
    u64 below = packed & ((1ull << 40) - 1);
    u64 largest = (1u << 24) - ((index & 15) << 19);
    double unit = double_of((u64)(1023 - 24 - (index >> 4)) << 52);
    return (double)(count * largest - below) * unit;
}

// The bin of a finite logit: the higher, the closer to the maximum.
DEVICE u32 bin_of(float logit, float max) {
    float below = (max - logit) * 32.0f;
    return below < (float)(NUM_BINS - 1) ? NUM_BINS - 1 - (u32)below : 0;
}

// The parts of the work that a draw needs.
struct Needs {
    bool is_drawn;
    // Sums of weights at the temperature, over the whole vocabulary or the tokens of top-p and min-p.
    bool weighs;
    bool has_nucleus;
    bool has_logprobs;
    // The number of tokens that top-k keeps, if it draws.
    u32 top_k;
    u32 num_top;
    // The number of tokens that must be sorted.
    u32 num_leading;
};

DEVICE Needs needs_of(const Draw& draw, const SlotParams& params, u32 vocab_size) {
    Needs needs;
    needs.is_drawn = draw.kind == DRAW;
    bool is_random = needs.is_drawn && params.temperature > 0.0f;
    needs.weighs = is_random && params.top_k == 0;
    needs.has_nucleus = needs.weighs && params.top_p < 1.0f;
    needs.has_logprobs = !needs.is_drawn || (params.flags & HAS_LOGPROBS);
    needs.top_k = is_random ? min(params.top_k, vocab_size) : 0;
    u32 num_top = needs.is_drawn ? params.num_top : params.num_prompt_top;
    needs.num_top = needs.has_logprobs ? min(num_top, vocab_size) : 0;
    needs.num_leading = max(needs.top_k, needs.num_top);
    return needs;
}

// The reason for a failed draw, once all maxima are known.
DEVICE u32 error_of(const DrawWork& work) {
    if (work.bad != 0) return NOT_FINITE;
    return bits_of(logit_of(work.best)) == NEG_INF_BITS ? NOTHING_ALLOWED : OK;
}

DEVICE float weight_at(float logit, float max, float temperature) {
    return exponential((logit - max) / temperature);
}

// Loads the logits of a lane, all at once; beyond the vocabulary they are minus infinity.
DEVICE void load_lane(float (&loaded)[BLOCK / LANES], const float* logits, u32 lane_first,
                      u32 vocab_size) {
#pragma unroll
    for (u32 i = 0; i < BLOCK / LANES; i++) {
        u32 token = lane_first + i * LANES;
        loaded[i] = token < vocab_size ? logits[token] : float_of(NEG_INF_BITS);
    }
}

// Sums of lanes in order, from consecutive memory.
DEVICE double sum_lanes(const double* lanes) {
    double sum = 0.0;
    for (u32 lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}
