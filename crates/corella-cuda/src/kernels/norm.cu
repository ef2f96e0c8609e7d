// The step between two matrix products: a branch is added to the residual stream, and the sum is normed for the next
// product.

#include "chunk.cuh"

// The kinds of norms.
#define NO_NORM 0
#define RMS_NORM 1
#define LAYER_NORM 2

struct NormWeights {
    const float* weight;
    const float* bias;
    u32 kind;
    float eps;
};

struct NormArgs {
    float* residual;
    const u32* index;
    const BRANCH* branch;
    OUT* out;
    NormWeights after;
    NormWeights before;
    float residual_scale;
    u32 hidden;
};

// The part of a row that a thread holds in registers: chunks `threadIdx.x + i * blockDim.x`.
struct Part {
    Chunk chunks[CHUNKS];
};

DEVICE u32 chunk_begin(u32 i) {
    return (threadIdx.x + i * blockDim.x) * CHUNK;
}

// The sum of squares of the differences from `mean` over the whole row.
DEVICE float sum_of_squares(const Part& part, float mean, u32 hidden) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
#pragma unroll
        for (u32 j = 0; j < CHUNK; j++) {
            // Elements beyond the row are 0, and would add to the sum if the mean is not 0.
            const bool is_inside = chunk_begin(i) + j < hidden;
            const float difference = is_inside ? part.chunks[i].at[j] - mean : 0.0f;
            sum = fmaf(difference, difference, sum);
        }
    }
    return block_sum(sum);
}

DEVICE float mean_of(const Part& part, u32 hidden) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
#pragma unroll
        for (u32 j = 0; j < CHUNK; j++) {
            sum += part.chunks[i].at[j];
        }
    }
    return block_sum(sum) / float(hidden);
}

// Norms a row in place. All threads of the block take the same branches, which depend only on the model.
DEVICE void normalise(Part& part, const NormWeights& norm, u32 hidden) {
    if (norm.kind == NO_NORM) {
        return;
    }
    const bool is_whole = has_whole_chunks(hidden);
    const float mean = norm.kind == LAYER_NORM ? mean_of(part, hidden) : 0.0f;
    const float variance = sum_of_squares(part, mean, hidden) / float(hidden);
    const float scale = 1.0f / sqrtf(variance + norm.eps);
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
        const Chunk weight = load_chunk(norm.weight, chunk_begin(i), hidden, is_whole);
        Chunk bias = {};
        if (norm.bias != nullptr) {
            bias = load_chunk(norm.bias, chunk_begin(i), hidden, is_whole);
        }
#pragma unroll
        for (u32 j = 0; j < CHUNK; j++) {
            const float x = part.chunks[i].at[j];
            part.chunks[i].at[j] = (x - mean) * scale * weight.at[j] + bias.at[j];
        }
    }
}

// One block computes one row and reads it once: for 4096 elements, each of 512 threads holds 8. The order of sums
// depends only on the length of the row.
KERNEL_AHEAD(residual_norm, NormArgs, 1024, 1) {
    const u32 hidden = args.hidden;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
        if (args.out != nullptr && chunk_begin(i) < hidden) prefetch(args.before.weight + chunk_begin(i));
    }
    wait_for_kernel_before();
    const bool is_whole = has_whole_chunks(hidden);
    const u64 row = args.index != nullptr ? args.index[blockIdx.x] : blockIdx.x;
    float* residual = args.residual + row * hidden;
    Part x;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
        x.chunks[i] = load_chunk(residual, chunk_begin(i), hidden, is_whole);
    }
    if (args.branch != nullptr) {
        Part branch;
        const BRANCH* from = args.branch + row * hidden;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            branch.chunks[i] = load_chunk(from, chunk_begin(i), hidden, is_whole);
        }
        normalise(branch, args.after, hidden);
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) {
                x.chunks[i].at[j] += args.residual_scale * branch.chunks[i].at[j];
            }
            store_chunk(residual, chunk_begin(i), hidden, is_whole, x.chunks[i]);
        }
    }
    if (args.out != nullptr) {
        normalise(x, args.before, hidden);
        OUT* out = args.out + u64(blockIdx.x) * hidden;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            store_chunk(out, chunk_begin(i), hidden, is_whole, x.chunks[i]);
        }
    }
}
