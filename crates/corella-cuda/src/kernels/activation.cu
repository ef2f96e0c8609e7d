// The activation function of a feed-forward layer, and the product with the gated values.

#include "activation_function.cuh"
#include "chunk.cuh"

struct ActivationArgs {
    const ELEMENT* input;
    ELEMENT* out;
    u32 width;
    u32 is_gated;
};

// One block computes `blockDim.x` chunks of one row.
KERNEL(activation, ActivationArgs) {
    const u32 first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    if (first >= args.width) {
        return;
    }
    const bool is_whole = has_whole_chunks(args.width);
    const u64 row = blockIdx.x;
    const ELEMENT* input = args.input + row * args.width * (args.is_gated ? 2 : 1);
    Chunk chunk = load_chunk(input, first, args.width, is_whole);
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) {
        chunk.at[i] = activate(chunk.at[i]);
    }
    if (args.is_gated) {
        const Chunk up = load_chunk(input + args.width, first, args.width, is_whole);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            chunk.at[i] *= up.at[i];
        }
    }
    store_chunk(args.out + row * args.width, first, args.width, is_whole, chunk);
}
