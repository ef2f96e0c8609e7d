// Eight neighbouring elements of a row, which a thread moves at a time: 16 bytes of bf16, or twice 16 bytes of float.
#pragma once

#include "prelude.cuh"

constexpr u32 CHUNK = 8;

struct Chunk {
    float at[CHUNK];
};

// Whether all chunks of rows of this length begin at a multiple of 16 bytes and are whole. The first
// row's address is a multiple of 256, see `Device::allocate`.
DEVICE bool has_whole_chunks(u32 len) {
    return len % CHUNK == 0;
}

DEVICE Chunk unpack_chunk(uint4 words) {
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
    Chunk chunk;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        chunk.at[2 * i] = low_bf16(pairs[i]);
        chunk.at[2 * i + 1] = high_bf16(pairs[i]);
    }
    return chunk;
}

DEVICE Chunk load_whole_chunk(const bf16* from) {
    return unpack_chunk(*reinterpret_cast<const uint4*>(from));
}

DEVICE Chunk load_whole_chunk(const float* from) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    return Chunk{{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

DEVICE void store_whole_chunk(bf16* to, const Chunk& chunk) {
    const float* x = chunk.at;
    *reinterpret_cast<uint4*>(to) = make_uint4(
        pack2_bf16(x[0], x[1]), pack2_bf16(x[2], x[3]), pack2_bf16(x[4], x[5]), pack2_bf16(x[6], x[7]));
}

DEVICE void store_whole_chunk(float* to, const Chunk& chunk) {
    const float* x = chunk.at;
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Reads the chunk that begins at element `first` of a row of `len` elements; elements beyond its end are zeros.
// `is_whole` is `has_whole_chunks` of the row length in memory.
template <class T>
DEVICE Chunk load_chunk(const T* row, u32 first, u32 len, bool is_whole) {
    Chunk chunk = {};
    if (is_whole) {
        if (first < len) {
            chunk = load_whole_chunk(row + first);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            if (first + i < len) {
                chunk.at[i] = to_float(row[first + i]);
            }
        }
    }
    return chunk;
}

// Writes the part of a chunk within the row.
template <class T>
DEVICE void store_chunk(T* row, u32 first, u32 len, bool is_whole, const Chunk& chunk) {
    if (is_whole) {
        if (first < len) {
            store_whole_chunk(row + first, chunk);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            if (first + i < len) {
                row[first + i] = from_float<T>(chunk.at[i]);
            }
        }
    }
}
