// Operations on whole pages: rows of one page copied to another, changes of page tables, and pages gathered in, or
// spread from, host memory.
//
// All of this is copying, so each kernel is a loop over 16 bytes at a time where addresses allow: smaller copies would
// not keep enough bytes under way.
#include "prelude.cuh"

struct PageCopy {
    u32 from, to, num_rows;
};

struct CopyRowsArgs {
    // The first layer within page 0.
    u8* kv;
    const PageCopy* copies;
    u64 page_bytes;
    u64 layer_bytes;
    u32 num_kv_heads;
    u32 head_bytes;
    u32 page_size;
    // The bytes of a key without its scale, and the bytes of the scale.
    u32 row_bytes;
    u32 scale_bytes;
};

// Copies bytes with all threads of a block, in pieces as large as both addresses and the length allow.
template <class Piece>
DEVICE void copy_pieces(u8* to, const u8* from, u64 num_bytes) {
    for (u64 i = threadIdx.x; i < num_bytes / sizeof(Piece); i += blockDim.x) {
        ((Piece*)to)[i] = ((const Piece*)from)[i];
    }
}

DEVICE void copy_bytes(u8* to, const u8* from, u64 num_bytes) {
    const u64 all = u64(to) | u64(from) | num_bytes;
    if (all % 16 == 0) {
        copy_pieces<uint4>(to, from, num_bytes);
    } else if (all % 4 == 0) {
        copy_pieces<u32>(to, from, num_bytes);
    } else {
        copy_pieces<u8>(to, from, num_bytes);
    }
}

// Copies the first rows of a page, keys and values of all heads. Block (x, y) has layer y of copy x.
KERNEL(copy_rows, CopyRowsArgs) {
    const PageCopy copy = args.copies[blockIdx.x];
    u8* layer = args.kv + blockIdx.y * args.layer_bytes;
    u8* to = layer + copy.to * args.page_bytes;
    const u8* from = layer + copy.from * args.page_bytes;
    for (u32 head = 0; head < args.num_kv_heads; head++) {
        const u64 side_bytes = u64(args.page_size) * args.row_bytes;
        const u64 scale_side_bytes = u64(args.page_size) * args.scale_bytes;
        for (u32 side = 0; side < 2; side++) {
            const u64 at = u64(head) * args.head_bytes + side * side_bytes;
            copy_bytes(to + at, from + at, u64(copy.num_rows) * args.row_bytes);
            const u64 scale_at = u64(head) * args.head_bytes + 2 * side_bytes + side * scale_side_bytes;
            copy_bytes(to + scale_at, from + scale_at, u64(copy.num_rows) * args.scale_bytes);
        }
    }
}

struct TableChange {
    u32 index, page;
};

struct ChangeTablesArgs {
    u32* tables;
    const TableChange* changes;
    u32 num_changes;
};

// Writes entries of page tables, each at its index among all tables.
KERNEL(change_tables, ChangeTablesArgs) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.num_changes) {
        args.tables[args.changes[i].index] = args.changes[i].page;
    }
}

struct MovePagesArgs {
    // The address of the layer's keys and values in page 0.
    u8* kv;
    const u32* pages;
    // The layer's parts of the pages, one after the other.
    u8* staging;
    u64 page_bytes;
    u64 layer_bytes;
};

// A block's part of a page within a layer, in multiples of 16 bytes.
struct Part {
    u64 first, num_bytes;
};

DEVICE Part part_of(u64 layer_bytes) {
    const u64 len = (layer_bytes / gridDim.y / 16 + 1) * 16;
    const u64 first = min(layer_bytes, blockIdx.y * len);
    return {first, min(len, layer_bytes - first)};
}

// Copies whole pages of a layer to memory of the host or the device. Block (x, y) has part y of page x.
KERNEL(gather_pages, MovePagesArgs) {
    const Part part = part_of(args.layer_bytes);
    const u8* from = args.kv + args.pages[blockIdx.x] * args.page_bytes + part.first;
    copy_bytes(args.staging + blockIdx.x * args.layer_bytes + part.first, from, part.num_bytes);
}

// The inverse of `gather_pages`.
KERNEL(spread_pages, MovePagesArgs) {
    const Part part = part_of(args.layer_bytes);
    u8* to = args.kv + args.pages[blockIdx.x] * args.page_bytes + part.first;
    copy_bytes(to, args.staging + blockIdx.x * args.layer_bytes + part.first, part.num_bytes);
}
