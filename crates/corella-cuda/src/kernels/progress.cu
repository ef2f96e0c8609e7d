// Tells threads of the host how far a step has come.

#include "prelude.cuh"

// The number that stands for a step of the executor's own, which nobody waits for.
#define NO_STEP 0xffffffffffffffffull

struct ProgressArgs {
    const u64* step;
    u64* progress;
    u32 num_layers;
    u32 padding;
};

// The kernels before this one are done, so all keys and values that they wrote are in the device's memory;
// the fence orders them before the number for other devices that read them, such as network cards.
KERNEL(progress, ProgressArgs) {
    const u64 step = *args.step;
    if (threadIdx.x == 0 && step != NO_STEP) {
        __threadfence_system();
        *(volatile u64*)args.progress = step | args.num_layers;
    }
}
