// Reports a step's progress to threads of the host.

#include "prelude.cuh"

// The id of the executor's internal steps, which no thread waits for.
#define NO_STEP 0xffffffffffffffffull

struct ProgressArgs {
    const u64* step;
    u64* progress;
    u32 num_layers;
    u32 padding;
};

// The earlier kernels are done, so all their keys and values are in the device's memory; the fence orders these before
// the progress for other devices that read them, such as network cards.
KERNEL(progress, ProgressArgs) {
    const u64 step = *args.step;
    if (threadIdx.x == 0 && step != NO_STEP) {
        __threadfence_system();
        *(volatile u64*)args.progress = step | args.num_layers;
    }
}
