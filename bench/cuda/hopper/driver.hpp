// NVIDIA's driver as far as this harness calls it, declared here so that it builds without CUDA's headers.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;

namespace driver {

using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;
using Event = void*;

struct alignas(64) TensorMap {
    u64 words[16];
};

enum AttributeId { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        int is_allowed;
        u32 cluster[3];
        char space[64];
    };
};
struct LaunchConfig {
    u32 grid[3], block[3], shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    u32 num_attributes;
};

constexpr int MULTIPROCESSOR_COUNT = 16, MAX_DYNAMIC_SHARED_BYTES = 8, NON_BLOCKING = 1;
constexpr int BFLOAT16 = 9, NO_INTERLEAVE = 0, SWIZZLE_128B = 3, PROMOTE_L2_256B = 3, FILL_ZEROS = 0;

// The driver's functions: name, parameters.
#define DRIVER_FUNCTIONS(X)                                              \
    X(cuInit, (u32))                                                     \
    X(cuDeviceGet, (int*, int))                                          \
    X(cuDevicePrimaryCtxRetain, (Context*, int))                         \
    X(cuCtxSetCurrent, (Context))                                        \
    X(cuDeviceGetAttribute, (int*, int, int))                            \
    X(cuMemAlloc_v2, (u64*, size_t))                                     \
    X(cuMemcpyDtoH_v2, (void*, u64, size_t))                             \
    X(cuMemcpyHtoD_v2, (u64, const void*, size_t))                       \
    X(cuMemsetD8Async, (u64, unsigned char, size_t, Stream))             \
    X(cuModuleLoadData, (Module*, const void*))                          \
    X(cuModuleGetFunction, (Function*, Module, const char*))             \
    X(cuFuncSetAttribute, (Function, int, int))                          \
    X(cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**)) \
    X(cuStreamCreate, (Stream*, u32))                                    \
    X(cuStreamSynchronize, (Stream))                                     \
    X(cuEventCreate, (Event*, u32))                                      \
    X(cuEventRecord, (Event, Stream))                                    \
    X(cuEventElapsedTime, (float*, Event, Event))                        \
    X(cuGetErrorString, (int, const char**))                             \
    X(cuTensorMapEncodeTiled,                                            \
      (TensorMap*, int, u32, void*, const u64*, const u64*, const u32*, const u32*, int, int, int, int))

#define DECLARE(name, parameters) static int(*name) parameters;
DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE

static void load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no driver: %s\n", dlerror());
        exit(1);
    }
#define FIND(name, parameters)                                         \
    name = reinterpret_cast<int(*) parameters>(dlsym(library, #name)); \
    if (!name) {                                                       \
        printf("the driver has no %s\n", #name);                       \
        exit(1);                                                       \
    }
    DRIVER_FUNCTIONS(FIND)
#undef FIND
}

static void check(int result, const char* what, int line) {
    if (result == 0) return;
    const char* text = "?";
    cuGetErrorString(result, &text);
    printf("ERROR line %d: %s: %s\n", line, what, text);
    fflush(stdout);
    _Exit(2);
}
#define OK(call) driver::check(driver::call, #call, __LINE__)

// The first GPU, its stream, and kernels of cubins in a folder.
class Gpu {
  public:
    explicit Gpu(const std::string& folder) : folder(folder) {
        load();
        int device;
        Context context;
        OK(cuInit(0));
        OK(cuDeviceGet(&device, 0));
        OK(cuDevicePrimaryCtxRetain(&context, device));
        OK(cuCtxSetCurrent(context));
        OK(cuDeviceGetAttribute(&multiprocessors, MULTIPROCESSOR_COUNT, device));
        OK(cuStreamCreate(&stream_, NON_BLOCKING));
    }

    u32 num_multiprocessors() const { return multiprocessors; }
    Stream stream() const { return stream_; }
    void synchronize() const { OK(cuStreamSynchronize(stream_)); }

    u64 allocate(u64 num_bytes) const {
        u64 address;
        OK(cuMemAlloc_v2(&address, (num_bytes + 511) / 256 * 256));
        return address;
    }

    Function kernel(const std::string& module, const std::string& name) {
        const std::string key = module + ":" + name;
        const auto found = kernels.find(key);
        if (found != kernels.end()) return found->second;
        std::ifstream file(folder + "/" + module + ".cubin", std::ios::binary);
        if (!file) {
            printf("ERROR there is no %s.cubin in %s\n", module.c_str(), folder.c_str());
            exit(1);
        }
        const std::string cubin((std::istreambuf_iterator<char>(file)), {});
        Module loaded;
        Function function;
        OK(cuModuleLoadData(&loaded, cubin.data()));
        OK(cuModuleGetFunction(&function, loaded, name.c_str()));
        // A little is left for what kernels have statically.
        const int shared_bytes = name == "linear_hopper" ? 232448 : 200 << 10;
        OK(cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes));
        return kernels[key] = function;
    }

    // Launches a kernel as the executor does; `args` are its only parameter.
    void launch(Function kernel, u32 x, u32 y, u32 z, u32 threads, u32 shared_bytes, void* args,
                u32 cluster_blocks = 0) const {
        LaunchAttribute attributes[2] = {};
        attributes[0].id = PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[0].is_allowed = 1;
        attributes[1].id = CLUSTER_DIMENSION;
        attributes[1].cluster[0] = cluster_blocks;
        attributes[1].cluster[1] = attributes[1].cluster[2] = 1;
        LaunchConfig config = {{x, y, z}, {threads, 1, 1}, shared_bytes, stream_, attributes, cluster_blocks ? 2u : 1u};
        void* parameters[] = {args};
        OK(cuLaunchKernelEx(&config, kernel, parameters, nullptr));
    }

    // Describes bf16 of which boxes are copied. Strides are in bytes, from the second dimension on.
    static TensorMap tensor_map(u64 address, u32 rank, const u64* lens, const u64* strides, const u32* box) {
        const u32 steps[] = {1, 1, 1, 1, 1};
        TensorMap map;
        OK(cuTensorMapEncodeTiled(&map, BFLOAT16, rank, reinterpret_cast<void*>(address), lens, strides, box, steps,
                                  NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_L2_256B, FILL_ZEROS));
        return map;
    }

  private:
    std::string folder;
    Stream stream_ = nullptr;
    int multiprocessors = 0;
    std::map<std::string, Function> kernels;
};

}  // namespace driver
