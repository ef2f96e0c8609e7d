// The basis of all kernels. On a GPU this is CUDA C++ as NVRTC compiles it, without any other header. The emulated
// device compiles the same kernels with a host compiler. There, emulation.h is included first. It defines
// EMULATED_DEVICE, and the functions that differ on that device.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

constexpr u32 WARP_SIZE = 32;

// A function of kernels.
#define DEVICE static __device__ __forceinline__

#ifndef EMULATED_DEVICE

constexpr u32 ALL_LANES = 0xffffffffu;

// `KERNEL(name, NameArgs) { ... }` defines a kernel whose body sees `args`, its only parameter. A block of such a
// kernel may have any number of threads, so the compiler gives each thread at most 64 registers. KERNEL_OF sets the
// largest number of threads in a block, so that each thread may have 65536 / threads registers, and the number of such
// blocks that must fit on a multiprocessor.
//
// From sm_90 on, a kernel's blocks start on multiprocessors when the last blocks of the previous kernel have ended,
// before the previous kernel's writes are visible. Bodies begin when these writes are visible. Only bodies of
// KERNEL_AHEAD begin earlier, and read weights first: they call `wait_for_kernel_before` themselves before they touch
// memory that any kernel writes. Every kernel must wait: the next kernel takes its end as the end of all earlier ones.
// No kernel calls griddepcontrol.launch_dependents, which would start blocks of the next kernel while blocks of this
// one still run. These blocks would crowd the multiprocessors that are free first; a step of Llama 3 8B took 1.3 times
// as long.
#define KERNEL(name, Args) KERNEL_OF(name, Args, 1024, 1)
#define KERNEL_OF(name, Args, max_threads, blocks_per_multiprocessor)                                                  \
    DEFINE_KERNEL(name, Args, max_threads, blocks_per_multiprocessor, wait_for_kernel_before())
#define KERNEL_AHEAD(name, Args, max_threads, blocks_per_multiprocessor)                                               \
    DEFINE_KERNEL(name, Args, max_threads, blocks_per_multiprocessor, (void)0)
#define DEFINE_KERNEL(name, Args, max_threads, blocks_per_multiprocessor, before_body)                                 \
    DEVICE void name##_body(const Args& args);                                                                         \
    extern "C" __constant__ u32 name##_args_bytes = sizeof(Args);                                                      \
    extern "C" __global__ void __launch_bounds__(max_threads, blocks_per_multiprocessor)                               \
        name(const __grid_constant__ Args args) {                                                                      \
        before_body;                                                                                                   \
        name##_body(args);                                                                                             \
    }                                                                                                                  \
    DEVICE void name##_body(const Args& args)

DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Begins to bring the line of an address to the cache that all multiprocessors share.
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" : : "l"(global)); }

// The base of a block's dynamic shared memory, aligned to 128 bytes.
DEVICE u8* dynamic_shared() {
    extern __shared__ __align__(128) u8 dynamic_shared_memory[];
    return dynamic_shared_memory;
}

DEVICE u16 bf16_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u32 pack2_bf16(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

DEVICE u16 f16_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE float float_from_f16_bits(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// 2 to the power of x, by the device's fastest instruction; 0 for x = -infinity.
DEVICE float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// The value of another lane of the warp. All 32 lanes must call this function, and the other shuffles, together.
template <class T>
DEVICE T shuffle(T value, u32 lane) {
    static_assert(sizeof(T) == 4, "shuffles exchange 32 bits");
    return __shfl_sync(ALL_LANES, value, lane);
}

template <class T>
DEVICE T shuffle_xor(T value, u32 mask) {
    static_assert(sizeof(T) == 4, "shuffles exchange 32 bits");
    return __shfl_xor_sync(ALL_LANES, value, mask);
}

// The value of the lane `delta` further on; beyond the last lane, the caller's own.
template <class T>
DEVICE T shuffle_down(T value, u32 delta) {
    static_assert(sizeof(T) == 4, "shuffles exchange 32 bits");
    return __shfl_down_sync(ALL_LANES, value, delta);
}

// Bit i is lane i's condition. All 32 lanes call it together.
DEVICE u32 ballot(bool condition) { return __ballot_sync(ALL_LANES, condition); }

// Sum and maximum over the lanes of a warp, as a butterfly from distance 16 to 1, so that all lanes get the same bits.
DEVICE float warp_sum(float value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value += shuffle_xor(value, distance);
    return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value = fmaxf(value, shuffle_xor(value, distance));
    return value;
}

// Adds to a counter and returns its earlier value.
DEVICE u32 atomic_add(u32* counter, u32 addend) { return atomicAdd(counter, addend); }

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// d += a · b on a tensor core, for a of 16 rows and 16 columns, b of 16 rows and 8 columns, both bf16, and d of 16 rows
// and 8 columns in f32. All 32 lanes call it together; lane l, with g = l / 4 and t = l % 4, holds
//   a[0], a[1], a[2], a[3]: (row g, columns 2t, 2t+1), (row g+8, the same), (row g, columns 2t+8, 2t+9), (row g+8, ...)
//   b[0], b[1]: (rows 2t, 2t+1 of column g), (rows 2t+8, 2t+9 of column g)
//   d[0..4]: (row g, columns 2t and 2t+1), (row g+8, columns 2t and 2t+1),
// the element that comes first in the lower half of a register.
DEVICE void mma_16x8x16(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8 and gets, in r[j],
// elements 2(l % 4) and 2(l % 4) + 1 of row l / 4 of matrix j; transposed, of column l / 4.
DEVICE void load_matrix_x4(u32 r[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

DEVICE void load_matrix_x4_transposed(u32 r[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

// Begins to copy 16 bytes from global to shared memory, both aligned to 16. This thread may read the bytes after the
// copy's group is committed and waited for. Other threads may read them after a barrier that follows the wait.
DEVICE void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(shared)), "l"(global) : "memory");
}

// The same, or 16 zeros if `reads` is false. `global` must be a valid address even without a read.
DEVICE void copy_async_16(void* shared, const void* global, bool reads) {
    const u32 num_bytes = reads ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(num_bytes)
                 : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until at most PENDING of the newest committed groups are still under way.
template <u32 PENDING>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// 16 bytes that are read once in a launch, such as weights, and are not written meanwhile.
DEVICE uint4 load_streaming_16(const void* global) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(global));
    return value;
}

#endif  // EMULATED_DEVICE

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }
DEVICE float to_float(f16 value) { return float_from_f16_bits(value.bits); }
DEVICE float to_float(i8 value) { return static_cast<float>(value); }

// `from_float<T>(x)`: the nearest value of T, ties to even.
template <class T>
DEVICE T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    return bf16{bf16_bits(value)};
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
    return f16{f16_bits(value)};
}

// The two values of a register of `pack2_bf16`.
DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE bool vote_any(bool condition) { return ballot(condition) != 0; }

// Sum and maximum over the threads of a block, the same bits for all of them: each warp by its butterfly, then the
// warps in order. All threads of the block call it together.
DEVICE float block_sum(float value) {
    __shared__ float of_warps[WARP_SIZE];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    float sum = of_warps[0];
    for (u32 warp = 1; warp < blockDim.x / WARP_SIZE; ++warp) sum += of_warps[warp];
    return sum;
}

DEVICE float block_max(float value) {
    __shared__ float of_warps[WARP_SIZE];
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    float maximum = of_warps[0];
    for (u32 warp = 1; warp < blockDim.x / WARP_SIZE; ++warp) maximum = fmaxf(maximum, of_warps[warp]);
    return maximum;
}
