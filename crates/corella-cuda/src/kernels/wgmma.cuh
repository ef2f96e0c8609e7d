// A warpgroup's products on the tensor cores of sm_90a, from shared memory to registers. ROW_TILE, a macro, is the number
// of columns: 64, 128 or 192.
#pragma once
#include "prelude.cuh"

// A warpgroup's 64 x ROW_TILE sums in f32. Lane 4 g + t of warp w has, for i < 4, row 16 w + g + i / 2 * 8 and column
// 8 j + 2 t + i % 2 in `at[4 * j + i]`.
struct WarpgroupSums {
    float at[ROW_TILE / 2];
};

// Describes rows of 128 bytes in shared memory that TMA has swizzled. Eight rows have 1,024 bytes. `shared` is aligned
// to that, plus a multiple of 32 bytes where the inputs of a product begin further along the rows.
DEVICE u64 swizzled_rows(u32 shared) {
    const u64 SWIZZLE_128_BYTES = 1, NEXT_8_ROWS = 1024;
    return u64(shared >> 4 & 0x3fff) | u64(1) << 16 | (NEXT_8_ROWS >> 4) << 32 | SWIZZLE_128_BYTES << 62;
}

// Makes later products read the registers as they are now.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits until at most PENDING of the newest committed groups are still under way.
template <u32 PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

#define SUMS_4(i) "+f"(sums.at[i]), "+f"(sums.at[i + 1]), "+f"(sums.at[i + 2]), "+f"(sums.at[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)

// Begins to add the products of 16 inputs of 64 rows of weights and ROW_TILE rows of inputs, or to replace the sums by
// them.
DEVICE void wgmma_64x16(WarpgroupSums& sums, u64 weights, u64 inputs, bool adds) {
#if ROW_TILE == 64
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;}"
        : SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24)
        : "l"(weights), "l"(inputs), "r"(u32(adds)));
#elif ROW_TILE == 128
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;}"
        : SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24), SUMS_8(32), SUMS_8(40),
          SUMS_8(48), SUMS_8(56)
        : "l"(weights), "l"(inputs), "r"(u32(adds)));
#elif ROW_TILE == 192
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %98, 0;"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, p, 1, 1, 0, 0;}"
        : SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24), SUMS_8(32), SUMS_8(40),
          SUMS_8(48), SUMS_8(56), SUMS_8(64), SUMS_8(72), SUMS_8(80), SUMS_8(88)
        : "l"(weights), "l"(inputs), "r"(u32(adds)));
#endif
}
