// Embeddings of the step's tokens: the beginning of the residual stream.

#include "chunk.cuh"
#include "step_row.cuh"

struct EmbedArgs {
    const Row* rows;
    const u32* drawn;
    const ELEMENT* embedding;
    const ELEMENT* positions;
    float* residual;
    u32* history;
    u32 hidden;
    u32 max_len;
    float scale;
    u32 vocab_size;
};

// One block computes one row, and each thread every `blockDim.x`th chunk of it.
KERNEL(embed, EmbedArgs) {
    const Row row = args.rows[blockIdx.x];
    if (row.position < 0) {
        return;
    }
    const u32 drawn = row.token < 0 ? args.drawn[row.slot] : u32(row.token);
    // No token from the host or a draw is beyond the vocabulary; the bound keeps an error elsewhere
    // from reading beyond the table.
    const u32 token = min(drawn, args.vocab_size - 1);
    const u64 position = u64(row.position);
    if (threadIdx.x == 0) {
        args.history[u64(row.slot) * args.max_len + position] = token;
    }
    const bool is_whole = has_whole_chunks(args.hidden);
    const ELEMENT* from = args.embedding + u64(token) * args.hidden;
    float* to = args.residual + u64(blockIdx.x) * args.hidden;
    for (u32 first = threadIdx.x * CHUNK; first < args.hidden; first += blockDim.x * CHUNK) {
        Chunk chunk = load_chunk(from, first, args.hidden, is_whole);
        for (u32 i = 0; i < CHUNK; i++) {
            chunk.at[i] *= args.scale;
        }
        if (args.positions != nullptr) {
            const ELEMENT* learned = args.positions + position * args.hidden;
            const Chunk added = load_chunk(learned, first, args.hidden, is_whole);
            for (u32 i = 0; i < CHUNK; i++) {
                chunk.at[i] += added.at[i];
            }
        }
        store_chunk(to, first, args.hidden, is_whole, chunk);
    }
}
