// The end of a linear layer whose sums are in memory: the sums of splits are added in their order, and the outputs are
// written. With one split, these are the sums of a product from the vendor's library.
#include "linear_args.cuh"

DEVICE Chunk sum_splits(const LinearArgs& args, u32 row, u32 first) {
    Chunk sums = {};
    for (u32 split = 0; split < args.num_splits; split++) {
        const float* partials = args.partials + (u64(split) * args.rows + row) * args.n;
        const Chunk chunk = load_chunk(partials, first, args.n, has_whole_chunks(args.n));
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) sums.at[i] += chunk.at[i];
    }
    return sums;
}

// A thread has 8 neighbouring outputs of a row.
KERNEL_OF(linear_finish, LinearArgs, 128, 8) {
    const u32 first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK, row = blockIdx.x;
#if GATED
    if (first >= args.n / 2) return;
    write_gated(args, row, first, sum_splits(args, row, first), sum_splits(args, row, args.n / 2 + first));
#else
    if (first >= args.n) return;
    write_outputs(args, row, first, sum_splits(args, row, first));
#endif
}
