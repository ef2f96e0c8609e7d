// The emulated device's side of prelude.cuh: a host compiler includes this before a kernel's source.
//
// The threads of a block are fibers of one host thread. A fiber runs until it waits for others, at a barrier or for an
// exchange within its warp; the last to arrive does the exchange for all. Fibers run alternately in rising and in
// falling order, so that a kernel that lacks a barrier gives a wrong result in one of the orders. The order of blocks
// alternates from launch to launch, and no block may wait for another. Shared memory holds NaN before each block. The
// destination of an asynchronous copy holds NaN until the kernel waits for the copy.
//
// All state belongs to one copy of the shared object, which runs one launch at a time. No state may lie in .bss,
// because .bss is the static shared memory: in a kernel's source, only shared variables have no initialiser.
#pragma once
#define EMULATED_DEVICE

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if !defined(__x86_64__) || defined(EMULATION_BY_UCONTEXT)
#include <ucontext.h>
#endif

#define __device__
#define __forceinline__ inline
#define __constant__ static const
#define __shared__ static
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// In CUDA code, alignas comes after __shared__. There, a host compiler accepts the attribute.
#define alignas(n) __attribute__((aligned(n)))

struct float2 { float x, y; } __align__(8);
struct float4 { float x, y, z, w; } __align__(16);
struct int2 { int x, y; } __align__(8);
struct int4 { int x, y, z, w; } __align__(16);
struct uint2 { unsigned x, y; } __align__(8);
struct uint4 { unsigned x, y, z, w; } __align__(16);
static inline float2 make_float2(float x, float y) { return float2{x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return int2{x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return int4{x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

// --- What runs -------------------------------------------------------------------------------------------------------

// The layout of `EmulatedLaunch` in `emulated/library.rs`.
struct EmulatedLaunch {
    void (*kernel)(const void* args);
    const char* name;
    const void* args;
    unsigned blocks[3];
    unsigned threads;
    unsigned shared_bytes;
    // Dynamic shared memory, aligned to 128 bytes, with inaccessible memory after it.
    unsigned char* shared;
    // The stacks of threads, at a distance of `stack_stride` bytes.
    unsigned char* stacks;
    size_t stack_stride;
    // The block and the thread that run now, for the handler of a fault.
    unsigned now[4];
    char error[512];
};

namespace emulation {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;

struct Dimensions {
    unsigned x, y, z;
};

struct PendingCopy {
    void* to;
    const void* from;
    unsigned long long group;
};

struct Fiber {
#if !defined(__x86_64__) || defined(EMULATION_BY_UCONTEXT)
    ucontext_t context;
#else
    void* stack_pointer;
#endif
    // The operation at which the fiber waits; "" while the fiber can run.
    const char* waits_at;
    PendingCopy* copies;
    unsigned num_copies, max_copies;
    unsigned long long num_groups;
};

struct Warp {
    // Lanes that can continue.
    unsigned ready;
    unsigned num_arrived;
    bool falling;
    const char* exchange;
    void* values[WARP];
};

struct State {
    EmulatedLaunch* launch;
    Dimensions thread_index, block_index, block_size, grid_size;
    unsigned num_warps;
    unsigned num_ended;
    unsigned num_at_barrier;
    bool falling;
    // Whether the last launch began with its last block.
    bool blocks_fall;
    Fiber main;
    Warp warps[MAX_THREADS / WARP];
    Fiber fibers[MAX_THREADS];
};

static State state __attribute__((section(".data.emulation_state"))) = {};

#if !defined(__x86_64__) || defined(EMULATION_BY_UCONTEXT)

static void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

static void prepare(Fiber& fiber, unsigned char* stack, size_t num_bytes, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = num_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

#else

// Saves the registers that a function must preserve on the stack, the stack's pointer in `*from`, and continues where
// `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void emulation_switch(void** from, void* to);
asm(".text\n"
    ".local emulation_switch\n"
    ".type emulation_switch, @function\n"
    "emulation_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size emulation_switch, .-emulation_switch\n");

static void switch_fiber(Fiber& from, Fiber& to) { emulation_switch(&from.stack_pointer, to.stack_pointer); }

static void prepare(Fiber& fiber, unsigned char* stack, size_t num_bytes, void (*entry)()) {
    // Six registers are popped, then `ret` takes the entry. A function expects its stack 8 bytes off a multiple of 16.
    void** top = reinterpret_cast<void**>(stack + num_bytes);
    memset(top - 8, 0, 64);
    top[-2] = reinterpret_cast<void*>(entry);
    fiber.stack_pointer = top - 8;
}

#endif

// Ends the launch with an error. The fibers of the block are never resumed.
[[noreturn]] static void fail(const char* format, ...) {
    char reason[400];
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    EmulatedLaunch& launch = *state.launch;
    const Dimensions& block = state.block_index;
    snprintf(launch.error, sizeof launch.error, "kernel %s, block (%u, %u, %u): %s", launch.name, block.x, block.y,
             block.z, reason);
    Fiber abandoned;
    switch_fiber(abandoned, state.main);
    __builtin_unreachable();
}

// Names a waiting thread, and a thread that it waits for. A pair within one warp comes first: threads of other warps
// may wait at a barrier only because of such a pair.
static void report_deadlock() {
    const unsigned num_threads = state.block_size.x;
    auto place = [](unsigned thread) { return state.fibers[thread].waits_at; };
    auto is_at = [&](unsigned thread, const char* name) { return !strcmp(place(thread), name); };
    unsigned waiting = 0;
    while (waiting < num_threads && (is_at(waiting, "the end") || is_at(waiting, "__syncthreads"))) ++waiting;
    unsigned missing = waiting / WARP * WARP;
    if (waiting == num_threads) {
        for (waiting = 0; !is_at(waiting, "__syncthreads");) ++waiting;
        missing = 0;
    }
    while (is_at(missing, place(waiting))) ++missing;
    fail("thread %u waits at %s, which thread %u never reaches: it is at %s", waiting, place(waiting), missing,
         place(missing));
}

// Runs another fiber that need not wait.
static void run_next() {
    const unsigned last = state.thread_index.x;
    unsigned warp = last / WARP;
    for (unsigned i = 0; i < state.num_warps && !state.warps[warp].ready; ++i) {
        warp = state.falling ? (warp ? warp - 1 : state.num_warps - 1) : (warp + 1 == state.num_warps ? 0 : warp + 1);
    }
    const unsigned ready = state.warps[warp].ready;
    if (!ready) {
        if (state.num_ended < state.block_size.x) report_deadlock();
        switch_fiber(state.fibers[last], state.main);
        return;
    }
    const unsigned lane = state.warps[warp].falling ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
    const unsigned next = warp * WARP + lane;
    state.thread_index.x = next;
    state.launch->now[3] = next;
    if (next != last) switch_fiber(state.fibers[last], state.fibers[next]);
}

static void wait_at(const char* place) {
    const unsigned thread = state.thread_index.x;
    state.fibers[thread].waits_at = place;
    state.warps[thread / WARP].ready &= ~(1u << thread % WARP);
    run_next();
    state.fibers[thread].waits_at = "a place before";
}

// Waits until all lanes of the warp have arrived, each with a value. The last lane calls `act` with all values.
template <class Value, class Act>
static inline void exchange(const char* name, Value& value, Act act) {
    const unsigned thread = state.thread_index.x;
    Warp& warp = state.warps[thread / WARP];
    if (warp.num_arrived > 0 && warp.exchange != name && strcmp(warp.exchange, name)) {
        fail("thread %u is at %s while other lanes of its warp wait at %s", thread, name, warp.exchange);
    }
    warp.exchange = name;
    warp.values[thread % WARP] = &value;
    if (++warp.num_arrived < WARP) return wait_at(name);
    warp.num_arrived = 0;
    act(reinterpret_cast<Value* const*>(warp.values));
    warp.ready = ~0u;
    warp.falling = !warp.falling;
}

static void run_thread() {
    state.launch->kernel(state.launch->args);
    ++state.num_ended;
    wait_at("the end");
}

static inline void check_aligned(const void* pointer, const char* what) {
    if (reinterpret_cast<size_t>(pointer) % 16) {
        fail("thread %u: %s is not aligned to 16 bytes", state.thread_index.x, what);
    }
}

extern "C" unsigned char __bss_start __attribute__((visibility("hidden")));
extern "C" unsigned char _end __attribute__((visibility("hidden")));

static inline bool is_shared(const void* pointer) {
    const auto* byte = static_cast<const unsigned char*>(pointer);
    const auto* dynamic = state.launch->shared;
    return (byte >= &__bss_start && byte < &_end) || (byte >= dynamic && byte < dynamic + state.launch->shared_bytes);
}

static inline void check_shared(const void* pointer, const char* what) {
    check_aligned(pointer, what);
    if (!is_shared(pointer)) fail("thread %u: %s is not in shared memory", state.thread_index.x, what);
}

static void run_block() {
    EmulatedLaunch& launch = *state.launch;
    // The memory after the section's end, up to the end of its page, belongs to no variable.
    memset(&__bss_start, 0xff, &_end - &__bss_start);
    memset(launch.shared, 0xff, launch.shared_bytes);
    const Dimensions& block = state.block_index;
    launch.now[0] = block.x, launch.now[1] = block.y, launch.now[2] = block.z, launch.now[3] = 0;
    state.num_warps = launch.threads / WARP;
    state.num_ended = state.num_at_barrier = 0;
    state.falling = (block.x + block.y + block.z) % 2;
    for (unsigned warp = 0; warp < state.num_warps; ++warp) {
        state.warps[warp].ready = ~0u;
        state.warps[warp].num_arrived = 0;
        state.warps[warp].falling = state.falling;
    }
    for (unsigned thread = 0; thread < launch.threads; ++thread) {
        Fiber& fiber = state.fibers[thread];
        fiber.waits_at = "its begin";
        fiber.num_copies = 0;
        fiber.num_groups = 0;
        // The guard page at a stack's lower end is the host's.
        prepare(fiber, launch.stacks + thread * launch.stack_stride, launch.stack_stride, run_thread);
    }
    const unsigned first = state.falling ? launch.threads - 1 : 0;
    state.thread_index = Dimensions{first, 0, 0};
    launch.now[3] = first;
    switch_fiber(state.main, state.fibers[first]);
}

}  // namespace emulation

// Returns whether the launch succeeded; otherwise its `error` gives the reason.
extern "C" __attribute__((visibility("default"))) bool emulation_run(EmulatedLaunch* launch) {
    using namespace emulation;
    state.launch = launch;
    state.block_size = Dimensions{launch->threads, 1, 1};
    state.grid_size = Dimensions{launch->blocks[0], launch->blocks[1], launch->blocks[2]};
    state.blocks_fall = !state.blocks_fall;
    const Dimensions& grid = state.grid_size;
    const unsigned long long num_blocks = static_cast<unsigned long long>(grid.x) * grid.y * grid.z;
    for (unsigned long long i = 0; i < num_blocks; ++i) {
        const unsigned long long block = state.blocks_fall ? num_blocks - 1 - i : i, row = block / grid.x;
        state.block_index = Dimensions{static_cast<unsigned>(block % grid.x), static_cast<unsigned>(row % grid.y),
                                       static_cast<unsigned>(row / grid.y)};
        run_block();
        if (launch->error[0]) return false;
    }
    return true;
}

// --- What CUDA has built in -------------------------------------------------------------------------------------------

static const emulation::Dimensions& threadIdx = emulation::state.thread_index;
static const emulation::Dimensions& blockIdx = emulation::state.block_index;
static const emulation::Dimensions& blockDim = emulation::state.block_size;
static const emulation::Dimensions& gridDim = emulation::state.grid_size;

static inline void __syncthreads() {
    using namespace emulation;
    if (++state.num_at_barrier < state.block_size.x) return wait_at("__syncthreads");
    state.num_at_barrier = 0;
    state.falling = !state.falling;
    for (unsigned warp = 0; warp < state.num_warps; ++warp) {
        state.warps[warp].ready = ~0u;
        state.warps[warp].falling = state.falling;
    }
}

static inline void __syncwarp() {
    int nothing = 0;
    emulation::exchange("__syncwarp", nothing, [](int* const*) {});
}

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}

template <class To, class From>
static inline To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits of the same number");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
static inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }
static inline float __uint_as_float(unsigned value) { return emulated_bits<float>(value); }
static inline int __float_as_int(float value) { return emulated_bits<int>(value); }
static inline float __int_as_float(int value) { return emulated_bits<float>(value); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline int __float2int_rn(float value) { return static_cast<int>(rintf(value)); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
template <class T>
static inline T __ldg(const T* pointer) { return *pointer; }

// Sum of the products of four signed bytes each, and c.
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return c;
}

#define EMULATED_MIN_MAX(T)                                          \
    static inline T min(T a, T b) { return b < a ? b : a; }          \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
static inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
static inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }

// --- The other side of prelude.cuh; its comments say what these do -----------------------------------------------------

#define KERNEL(name, Args) KERNEL_OF(name, Args, 1024, 1)
#define KERNEL_OF(name, Args, max_threads, blocks_per_multiprocessor)                                               \
    static void name##_body(const Args& args);                                                                      \
    extern "C" {                                                                                                    \
    __attribute__((visibility("default"))) extern const unsigned name##_args_bytes = sizeof(Args);                  \
    __attribute__((visibility("default"))) extern const unsigned name##_max_threads = max_threads;                  \
    __attribute__((visibility("default"))) void name(const void* args) { name##_body(*static_cast<const Args*>(args)); } \
    }                                                                                                               \
    static void name##_body(const Args& args)
#define KERNEL_AHEAD(name, Args, max_threads, blocks_per_multiprocessor)                                            \
    KERNEL_OF(name, Args, max_threads, blocks_per_multiprocessor)

// Kernels run one after the other.
static inline void wait_for_kernel_before() {}
static inline void prefetch(const void*) {}

static inline unsigned char* dynamic_shared() { return emulation::state.launch->shared; }

// Rounds as the device's conversions do: to the nearest number, ties to even, and every NaN to the same NaN.
static inline unsigned short bf16_bits(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline unsigned pack2_bf16(float low, float high) {
    return static_cast<unsigned>(bf16_bits(high)) << 16 | bf16_bits(low);
}

static inline unsigned short f16_bits(float value) {
    if (value != value) return 0x7fff;
    return emulated_bits<unsigned short>(static_cast<_Float16>(value));
}

static inline float float_from_f16_bits(unsigned short bits) {
    return static_cast<float>(emulated_bits<_Float16>(bits));
}

static inline float exp2_fast(float x) { return exp2f(x); }

namespace emulation {

struct Shuffled {
    unsigned value, from, result;
};

template <class T>
static inline T shuffle_from(const char* name, T value, unsigned lane) {
    static_assert(sizeof(T) == 4, "shuffles exchange 32 bits");
    Shuffled shuffled{emulated_bits<unsigned>(value), lane, 0};
    exchange(name, shuffled, [](Shuffled* const* lanes) {
        for (unsigned lane = 0; lane < WARP; ++lane) lanes[lane]->result = lanes[lanes[lane]->from]->value;
    });
    return emulated_bits<T>(shuffled.result);
}

// The butterfly of prelude.cuh in one exchange.
template <class Combine>
static inline float butterfly(const char* name, float value, Combine) {
    exchange(name, value, [](float* const* lanes) {
        float values[WARP], others[WARP];
        for (unsigned lane = 0; lane < WARP; ++lane) values[lane] = *lanes[lane];
        for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
            memcpy(others, values, sizeof values);
            for (unsigned lane = 0; lane < WARP; ++lane) {
                values[lane] = Combine::combine(others[lane], others[lane ^ distance]);
            }
        }
        for (unsigned lane = 0; lane < WARP; ++lane) *lanes[lane] = values[lane];
    });
    return value;
}

struct Add {
    static float combine(float a, float b) { return a + b; }
};

struct Maximum {
    static float combine(float a, float b) { return fmaxf(a, b); }
};

}  // namespace emulation

template <class T>
static inline T shuffle(T value, unsigned lane) { return emulation::shuffle_from("shuffle", value, lane % 32); }

template <class T>
static inline T shuffle_xor(T value, unsigned mask) {
    return emulation::shuffle_from("shuffle_xor", value, (threadIdx.x ^ mask) % 32);
}

template <class T>
static inline T shuffle_down(T value, unsigned delta) {
    const unsigned lane = threadIdx.x % 32;
    return emulation::shuffle_from("shuffle_down", value, lane + delta < 32 ? lane + delta : lane);
}

static inline unsigned ballot(bool condition) {
    unsigned votes = condition;
    emulation::exchange("ballot", votes, [](unsigned* const* lanes) {
        unsigned all = 0;
        for (unsigned lane = 0; lane < 32; ++lane) all |= *lanes[lane] << lane;
        for (unsigned lane = 0; lane < 32; ++lane) *lanes[lane] = all;
    });
    return votes;
}

static inline float warp_sum(float value) { return emulation::butterfly("warp_sum", value, emulation::Add()); }
static inline float warp_max(float value) { return emulation::butterfly("warp_max", value, emulation::Maximum()); }

static inline unsigned atomic_add(unsigned* counter, unsigned addend) {
    return __atomic_fetch_add(counter, addend, __ATOMIC_RELAXED);
}

namespace emulation {

struct Fragments {
    float* d;
    const unsigned* a;
    const unsigned* b;
};

static void multiply_fragments(Fragments* const* lanes) {
    float a[16][16], b[16][8];
    auto low = [](unsigned pair) { return __uint_as_float(pair << 16); };
    auto high = [](unsigned pair) { return __uint_as_float(pair & 0xffff0000u); };
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const unsigned group = lane / 4, pair = lane % 4 * 2;
        for (unsigned i = 0; i < 4; ++i) {
            float* row = a[group + i % 2 * 8] + pair + i / 2 * 8;
            row[0] = low(lanes[lane]->a[i]);
            row[1] = high(lanes[lane]->a[i]);
        }
        for (unsigned i = 0; i < 2; ++i) {
            b[pair + i * 8][group] = low(lanes[lane]->b[i]);
            b[pair + i * 8 + 1][group] = high(lanes[lane]->b[i]);
        }
    }
    for (unsigned row = 0; row < 16; ++row) {
        float sums[8];
        for (unsigned column = 0; column < 8; ++column) {
            sums[column] = lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
        }
        for (unsigned k = 0; k < 16; ++k) {
            for (unsigned column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
        }
        for (unsigned column = 0; column < 8; ++column) {
            lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2] = sums[column];
        }
    }
}

struct MatrixRow {
    const void* row;
    unsigned* r;
};

template <bool TRANSPOSED>
static void load_matrices(MatrixRow* const* lanes) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned short elements[8][8];
        for (unsigned row = 0; row < 8; ++row) memcpy(elements[row], lanes[matrix * 8 + row]->row, 16);
        for (unsigned lane = 0; lane < WARP; ++lane) {
            const unsigned major = lane / 4, minor = lane % 4 * 2;
            const unsigned first = TRANSPOSED ? elements[minor][major] : elements[major][minor];
            const unsigned second = TRANSPOSED ? elements[minor + 1][major] : elements[major][minor + 1];
            lanes[lane]->r[matrix] = second << 16 | first;
        }
    }
}

static inline void begin_copy(void* shared, const void* global) {
    check_shared(shared, "the destination of copy_async_16");
    check_aligned(global, "the source of copy_async_16");
    memset(shared, 0xff, 16);
    Fiber& fiber = state.fibers[state.thread_index.x];
    if (fiber.num_copies == fiber.max_copies) {
        fiber.max_copies = fiber.max_copies ? 2 * fiber.max_copies : 16;
        fiber.copies = static_cast<PendingCopy*>(realloc(fiber.copies, fiber.max_copies * sizeof(PendingCopy)));
    }
    fiber.copies[fiber.num_copies++] = PendingCopy{shared, global, fiber.num_groups};
}

static const unsigned char ZEROS[16] __align__(16) = {};

}  // namespace emulation

static inline void mma_16x8x16(float d[4], const unsigned a[4], const unsigned b[2]) {
    emulation::Fragments fragments{d, a, b};
    emulation::exchange("mma_16x8x16", fragments, emulation::multiply_fragments);
}

static inline void load_matrix_x4(unsigned r[4], const void* shared_row) {
    emulation::check_shared(shared_row, "the row of load_matrix_x4");
    emulation::MatrixRow row{shared_row, r};
    emulation::exchange("load_matrix_x4", row, emulation::load_matrices<false>);
}

static inline void load_matrix_x4_transposed(unsigned r[4], const void* shared_row) {
    emulation::check_shared(shared_row, "the row of load_matrix_x4_transposed");
    emulation::MatrixRow row{shared_row, r};
    emulation::exchange("load_matrix_x4_transposed", row, emulation::load_matrices<true>);
}

static inline void copy_async_16(void* shared, const void* global) { emulation::begin_copy(shared, global); }

static inline void copy_async_16(void* shared, const void* global, bool reads) {
    emulation::begin_copy(shared, reads ? global : emulation::ZEROS);
}

static inline void copy_async_commit() {
    ++emulation::state.fibers[emulation::state.thread_index.x].num_groups;
}

template <unsigned PENDING>
static inline void copy_async_wait() {
    using namespace emulation;
    Fiber& fiber = state.fibers[state.thread_index.x];
    unsigned num_done = 0;
    while (num_done < fiber.num_copies && fiber.copies[num_done].group + PENDING < fiber.num_groups) {
        memcpy(fiber.copies[num_done].to, fiber.copies[num_done].from, 16);
        ++num_done;
    }
    fiber.num_copies -= num_done;
    if (num_done) memmove(fiber.copies, fiber.copies + num_done, fiber.num_copies * sizeof(PendingCopy));
}

static inline uint4 load_streaming_16(const void* global) {
    emulation::check_aligned(global, "the source of load_streaming_16");
    return *static_cast<const uint4*>(global);
}
