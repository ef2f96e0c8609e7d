// sm_90's copies of whole tiles: barriers that count bytes, copies by tensor maps, and clusters of blocks that read
// each other's shared memory. Addresses of shared memory are as `shared_address` returns them.
#pragma once
#include "prelude.cuh"

// The output of `cuTensorMapEncodeTiled`.
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE void barrier_init(u32 barrier, u32 num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(num_arrivals) : "memory");
}

// Makes initialised barriers visible to copies and to other blocks.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Arrives at the same barrier of another block of the cluster.
DEVICE void barrier_arrive_at(u32 barrier, u32 block) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}"
                 :
                 : "r"(barrier), "r"(block)
                 : "memory");
}

// Arrives, and extends the phase until `num_bytes` bytes have been copied.
DEVICE void barrier_expect(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(num_bytes) : "memory");
}

// Waits for the end of a phase. The first phase has parity 0; the phase before it, which has always ended, has parity
// 1.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}"
                 :
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

// A barrier among `num_threads` threads. `which` is the index of one of a block's 16 barriers. __syncthreads uses
// barrier 0.
DEVICE void sync_threads(u32 which, u32 num_threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(which), "r"(num_threads) : "memory");
}

DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory"); }

// Begins to copy the box at these coordinates, the innermost first. `barrier` counts its bytes.
DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :
                 : "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :
                 : "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Like `copy_box`, but into the same place of several blocks, each with a bit in `blocks`, and with the same barrier in
// each block.
DEVICE void copy_box_to(u32 blocks, u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%4, %5}], [%2], %3;"
                 :
                 : "r"(to), "l"(&map), "r"(barrier), "h"(u16(blocks)), "r"(x), "r"(y)
                 : "memory");
}

DEVICE void copy_box_to(u32 blocks, u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
                 :
                 : "r"(to), "l"(&map), "r"(barrier), "h"(u16(blocks)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Orders earlier ordinary accesses before later copies to the same memory.
DEVICE void copy_fence() { asm volatile("fence.proxy.async;" : : : "memory"); }

// The index of a block in its cluster.
DEVICE u32 cluster_block() {
    u32 block;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}

// Waits for all threads of the cluster, and sees their earlier writes.
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" : : : "memory");
}

// The address of another block's copy of `address` in the cluster.
DEVICE u32 address_in(u32 block, u32 address) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

DEVICE float4 load_from_cluster(u32 address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Sets the number of registers of a warpgroup's threads. All threads of the warpgroup call it. Warpgroups that need
// fewer registers call it first.
template <u32 NUM>
DEVICE void give_up_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(NUM));
}

template <u32 NUM>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(NUM));
}
